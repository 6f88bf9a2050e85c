"""Estimates and their intervals over seeds and documents, on plain arrays.

Let S be seeds and D documents. ``sums [S, D]`` holds the sum of some per-token value over each
document's targets (NLL in nats, the difference of two of them, hits), and ``tokens [D]`` how many
targets there are: the same for every seed and encoding, because the targets are. An estimate is a
mean per token within each seed, then the mean over seeds. Everything is float64.

Too little data is no error: an `Interval` without bounds says why it has none, so that a report of
one seed can be made. What cannot be right is refused: shapes that disagree, values that are not
finite, no tokens. ``level`` is that of all ``comparisons`` together (see `simultaneous`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special

from posenc.errors import UserError

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Numbers: TypeAlias = Array | np.float64  # one for each of the leading axes, which may be none

LEVEL = 0.95
POWER = 0.8
RESAMPLES = 10_000
# With fewer seeds a p-value invites more trust than it earns, and percentiles of resampled seeds
# cover far less than they claim (`python -m eval coverage`).
SEEDS_FOR_P = 8
SEEDS_FOR_BOOTSTRAP = 10

OVER_SEEDS = "t over seeds"
CROSSED = "seeds crossed with documents"
OVER_DOCUMENTS = "bootstrap over documents"
BOOTSTRAP_SEEDS = "bootstrap over seeds"
DOCUMENTS_ONLY = "documents only"
WILSON = "Wilson"

# Resamples drawn at once: bounds memory, and is no option because the stream depends on it.
_CHUNK = 1000
# A spread that is this small beside its values is rounding.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate with a two-sided interval, or with the reason why it has none.

    ``low`` and ``high`` are both None, or neither is; ``why`` is empty exactly when they are not.
    ``level`` holds for all ``comparisons`` at once. ``df`` are Student's degrees of freedom.
    """

    estimate: float
    low: float | None
    high: float | None
    method: str
    level: float = LEVEL
    comparisons: int = 1
    df: float | None = None
    why: str = ""

    def above(self, value: float) -> bool:
        """Whether the whole interval lies above a value; False where there is no interval."""
        return self.low is not None and self.low > value

    def below(self, value: float) -> bool:
        """Whether the whole interval lies below a value; False where there is no interval."""
        return self.high is not None and self.high < value

    def holds(self, value: float) -> bool:
        """Whether the interval holds a value; False where there is no interval."""
        return self.low is not None and self.high is not None and self.low <= value <= self.high


@dataclasses.dataclass(frozen=True)
class Paired:
    """The difference A minus B over seeds that both have.

    ``correlation`` is that of A's and B's seeds: pairing helps as far as it is positive, and
    sharing a seed does not make it so. ``detectable`` is the smallest difference that this many
    seeds with this spread would find (see `detectable_difference`).
    """

    interval: Interval
    per_seed: tuple[float, ...]
    correlation: float | None
    detectable: float | None
    p: float | None


@dataclasses.dataclass(frozen=True)
class Crossed:
    """A mean over seeds crossed with documents, both taken as drawn at random.

    The variance components are as estimated, so they may be negative; those in ``clipped`` (of
    ``"seeds"``, ``"documents"``) count as zero in ``variance``, that of the mean. None where there
    are too few seeds or documents to tell. ``widened``: the interval is Student's t over seeds, the
    wider one.
    """

    interval: Interval
    variance: float | None
    seed_variance: float | None
    document_variance: float | None
    residual_variance: float | None
    clipped: tuple[str, ...] = ()
    widened: bool = False


@dataclasses.dataclass(frozen=True)
class Summary:
    """What stands beside a mean over seeds; ``success`` is the rate of those past a threshold."""

    values: tuple[float, ...]
    mean: float
    median: float
    best: float
    worst: float
    success: Interval | None


def simultaneous(level: float, comparisons: int) -> float:
    """Give the level of each of several intervals that together hold with ``level``: Bonferroni.

    Differences from one baseline are correlated in an unknown way and some intervals are
    bootstrapped; Bonferroni needs nothing of either. Sidak's would be narrower by about 1% with
    three seeds, and the maximal t needs the correlation of the comparisons, which they do not give.

    Raises:
        UserError: a level outside [0.5, 1) or fewer than one comparison.
    """
    if not 0.5 <= level < 1:
        raise UserError(f"level {level} is not in [0.5, 1); 0.95 is usual")
    if comparisons < 1:
        raise UserError(f"{comparisons} comparisons; count them, and give 1 for a single one")
    return 1 - (1 - level) / comparisons


def over_seeds(values: ArrayLike, *, level: float = LEVEL, comparisons: int = 1) -> Interval:
    """Give the mean of one value per seed with Student's t interval.

    Args:
        values: ``[S]``, in any unit.
        level: Of the interval; of all together where there are several.
        comparisons: How many.

    Raises:
        UserError: no values, or some that are not finite.
    """
    each = simultaneous(level, comparisons)
    values = _per_seed(values)
    mean, _ = _mean_and_deviation(values)
    if values.size < 2:
        why = f"{DOCUMENTS_ONLY}: one seed"
        return Interval(float(mean), None, None, OVER_SEEDS, level, comparisons, None, why)
    low, high = t_limits(values, each)
    df = float(values.size - 1)
    return Interval(float(mean), float(low), float(high), OVER_SEEDS, level, comparisons, df)


def paired(
    a: ArrayLike,
    b: ArrayLike,
    tokens: ArrayLike,
    *,
    level: float = LEVEL,
    comparisons: int = 1,
) -> Paired:
    """Compare two encodings, A minus B, seed by seed on identical targets.

    The interval is for these documents: it says what other seeds would give. `crossed` of
    ``a - b`` says what other documents would give as well. The p-value, two-sided, times the number
    of comparisons (Bonferroni), is given from 8 seeds on.

    Args:
        a: ``[S, D]``, sums over the targets of each document.
        b: The same seeds and documents of the other.
        tokens: ``[D]``, targets of each document.
        level: Of the interval; of all together where there are several.
        comparisons: How many.

    Raises:
        UserError: shapes that disagree, values that are not finite, or no tokens.
    """
    first, counts = checked(a, tokens)
    second, _ = checked(b, tokens)
    if first.shape != second.shape:
        raise UserError(
            f"A has {len(first)} seeds and B {len(second)}; pairs need the same seeds of both"
        )
    differences = _per_token(first - second, counts)
    interval = over_seeds(differences, level=level, comparisons=comparisons)
    seeds = len(differences)
    _, deviation = _mean_and_deviation(differences)
    p = None
    if seeds >= SEEDS_FOR_P and deviation > 0:
        statistic = abs(interval.estimate) / (deviation / np.sqrt(seeds))
        p = min(1.0, comparisons * 2 * float(special.stdtr(seeds - 1, -statistic)))
    return Paired(
        interval,
        tuple(differences.tolist()),
        _correlation(_per_token(first, counts), _per_token(second, counts)),
        detectable_difference(float(deviation), seeds, level=level, comparisons=comparisons),
        p,
    )


def detectable_difference(
    deviation: float, seeds: int, *, level: float = LEVEL, comparisons: int = 1
) -> float | None:
    """Give the smallest difference that a paired t-test finds four times in five.

    It is ``delta = ncp * deviation / sqrt(S)``, where the noncentral t with S - 1 degrees of
    freedom and noncentrality ncp lies outside Student's two-sided limits with probability 0.8. The
    standard deviation of the pairs' differences is an estimate, hence so is delta.

    Returns:
        In the unit of ``deviation``; None for one seed.
    """
    each = simultaneous(level, comparisons)
    if seeds < 2:
        return None
    return _noncentrality(seeds - 1, each) * deviation / float(np.sqrt(seeds))


def crossed(
    sums: ArrayLike, tokens: ArrayLike, *, level: float = LEVEL, comparisons: int = 1
) -> Crossed:
    """Give the mean with an interval over other seeds and other documents together.

    The model is ``y[s, d] = mean + seed[s] + document[d] + residual[s, d]`` for the values per
    token, all three random; without replication, interaction and noise are one. With weights
    ``p = tokens / tokens.sum()`` and ``h = (p ** 2).sum()``, three mean squares whose expectations
    are in the right column (for equal documents those of the analysis of variance, up to factors):

        A, variance of the seeds' means                                seed + h residual
        B, p ** 2 times squared deviations of documents' means, / g    document + residual / S
        E, p ** 2 times squared residuals, / (g (S - 1))               residual

    where ``g = h - 2 (p ** 3).sum() + h ** 2``. The mean's variance is ``A/S + h (B - E/S)`` with
    Satterthwaite's degrees of freedom. Those of B and E are as few as documents of unequal size
    leave: ``tr(M)^2 / tr(M^2)`` of a quadratic form with the matrix M. A negative component of
    variance counts as zero, which makes the mean's ``max(A/S, h B)``, with the degrees of freedom
    of the one that is left.

    Seeds that happen to lie close make all of this too sure (two seeds: 88% of the intervals
    cover), so the interval is never narrower than Student's t over seeds, which asks for less.

    Args:
        sums: ``[S, D]``, of one encoding or the difference of two.
        tokens: ``[D]``, targets of each document.
        level: Of the interval; of all together where there are several.
        comparisons: How many.

    Returns:
        With one document, Student's t over seeds; with one seed, an interval without bounds.

    Raises:
        UserError: shapes that disagree, values that are not finite, or no tokens.
    """
    values, counts = checked(sums, tokens)
    seeds, documents = values.shape
    per_seed = _per_token(values, counts)
    if seeds < 2 or documents < 2:
        interval = over_seeds(per_seed, level=level, comparisons=comparisons)
        if seeds < 2:
            return Crossed(dataclasses.replace(interval, method=CROSSED), None, None, None, None)
        variance = float(np.var(per_seed, ddof=1) / seeds)
        return Crossed(interval, variance, None, None, None)
    parts = crossed_parts(values / counts, counts)
    each = simultaneous(level, comparisons)
    low, high = crossed_limits(parts, each)
    by_seeds, by_satterthwaite = _crossed_halves(parts, each)
    widened = bool(by_seeds > by_satterthwaite)
    names = (("seeds", parts.seed_variance), ("documents", parts.document_variance))
    return Crossed(
        Interval(
            float(_mean_and_deviation(per_seed)[0]),
            float(low),
            float(high),
            CROSSED,
            level,
            comparisons,
            float(seeds - 1 if widened else parts.df),
        ),
        float(parts.variance),
        float(parts.seed_variance),
        float(parts.document_variance),
        float(parts.residual_variance),
        tuple(name for name, component in names if component < 0),
        widened,
    )


def bootstrap_documents(
    sums: ArrayLike,
    tokens: ArrayLike,
    *,
    seed: int,
    level: float = LEVEL,
    comparisons: int = 1,
    resamples: int | None = None,
) -> Interval:
    """Give the spread over documents of the mean over these very seeds: a percentile bootstrap.

    Documents are resampled with all their tokens, the same ones for every seed; of ``a - b`` it is
    the paired bootstrap. Give one row, ``sums[s : s + 1]``, for the spread within a seed: the same
    ``seed`` draws the same documents. It says nothing of other training seeds.

    Args:
        sums: ``[S, D]``, of one encoding or the difference of two.
        tokens: ``[D]``, targets of each document.
        seed: Of the resampling.
        level: Of the interval; of all together where there are several.
        comparisons: How many.
        resamples: How many; ten or more beyond each limit, and 10,000 or more unless given.

    Raises:
        UserError: as `crossed`, or too few resamples for the level.
    """
    each = simultaneous(level, comparisons)
    resamples = enough_resamples(each, resamples)
    values, counts = checked(sums, tokens)
    mean = float(_mean_and_deviation(_per_token(values, counts))[0])
    method = OVER_DOCUMENTS
    if counts.size < 2:
        return Interval(mean, None, None, method, level, comparisons, None, "one document")
    low, high = resampled_limits(
        values.mean(0), counts, draw_resamples(counts.size, resamples, seed), each
    )
    return Interval(mean, float(low), float(high), method, level, comparisons)


def bootstrap_seeds(
    values: ArrayLike,
    *,
    seed: int,
    level: float = LEVEL,
    comparisons: int = 1,
    resamples: int | None = None,
) -> Interval:
    """Give the mean of one value per seed with a percentile bootstrap, from 10 seeds on.

    Args:
        values: ``[S]``, in any unit.
        seed: Of the resampling.
        level: Of the interval; of all together where there are several.
        comparisons: How many.
        resamples: How many; ten or more beyond each limit, and 10,000 or more unless given.

    Raises:
        UserError: no values, some that are not finite, or too few resamples for the level.
    """
    each = simultaneous(level, comparisons)
    resamples = enough_resamples(each, resamples)
    values = _per_seed(values)
    mean = float(_mean_and_deviation(values)[0])
    if values.size < SEEDS_FOR_BOOTSTRAP:
        why = f"{values.size} seeds; percentiles of resampled seeds need {SEEDS_FOR_BOOTSTRAP}"
        return Interval(mean, None, None, BOOTSTRAP_SEEDS, level, comparisons, None, why)
    draws = draw_resamples(values.size, resamples, seed)
    low, high = resampled_limits(values, np.ones(values.size), draws, each)
    return Interval(mean, float(low), float(high), BOOTSTRAP_SEEDS, level, comparisons)


def primary_interval(
    sums: ArrayLike,
    tokens: ArrayLike,
    *,
    seed: int = 0,
    level: float = LEVEL,
    comparisons: int = 1,
) -> Interval:
    """Give Student's t over seeds or, for one seed, the spread over documents, called so.

    Args:
        sums: ``[S, D]``, of one encoding or the difference of two.
        tokens: ``[D]``, targets of each document.
        seed: Of the resampling, where there is one.
        level: Of the interval; of all together where there are several.
        comparisons: How many.

    Raises:
        UserError: shapes that disagree, values that are not finite, or no tokens.
    """
    values, counts = checked(sums, tokens)
    if len(values) > 1:
        return over_seeds(_per_token(values, counts), level=level, comparisons=comparisons)
    interval = bootstrap_documents(values, counts, seed=seed, level=level, comparisons=comparisons)
    return dataclasses.replace(interval, method=DOCUMENTS_ONLY)


def wilson(successes: int, trials: int, *, level: float = LEVEL, comparisons: int = 1) -> Interval:
    """Give a success rate with Wilson's score interval (1927), without continuity correction.

    Raises:
        UserError: not 0 <= successes <= trials, or no trials.
    """
    each = simultaneous(level, comparisons)
    if not 0 <= successes <= trials or trials < 1:
        raise UserError(f"{successes} successes of {trials}; give 0 to n of at least one trial")
    rate, z = successes / trials, float(special.ndtri(0.5 + each / 2))
    scale = 1 + z**2 / trials
    centre = (rate + z**2 / (2 * trials)) / scale
    half = z / scale * np.sqrt(rate * (1 - rate) / trials + (z / (2 * trials)) ** 2)
    # At none and all the limit is the rate itself, which rounding would miss.
    low = 0.0 if successes == 0 else float(centre - half)
    high = 1.0 if successes == trials else float(centre + half)
    return Interval(rate, low, high, WILSON, level, comparisons)


def summarize(
    values: ArrayLike,
    *,
    lower_is_better: bool = True,
    threshold: float | None = None,
    level: float = LEVEL,
) -> Summary:
    """Give mean, median, best and worst over seeds, and how many reach a threshold.

    Args:
        values: ``[S]``, one a seed.
        lower_is_better: As of a loss; False for an accuracy.
        threshold: A seed that reaches it, or is better, is a success.
        level: Of the success rate's interval.

    Raises:
        UserError: no values, or some that are not finite.
    """
    values = _per_seed(values)
    best, worst = (values.min(), values.max()) if lower_is_better else (values.max(), values.min())
    success = None
    if threshold is not None:
        reached = values <= threshold if lower_is_better else values >= threshold
        success = wilson(int(reached.sum()), values.size, level=level)
    return Summary(
        tuple(values.tolist()),
        float(_mean_and_deviation(values)[0]),
        float(np.median(values)),
        float(best),
        float(worst),
        success,
    )


def checked(sums: ArrayLike, tokens: ArrayLike) -> tuple[Array, Array]:
    """Give both as float64, without the documents that have no tokens.

    Raises:
        UserError: shapes that disagree, values that are not finite, or no tokens.
    """
    values, counts = np.asarray(sums, np.float64), np.asarray(tokens, np.float64)
    if values.ndim != 2 or not len(values) or counts.shape != values.shape[1:]:
        raise UserError(
            f"sums of shape {values.shape} and tokens of shape {counts.shape}; "
            "give [seeds, documents] and [documents]"
        )
    if not np.isfinite(counts).all() or (counts < 0).any() or not counts.sum() > 0:
        raise UserError("tokens must be finite, none negative, and not all zero; count the targets")
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        seed, document = bad[0]
        raise UserError(
            f"{len(bad)} of {values.size} sums are not finite, first that of seed {seed} (counted "
            f"from 0) and document {document}; leave out what is undefined, and say so"
        )
    kept = counts > 0
    if values[:, ~kept].any():
        raise UserError("a document without tokens has a sum other than 0; give its tokens")
    return values[:, kept], counts[kept]


def enough_resamples(level: float, resamples: int | None = None) -> int:
    """Give how many resamples a percentile interval takes: ten or more beyond each limit.

    Raises:
        UserError: fewer are asked for.
    """
    needed = round(20 / (1 - level))
    if resamples is not None and resamples < needed:
        raise UserError(
            f"{resamples} resamples are too few for level {level:.6g}; give {needed} or more"
        )
    return max(RESAMPLES, needed) if resamples is None else resamples


def student_quantile(df: float | Numbers, level: float) -> Numbers:
    """Give Student's two-sided limit: the t that |t| exceeds with probability 1 - level."""
    return special.stdtrit(df, 0.5 + level / 2)


# What follows takes arrays of any number of leading axes: thousands of studies at once are what
# `python -m eval coverage` tries, with the very functions that make a report's intervals.


def t_limits(values: Array, level: float) -> tuple[Numbers, Numbers]:
    """Give Student's limits for the mean over the last axis, ``[..., S]`` to ``[...]``."""
    seeds = values.shape[-1]
    mean, deviation = _mean_and_deviation(values)
    half = student_quantile(seeds - 1, level) * deviation / np.sqrt(seeds)
    return mean - half, mean + half


@dataclasses.dataclass(frozen=True, eq=False)
class CrossedParts:
    """The mean of a crossed design, its variance and the components of that, each ``[...]``.

    ``seeds_alone`` is the variance of the mean on these documents.
    """

    seeds: int
    mean: Numbers
    seeds_alone: Numbers
    variance: Numbers
    df: Numbers
    seed_variance: Numbers
    document_variance: Numbers
    residual_variance: Numbers


def crossed_parts(values: Array, tokens: Array) -> CrossedParts:
    """Estimate what `crossed` needs, from values per token ``[..., S, D]`` and tokens ``[D]``."""
    seeds = values.shape[-2]
    p = tokens / tokens.sum()
    h = (p**2).sum()
    g = h - 2 * (p**3).sum() + h**2
    # Relative to one value, so that equal ones have no spread at all, and not that of rounding.
    origin = values[..., :1, :1]
    values = values - origin
    by_seed = values @ p
    by_document = values.mean(-2)
    mean = by_seed.mean(-1)
    residuals = values - by_seed[..., None] - by_document[..., None, :] + mean[..., None, None]
    a = ((by_seed - mean[..., None]) ** 2).sum(-1) / (seeds - 1) / seeds
    b = ((by_document - mean[..., None]) ** 2) @ p**2 / g * h
    residual = (residuals**2 @ p**2).sum(-1) / (g * (seeds - 1))
    e = residual * h / seeds
    # A component below zero counts as zero.
    few_seeds, few_documents = a < e, b < e
    variance = np.where(few_seeds | few_documents, np.maximum(a, b), a + b - e)
    df_seeds, df_documents = float(seeds - 1), _document_df(p)
    spread = a**2 / df_seeds + b**2 / df_documents + e**2 / (df_seeds * df_documents)
    satterthwaite = variance**2 / np.where(spread > 0, spread, 1)
    clipped = np.where(a >= b, df_seeds, df_documents)
    df = np.where(few_seeds | few_documents | (spread == 0), clipped, satterthwaite)
    return CrossedParts(
        seeds,
        mean + origin[..., 0, 0],
        a,
        variance,
        df,
        seeds * (a - e),
        (b - e) / h,
        residual,
    )


def _document_df(p: Array) -> float:
    """Give the degrees of freedom of squared deviations from a mean, weighted by ``p ** 2``.

    With ``K = C C'`` for ``C = I - 1 p'``, the form's matrix has the eigenvalues of ``W K``, where
    ``W = diag(p ** 2)`` and ``K[i, j] = (i == j) + h - p[i] - p[j]``: twice its squared mean over
    its variance is ``tr(W K)^2 / tr(W K W K)``. Documents of one size have one less than there are.
    """
    h, cubes, fourth, fifth = ((p**power).sum() for power in (2, 3, 4, 5))
    trace = h - 2 * cubes + h**2
    squares = fourth + 4 * h * fourth - 4 * fifth + h**4 - 4 * h**2 * cubes + 2 * cubes**2
    return float(np.clip(trace**2 / squares, 1, p.size - 1))


def crossed_limits(
    parts: CrossedParts, level: float, widened: bool = True
) -> tuple[Numbers, Numbers]:
    """Give the limits of the mean of a crossed design; ``widened`` as `crossed` says."""
    by_seeds, by_satterthwaite = _crossed_halves(parts, level)
    half = np.maximum(by_seeds, by_satterthwaite) if widened else by_satterthwaite
    return parts.mean - half, parts.mean + half


def _crossed_halves(parts: CrossedParts, level: float) -> tuple[Numbers, Numbers]:
    return (
        student_quantile(float(parts.seeds - 1), level) * np.sqrt(parts.seeds_alone),
        student_quantile(parts.df, level) * np.sqrt(parts.variance),
    )


def draw_resamples(units: int, resamples: int, seed: int) -> Array:
    """Draw how often each unit is in each resample, ``[resamples, units]``."""
    generator = np.random.default_rng(seed)
    rates = np.full(units, 1 / units)
    chunks = [
        generator.multinomial(units, rates, size=min(_CHUNK, resamples - start))
        for start in range(0, resamples, _CHUNK)
    ]
    return np.concatenate(chunks).astype(np.float64)


def resampled_limits(
    sums: Array, counts: Array, draws: Array, level: float
) -> tuple[Numbers, Numbers]:
    """Give percentile limits of ``sums / counts``, each summed over a resample's units.

    Args:
        sums: ``[..., N]``, a sum for each unit.
        counts: ``[N]``, what the ratio divides by.
        draws: ``[resamples, N]``, how often each unit is in it.
        level: Of the interval.
    """
    means = (sums @ draws.T) / (draws @ counts)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=-1)
    return low, high


def _mean_and_deviation(values: Array) -> tuple[Numbers, Numbers]:
    """Give mean and standard deviation (n - 1) over the last axis; 0 for one value, or equal ones.

    Relative to the first value: a mean that is rounded would give equal values a spread.
    """
    origin = values[..., :1]
    shifted = values - origin
    deviation = shifted.std(-1, ddof=1) if values.shape[-1] > 1 else np.zeros(values.shape[:-1])
    return origin[..., 0] + shifted.mean(-1), deviation


def _correlation(a: Array, b: Array) -> float | None:
    if len(a) < 3:
        return None
    for values in (a, b):
        if _mean_and_deviation(values)[1] <= _ROUNDING * np.abs(values).max():
            return None
    return float(np.corrcoef(a, b)[0, 1])


@functools.lru_cache(maxsize=1024)
def _noncentrality(df: int, level: float) -> float:
    """Give the noncentrality at which a two-sided t-test has power 0.8.

    The noncentral t is integrated here, over its normal numerator: the tail beyond Student's limit
    is a chi-square probability for each value of that. SciPy's distribution is NaN in places that
    few seeds reach.
    """
    limit = float(student_quantile(df, level))
    normal, step = np.linspace(-10, 10, 8001, retstep=True)
    density = np.exp(-(normal**2) / 2) / np.sqrt(2 * np.pi) * step

    def excess(noncentrality: float) -> float:
        squared = ((normal + noncentrality) / limit) ** 2
        return float(density @ special.gammainc(df / 2, squared * df / 2)) - POWER

    return float(optimize.brentq(excess, 0, 2 * limit + 10, xtol=1e-12))


def _per_seed(values: ArrayLike) -> Array:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not array.size:
        raise UserError(f"values of shape {array.shape}; give one for each seed")
    if not np.isfinite(array).all():
        count = int((~np.isfinite(array)).sum())
        raise UserError(
            f"{count} of {array.size} seeds have no finite value; leave them out, and say so"
        )
    return array


def _per_token(sums: Array, tokens: Array) -> Array:
    return np.asarray(sums.sum(-1) / tokens.sum(), np.float64)
