"""Token files by memory map: documents, splits and batches against those of the same text."""

import dataclasses
import hashlib
import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.texts import load_text
from posenc import data
from posenc.data import shards, token_files
from posenc.data.shards import LLMC_MAGIC
from posenc.data.token_files import load_token_files
from posenc.data.vocabularies import train_bpe
from posenc.errors import UserError
from posenc.runs import config_hash, open_run
from train import Arguments
from train import main as train_main

fast = pytest.mark.fast
BYTES = data.ByteTokenizer()
SPLITS = ("train", "valid", "test")


def write(folder, suffix=".bin", **splits):
    """Write a file a split and give the data spec of them."""
    for name, tokens in splits.items():
        if suffix == ".bin":
            np.asarray(tokens, "<u2").tofile(folder / f"{name}.bin")
        else:
            np.save(folder / f"{name}.npy", np.asarray(tokens, np.uint16))
    return ",".join(f"{folder / name}{suffix}" for name in splits)


def naive_documents(tokens, separator):
    """Cut before every separator."""
    documents = []
    for token in tokens:
        if token == separator or not documents:
            documents.append([])
        documents[-1].append(token)
    return documents


@fast
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 7))
def test_documents_begin_at_separators(tmp_path_factory, tokens, chunk):
    spec = write(tmp_path_factory.mktemp("t"), train=tokens, valid=tokens, test=tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "CHUNK", chunk)
        corpus = data.open_data(spec, 0)
    expected = naive_documents(tokens, 0)
    part = corpus.parts["train"]
    found = [
        part.tokens[a:b].tolist() for a, b in zip(part.offsets[:-1], part.offsets[1:], strict=True)
    ]
    assert found == expected
    assert part.highest == max(tokens)
    # However large the pieces in which a file is read, it is the same one.
    digest = hashlib.sha256(b"<u2\0" + np.array(tokens, "<u2").tobytes())
    assert part.sha256 == digest.hexdigest()
    # The documents that are scored have no BOS, and none is empty.
    stripped = [d[1:] if d[0] == 0 else d for d in expected]
    scored = data.token_documents(corpus, "test", BYTES, "document")
    assert [d.tolist() for d in scored] == [d for d in stripped if d]


@fast
@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.booleans())
def test_without_a_test_file_validation_is_halved(tmp_path_factory, tokens, separated):
    spec = write(tmp_path_factory.mktemp("t"), train=[5], valid=tokens)
    starts = [i for i, t in enumerate(tokens) if t == 0] if separated else [len(tokens) // 2]
    borders = [i for i in starts if i >= len(tokens) // 2]
    separator = 0 if separated else None
    if not borders:
        with pytest.raises(UserError, match="no document begins in its second half"):
            data.open_data(spec, separator)
        return
    corpus = data.open_data(spec, separator)
    border = borders[0]
    for name, half in (("valid", tokens[:border]), ("test", tokens[border:])):
        part = corpus.parts[name]
        assert part.tokens.tolist() == half
        documents = naive_documents(half, separator)
        assert np.diff(part.offsets).tolist() == [len(d) for d in documents]
    assert data.split_rule(corpus) == "files, validation halved"
    assert "the validation file's second half is the test" in data.describe_split(corpus)


# --- the same text, as text and as tokens ---------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for index in range(160):
        words = rng.choice(["cipher", "slope", "phase", "wave", "délta"], rng.integers(9, 60))
        (folder / f"{index}.txt").write_text(" ".join(words))
    return f"{folder}/*.txt"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "bpe.json"
    path.write_text(train_bpe([b"cipher slope phase wave"], 270))
    return data.tokenizer(str(path))


@pytest.fixture(scope="module")
def files(text, tokenizer, tmp_path_factory):
    """The splits of the text, tokenized, each document after BOS."""
    corpus = data.load(text)
    streams = {n: data.token_stream(corpus, n, tokenizer, "document") for n in SPLITS}
    tokens = {name: stream.tokens for name, stream in streams.items()}
    return write(tmp_path_factory.mktemp("files"), **tokens)


@fast
def test_batches_are_those_of_the_text(text, tokenizer, files):
    corpus, mapped = data.load(text), data.open_data(files, tokenizer.bos)
    for name in SPLITS:
        ours = data.token_stream(mapped, name, tokenizer, "document")
        theirs = data.token_stream(corpus, name, tokenizer, "document")
        assert isinstance(ours.tokens, np.memmap)
        np.testing.assert_array_equal(ours.offsets, theirs.offsets)
        batches = [data.Batches(data.Windows(s, 24), 4, seed=3) for s in (ours, theirs)]
        for step in range(3):
            a, b = batches[0][step], batches[1][step]
            assert a.keys() == b.keys()
            for field in a:
                np.testing.assert_array_equal(a[field], b[field], strict=True)
    found = data.token_documents(mapped, "test", tokenizer, "document")
    expected = data.token_documents(corpus, "test", tokenizer, "document")
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    total = sum(len(d.text) for d in data.split(corpus, "test"))
    assert sum(tokenizer.count_bytes(d) for d in found) == total


def short_run(text, tokenizer, tmp_path):
    return Arguments(
        encoding=("nope",),
        model="nano",
        data=text,
        tokenizer=str(tokenizer.files[0]),
        train_length=8,
        batch_size=2,
        steps=3,
        warmup_steps=1,
        eval_tokens=16,
        out=tmp_path,
        name="text",
    )


def measured(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if "second" not in k} for r in rows]


def test_a_run_on_token_files_is_the_run_on_the_text(text, tokenizer, files, tmp_path):
    arguments = short_run(text, tokenizer, tmp_path)
    (of_text,) = train_main(arguments)
    changed = {"data": files, "separator_id": tokenizer.bos, "name": "files"}
    (of_files,) = train_main(dataclasses.replace(arguments, **changed))
    assert measured(of_text) == measured(of_files)
    run = open_run(of_files)
    assert run.config.separator_id == 0
    assert run.data["separator_id"] == "0"
    assert run.data["name"] == "train.bin,valid.bin,test.bin"
    a, b = load_text(run), load_text(open_run(of_text))
    assert a.bos == b.bos == 0
    for ours, theirs in zip(a.documents, b.documents, strict=True):
        np.testing.assert_array_equal(ours, theirs)

    # Changed training tokens are refused, although only the test's would be scored.
    path = Path(files.split(",")[0])
    content = path.read_bytes()
    path.write_bytes(content[:-2] + b"\1\0")
    with pytest.raises(UserError, match=r"sha256 \(\w+ there, \w+ now\) of"):
        load_text(run)
    path.write_bytes(content)


def test_hashes_of_configs_without_a_separator_stay():
    # The one that the same config had before there were separators.
    from posenc.runs import RunConfig
    from posenc.transformer import preset

    config = RunConfig("rope", "nano", preset("nano"), "manuals-small")
    assert config_hash(config, {"name": "x"}) == CONFIG_HASH
    assert config_hash(dataclasses.replace(config, separator_id=0), {"name": "x"}) != CONFIG_HASH


CONFIG_HASH = "ebc57825931d01de"

# --- shards ---------------------------------------------------------------------------------


def write_shards(folder, name, tokens, cuts, suffix=".bin"):
    """Cut tokens into files, numbered in order, and give the glob that matches them."""
    pieces = np.split(np.asarray(tokens, np.uint16), sorted(cuts))
    for index, piece in enumerate(pieces):
        write(folder, suffix, **{f"{name}_{index:06}": piece})
    return f"{folder / name}_*{suffix}"


@st.composite
def cut_tokens(draw):
    tokens = draw(st.lists(st.integers(0, 3), min_size=4, max_size=40))
    return tokens, draw(st.sets(st.integers(1, len(tokens) - 1)))


@fast
@given(
    cut_tokens(),
    st.sampled_from([".bin", ".npy"]),
    st.sampled_from([None, 0]),
    st.integers(1, 7),
    st.sampled_from(sorted(data.PACKINGS)),
    st.data(),
)
def test_however_tokens_are_cut_into_files_they_are_the_same(
    tmp_path_factory, cut, suffix, separator, length, packing, draw
):
    tokens, cuts = cut
    folder = tmp_path_factory.mktemp("t")
    one = write(folder, suffix, train=tokens, valid=[3, 1], test=tokens)
    several = write_shards(folder, "shard", tokens, cuts, suffix)
    bos = "none" if separator is None else "document"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "OPEN_MAPS", 1)
        patch.setattr(token_files, "CHUNK", 5)
        joined = data.open_data(one, separator)
        # The same shards as training and as test are no leak here: one is read at a time.
        given = [several, str(folder / f"valid{suffix}"), str(folder / f"test{suffix}")]
        parted = data.open_data(",".join(given), separator)
        given = [str(folder / f"train{suffix}"), given[1], several]
        tested = data.open_data(",".join(given), separator)
    assert parted.sha256 == tested.sha256 == joined.sha256
    ours = data.token_stream(parted, "train", BYTES, bos)
    theirs = data.token_stream(joined, "train", BYTES, bos)
    np.testing.assert_array_equal(ours.offsets, theirs.offsets)
    np.testing.assert_array_equal(np.asarray(ours.tokens), tokens)
    low, high = sorted(draw.draw(st.tuples(*[st.integers(0, len(tokens))] * 2)))
    again = draw.draw(st.integers(0, 5))
    np.testing.assert_array_equal(ours.tokens[low:high][again:], tokens[low:high][again:])
    documents = [data.token_documents(c, "test", BYTES, bos) for c in (tested, joined)]
    for a, b in zip(*documents, strict=True):
        np.testing.assert_array_equal(a, b)
    try:
        expected = data.PACKINGS[packing](theirs, length)
    except UserError as error:
        with pytest.raises(UserError, match=str(error).split(":")[0]):
            data.PACKINGS[packing](ours, length)
        return
    windows = data.PACKINGS[packing](ours, length)
    assert len(windows) == len(expected)
    for index in range(len(expected)):
        for field, value in expected[index].items():
            np.testing.assert_array_equal(windows[index][field], value, strict=True)


@fast
@given(cut_tokens(), st.sampled_from([None, 0]))
def test_shards_are_halved_as_one_file_is(tmp_path_factory, cut, separator):
    folder = tmp_path_factory.mktemp("t")
    tokens, cuts = cut
    several = write_shards(folder, "valid", tokens, cuts)
    one = write(folder, train=[3], valid=tokens)
    try:
        joined = data.open_data(one, separator)
    except UserError:
        with pytest.raises(UserError, match=r"valid_\*\.bin cannot be halved"):
            data.open_data(f"{folder}/train.bin,{several}", separator)
        return
    parted = data.open_data(f"{folder}/train.bin,{several}", separator)
    for name in ("valid", "test"):
        a, b = joined.parts[name], parted.parts[name]
        np.testing.assert_array_equal(np.asarray(b.tokens), a.tokens)
        np.testing.assert_array_equal(b.offsets, a.offsets)
    assert parted.sha256 == joined.sha256
    whose = "file's" if not cuts else "files'"
    assert f"the validation {whose} second half is the test" in data.describe_split(parted)


def test_a_run_on_shards_is_the_run_on_the_joined_file(text, tokenizer, files, tmp_path):
    globs = []
    for number, path in enumerate(files.split(",")):
        tokens = np.fromfile(path, "<u2")
        # Documents go across these borders, and with llm.c's header a file begins otherwise.
        cuts = np.linspace(0, len(tokens), 5 + number).astype(int)[1:-1]
        globs.append(write_shards(tmp_path, Path(path).stem, tokens, cuts))
    header = np.zeros(256, "<i4")
    header[:2] = LLMC_MAGIC, 1
    first = tmp_path / "train_000001.bin"
    first.write_bytes(header.tobytes() + first.read_bytes())
    spec = ",".join(globs)
    arguments = dataclasses.replace(
        short_run(files, tokenizer, tmp_path), separator_id=tokenizer.bos, seeds=2
    )
    (of_one,) = train_main(arguments)
    (of_shards,) = train_main(dataclasses.replace(arguments, data=spec, name="shards"))
    assert measured(of_one) == measured(of_shards)
    one, several = open_run(of_one), open_run(of_shards)
    assert several.data == {**one.data, "name": "train_*.bin,valid_*.bin,test_*.bin"}
    for ours, theirs in zip(load_text(several).documents, load_text(one).documents, strict=True):
        np.testing.assert_array_equal(ours, theirs)

    streams = [
        data.token_stream(data.open_data(s, tokenizer.bos), "train", tokenizer, "document")
        for s in (files, spec)
    ]
    for process in range(2):
        a, b = (
            data.Batches(data.Windows(stream, 24), 4, 3, process, 2)[1]["inputs"]
            for stream in streams
        )
        np.testing.assert_array_equal(a, b)
    # Another document at the end of the last shard is other data.
    last = tmp_path / "train_000003.bin"
    last.write_bytes(last.read_bytes() + b"\1\0")
    with pytest.raises(UserError, match=r"sha256 \(\w+ there, \w+ now\) of"):
        load_text(several)


@fast
def test_more_shards_than_a_process_may_hold_open(tmp_path):
    tokens = np.arange(400) % 250
    several = write_shards(tmp_path, "train", tokens, range(1, 400))
    valid = write(tmp_path, valid=[1, 2], test=[3])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + shards.OPEN_MAPS + 20, limits[1]))
    try:
        corpus = data.open_data(f"{several},{valid}")
        assert "1 training documents in 400 files: split as given" in data.describe_split(corpus)
        windows = data.Windows(data.token_stream(corpus, "train", BYTES, "none"), 3)
        found = [windows[index]["tokens"][:-1] for index in range(len(windows))]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    np.testing.assert_array_equal(np.concatenate(found), tokens[:399])


@fast
def test_refusals_of_shards(tmp_path):
    valid = write(tmp_path, valid=[1, 2])
    a = write_shards(tmp_path, "a", [1, 2, 3, 4, 300, 6], [2, 4])
    for spec, message in {
        f"{tmp_path}/b_*.bin,{valid}": r"no file in .* matches 'b_\*\.bin'",
        f"{a},{a}": r"a_000000\.bin is of two splits, by .*share no file",
        f"{a},{tmp_path}/a_000002.bin": r"a_000002\.bin is of two splits",
        f"{tmp_path}/*.bin,{valid}": r"valid\.bin is of two splits, by .*\*\.bin' and by",
    }.items():
        with pytest.raises(UserError, match=message) as refused:
            data.open_data(spec)
        assert "\n" not in str(refused.value)
    (tmp_path / "link.bin").symlink_to("a_000001.bin")
    with pytest.raises(UserError, match=r"link\.bin is of two splits"):
        data.open_data(f"{a},{tmp_path}/link.bin")
    # It is the shard that is named, not its glob.
    with pytest.raises(UserError, match=r"a_000002\.bin holds the token 300, and the tokenizer"):
        data.token_stream(data.open_data(f"{a},{valid}"), "train", BYTES, "none")
    (tmp_path / "a_000001.bin").write_bytes(b"odd")
    with pytest.raises(UserError, match=r"a_000001\.bin holds no tokens"):
        data.open_data(f"{a},{valid}")
    np.save(tmp_path / "c_0.npy", np.array([1, 2], np.uint16))
    np.save(tmp_path / "c_1.npy", np.array([1, 2], np.uint32))
    with pytest.raises(UserError, match=r"c_1\.npy holds uint32, and .*c_0\.npy, of the same spl"):
        data.open_data(f"{tmp_path}/c_*.npy,{valid}")
    # A record of another tokenizer beside any shard is heard.
    b = write_shards(tmp_path, "b", [1, 2, 3], [1])
    (tmp_path / "tokens.json").write_text('{"tokenizer": {"name": "x", "sha256": null}}')
    with pytest.raises(UserError, match=r"b_000000\.bin was made with the tokenizer x"):
        data.token_stream(data.open_data(f"{b},{valid}"), "train", BYTES, "none")
    (tmp_path / "tokens.json").unlink()
    # A file that is replaced while it is in use gives no other tokens in silence.
    stream = data.token_stream(data.open_data(f"{b},{valid}"), "train", BYTES, "none")
    (tmp_path / "b_000001.bin").write_bytes(b"\1\0\2\0\3\0")
    with pytest.raises(UserError, match=r"b_000001\.bin changed while it was in use"):
        np.asarray(stream.tokens[0:3])


# --- formats --------------------------------------------------------------------------------


@fast
def test_formats_of_the_same_tokens_are_the_same_data(tmp_path):
    splits = {"train": [1, 700, 3], "valid": [4, 1, 2], "test": [7]}
    plain = load_token_files(write(tmp_path, ".bin", **splits), 1)
    arrays = load_token_files(write(tmp_path, ".npy", **splits), 1)
    assert plain.sha256 == arrays.sha256
    header = np.zeros(256, "<i4")
    header[:3] = LLMC_MAGIC, 1, 3
    path = tmp_path / "train.bin"
    path.write_bytes(header.tobytes() + path.read_bytes())
    spec = ",".join(str(tmp_path / f"{name}.bin") for name in SPLITS)
    headed = load_token_files(spec, 1)
    assert headed.parts["train"].tokens.tolist() == [1, 700, 3]
    assert headed.sha256 == plain.sha256
    for name in SPLITS:
        np.testing.assert_array_equal(plain.parts[name].offsets, arrays.parts[name].offsets)
        changed = {**splits, name: [*splits[name], 2]}
        assert load_token_files(write(tmp_path, ".bin", **changed), 1).sha256 != plain.sha256


@fast
def test_wide_integers(tmp_path):
    for name in SPLITS:
        np.save(tmp_path / f"{name}.npy", np.array([100_000, 5, 100_001], ">i8"))
    spec = ",".join(str(tmp_path / f"{name}.npy") for name in SPLITS)
    corpus = load_token_files(spec, 5)
    stream = data.TokenStream.of_tokens(corpus.parts["train"].tokens, np.array([0, 3]))
    window = data.Windows(stream, 2)[0]
    np.testing.assert_array_equal(window["tokens"], np.array([100_000, 5, 100_001], np.int32))


# --- refusals -------------------------------------------------------------------------------


@fast
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.zeros((2, 2), np.int32), r"holds int32 of shape \[2, 2\]"),
        (np.zeros(3, np.float32), r"holds float32 of shape \[3\]"),
        (np.zeros(3, bool), r"holds bool of shape \[3\]"),
        (np.zeros(0, np.int32), r"holds int32 of shape \[0\]"),
        (np.array([1, -1]), "holds the token -1"),
        (np.array([None]), "holds no tokens"),
    ],
)
def test_arrays_that_are_no_tokens(tmp_path, content, message):
    np.save(tmp_path / "a.npy", content, allow_pickle=True)
    with pytest.raises(UserError, match=rf"a\.npy {message}"):
        load_token_files(f"{tmp_path}/a.npy,{tmp_path}/a.npy")


@fast
@pytest.mark.parametrize("content", [b"", b"odd"])
def test_files_that_are_no_tokens(tmp_path, content):
    (tmp_path / "a.bin").write_bytes(content)
    (tmp_path / "a.npy").write_bytes(content)
    for name in ("a.bin", "a.npy"):
        with pytest.raises(UserError, match=f"{name} holds no tokens"):
            load_token_files(f"{tmp_path}/{name},{tmp_path}/{name}")


@fast
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("train.bin", "give those of train and validation, and perhaps test"),
        ("a.bin,b.bin,c.bin,d.bin", "give those of train and validation"),
        ("train.bin,valid.txt", r"each ending in \.npy or \.bin"),
        ("no/such.bin,valid.bin", r"cannot read no/such\.bin: No such file"),
        ("no/such.npy,valid.bin", r"cannot read no/such\.npy: No such file"),
    ],
)
def test_specs_of_token_files(spec, message):
    with pytest.raises(UserError, match=message):
        data.open_data(spec)


@fast
def test_token_files_that_do_not_fit(tmp_path):
    spec = write(tmp_path, train=[256, 1, 2], valid=[256, 1, 257], test=[256, 3])
    with pytest.raises(
        UserError, match=r"valid\.bin holds the token 257, and .* bytes has 257 \(0"
    ):
        data.token_stream(data.open_data(spec, 256), "train", BYTES, "document")
    spec = write(tmp_path, train=[256, 1, 2], valid=[256, 1, 25], test=[256, 3])
    with pytest.raises(UserError, match="give --separator-id, or --bos none"):
        data.token_stream(data.open_data(spec), "train", BYTES, "document")
    with pytest.raises(UserError, match="leave out --bos none"):
        data.token_stream(data.open_data(spec, 256), "train", BYTES, "none")
    with pytest.raises(UserError, match="--separator-id 300 is no token of bytes, which has 257"):
        data.token_documents(data.open_data(spec, 300), "test", BYTES, "document")
    with pytest.raises(UserError, match="--separator-id is -1"):
        data.open_data(spec, -1)
    with pytest.raises(UserError, match="is of token files, and 'manuals' is text"):
        data.open_data("manuals", 256)
