"""Data sets of the hub on local ones of the same layout: documents, splits, kills."""

import dataclasses
import json
import re

import datasets
import huggingface_hub
import numpy as np
import pytest

from posenc import data
from posenc.data import hub, writing
from posenc.data.__main__ import main as data_main
from posenc.data.hub import RECIPES, HubSource, documents
from posenc.data.splits import split_of
from posenc.data.vocabularies import train_bpe
from posenc.data.writing import write_tokens
from posenc.errors import UserError

BYTES = data.ByteTokenizer()
ROWS = [{"text": f"row {i} " + "é" * (i % 7), "id": f"<{i}>"} for i in range(90)]
SPLITS = {"validation": ROWS[:20], "test": ROWS[20:30], "train": ROWS[30:]}
TARGETS = {"validation": "valid", "test": "test", "train": "train"}


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
        yield


@pytest.fixture(scope="module", params=["disk", "jsonl", "parquet"])
def folder(request, tmp_path_factory):
    """The same rows in three forms, those that are files in two files a split."""
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "disk":
        sets = {name: datasets.Dataset.from_list(rows) for name, rows in SPLITS.items()}
        datasets.DatasetDict(sets).save_to_disk(path)
        return str(path)
    for name, rows in SPLITS.items():
        for part, some in enumerate((rows[: len(rows) // 3], rows[len(rows) // 3 :])):
            if request.param == "jsonl":
                lines = "".join(json.dumps(row) + "\n" for row in some)
                (path / f"{name}-{part}.jsonl").write_text(lines)
            else:
                datasets.Dataset.from_list(some).to_parquet(path / f"{name}-{part}.parquet")
    return str(path)


def expected(choose):
    """The tokens of each split, where `choose` says whose a row is."""
    found = {"train": [], "valid": [], "test": []}
    for name, rows in SPLITS.items():
        for place, row in enumerate(rows):
            found[choose(name, place, row)] += [256, *row["text"].encode()]
    return found


def read(folder, names=("train", "valid", "test")):
    return {name: np.load(folder / f"{name}.npy").tolist() for name in names}


def by_hash(name, place, row):
    return split_of(data.Document(row["id"], b""))


def test_documents_are_rows(folder, tmp_path):
    source = HubSource(folder)
    write_tokens(lambda state: documents(source, state), {}, BYTES, tmp_path)
    assert read(tmp_path) == expected(lambda name, place, row: TARGETS[name])


@pytest.mark.parametrize("died", [1, 25, 47, 89, "renaming"])
def test_going_on_after_a_kill(folder, tmp_path, monkeypatch, died):
    monkeypatch.setattr(writing, "CHECKPOINT_TOKENS", 40)
    source = HubSource(folder, id_column="id", by_hash=True)
    opened = []

    def dying(state):
        for count, piece in enumerate(documents(source, state)):
            if count == died:
                raise KeyboardInterrupt
            yield piece

    def going_on(state):
        opened.append(state)
        return documents(source, state)

    def replace(source, target, real=writing.os.replace):
        if str(target).endswith("test.npy"):
            raise KeyboardInterrupt
        real(source, target)

    if died == "renaming":
        monkeypatch.setattr(writing.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        write_tokens(dying, {}, BYTES, tmp_path)
    monkeypatch.undo()
    write_tokens(going_on, {}, BYTES, tmp_path)
    assert read(tmp_path) == expected(by_hash)
    assert sorted(path.suffix for path in tmp_path.glob("t*")) == [".json", ".npy", ".npy"]
    if died != 1:
        # It did not begin again: at most a few rows lie between two records.
        rows = opened[0]["row"] + {0: 0, 1: 20, 2: 30}[opened[0]["split"]]
        assert (90 if died == "renaming" else died) - rows <= 8
    # Finished, nothing is read again.
    write_tokens(going_on, {}, BYTES, tmp_path)
    assert len(opened) == 1


def test_articles_of_wikitext(tmp_path):
    lines = ["", " = One = \n", "", " First . \n", " = = Section = = \n", " More . \n", ""]
    lines += [" = Two words = \n", " a = b = c \n", " = X = \n", " Last . \n"]
    for name in SPLITS:
        rows = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(rows)
    source = dataclasses.replace(RECIPES["wikitext-103"], path=str(tmp_path), config=None)
    pieces = list(documents(source))
    articles = ["".join(lines[1:7]), "".join(lines[7:9]), "".join(lines[9:])]
    assert [(p.split, p.text.decode()) for p in pieces] == [
        (target, article) for target in ("valid", "test", "train") for article in articles
    ]
    # From the state of any article on come the articles after it.
    for place in range(len(pieces)):
        states = []
        for piece in documents(source):
            states.append(piece.state())
            if len(states) > place:
                break
        rest = documents(source, json.loads(json.dumps(states[-1])))
        assert [(p.split, p.text) for p in rest] == [(p.split, p.text) for p in pieces[place + 1 :]]


def test_one_text_is_cut_by_bytes(tmp_path):
    text = "aé" * 50
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": text}) + "\n")
    local = {"path": str(tmp_path), "revision": None, "data_files": "*.jsonl"}
    source = dataclasses.replace(RECIPES["enwik8"], **local, cut=(101, 120))
    pieces = [(p.split, p.text) for p in documents(source)]
    raw = text.encode()
    assert pieces == [("train", raw[:101]), ("valid", raw[101:120]), ("test", raw[120:])]
    with pytest.raises(UserError, match="150 bytes cannot be cut at 90000000"):
        list(documents(dataclasses.replace(source, cut=RECIPES["enwik8"].cut)))


@pytest.mark.parametrize("name", ["pg19", "fineweb-edu", "codeparrot"])
def test_recipes_read_local_data_of_their_layout(tmp_path, name):
    recipe = RECIPES[name]
    for split in recipe.splits:
        rows = "".join(
            json.dumps({recipe.column: row["text"], "id": row["id"]}) + "\n"
            for row in SPLITS[split]
        )
        (tmp_path / f"{split}.jsonl").write_text(rows)
    source = dataclasses.replace(recipe, path=str(tmp_path), config=None)
    found = [(piece.split, piece.text.decode()) for piece in documents(source)]
    wanted = []
    for split in recipe.splits:
        for place, row in enumerate(SPLITS[split]):
            key = row["id"] if recipe.id_column else f"{split}:{place}"
            target = split_of(data.Document(key, b"")) if recipe.by_hash else TARGETS[split]
            wanted.append((target, row["text"]))
    assert found == wanted


# --- the command ----------------------------------------------------------------------------


def test_the_command_writes_what_training_reads(folder, tmp_path, capsys):
    words = ["tokens", "--data", f"hub:{folder}", "--out", str(tmp_path / "out")]
    data_main(words)
    said = capsys.readouterr().out
    spec, separator = re.search(r"--data (\S+) --separator-id (\d+)", said).groups()
    corpus = data.open_data(spec, int(separator))
    for name, target in TARGETS.items():
        found = data.token_documents(corpus, target, BYTES, "document")
        assert [d.astype(np.uint8).tobytes().decode() for d in found] == [
            row["text"] for row in SPLITS[name]
        ]
    other = tmp_path / "other.json"
    other.write_text(train_bpe([b"row"], 257))
    with pytest.raises(
        UserError, match=r"made with the tokenizer bytes \(None there, other\.json, \w+"
    ):
        data.token_stream(corpus, "train", data.tokenizer(str(other)), "document")
    with pytest.raises(SystemExit):
        data_main([*words, "--splits", "hash"])
    assert re.search(
        r"holds other tokens: source .*'by_hash': False.*--out", capsys.readouterr().err
    )


def test_a_limit_ends_reading(folder, tmp_path):
    source = HubSource(folder)
    limited = write_tokens(lambda state: documents(source, state), {}, BYTES, tmp_path, limit=50)
    whole = expected(lambda name, place, row: TARGETS[name])
    found = read(tmp_path)
    assert limited.tokens == {name: len(tokens) for name, tokens in found.items()}
    assert found["valid"] == whole["valid"]
    assert found["test"] == whole["test"]
    assert found["train"] == whole["train"][: limited.tokens["train"]]
    assert 50 <= limited.tokens["train"] < 70


def test_a_corpus_becomes_the_tokens_of_its_splits(tmp_path, capsys):
    for row in ROWS:
        (tmp_path / f"{row['id']}.txt").write_text(row["text"])
    corpus = data.load(f"{tmp_path}/*.txt")
    data_main(["tokens", "--data", f"{tmp_path}/*.txt", "--out", str(tmp_path / "out")])
    for name, tokens in read(tmp_path / "out").items():
        assert tokens == data.token_stream(corpus, name, BYTES, "document").tokens.tolist()
    words = ["tokens", "--data", f"{tmp_path}/*.txt", "--out", f"{tmp_path}/b", "--column", "t"]
    with pytest.raises(SystemExit):
        data_main(words)
    assert "--column is of data sets of the hub" in capsys.readouterr().err


# --- refusals -------------------------------------------------------------------------------


def test_refusals(folder, tmp_path):
    with pytest.raises(UserError, match="no text in the column 'body'; its columns are text, id"):
        list(documents(HubSource(folder, column="body")))
    with pytest.raises(UserError, match=r"the split 'dev' of .* cannot be opened"):
        list(documents(HubSource(folder, splits=("dev",))))
    with pytest.raises(UserError, match="the split 'validation' of no/such cannot be opened"):
        list(documents(HubSource("no/such")))
    for spec in ("hub:x/y", *RECIPES):
        with pytest.raises(UserError, match=f"python -m posenc.data tokens --data {spec} --out"):
            data.open_data(spec)

    source = HubSource(folder, splits=("train",))

    def write(folder, tokenizer=BYTES):
        return write_tokens(lambda state: documents(source, state), {}, tokenizer, folder)

    with pytest.raises(UserError, match="is in valid: give more, or --splits hash"):
        write(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "train.npy").touch()
    with pytest.raises(UserError, match=r"holds train\.npy and no tokens\.json"):
        write(tmp_path / "b")


def test_lost_files_are_noticed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "CHECKPOINT_TOKENS", 40)
    source = HubSource(folder)

    def dying(state):
        for count, piece in enumerate(documents(source, state)):
            if count == 80:
                raise KeyboardInterrupt
            yield piece

    with pytest.raises(KeyboardInterrupt):
        write_tokens(dying, {}, BYTES, tmp_path)
    kept = (tmp_path / "train.npy.part").read_bytes()
    (tmp_path / "train.npy.part").unlink()
    with pytest.raises(UserError, match=r"train\.npy\.part has lost tokens"):
        write_tokens(lambda state: documents(source, state), {}, BYTES, tmp_path)
    (tmp_path / "train.npy.part").write_bytes(kept)
    write_tokens(lambda state: documents(source, state), {}, BYTES, tmp_path)
    assert read(tmp_path) == expected(lambda name, place, row: TARGETS[name])
    (tmp_path / "test.npy").unlink()
    with pytest.raises(UserError, match=r"test\.npy is gone"):
        write_tokens(lambda state: documents(source, state), {}, BYTES, tmp_path)


def test_a_network_that_breaks_off(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "CHECKPOINT_TOKENS", 40)
    source = HubSource(folder)

    class Breaking:
        def __init__(self, rows):
            self.rows, self.state_dict = rows, rows.state_dict

        def __iter__(self):
            for count, values in enumerate(self.rows):
                if count == 15:
                    raise ConnectionError("no route\nto host")
                yield values

    with monkeypatch.context() as patch:
        patch.setattr(hub, "_open", lambda *words, real=hub._open: Breaking(real(*words)))
        with pytest.raises(UserError, match=r"validation: reading broke off \(no route to host\)"):
            write_tokens(lambda state: documents(source, state), {}, BYTES, tmp_path)
    assert json.loads((tmp_path / "tokens.json").read_text())["state"]["row"] > 10
    write_tokens(lambda state: documents(source, state), {}, BYTES, tmp_path)
    assert read(tmp_path) == expected(lambda name, place, row: TARGETS[name])


def test_the_package_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(hub, "import_module", lambda name: (_ for _ in ()).throw(ImportError))
    with pytest.raises(UserError, match=r"pip install 'posenc\[hf\]'"):
        next(documents(HubSource("x/y")))
