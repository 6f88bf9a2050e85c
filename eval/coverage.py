"""``python -m eval coverage``: how often intervals hold the truth that they claim to hold.

Studies are simulated whose truth is known: the difference of two encodings for each seed and
document, ``y[s, d] = seed[s] + document[d] + residual[s, d]``, of mean 0. Seeds are crossed with
documents, which are of 1 to 16 blocks and count by their tokens. `eval.stats` makes the intervals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from eval.stats import (
    LEVEL,
    Array,
    Numbers,
    crossed_limits,
    crossed_parts,
    draw_resamples,
    enough_resamples,
    resampled_limits,
    simultaneous,
    t_limits,
)
from posenc.errors import UserError

# Effects of one unit's standard deviation, from a generator and a shape.
Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]


def _normal(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return generator.standard_normal(shape)


def _heavy(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return generator.standard_t(3, shape) / np.sqrt(3)  # its variance is 3


def _failing(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    fails = generator.random(shape) < 0.25
    return (fails - 0.25) / np.sqrt(0.25 * 0.75)


@dataclasses.dataclass(frozen=True)
class World:
    """Where studies come from: distributions and standard deviations of the three effects."""

    name: str
    says: str
    seeds: Draw
    others: Draw
    document: float
    residual: float


WORLDS = (
    World(
        "normal", "normal effects, seed : document : residual = 1 : 1 : 1", _normal, _normal, 1, 1
    ),
    World("documents", "normal effects, 1 : 4 : 2", _normal, _normal, 4, 2),
    World("heavy", "all effects from Student's t with 3 degrees, 1 : 1 : 1", _heavy, _heavy, 1, 1),
    World(
        "failing",
        "one seed in four fails, other effects normal, 1 : 1 : 1",
        _failing,
        _normal,
        1,
        1,
    ),
)

COLUMNS = (
    ("t, these", "t over seeds; the truth is the mean over seeds, on these documents"),
    ("t, new", "the same; the truth is the mean over seeds and documents"),
    ("crossed", "seeds crossed with documents; the truth as in `t, new`"),
    (
        "satterthw.",
        "the same where it may be narrower than `t over seeds`, which eval.stats forbids",
    ),
    ("boot seeds", "percentile bootstrap over seeds; the truth as in `t, these`"),
    ("boot docs", "percentile bootstrap over documents only; the truth as in `t, new`"),
)


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Simulate how often intervals cover, by number of seeds."""

    seeds: tuple[int, ...] = (2, 3, 4, 5, 8, 10, 20)
    """Numbers of seeds."""
    documents: int = 40
    """Of a study."""
    studies: int = 4000
    """Simulated ones, for each line."""
    level: float = LEVEL
    """What the intervals claim."""
    worlds: tuple[str, ...] = tuple(world.name for world in WORLDS)
    """Where the studies come from."""
    seed: int = 0
    """Of the simulation."""


def cover(arguments: Coverage, world: World, seeds: int) -> dict[str, float]:
    """Give for each column how often the interval covers; a line depends on no other line."""
    place = WORLDS.index(world)
    generator = np.random.default_rng([arguments.seed, place, seeds, arguments.documents])
    studies, documents = arguments.studies, arguments.documents
    tokens = np.asarray(1 + np.arange(documents) % 16, np.float64)
    document = world.document * world.others(generator, (studies, documents))
    values = (
        world.seeds(generator, (studies, seeds, 1))
        + document[:, None]
        + world.residual * world.others(generator, (studies, seeds, documents))
    )
    level = arguments.level
    by_seed = values @ tokens / tokens.sum()
    here = document @ tokens / tokens.sum()
    resamples = enough_resamples(level, 1000)
    over_seeds = draw_resamples(seeds, resamples, arguments.seed)
    over_documents = draw_resamples(documents, resamples, arguments.seed)
    t = t_limits(by_seed, level)
    parts = crossed_parts(values, tokens)
    both, narrow = (crossed_limits(parts, level, widened) for widened in (True, False))
    percentile = resampled_limits(by_seed, np.ones(seeds), over_seeds, level)
    only = resampled_limits(values.mean(1) * tokens, tokens, over_documents, level)

    def rate(limits: tuple[Numbers, Numbers], truth: Array | float) -> float:
        return float(np.mean((limits[0] <= truth) & (truth <= limits[1])))

    rates = (
        *(rate(t, here), rate(t, 0), rate(both, 0), rate(narrow, 0)),
        *(rate(percentile, here), rate(only, 0)),
    )
    return {name: value for (name, _), value in zip(COLUMNS, rates, strict=True)}


def lines(arguments: Coverage) -> Iterator[str]:
    """Give what the command prints, line by line.

    Raises:
        UserError: an unknown world, too few seeds, documents or studies, or a negative seed.
    """
    simultaneous(arguments.level, 1)
    known = {world.name: world for world in WORLDS}
    for name in arguments.worlds:
        if name not in known:
            raise UserError(f"no world {name!r}; choose among {', '.join(known)}")
    for what, number, least in (
        ("seeds", min(arguments.seeds, default=0), 2),
        ("documents", arguments.documents, 2),
        ("studies", arguments.studies, 1),
        ("seed", arguments.seed, 0),
    ):
        if number < least:
            raise UserError(f"{number} {what}; give {least} or more")
    error = 100 * np.sqrt(arguments.level * (1 - arguments.level) / arguments.studies)
    yield (
        f"% of {arguments.studies} simulated studies of {arguments.documents} documents whose "
        f"{100 * arguments.level:g}% interval holds the truth"
    )
    yield f"standard error {error:.2f} where an interval covers as it claims"
    yield ""
    yield "world      seeds" + "".join(f"{name:>12}" for name, _ in COLUMNS)
    for name in arguments.worlds:
        for seeds in arguments.seeds:
            rates = cover(arguments, known[name], seeds).values()
            yield f"{name:<10} {seeds:>5}" + "".join(f"{100 * rate:>12.1f}" for rate in rates)
    yield ""
    width = max(len(name) for name, _ in COLUMNS + tuple((world, "") for world in known))
    for name, says in COLUMNS:
        yield f"{name:<{width}}  {says}"
    for name in arguments.worlds:
        yield f"{name:<{width}}  {known[name].says}"


def coverage(arguments: Coverage) -> None:
    """Print the table."""
    for line in lines(arguments):
        print(line)
