"""The data's part of a result's birth certificate."""

from __future__ import annotations

from posenc.data.corpora import Corpus
from posenc.data.splits import SPLIT_VERSION, split_rule
from posenc.data.token_files import TokenCorpus
from posenc.data.tokens import Tokenizer


def identity(corpus: Corpus | TokenCorpus, tokenizer: Tokenizer, bos: str) -> dict[str, str]:
    """Say which data this is, ready for JSON: equal identities mean equal tokens in equal splits.

    Args:
        corpus: the text; its name, version and SHA-256; of token files, the separator.
        tokenizer: its name, and the SHA-256 of its file where it has one.
        bos: the rule given to `TokenStream`.
    """
    given = {
        "name": corpus.name,
        "version": corpus.version,
        "sha256": corpus.sha256,
        "tokenizer": tokenizer.name,
        "split_version": SPLIT_VERSION,
        "split_rule": split_rule(corpus),
        "bos": bos,
    }
    # What needs no file and no separator has the identity that it had before there were any.
    if sha256 := getattr(tokenizer, "sha256", None):
        given["tokenizer_sha256"] = sha256
    if isinstance(corpus, TokenCorpus) and corpus.separator_id is not None:
        given["separator_id"] = str(corpus.separator_id)
    return given
