"""Tokenizers that are read from a file: byte-level BPE of `tokenizers` and of `tiktoken`."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from posenc.errors import UserError

# Which special begins a document, where a tokenizer.json has several: the first of these.
BOS_NAMES = (
    *("<|bos|>", "<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "[BOS]"),
    *("<|endoftext|>", "<|end_of_text|>", "<|im_start|>"),
)
TIKTOKEN_BOS = "<|endoftext|>"  # GPT-2's only special, with the id after its last token


def library(name: str) -> Any:
    """Import one of the tokenizer libraries.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError:
        raise UserError(
            f"this tokenizer needs the package {name}, which is not installed: "
            "pip install 'posenc[tokenizers]'"
        ) from None


def byte_characters() -> dict[str, int]:
    """Give the byte behind each character in which byte-level BPE writes its tokens.

    Printable Latin-1 stands for itself; the other bytes, in order, are the characters from U+0100
    on (Radford et al. 2019, GPT-2).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + place): byte for place, byte in enumerate(others)},
    }


class FileTokenizer:
    """A tokenizer whose every token stands for some bytes of text, and a special for none.

    Attributes:
        name: of its file, without the folder, which may differ from machine to machine.
        sha256: of what was read.
        files: what was read.
        vocab_size: the highest id and one.
        bos: the id that begins a document.

    Args:
        files: the vocabulary first.
        pieces: the bytes behind each id, none for specials and for ids without a token.
        bos: see above.
        encode_text: gives the ids of text that is valid UTF-8.
    """

    def __init__(
        self,
        files: Sequence[Path],
        pieces: Sequence[bytes],
        bos: int,
        encode_text: Callable[[str], Sequence[int] | np.ndarray],
    ):
        self.name, self.files, self.sha256 = files[0].name, tuple(files), _hash(files)
        self.vocab_size, self.bos = len(pieces), bos
        self._pieces, self._encode_text = list(pieces), encode_text
        self._sizes = np.array([len(piece) for piece in pieces], np.int64)
        self._ids = {piece: token for token, piece in enumerate(pieces) if len(piece) == 1}

    def encode(self, text: bytes) -> np.ndarray:
        """Give the ids of `text`: integers `[n]`, without specials.

        Text that spells a special is text. Bytes that are not UTF-8, such as half a character
        where a document was cut, are a token each.

        Raises:
            UserError: the tokens would not stand for as many bytes as the text has.
        """
        try:
            whole = text.decode()
        except UnicodeDecodeError:
            ids = np.concatenate([self._encode_run(run) for run in _runs(text)])
        else:
            ids = np.asarray(self._encode_text(whole), np.int64)
        if (behind := int(self._sizes[ids].sum())) != len(text):
            raise UserError(
                f"the tokenizer {self.name} gives tokens of {behind} bytes for a document of "
                f"{len(text)} bytes, so that bits per byte would be wrong: give one without "
                "normalizer and without added prefix space, whose vocabulary has every byte"
            )
        return ids

    def _encode_run(self, run: str) -> np.ndarray:
        if not "\udc80" <= run[0] <= "\udcff":
            return np.asarray(self._encode_text(run), np.int64)
        singles = [bytes([byte]) for byte in run.encode("utf-8", "surrogateescape")]
        return np.array([self._ids[one] for one in singles if one in self._ids], np.int64)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Give the text of `ids` (integers, any shape); specials are skipped, bad UTF-8 is "�"."""
        text = b"".join(self._pieces[token] for token in self._known(ids))
        return text.decode("utf-8", errors="replace")

    def count_bytes(self, ids: Iterable[int] | np.ndarray) -> int:
        """Count the bytes of text behind `ids`, none for specials.

        Bits per byte are total nats / ln 2 / this.
        """
        return int(self._sizes[self._known(ids)].sum())

    def _known(self, ids: Iterable[int] | np.ndarray) -> np.ndarray:
        flat = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64).ravel()
        return flat[(flat >= 0) & (flat < self.vocab_size)]


def _runs(text: bytes) -> list[str]:
    """Cut text into runs that are UTF-8 and runs of escaped bytes that are not."""
    escaped = text.decode("utf-8", "surrogateescape")
    return re.findall("[\udc80-\udcff]+|[^\udc80-\udcff]+", escaped)


def _hash(files: Sequence[Path]) -> str:
    # Of one file it is the file's own, as sha256sum prints it.
    contents = [path.read_bytes() for path in files]
    if len(contents) > 1:
        contents = [hashlib.sha256(content).digest() for content in contents]
    return hashlib.sha256(b"".join(contents)).hexdigest()


# --- tokenizer.json ---------------------------------------------------------------------------


def read_json(path: Path) -> FileTokenizer:
    """Read a byte-level BPE from a JSON file of Hugging Face's `tokenizers`.

    BOS is the first of `BOS_NAMES` that the file has as a special; without any, it is an id of its
    own after the last one.

    Raises:
        UserError: the file is no tokenizer, or none of bytes.
    """
    tokenizers = library("tokenizers")
    try:
        content = path.read_text(encoding="utf-8")
        tree = json.loads(content)
        inner = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises Exception itself
        raise UserError(f"{path} is no tokenizer of the package tokenizers: {error}") from None
    if tree["model"]["type"] != "BPE" or not _has_byte_level(tree):
        raise UserError(
            f"{path} is a {tree['model']['type']} tokenizer that does not work on bytes, and bits "
            "per byte would not be exact: give a byte-level BPE, such as GPT-2's, or train one: "
            "python -m posenc.data tokenizer"
        )
    added = inner.get_added_tokens_decoder()
    ids = inner.get_vocab(with_added_tokens=True)
    pieces = [b""] * (1 + max(ids.values()))
    table = byte_characters()
    for token, number in ids.items():
        if number in added:
            pieces[number] = b"" if added[number].special else token.encode()
        elif set(token) <= table.keys():
            pieces[number] = bytes(table[character] for character in token)
    specials = {token.content: number for number, token in added.items() if token.special}
    bos = next((specials[name] for name in BOS_NAMES if name in specials), len(pieces))
    if bos == len(pieces):
        pieces.append(b"")
    # Text is text, also where it spells a special, which has no bytes to be counted.
    inner.encode_special_tokens = True
    inner.no_truncation()
    inner.no_padding()

    def encode(text: str) -> list[int]:
        return inner.encode_batch_fast([text], add_special_tokens=False)[0].ids

    return FileTokenizer([path], pieces, bos, encode)


def _has_byte_level(tree: dict[str, Any]) -> bool:
    parts = [tree.get("pre_tokenizer"), tree.get("decoder")]
    return any('"ByteLevel"' in json.dumps(part) for part in parts)


# --- .tiktoken --------------------------------------------------------------------------------


def read_tiktoken(path: Path) -> FileTokenizer:
    """Read a `tiktoken` vocabulary: a line a token, base64 of its bytes and its rank.

    Its split pattern is GPT-2's and its only special `<|endoftext|>`, after the last rank, unless a
    JSON file beside it, NAME.tiktoken.json, says otherwise under tiktoken's own names: `pat_str`, a
    regular expression, and `special_tokens`, ids by name; and `bos`, the name of the one that
    begins a document (the first one unless told otherwise).

    Raises:
        UserError: one of the files cannot be read.
    """
    tiktoken = library("tiktoken")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"{path}, line {number}: not the base64 of a token and its rank, as in 'IQ== 0'"
            ) from None
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise UserError(
            f"{path} has no token for {len(missing)} of the 256 bytes, such as {missing[0]}: it is "
            "no whole tiktoken vocabulary"
        )
    last = max(ranks.values())
    options: dict[str, Any] = {
        "pat_str": None,
        "special_tokens": {TIKTOKEN_BOS: last + 1},
        "bos": None,
    }
    beside = path.with_name(path.name + ".json")
    if beside.is_file():
        options.update(_options(beside, options))
    pattern = options["pat_str"] or library("tiktoken_ext.openai_public").r50k_pat_str
    specials = options["special_tokens"]
    bos = options["bos"] or next(iter(specials))
    if bos not in specials:
        raise UserError(f"{beside}: bos {bos!r} is none of its special_tokens: {list(specials)}")
    ids = [*ranks.values(), *specials.values()]
    if len(set(ids)) < len(ids):
        raise UserError(f"{path}: two of its tokens or specials have the same id")
    try:
        inner = tiktoken.Encoding(
            path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials
        )
    except Exception as error:  # of the library's compiled part
        raise UserError(f"{path}: tiktoken refuses it: {error}") from None
    pieces = [b""] * (1 + max(last, *specials.values()))
    for piece, number in ranks.items():
        pieces[number] = piece
    files = [path, beside] if beside.is_file() else [path]
    return FileTokenizer(files, pieces, specials[bos], inner.encode_ordinary)


def _options(path: Path, known: dict[str, Any]) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        other = sorted(tree.keys() - known.keys())
        specials = tree.get("special_tokens", {"": 0})
        sound = all(isinstance(value, int) and value >= 0 for value in specials.values())
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} holds no JSON object of options: {error}") from None
    if other or not sound or not specials:
        raise UserError(
            f"{path} may hold pat_str, special_tokens (at least one id by name) and bos"
            f"{', not ' + ', '.join(other) if other else ''}"
        )
    return tree


KINDS: dict[str, Callable[[Path], FileTokenizer]] = {
    ".json": read_json,
    ".tiktoken": read_tiktoken,
}


# --- training one -----------------------------------------------------------------------------


def train_bpe(texts: Iterable[bytes], vocab_size: int) -> str:
    """Train a byte-level BPE with GPT-2's split pattern.

    Args:
        texts: of the documents to learn from.
        vocab_size: at most; the 256 bytes and the special `<|bos|>`, id 0, are among them.

    Returns:
        The JSON of Hugging Face's `tokenizers`.

    Raises:
        UserError: the vocabulary is smaller than 257.
    """
    if vocab_size < 257:
        raise UserError(f"--vocab-size is {vocab_size}: 256 bytes and one special need 257")
    tokenizers = library("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|bos|>"],
        initial_alphabet=sorted(byte_characters()),
        show_progress=False,
    )
    inner.train_from_iterator((text.decode("utf-8", "ignore") for text in texts), trainer)
    return inner.to_str(pretty=True)
