"""Token files by memory map: documents, splits and batches against those of the same text."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.evaluate import load_text
from posenc import data
from posenc.data import token_files
from posenc.data.token_files import LLMC_MAGIC, load_token_files
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


def test_a_run_on_token_files_is_the_run_on_the_text(text, tokenizer, files, tmp_path):
    arguments = Arguments(
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
    (of_text,) = train_main(arguments)
    changed = {"data": files, "separator_id": tokenizer.bos, "name": "files"}
    (of_files,) = train_main(dataclasses.replace(arguments, **changed))

    def measured(folder):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in r.items() if "per_second" not in k} for r in rows]

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
