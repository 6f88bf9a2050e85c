"""Text to tokens to batches: corpora, splits, windows, and the identity of what was read."""

from posenc.data.corpora import CORPORA, Corpus, Document, cache_folder, load
from posenc.data.identity import identity
from posenc.data.reading import bos_id, open_data, token_documents, token_stream
from posenc.data.regimes import REGIMES, attended_distances, make_regime, read_train_length
from posenc.data.shards import TokenArray
from posenc.data.splits import SPLIT_VERSION, SPLITS, Block, describe_split, split, split_rule
from posenc.data.token_files import TokenCorpus
from posenc.data.tokens import TOKENIZERS, ByteTokenizer, Tokenizer, keep_tokenizer, tokenizer
from posenc.data.windows import (
    PACKINGS,
    Batch,
    Batches,
    TokenStream,
    Windows,
    fixed_windows,
    make_batch,
    placed,
)

__all__ = [
    "CORPORA",
    "PACKINGS",
    "REGIMES",
    "SPLITS",
    "SPLIT_VERSION",
    "TOKENIZERS",
    "Batch",
    "Batches",
    "Block",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "TokenArray",
    "TokenCorpus",
    "TokenStream",
    "Tokenizer",
    "Windows",
    "attended_distances",
    "bos_id",
    "cache_folder",
    "describe_split",
    "fixed_windows",
    "identity",
    "keep_tokenizer",
    "load",
    "make_batch",
    "make_regime",
    "open_data",
    "placed",
    "read_train_length",
    "split",
    "split_rule",
    "token_documents",
    "token_stream",
    "tokenizer",
]
