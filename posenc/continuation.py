"""Text that a finished run goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posenc.data import tokenizer
from posenc.encodings.registry import canonical_part, make_sampler, parse_part
from posenc.errors import UserError
from posenc.generate import Sampling, generate
from posenc.runs import load_model, open_run


def continuations(
    folder: Path,
    prompts: Sequence[str],
    new_tokens: int,
    sampling: Sampling,
    *,
    extend: str | None = None,
    checkpoint: int | None = None,
    run_seed: int | None = None,
    allow_plugins: bool = False,
) -> list[str]:
    """Continue texts by the model of a finished run.

    A text begins as documents did in training, and ends early where another one would begin.

    Args:
        folder: of the run.
        prompts: what to go on from; an empty one begins a document.
        new_tokens: how many to add at most.
        sampling: how tokens are chosen.
        extend: an extension policy, for the length of the longest prompt with its new tokens.
        checkpoint: the step; the last one unless told otherwise.
        run_seed: which model, of a run that trained several seeds at once.
        allow_plugins: whether code that the run's config names may be imported.

    Returns:
        Each prompt with what follows.

    Raises:
        UserError: the folder is no finished run, or it was trained to be evaluated at positions
            that are not one after another.
        EncodingError: the policy is unknown or has nothing to act on, or the encoding ends before
            the last token.
    """
    run = open_run(folder)
    sampler = make_sampler(run.config.positions)
    if sampler.evaluation != "sequential":
        raise UserError(
            f"{folder} was trained with positions {run.config.positions}, whose evaluation is "
            f"{sampler.evaluation}: it places a text as a whole, and decoding one token after "
            f"another; train with {sampler.name}(evaluation=sequential), or score it (-m eval)"
        )
    made = tokenizer(run.config.tokenizer, beside=folder / "tokenizer")
    separator = run.config.separator_id
    bos = made.bos if separator is None else separator
    begin = [bos] if run.config.bos == "document" else []
    # What a terminal hands over as bytes that are no UTF-8 goes in as it is.
    ids = [[*begin, *made.encode(p.encode("utf-8", "surrogateescape")).tolist()] for p in prompts]
    model = load_model(run, checkpoint, seed=run_seed, allow_plugins=allow_plugins)
    if extend is not None:
        policy = canonical_part(parse_part(extend))
        length = max(map(len, ids)) + new_tokens
        if not model.encoding.extend(policy, length):
            print(f"{policy.name} changes nothing at {length} tokens: the encoding reaches so far")
    stop = bos if begin else None
    new = generate(model, ids, new_tokens, sampling, stop=stop)
    return [made.decode([*old, *row]) for old, row in zip(ids, new.tolist(), strict=True)]
