"""The text that runs are scored on, and whether it is long enough."""

from __future__ import annotations

import dataclasses
import sys

from eval.controls import ForeignPrefix
from eval.protocols import VERY_FEW_DOCUMENTS, Settings
from posenc import data as datasets
from posenc.errors import UserError
from posenc.runs import Run


@dataclasses.dataclass(frozen=True)
class TestText:
    """The test split that a run is scored on.

    Attributes:
        documents: token ids, without BOS.
        tokenizer: that made them.
        bos: the id that begins a document.
    """

    __test__ = False  # pytest looks at names

    documents: list[datasets.TokenArray]
    tokenizer: datasets.Tokenizer
    bos: int


def load_text(run: Run) -> TestText:
    """Read the test split of a run's data, the same bytes that it was trained beside.

    Raises:
        UserError: the data are not what they were.
    """
    config = run.config
    corpus = datasets.open_data(config.data, config.separator_id)
    # The run has a copy of its tokenizer's files, which may lie elsewhere on this machine.
    tokenizer = datasets.tokenizer(config.tokenizer, beside=run.folder / "tokenizer")
    identity = datasets.identity(corpus, tokenizer, config.bos)
    changed = [
        f"{key} ({run.data.get(key)} there, {identity.get(key)} now)"
        for key in sorted(identity.keys() | run.data.keys())
        if identity.get(key) != run.data.get(key)
    ]
    if changed:
        raise UserError(
            f"{run.folder} was trained on other data: {', '.join(changed)} of {config.data!r} "
            "changed since; restore the data, or train again"
        )
    if tokenizer.vocab_size != config.model.vocab_size:
        raise UserError(
            f"{run.folder} has a vocabulary of {config.model.vocab_size}, and the tokenizer "
            f"{config.tokenizer!r} has {tokenizer.vocab_size}: evaluate with the version of posenc "
            "that trained it"
        )
    documents = datasets.token_documents(corpus, "test", tokenizer, config.bos)
    return TestText(documents, tokenizer, datasets.bos_id(corpus, tokenizer))


def check_text(text: TestText, settings: Settings, run: Run) -> None:
    """Say where few documents are as long as the longest window.

    Raises:
        UserError: none is.
    """
    need = max(settings.lengths)
    sizes = [len(document) for document in text.documents]
    long_enough = sum(size >= need for size in sizes)
    if not long_enough:
        raise UserError(
            f"no test document of {run.config.data!r} is long enough for length {need}: the "
            f"longest of {len(sizes)} has {max(sizes, default=0)} tokens; give a shorter length"
        )
    if long_enough < VERY_FEW_DOCUMENTS:
        print(
            f"warning: only {long_enough} test documents have {need} tokens; "
            "the curve may be theirs, not the encoding's",
            file=sys.stderr,
        )


def no_foreign(settings: Settings) -> str:
    """Give the reason why a block has no foreign prefix."""
    room = max(settings.lengths) - settings.train_length
    return f"no other test document has the {room} tokens of a foreign prefix"


def check_foreign(text: TestText, settings: Settings) -> None:
    """Say where what stands before blocks as a foreign prefix is of few documents, or of none."""
    if max(settings.lengths) <= settings.train_length:
        return
    sizes = [len(document) for document in text.documents]
    # A block's own document, which is long enough too, is never before it.
    others = len(ForeignPrefix().sources(sizes, settings)) - 1
    if others >= VERY_FEW_DOCUMENTS:
        return
    text_of = (
        f"only {others} other test document{'s are' if others > 1 else ' is'} long enough to be "
        "the foreign prefix of a block; tax and info may be theirs, not the encoding's"
        if others
        else f"{no_foreign(settings)}: its rows are undefined; give shorter --lengths, or a text "
        "with more long documents"
    )
    print(f"warning: {text_of}", file=sys.stderr)
