"""Plans into passes: which windows of a run one compiled program scores, and what cannot be."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from flax import nnx

from eval.protocols import (
    NllByContext,
    NonOverlapping,
    PerPosition,
    Protocol,
    Settings,
    Sliding,
    Window,
)
from posenc.encodings.base import EncodingError
from posenc.encodings.extension import POLICIES
from posenc.encodings.registry import Encodings, Part
from posenc.encodings.sampling import Sampler
from posenc.runs import Run
from posenc.transformer import Transformer

PLAIN = {p.name: p for p in (NllByContext(), NonOverlapping(), PerPosition(), Sliding())}


@dataclasses.dataclass(frozen=True)
class Job:
    """One length of one run: as it was trained, or by a policy, or undefined and why."""

    length: int
    policy: Part | None = None
    undefined: str | None = None

    @property
    def extend(self) -> str | None:
        """The policy as rows name it."""
        return None if self.policy is None else str(self.policy)


@dataclasses.dataclass(frozen=True)
class Pass:
    """Windows of one size that are scored by one compiled program.

    Attributes:
        job: of the length and policy.
        plans: windows by protocol.
        places: of a window.
        positions: of these places; None are those that any window has.
        undefined: why there is no score.
    """

    job: Job
    plans: dict[str, list[Window]]
    places: int
    positions: np.ndarray | None = None
    undefined: str | None = None

    @property
    def windows(self) -> list[Window]:
        """Every window once, whichever plans share it."""
        return list(dict.fromkeys(itertools.chain(*self.plans.values())))


def _end(model: Transformer, length: int, end: int) -> str | None:
    """Say why windows have no score: of so many places, whose positions lie below ``end``."""
    if model.copies > 1 and length > model.context_length:
        return f"no weights beyond {model.context_length - 1}"
    limit = model.encoding.max_position
    return None if limit is None or end <= limit else f"no position beyond {limit - 1}"


def jobs_of(
    model: Transformer, lengths: tuple[int, ...], policies: list[Part], sampler: Sampler
) -> list[Job]:
    """Give every length of a run, and again by each policy that acts there."""
    jobs = []
    for length in lengths:
        try:
            end = sampler.extent(length, training=False)
        except EncodingError as error:
            jobs.append(Job(length, undefined=str(error).split(":")[0]))
            continue
        jobs.append(Job(length, undefined=_end(model, length, end)))
        if model.copies > 1 and length > model.context_length:
            continue  # whatever the encoding could be made to represent, the blocks end here
        jobs += [Job(length, p) for p in policies if model.encoding.extends(p.name, length)]
    return jobs


def passes_of(
    model: Transformer,
    jobs: list[Job],
    protocols: list[Protocol],
    sizes: list[int],
    settings: Settings,
    *,
    with_bos: bool,
    drawn: bool,
) -> list[Pass]:
    """Give what is scored of a model, in order.

    Args:
        model: as it was trained.
        jobs: its lengths and policies.
        protocols: that are asked for.
        sizes: of the test documents, in tokens.
        settings: of the evaluation.
        with_bos: whether training placed BOS.
        drawn: whether positions of evaluation are drawn, so that no other ones can be told.
    """
    passes = []
    told = any(part.shift_invariant == "no" for part in model.encoding.parts)
    for job in jobs:
        plans = {p.name: p.plan(sizes, job.length, settings, with_bos) for p in protocols}
        own: dict[str, list[Window]] = {}
        for protocol in protocols:
            positions = protocol.positions(job.length, settings)
            windows = plans[protocol.name]
            if positions is None:
                own[protocol.name] = windows
            # Where a constant changes nothing, tokens are aligned as they stand.
            elif windows and not drawn and (told or protocol.name != "aligned"):
                end = int(positions.max()) + 1
                undefined = None if job.policy else _end(model, end, end)
                one = {protocol.name: windows}
                passes.append(Pass(job, one, len(positions), positions, undefined))
        passes.append(Pass(job, own, job.length, None, job.undefined))
    return passes


def draws_positions(sampler: Sampler, length: int) -> bool:
    """Say whether evaluation gives a window other positions than one after another."""
    window = np.zeros((1, length), np.int32)
    positions, _ = sampler.place(window + 1, [0], (0,), 1, training=False)
    return not np.array_equal(positions[0], np.arange(length))


def check_policies(
    runs: list[Run], policies: list[Part], settings: Settings, allow_plugins: bool
) -> None:
    """Find a policy that is misspelt, or that no run has a use for, before scoring."""
    longest = max(settings.lengths)

    def encodings(run: Run, policy: Part | None = None, length: int = 0) -> Encodings:
        """Give a run's encodings, abstractly, extended if a policy is given."""
        config = run.config

        def made() -> Encodings:
            encodings = Transformer(
                config.model, config.encoding, config.train_length, allow_plugins=allow_plugins
            ).encoding
            if policy is not None:
                encodings.extend(policy, length)
            return encodings

        return nnx.eval_shape(made)

    for policy in policies:
        helped, ending = [], []
        for run in runs:
            tried = encodings(run)
            # No policy leads beyond the end of blocks whose positions share no weights.
            limit = run.config.train_length if run.config.model.sharing != "all" else longest
            lengths = [n for n in settings.lengths if n <= limit]
            if any(tried.extends(policy.name, n) for n in lengths):
                helped.append(run.name)
                encodings(run, policy, max(lengths))  # an option that is wrong is refused now
            elif tried.max_position is not None and tried.max_position < min(longest, limit):
                ending.append(run)
        if helped:
            others = [run.name for run in runs if run.name not in helped]
            if others:
                print(f"{policy.name} has nothing to act on in {', '.join(others)}")
            continue
        # Refused for the reason that the first run has that ends too early, if there is one.
        table = policy.name in POLICIES and POLICIES[policy.name].needs == "table"
        if ending or not table:
            encodings((ending or runs)[0], policy, longest)
        print(f"no run needs {policy.name} at any of these lengths: --extend changes nothing")
