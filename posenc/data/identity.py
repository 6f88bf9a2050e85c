"""The data's part of a result's birth certificate."""

from __future__ import annotations

from posenc.data.corpora import Corpus
from posenc.data.splits import SPLIT_VERSION, split_rule
from posenc.data.tokens import Tokenizer


def identity(corpus: Corpus, tokenizer: Tokenizer, bos: str) -> dict[str, str]:
    """Say which data this is, ready for JSON: equal identities mean equal tokens in equal splits.

    Args:
        corpus: the text; its name, version and SHA-256.
        tokenizer: its name.
        bos: the rule given to `TokenStream`.
    """
    return {
        "name": corpus.name,
        "version": corpus.version,
        "sha256": corpus.sha256,
        "tokenizer": tokenizer.name,
        "split_version": SPLIT_VERSION,
        "split_rule": split_rule(corpus),
        "bos": bos,
    }
