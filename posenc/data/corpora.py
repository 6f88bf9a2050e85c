"""Where text comes from: registered corpora, text files and JSON lines."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath

from posenc.data import sotu as addresses
from posenc.data._names import unknown
from posenc.data.manuals import VERSION as BOTOCORE_VERSION
from posenc.data.manuals import extract
from posenc.errors import UserError


@dataclass(frozen=True)
class Document:
    """One text, with an id that does not depend on the machine."""

    id: str
    text: bytes

    @property
    def key(self) -> bytes:
        """The id as bytes, for hashing (file names need not be UTF-8)."""
        return self.id.encode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, under a name and a version."""

    name: str
    version: str
    documents: tuple[Document, ...]

    @cached_property
    def sha256(self) -> str:
        """Hash of ids, lengths and texts, so that moving a border between documents counts."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(document.key + b"\0" + str(len(document.text)).encode() + b"\0")
            digest.update(document.text)
        return digest.hexdigest()


# --- the cache ------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Give the folder for extracted text.

    It is `$POSENC_CACHE`, else `$XDG_CACHE_HOME/posenc`, else `~/.cache/posenc`.
    """
    if own := os.environ.get("POSENC_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "posenc"


def _write_cache(stem: str, corpus: Corpus) -> None:
    offsets = [0]
    for document in corpus.documents:
        offsets.append(offsets[-1] + len(document.text))
    ids = [document.id for document in corpus.documents]
    index = {"ids": ids, "offsets": offsets, "sha256": corpus.sha256}
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / f"{stem}.bin", b"".join(d.text for d in corpus.documents))
        replace_file(folder / f"{stem}.json", json.dumps(index).encode())
    except OSError as error:
        raise UserError(
            f"cannot write the cache folder {folder} ({error.strerror or error}); "
            "set POSENC_CACHE to a folder that can be written"
        ) from None


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that it is either the old one or the new one, whole."""
    # The temporary file lies beside the target: os.replace is atomic within one file system only.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_cache(stem: str, name: str, version: str, sha256: str) -> Corpus | None:
    """Read a cached corpus; None where it is missing or is not the text that `sha256` names."""
    folder = cache_folder()
    try:
        index = json.loads((folder / f"{stem}.json").read_bytes())
        text = (folder / f"{stem}.bin").read_bytes()
        ids, offsets = index["ids"], index["offsets"]
        spans = zip(ids, offsets[:-1], offsets[1:], strict=True)
        corpus = Corpus(name, version, tuple(Document(i, text[a:b]) for i, a, b in spans))
        return corpus if corpus.sha256 == sha256 else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


# --- registered corpora ---------------------------------------------------------------------

MANUALS_SHA256 = "a90688e8069f748e2d5aa1baf90d63bd593b4f47ed4695b94599de627dedd8ce"
SMALL_BYTES = 16 * 1024


def manuals() -> Corpus:
    """Documentation of 424 web services, one document each: 44,137,450 bytes of English.

    Extracted once from the package `botocore` and kept in `cache_folder()`; checked by SHA-256 at
    every load, and extracted again where the cached file is damaged.
    """
    version = f"botocore-{BOTOCORE_VERSION}"
    stem = f"manuals-{version}"
    corpus = _read_cache(stem, "manuals", version, MANUALS_SHA256)
    if corpus is None:
        texts = extract()
        corpus = Corpus("manuals", version, tuple(Document(i, t) for i, t in texts.items()))
        if corpus.sha256 != MANUALS_SHA256:
            raise UserError(
                f"manuals: the text extracted from botocore {BOTOCORE_VERSION} has SHA-256 "
                f"{corpus.sha256}, not {MANUALS_SHA256}; reinstall it: "
                f"pip install --force-reinstall botocore=={BOTOCORE_VERSION}"
            )
        _write_cache(stem, corpus)
    return corpus


def manuals_small() -> Corpus:
    """Give the first 16 KiB of each document of `manuals`, cut at a character: for demos."""
    whole = manuals()
    documents = tuple(Document(d.id, _head(d.text, SMALL_BYTES)) for d in whole.documents)
    return Corpus("manuals-small", f"{whole.version}-16KiB", documents)


def _head(text: bytes, limit: int) -> bytes:
    if len(text) <= limit:
        return text
    # 0b10xxxxxx continues a character: a cut before such a byte would split it.
    while limit and text[limit] & 0xC0 == 0x80:
        limit -= 1
    return text[:limit]


SOTU_SHA256 = "4608dbc16d7d1ed63d3c9854a5e1ef11daedf31d07f1352a9c0bd81d21b17ed8"


def sotu() -> Corpus:
    """State of the Union addresses 1790-2021, one document each: 233, 10,761,413 bytes of English.

    Read from the archive that `npm pack` put into `cache_folder()`, checked by SHA-256.
    """
    folder = cache_folder()
    texts = addresses.extract(folder)
    version = f"stdlib-{addresses.VERSION}"
    corpus = Corpus("sotu", version, tuple(Document(i, t) for i, t in texts.items()))
    if corpus.sha256 != SOTU_SHA256:
        raise UserError(
            f"sotu: the text of {addresses.PACKAGE} in {folder} has SHA-256 {corpus.sha256}, not "
            f"{SOTU_SHA256}; get it again: cd {folder} && {addresses.HOW}"
        )
    return corpus


CORPORA: dict[str, Callable[[], Corpus]] = {
    "manuals": manuals,
    "manuals-small": manuals_small,
    "sotu": sotu,
}


# --- files ----------------------------------------------------------------------------------

FILES_VERSION = "files-1"  # how files become documents; part of a corpus's identity


def load(spec: str) -> Corpus:
    """Load a corpus by registered name, file path or glob.

    Args:
        spec: a name in `CORPORA`; or a path or glob (`**` too) of files. A `.jsonl` file holds one
            object a line, with the key `text` and perhaps `id`; any other file is one document,
            whose bytes are taken as they are. Ids are paths relative to the first folder without
            a wildcard, so that a corpus is the same one wherever it lies.

    Raises:
        UserError: nothing matches, a line is malformed, or there is no text.
    """
    if spec in CORPORA:
        return CORPORA[spec]()
    root, pattern, paths = match_files(spec)
    if not paths:
        folder = f" (a folder: say {spec.rstrip('/')}/*.txt)" if os.path.isdir(spec) else ""
        way_out = (
            f"; or give a path or glob of .txt or .jsonl files: no file in {Path.cwd()} "
            f"matches{folder}"
        )
        raise unknown("corpus", spec, CORPORA, way_out)
    documents: list[Document] = []
    for path in paths:
        name = path.relative_to(root).as_posix()
        content = _read(path)
        if path.suffix == ".jsonl":
            documents.extend(_json_lines(name, content))
        else:
            documents.append(Document(name, content))
    if not any(document.text for document in documents):
        raise UserError(
            f"corpus {spec!r} is empty: {len(paths)} file(s) and 0 bytes of text; "
            "give files that hold text"
        )
    return Corpus(pattern, FILES_VERSION, tuple(documents))


def match_files(spec: str) -> tuple[Path, str, list[Path]]:
    """Give the folder that ids are relative to, the rest of the spec, and the files in order."""
    spec = os.path.expanduser(spec)
    if os.path.isfile(spec):  # a file whose name looks like a glob is still that file
        path = Path(spec)
        return path.parent, path.name, [path]
    parts = PurePath(spec).parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root, pattern = Path(*parts[:fixed]), "/".join(parts[fixed:])
    if not pattern:
        return root, pattern, []
    found = glob.glob(pattern, root_dir=root, recursive=True)
    return root, pattern, [root / name for name in sorted(found) if (root / name).is_file()]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _json_lines(name: str, content: bytes) -> Iterable[Document]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not a JSON object in UTF-8 ({error})") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}: a {type(row).__name__}, not a JSON object with key 'text'")
        if not isinstance(row.get("text"), str):
            raise UserError(
                f"{where}: needs a string under the key 'text'; its keys are "
                f"{', '.join(map(repr, row)) or 'none'}"
            )
        key = row.get("id")
        identity = f"{name}:{number}" if key is None else str(key)
        try:
            identity.encode()
            text = row["text"].encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: an escape that is not a character ({error})") from None
        yield Document(identity, text)
