import hashlib
import importlib.metadata
import json
import os
import sys
from itertools import chain, count, islice, pairwise
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posenc import data
from posenc.data import (
    Batches,
    Block,
    ByteTokenizer,
    Corpus,
    Document,
    TokenStream,
    Windows,
    fixed_windows,
    load,
    split,
)
from posenc.data import corpora as corpora_module
from posenc.data.manuals import clean
from posenc.errors import UserError

fast = pytest.mark.fast
BYTES = ByteTokenizer()
FIELDS = ("inputs", "targets", "positions", "segments", "mask")

MANUALS_SHA256 = "a90688e8069f748e2d5aa1baf90d63bd593b4f47ed4695b94599de627dedd8ce"
SMALL_SHA256 = "86a21e40a51b48525c51af4da26a09a644225c865241119a1731adb3b47d46cd"
FIRST_BATCHES_SHA256 = "0eef0851e5c7fc5ad3dfa1e5a3c838738ebdb39fc1542d9531899ce2ac03e58e"


def corpus_of(*texts, name="c"):
    return Corpus(name, "1", tuple(Document(f"d{i}", t) for i, t in enumerate(texts)))


def stream_of(*texts, bos="document"):
    return TokenStream([Document(f"d{i}", t) for i, t in enumerate(texts)], BYTES, bos)


def equal(a, b):
    assert a.keys() == b.keys()
    for field in a:
        np.testing.assert_array_equal(a[field], b[field], strict=True, err_msg=field)


# --- tokens ---------------------------------------------------------------------------------


@fast
@given(st.binary(max_size=40))
def test_bytes_round_trip(text):
    ids = BYTES.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(text)
    assert BYTES.decode(ids) == text.decode("utf-8", errors="replace")
    assert BYTES.count_bytes(ids) == len(text)


@fast
def test_specials_are_no_text():
    ids = [256, *"né".encode(), 256, 300, -1]
    assert BYTES.decode(ids) == "né"
    assert BYTES.count_bytes(np.array([ids, ids])) == 6
    assert (BYTES.name, BYTES.vocab_size, BYTES.bos) == ("bytes", 257, 256)


@fast
def test_tokenizer_lookup():
    assert data.tokenizer("bytes").name == "bytes"
    with pytest.raises(UserError, match="unknown tokenizer 'byte': did you mean bytes"):
        data.tokenizer("byte")


# --- corpora from files ---------------------------------------------------------------------


@fast
def test_text_files(tmp_path):
    (tmp_path / "a" / "sub").mkdir(parents=True)
    (tmp_path / "a" / "two.txt").write_bytes(b"two\xff")
    (tmp_path / "a" / "sub" / "one.txt").write_bytes(b"one")
    (tmp_path / "a" / "three.md").write_bytes(b"no")
    corpus = load(f"{tmp_path}/a/**/*.txt")
    assert corpus.documents == (Document("sub/one.txt", b"one"), Document("two.txt", b"two\xff"))
    assert corpus.name == "**/*.txt"
    expected = b"sub/one.txt\0" + b"3\0one" + b"two.txt\0" + b"4\0two\xff"
    assert corpus.sha256 == hashlib.sha256(expected).hexdigest()
    assert load(f"{tmp_path}/a/two.txt").documents == (Document("two.txt", b"two\xff"),)


@fast
def test_identity_does_not_depend_on_the_folder(tmp_path, monkeypatch):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("same")
    there, here = load(f"{tmp_path}/x/*.txt"), load(f"{tmp_path}/y/*.txt")
    assert data.identity(there, BYTES, "none") == data.identity(here, BYTES, "none")
    monkeypatch.chdir(tmp_path / "x")
    assert load("*.txt") == there
    assert load("a.txt").sha256 == there.sha256


@fast
def test_json_lines(tmp_path):
    lines = [{"text": "é"}, {"id": 7, "text": "b"}, {"id": "k", "text": "c", "more": [1]}]
    body = "\n\n".join(json.dumps(line) for line in lines)
    (tmp_path / "f.jsonl").write_text(body + "\n")
    assert load(f"{tmp_path}/f.jsonl").documents == (
        Document("f.jsonl:1", "é".encode()),
        Document("7", b"b"),
        Document("k", b"c"),
    )


@fast
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', "f.jsonl, line 2: not a JSON object in UTF-8"),
        (b'{"text": "\xff"}', "f.jsonl, line 2: not a JSON object in UTF-8"),
        (b"[1]", "f.jsonl, line 2: a list, not a JSON object"),
        (b'{"txt": "a"}', "f.jsonl, line 2: needs a string under the key 'text'.*'txt'"),
        (b'{"text": 3}', "f.jsonl, line 2: needs a string under the key 'text'"),
        (b'{"text": "\\ud800"}', "f.jsonl, line 2: an escape that is not a character"),
    ],
)
def test_malformed_json_line(tmp_path, line, message):
    (tmp_path / "f.jsonl").write_bytes(b'{"text": "fine"}\n' + line)
    with pytest.raises(UserError, match=message):
        load(f"{tmp_path}/*.jsonl")


@fast
def test_unknown_and_empty_corpora(tmp_path):
    with pytest.raises(UserError, match=r"'manual': did you mean manuals.* path or glob of \.txt"):
        load("manual")
    with pytest.raises(UserError, match="known: manuals, manuals-small, sotu; or give a path"):
        load(f"{tmp_path}/*.txt")
    with pytest.raises(UserError, match=r"a folder: say .*/\*\.txt"):
        load(str(tmp_path))
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match=r"empty: 1 file\(s\) and 0 bytes"):
        load(f"{tmp_path}/a.txt")


@fast
def test_borders_count_in_the_hash():
    assert corpus_of(b"ab", b"c").sha256 != corpus_of(b"a", b"bc").sha256
    assert corpus_of(b"ab").sha256 == corpus_of(b"ab", name="other").sha256


@fast
def test_cache_folder(monkeypatch):
    monkeypatch.setenv("POSENC_CACHE", "/p")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("HOME", "/h")
    assert str(data.cache_folder()) == "/p"
    monkeypatch.delenv("POSENC_CACHE")
    assert str(data.cache_folder()) == "/x/posenc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert str(data.cache_folder()) == "/h/.cache/posenc"


# --- manuals --------------------------------------------------------------------------------


@fast
def test_cleaning():
    html = "<p>One&nbsp;&lt;a&gt;,  <b>two</b>.</p>\n <p>\tThree<br/>four</p> <ul> <li>x</li> </ul>"
    assert clean(html) == "One\xa0<a>, two.\n Three\nfour\n x"


@fast
def test_head_ends_at_a_character():
    for limit in range(8):
        head = corpora_module._head("aé€z".encode(), limit)
        assert head.decode() == "aé€z"[: sum(limit >= n for n in (1, 3, 6, 7))]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache") / "deep"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POSENC_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def manuals(cache):
    return load("manuals")


@pytest.fixture(scope="module")
def small(manuals):
    return load("manuals-small")


def test_manuals(manuals, cache, monkeypatch):
    texts = [document.text for document in manuals.documents]
    assert len(texts) == 424
    assert sum(map(len, texts)) == 44_137_450
    assert max(map(len, texts)) == 2_025_293
    assert manuals.sha256 == corpora_module.MANUALS_SHA256 == MANUALS_SHA256
    assert sorted(path.suffix for path in cache.iterdir()) == [".bin", ".json"]

    def again():
        raise AssertionError("extracted although the cache is sound")

    monkeypatch.setattr(corpora_module, "extract", again)
    assert load("manuals") == manuals


def test_manuals_small(manuals, small):
    assert small.sha256 == SMALL_SHA256
    for head, whole in zip(small.documents, manuals.documents, strict=True):
        assert head.id == whole.id
        assert whole.text.startswith(head.text)
        head.text.decode()
        assert len(head.text) > 16 * 1024 - 4 or head.text == whole.text


@pytest.mark.parametrize("damage", ["flip", "cut", "index", "gone"])
def test_a_damaged_cache_is_mended(manuals, cache, monkeypatch, damage):
    # What extraction gives is already known: running it again would only take time.
    texts = {document.id: document.text for document in manuals.documents}
    calls = []
    monkeypatch.setattr(corpora_module, "extract", lambda: calls.append(1) or texts)
    (text,), (index,) = cache.glob("*.bin"), cache.glob("*.json")
    if damage == "flip":
        with open(text, "r+b") as file:
            file.seek(1_000_000)
            byte = file.read(1)[0]
            file.seek(1_000_000)
            file.write(bytes([byte ^ 1]))
    elif damage == "cut":
        os.truncate(text, 40_000_000)
    elif damage == "index":
        index.write_text("[]")
    else:
        index.unlink()
    assert load("manuals") == manuals
    assert len(calls) == 1
    assert load("manuals") == manuals
    assert len(calls) == 1


@fast
def test_an_extraction_that_differs(monkeypatch, tmp_path):
    monkeypatch.setenv("POSENC_CACHE", str(tmp_path))
    monkeypatch.setattr(corpora_module, "extract", lambda: {"a": b"b"})
    with pytest.raises(UserError, match=f"not {MANUALS_SHA256}"):
        load("manuals")
    assert list(tmp_path.iterdir()) == []


@fast
def test_botocore_missing_or_another(monkeypatch, tmp_path):
    monkeypatch.setenv("POSENC_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "botocore", None)
    with pytest.raises(UserError, match=r"not installed: pip install 'posenc\[corpus\]'"):
        load("manuals")
    other = ModuleType("botocore")
    other.__version__ = "1.2.3"
    monkeypatch.setitem(sys.modules, "botocore", other)
    with pytest.raises(UserError, match=r"botocore 1\.43\.11, but 1\.2\.3 is installed"):
        load("manuals")


def test_the_pinned_botocore_is_installed():
    assert importlib.metadata.version("botocore") == "1.43.11"


@fast
def test_unwritable_cache(monkeypatch, tmp_path):
    # A file in the folder's place is refused to every user, root too.
    (tmp_path / "file").touch()
    monkeypatch.setenv("POSENC_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=f"{tmp_path}/file .*; set POSENC_CACHE"):
        corpora_module._write_cache("stem", corpus_of(b"a"))


# --- splits ---------------------------------------------------------------------------------


@fast
def test_split_by_document():
    corpus = corpus_of(*(bytes([i]) for i in range(200)))
    parts = {name: split(corpus, name) for name in data.SPLITS}
    assert sorted(chain(*parts.values()), key=corpus.documents.index) == list(corpus.documents)
    for name, (low, high) in {"train": (0, 0.9), "valid": (0.9, 0.95), "test": (0.95, 1)}.items():
        assert parts[name] == sorted(parts[name], key=corpus.documents.index)
        for document in parts[name]:
            u = int(hashlib.sha256(document.id.encode()).hexdigest()[:16], 16) / 2**64
            assert low <= u < high
    assert data.describe_split(corpus).startswith("200 documents: split by SHA-256")


def blocks_by_hand(corpus):
    blocks = {}
    for document in corpus.documents:
        pieces = [document.text[i : i + 65536] for i in range(0, len(document.text), 65536)]
        for k, piece in enumerate(pieces):
            kept = piece if k == len(pieces) - 1 else piece[:61440]
            key = hashlib.sha256(f"{document.id}:{k}".encode()).hexdigest()
            blocks[f"{document.id}[{k}]"] = (key, kept)
    return blocks


@fast
@pytest.mark.parametrize("sizes", [[65536 * 2 + 1], [10, 65536, 65537], [200_000] * 11])
def test_split_by_block(sizes):
    rng = np.random.default_rng(0)
    corpus = corpus_of(*(rng.bytes(size) for size in sizes))
    expected = blocks_by_hand(corpus)
    order = sorted(expected, key=lambda name: expected[name][0])
    held = max(1, round(len(order) / 20))
    wanted = {"test": order[:held], "valid": order[held : 2 * held], "train": order[2 * held :]}
    for name in data.SPLITS:
        blocks = split(corpus, name)
        assert all(isinstance(block, Block) for block in blocks)
        assert [b.id for b in blocks] == [i for i in expected if i in wanted[name]]
        assert [b.text for b in blocks] == [expected[b.id][1] for b in blocks]
    total = sum(len(b.text) for name in data.SPLITS for b in split(corpus, name))
    borders = len(expected) - len(sizes)
    assert total == sum(sizes) - 4096 * borders


@fast
def test_the_gap_is_in_no_split():
    # Every byte of the gap is marked: 61440..65535 of each full block that another one follows.
    text = (b"." * 61440 + b"#" * 4096) * 3 + b"." * 100
    corpus = corpus_of(text)
    kept = b"".join(b.text for name in data.SPLITS for b in split(corpus, name))
    assert kept == b"." * (3 * 61440 + 100)
    assert data.describe_split(corpus) == (
        "fewer than 20 documents (1): split by 64 KiB blocks, 4 KiB dropped at each border; "
        "no window crosses a border"
    )


def train_ids():
    """Ids whose hash begins with a byte below 0xE0, and so u < 0.875: all of them train."""
    ids = map(str, count())
    return (i for i in ids if hashlib.sha256(i.encode()).digest()[0] < 0xE0)


@fast
def test_split_errors():
    with pytest.raises(UserError, match="unknown split 'vald': did you mean valid"):
        split(corpus_of(b"a"), "vald")
    with pytest.raises(UserError, match=r"1 document\(s\) in 2 block\(s\).*at least 3"):
        split(corpus_of(b"a" * 131072), "train")
    with pytest.raises(UserError, match="none of its 20 documents falls into the split 'test'"):
        split(Corpus("c", "1", tuple(Document(i, b"a") for i in islice(train_ids(), 20))), "test")


@fast
def test_identity():
    one = corpus_of(b"a", name="n")
    assert data.identity(one, BYTES, "none") == {
        "name": "n",
        "version": "1",
        "sha256": hashlib.sha256(b"d0\0" + b"1\0a").hexdigest(),
        "tokenizer": "bytes",
        "split_version": "1",
        "split_rule": "blocks",
        "bos": "none",
    }
    many = data.identity(corpus_of(*[b"a"] * 20), BYTES, "document")
    assert (many["split_rule"], many["bos"]) == ("documents", "document")


# --- windows --------------------------------------------------------------------------------


def naive_rows(documents, length, bos):
    """Every window with its segments, positions and mask, by loops over lists."""
    tagged = []
    for number, document in enumerate(documents):
        ids = ([256] if bos == "document" else []) + list(document.text)
        tagged.append([(i, number) for i in ids])
    blocks = isinstance(documents[0], Block)
    regions = tagged if blocks else [[pair for region in tagged for pair in region]]
    rows = []
    for region in regions:
        start = 0
        while start + length + 1 <= len(region):
            window = region[start : start + length + 1]
            segments, positions = [1], [0]
            for (_, before), (_, now) in pairwise(window):
                same = before == now
                segments.append(segments[-1] if same else segments[-1] + 1)
                positions.append(positions[-1] + 1 if same else 0)
            rows.append(
                {
                    "inputs": [i for i, _ in window[:-1]],
                    "targets": [i for i, _ in window[1:]],
                    "positions": positions[:-1],
                    "segments": segments[:-1],
                    "mask": [a == b for a, b in pairwise(segments)],
                }
            )
            start += length
    return rows


def rows_of(batch):
    return [
        {field: batch[field][i].tolist() for field in FIELDS} for i in range(len(batch["inputs"]))
    ]


@fast
@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    length=st.integers(1, 9),
    bos=st.sampled_from(["document", "none"]),
    kind=st.sampled_from([Document, Block]),
)
def test_windows_equal_the_naive_loop(sizes, length, bos, kind):
    text = bytes(range(100))
    documents = [kind(f"d{i}", text[9 * i : 9 * i + n]) for i, n in enumerate(sizes)]
    expected = naive_rows(documents, length, bos)
    stream = TokenStream(documents, BYTES, bos)
    if not expected:
        with pytest.raises(UserError, match=f"{length + 1} are needed"):
            Windows(stream, length)
        return
    windows = Windows(stream, length)
    assert len(windows) == len(expected)
    batch = data.make_batch(windows[i] for i in range(len(windows)))
    assert rows_of(batch) == expected
    assert {str(batch[field].dtype) for field in FIELDS[:4]} == {"int32"}
    assert batch["mask"].dtype == bool
    # Asked for more than there are, it gives all there are.
    equal(fixed_windows(stream, length, len(windows) + 3), batch)


@fast
def test_an_example_by_hand():
    stream = stream_of(b"abc", b"", b"de", bos="none")
    assert stream.offsets.tolist() == [0, 3, 3, 5]
    assert rows_of(data.make_batch([Windows(stream, 4)[0]])) == [
        {
            "inputs": [97, 98, 99, 100],
            "targets": [98, 99, 100, 101],
            "positions": [0, 1, 2, 0],
            "segments": [1, 1, 1, 2],
            "mask": [True, True, False, True],
        }
    ]
    assert stream_of(b"abc", b"", b"de").tokens.tolist() == [256, 97, 98, 99, 256, 256, 100, 101]


@fast
def test_a_larger_vocabulary_is_int32():
    class Wide(ByteTokenizer):
        vocab_size = 2**16 + 1
        bos = 2**16

    stream = TokenStream([Document("d", b"ab")], Wide())
    assert stream.tokens.dtype == np.int32
    assert stream.tokens.tolist() == [65536, 97, 98]


@fast
def test_window_errors():
    with pytest.raises(UserError, match="it has 4 tokens and 5 are needed"):
        Windows(stream_of(b"abc"), 4)
    with pytest.raises(UserError, match="it has 0 tokens"):
        Windows(stream_of(), 4)
    blocks = TokenStream([Block("a[0]", b"abc"), Block("a[1]", b"ab")], BYTES)
    with pytest.raises(UserError, match="none of its 2 blocks has more than 4 tokens and 5"):
        Windows(blocks, 4)
    with pytest.raises(UserError, match="window length 0 is below 1"):
        Windows(stream_of(b"abc"), 0)
    with pytest.raises(UserError, match="unknown bos rule 'documents': did you mean document"):
        stream_of(b"abc", bos="documents")
    windows = Windows(stream_of(b"abc"), 3)
    for index in (-1, 1):
        with pytest.raises(IndexError):
            windows[index]
    with pytest.raises(UserError, match="0 validation windows"):
        fixed_windows(stream_of(b"abc"), 3, 0)
    with pytest.raises(UserError, match="shorter length"):
        fixed_windows(stream_of(b"abc"), 4, 1)


@fast
def test_fixed_windows_are_evenly_spread():
    stream = stream_of(bytes(range(101)), bos="none")
    batch = fixed_windows(stream, 10, 5)
    assert batch["inputs"][:, 0].tolist() == [10, 30, 50, 70, 90]
    assert fixed_windows(stream, 20, 2)["inputs"][:, 0].tolist() == [20, 60]
    equal(batch, fixed_windows(stream, 10, 5))


# --- batches --------------------------------------------------------------------------------


def first_tokens(batches, steps):
    return np.concatenate([batches[step]["inputs"][:, 0] for step in steps]).tolist()


@fast
def test_an_epoch_is_a_fresh_permutation():
    stream = stream_of(bytes(range(61)), bos="none")
    batches = Batches(Windows(stream, 5), 4, seed=3)
    epochs = [first_tokens(batches, range(3 * e, 3 * e + 3)) for e in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 60, 5))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert first_tokens(Batches(Windows(stream, 5), 4, seed=4), range(3)) not in epochs


@fast
def test_an_epoch_may_end_within_a_batch():
    batches = Batches(Windows(stream_of(bytes(range(15)), bos="none"), 2), 3, seed=0)
    tokens = first_tokens(batches, range(7))
    assert [sorted(tokens[7 * e : 7 * e + 7]) for e in range(3)] == [list(range(0, 14, 2))] * 3
    one = Batches(Windows(stream_of(b"abc", bos="none"), 2), 2, seed=0)
    assert one[5]["inputs"].tolist() == [[97, 98], [97, 98]]


@fast
def test_a_batch_is_a_function_of_seed_and_step():
    windows = Windows(stream_of(bytes(range(200)), bytes(range(31))), 7)
    forward = Batches(windows, 6, seed=5)
    read = {step: forward[step] for step in range(8)}
    backward = Batches(windows, 6, seed=5)
    for step in (7, 0, 3, 3, 6, 1, 5, 2, 4):
        equal(backward[step], read[step])
    for processes in (2, 3):
        parts = [Batches(windows, 6, 5, index, processes) for index in range(processes)]
        for step in (4, 1):
            rows = [part[step] for part in parts]
            joined = {f: np.concatenate([row[f] for row in rows]) for f in FIELDS}
            equal(joined, read[step])


@fast
def test_batches_are_rows_of_the_windows():
    documents = [Document("a", b"abcdefgh"), Document("b", b"ijk"), Document("c", b"lmnopqrs")]
    expected = naive_rows(documents, 4, "document")
    batches = Batches(Windows(TokenStream(documents, BYTES), 4), len(expected), seed=1)
    assert sorted(rows_of(batches[2]), key=str) == sorted(expected, key=str)


@fast
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 6, "process_count": 4}, "batch size 6 .* multiple of 4, such as 8"),
        ({"batch_size": 0}, "batch size 0 .* such as 1"),
        ({"process_index": 2, "process_count": 2}, "process 2 of 2"),
        ({"seed": -1}, "seed -1 is outside"),
        ({"seed": 2**32}, "seed 4294967296 is outside"),
    ],
)
def test_batch_errors(arguments, message):
    windows = Windows(stream_of(b"abc"), 2)
    with pytest.raises(UserError, match=message):
        Batches(windows, **{"batch_size": 4, "seed": 0, **arguments})


@fast
def test_a_negative_step():
    with pytest.raises(ValueError, match="step -1 is negative"):
        Batches(Windows(stream_of(b"abc"), 2), 4, 0)[-1]


def test_the_first_batches_are_pinned(small):
    stream = TokenStream(split(small, "train"), BYTES)
    batches = Batches(Windows(stream, 64), 8, seed=0)
    digest = hashlib.sha256()
    for step in range(3):
        for field in FIELDS:
            digest.update(batches[step][field].astype("<i4").tobytes())
    assert digest.hexdigest() == FIRST_BATCHES_SHA256


def test_splits_of_manuals(manuals, small):
    sizes = {name: len(split(manuals, name)) for name in data.SPLITS}
    assert sum(sizes.values()) == 424
    for name in data.SPLITS:
        whole, heads = split(manuals, name), split(small, name)
        assert [d.id for d in whole] == [d.id for d in heads]
