"""What the losses at several lengths say about a positional encoding, from plain arrays.

Let K be lengths, S seeds, D documents, L the training length and T an evaluated one (context and
target together). ``nll [K, S, D]`` holds sums of NLL in nats over each document's targets, which
are the same at every length; ``tokens [D]`` counts them. A length at which any value is not finite
is undefined there: nothing is averaged over it, and the result names it.

Intervals are `eval.stats.primary_interval`: Student's t over seeds, or for one seed the spread over
documents, which then says "documents only". Differences of losses are taken within a seed and
target first. The *reference* of an encoding is its lowest mean loss at any T up to L: the length is
chosen on the mean over seeds, the loss there is each seed's own, so that a difference from it has
the reference's uncertainty in its interval. That the lowest of several was chosen is not in it; it
makes the reference lower, hence what is compared with it worse, by less than the spread there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from eval.stats import (
    DOCUMENTS_ONLY,
    LEVEL,
    Array,
    Interval,
    Paired,
    checked,
    draw_resamples,
    enough_resamples,
    paired,
    primary_interval,
    resampled_limits,
    simultaneous,
    student_quantile,
)
from posenc.errors import UserError

ENDPOINT_REACH = 16
TOLERANCE = 0.05
VOID_BEYOND = 0.25

FIELLER = "Fieller over seeds"


@dataclasses.dataclass(frozen=True)
class Reference:
    """The lowest loss at any length up to the training length, in nats per token."""

    length: int
    loss: float


@dataclasses.dataclass(frozen=True, eq=False)
class Endpoint:
    """The mean over log T in [L, 16 L] of loss minus reference, in nats per token.

    ``sums [S, D]`` is the same combination of the losses for each seed and document, ready for
    `paired`, `crossed` and `bootstrap_documents`. Where ``why`` is not empty there is no endpoint,
    and ``interval`` and ``sums`` are None.
    """

    interval: Interval | None
    sums: Array | None
    reference: Reference
    lengths: tuple[int, ...]
    why: str = ""


@dataclasses.dataclass(frozen=True)
class EffectiveLength:
    """A length in tokens, censored where it cannot be told: ``=``, ``>=``, ``<=`` or ``void``.

    ``intervals`` has every length that was asked and what decided there, None where undefined;
    ``why`` says what ended it; ``without`` are the lengths below it that did not pass.
    """

    length: int | None
    sign: Literal["=", ">=", "<=", "void"]
    intervals: tuple[tuple[int, Interval | None], ...] = ()
    why: str = ""
    without: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Give it as a table shows it."""
        if self.length is None:
            return "void"
        return str(self.length) if self.sign == "=" else f"{self.sign} {self.length}"


@dataclasses.dataclass(frozen=True)
class Recovery:
    """The part that training long gains over truncation, and that a method recovers.

    ``interval`` is None where ``denominator``, of TRUNC minus train-long, is not above 0.
    """

    interval: Interval | None
    denominator: Interval
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a method does with the far context of one length, and the three differences behind it.

    ``word`` is ``extrapolates``, ``tolerates`` or ``neither``; None where there are no intervals.
    """

    word: Literal["extrapolates", "tolerates", "neither"] | None
    info: Interval
    gain: Interval
    tax: Interval


def reference(
    nll: ArrayLike, tokens: ArrayLike, lengths: Sequence[int], train_length: int
) -> Reference:
    """Give the lowest loss at any T up to L, and where it is; the longer one of equals.

    Args:
        nll: ``[K, S, D]``, sums in nats.
        tokens: ``[D]``, targets of each document.
        lengths: The K lengths T.
        train_length: L.

    Raises:
        UserError: no defined length up to L, or arrays that do not fit.
    """
    curve = _curve(nll, tokens, lengths)
    means = {
        length: float(sums.sum(-1).mean() / curve.tokens.sum())
        for length, sums in curve.defined.items()
        if length <= train_length
    }
    if not means:
        raise UserError(
            f"no loss at any length up to the training length {train_length}, only at "
            f"{', '.join(map(str, curve.lengths))}; score {train_length} too"
        )
    best = min(means, key=lambda length: (means[length], -length))
    return Reference(best, means[best])


def log_weights(lengths: Sequence[int]) -> Array:
    """Give the trapezoid rule's weights for a mean over log T; they sum to 1.

    Raises:
        UserError: fewer than two lengths, or not increasing.
    """
    x = np.log(np.asarray(lengths, np.float64))
    if x.size < 2 or (np.diff(x) <= 0).any():
        raise UserError(f"lengths {list(lengths)}; give two or more, increasing")
    weights = np.zeros(x.size)
    weights[:-1] += np.diff(x) / 2
    weights[1:] += np.diff(x) / 2
    return weights / (x[-1] - x[0])


def endpoint(
    nll: ArrayLike,
    tokens: ArrayLike,
    lengths: Sequence[int],
    train_length: int,
    *,
    reach: int = ENDPOINT_REACH,
    level: float = LEVEL,
    comparisons: int = 1,
    seed: int = 0,
) -> Endpoint:
    """Give the primary endpoint: the mean over log T in [L, 16 L] of loss minus reference.

    The trapezoid rule in log T over the evaluated lengths in the range. L and 16 L must be among
    them, and none may be undefined: an endpoint over a part of the range would be another number.
    Lengths between them may be missing; ``lengths`` says which were used, and `paired_endpoints`
    refuses two that differ in it.

    Args:
        nll: ``[K, S, D]``, sums in nats.
        tokens: ``[D]``, targets of each document.
        lengths: The K lengths T.
        train_length: L.
        reach: The end of the range, in multiples of L.
        level: Of the interval; of all together where there are several.
        comparisons: How many.
        seed: Of the resampling of documents, where there is one training seed.

    Raises:
        UserError: no defined length up to L, or arrays that do not fit.
    """
    curve = _curve(nll, tokens, lengths)
    base = reference(nll, tokens, lengths, train_length)
    end = reach * train_length
    used = tuple(length for length in curve.lengths if train_length <= length <= end)
    missing = [length for length in (train_length, end) if length not in used]
    undefined = [length for length in used if length not in curve.defined]
    if missing:
        why = f"not evaluated at {_listed(missing)}"
    elif undefined:
        why = "; ".join(curve.undefined[length] for length in undefined)
    else:
        weights = log_weights(used)
        sums = np.tensordot(weights, np.stack([curve.defined[length] for length in used]), 1)
        sums = sums - curve.defined[base.length]
        interval = primary_interval(
            sums, curve.tokens, level=level, comparisons=comparisons, seed=seed
        )
        return Endpoint(interval, sums, base, used)
    return Endpoint(None, None, base, used, why)


def paired_endpoints(
    a: Endpoint,
    b: Endpoint,
    tokens: ArrayLike,
    *,
    level: float = LEVEL,
    comparisons: int = 1,
) -> Paired:
    """Compare two encodings by their endpoints, A minus B, as `eval.stats.paired` does.

    Raises:
        UserError: one of them is void, or they are over different lengths.
    """
    for endpoint in (a, b):
        if endpoint.sums is None:
            raise UserError(f"no endpoint to compare: {endpoint.why}")
    if a.lengths != b.lengths:
        raise UserError(
            f"endpoints over different lengths, {_listed(a.lengths)} and {_listed(b.lengths)}; "
            "score both at the same"
        )
    assert a.sums is not None
    assert b.sums is not None
    return paired(a.sums, b.sums, tokens, level=level, comparisons=comparisons)


def tolerated(
    nll: ArrayLike,
    tokens: ArrayLike,
    lengths: Sequence[int],
    train_length: int,
    *,
    margin: float = TOLERANCE,
    lowest_reference: float | None = None,
    void_beyond: float = VOID_BEYOND,
    level: float = LEVEL,
    comparisons: int = 1,
    seed: int = 0,
) -> EffectiveLength:
    """Give the longest T up to which the loss stays within a margin of the reference.

    The upper bound of loss(T') minus reference must be within the margin at every evaluated T' from
    the reference's length to T; a shorter T' has less to go by and is not asked. That all of
    several hold needs no correction for their number. Censored as ``>=`` where it is the longest
    tried.

    Args:
        nll: ``[K, S, D]``, sums in nats.
        tokens: ``[D]``, targets of each document.
        lengths: The K lengths T.
        train_length: L.
        margin: In nats per token.
        lowest_reference: Among the compared encodings; None asks no such question.
        void_beyond: A reference that is more than this above the lowest, in nats per token, voids
            the length: a model that has learned little has little to lose. By the means alone.
        level: Of the intervals; of all encodings together where there are several.
        comparisons: How many encodings.
        seed: Of the resampling of documents, where there is one training seed.

    Raises:
        UserError: no defined length up to L, or arrays that do not fit.
    """
    curve = _curve(nll, tokens, lengths)
    base = reference(nll, tokens, lengths, train_length)
    longer = [length for length in curve.lengths if length > base.length]
    intervals: list[tuple[int, Interval | None]] = []
    for length in longer:
        interval = None
        if length in curve.defined:
            difference = curve.defined[length] - curve.defined[base.length]
            interval = primary_interval(
                difference, curve.tokens, level=level, comparisons=comparisons, seed=seed
            )
        intervals.append((length, interval))
    asked = tuple(intervals)
    void = _void(base.loss, lowest_reference, void_beyond)
    if void:
        return EffectiveLength(None, "void", asked, void)
    reached = base.length
    for length, interval in asked:
        if interval is None:
            return EffectiveLength(reached, "=", asked, curve.undefined[length])
        if interval.high is None:
            return EffectiveLength(None, "void", asked, f"no interval: {interval.why}")
        if interval.high > margin:
            why = f"up to {interval.high:.3g} nats above the reference at {length}"
            return EffectiveLength(reached, "=", asked, why)
        reached = length
    return EffectiveLength(reached, ">=", asked, "the longest tried")


def used(
    info: ArrayLike,
    tokens: ArrayLike,
    lengths: Sequence[int],
    train_length: int,
    *,
    loss_reference: float | None = None,
    lowest_reference: float | None = None,
    void_beyond: float = VOID_BEYOND,
    level: float = LEVEL,
    comparisons: int = 1,
    seed: int = 0,
) -> EffectiveLength:
    """Give the longest T whose far half is used: info(T) - info(T/2) > 0 by its lower bound.

    info is 0 up to L, where nothing is foreign. Lengths whose half was not evaluated are not asked.
    Each increment has the level by itself: a T with no gap below it (``without`` is empty) needs no
    correction for the number of lengths, as the increments pass in order; one above a gap might be
    the luck of several tries. ``>=`` where it is the longest tried, ``<= L`` where none passes.

    Args:
        info: ``[K, S, D]``, sums in nats of the loss with a foreign prefix minus that with the true
            one.
        tokens: ``[D]``, targets of each document.
        lengths: The K lengths T; those up to L are ignored.
        train_length: L.
        loss_reference: The encoding's own reference, in nats per token.
        lowest_reference: Among the compared encodings; None asks no such question.
        void_beyond: As in `tolerated`.
        level: Of the intervals; of all encodings together where there are several.
        comparisons: How many encodings.
        seed: Of the resampling of documents, where there is one training seed.

    Raises:
        UserError: no length whose half is known (but where the reference voids it), one reference
            without the other, or arrays that do not fit.
    """
    if (loss_reference is None) != (lowest_reference is None):
        raise UserError("give both loss_reference and lowest_reference, or neither")
    curve = _curve(info, tokens, lengths)
    zero = np.zeros((curve.values.shape[1], curve.tokens.size))
    known = {length: zero for length in curve.lengths if length <= train_length}
    known |= {length: sums for length, sums in curve.defined.items() if length > train_length}
    intervals: list[tuple[int, Interval | None]] = []
    for length in curve.lengths:
        half = length / 2
        if length <= train_length or (half > train_length and half not in curve.lengths):
            continue
        before = zero if half <= train_length else known.get(int(half))
        interval = None
        if length in known and before is not None:
            interval = primary_interval(
                known[length] - before,
                curve.tokens,
                level=level,
                comparisons=comparisons,
                seed=seed,
            )
        intervals.append((length, interval))
    asked = tuple(intervals)
    void = "" if loss_reference is None else _void(loss_reference, lowest_reference, void_beyond)
    if void:
        return EffectiveLength(None, "void", asked, void)
    if not intervals:
        raise UserError(
            f"no length beyond {train_length} whose half is evaluated, among "
            f"{_listed(curve.lengths)}; score {2 * train_length}"
        )
    if all(interval is not None and interval.low is None for _, interval in asked):
        first = asked[0][1]
        assert first is not None
        return EffectiveLength(None, "void", asked, f"no interval: {first.why}")
    passed = [length for length, interval in asked if interval is not None and interval.above(0)]
    undefined = "; ".join(why for length, why in curve.undefined.items() if length > train_length)
    if not passed:
        return EffectiveLength(train_length, "<=", asked, undefined or "no gain beyond it is shown")
    longest = passed[-1]
    without = tuple(length for length, _ in asked if length < longest and length not in passed)
    if longest == asked[-1][0]:
        return EffectiveLength(longest, ">=", asked, undefined or "the longest tried", without)
    beyond = next(length for length, _ in asked if length > longest)
    return EffectiveLength(
        longest, "=", asked, undefined or f"no gain from it to {beyond} is shown", without
    )


def recovery(
    trunc: ArrayLike,
    loss: ArrayLike,
    train_long: ArrayLike,
    tokens: ArrayLike,
    *,
    level: float = LEVEL,
    comparisons: int = 1,
    seed: int = 0,
) -> Recovery:
    """Give (TRUNC - loss) / (TRUNC - train-long) at one length, with Fieller's interval over seeds.

    The ratio is that of means over seeds, paired by seed. Fieller (1954) takes the ratios that a
    t-test of numerator minus ratio times denominator does not reject; they are an interval
    exactly where the denominator's own interval excludes 0. Where that lies below 0 there is
    nothing to recover. With one seed: the percentile bootstrap of the ratio over documents.

    Args:
        trunc: ``[S, D]``, sums in nats, given the last L tokens alone.
        loss: The same with the whole context.
        train_long: The same of a model trained at that length.
        tokens: ``[D]``, targets of each document.
        level: Of the interval; of all together where there are several.
        comparisons: How many.
        seed: Of the resampling of documents, where there is one training seed.

    Raises:
        UserError: shapes that disagree, values that are not finite, or no tokens.
    """
    truncated, counts = checked(trunc, tokens)
    whole, _ = checked(loss, tokens)
    long, _ = checked(train_long, tokens)
    if not truncated.shape == whole.shape == long.shape:
        seeds = ", ".join(str(len(array)) for array in (truncated, whole, long))
        raise UserError(f"{seeds} seeds of TRUNC, loss and train-long; give the same of each")
    top, bottom = truncated - whole, truncated - long
    denominator = primary_interval(bottom, counts, level=level, comparisons=comparisons, seed=seed)
    if denominator.low is None:
        return Recovery(None, denominator, denominator.why)
    if not denominator.above(0):
        may = "is below" if denominator.below(0) else "may be"
        return Recovery(None, denominator, f"TRUNC minus train-long {may} 0")
    if len(top) > 1:
        x, y = top.sum(-1) / counts.sum(), bottom.sum(-1) / counts.sum()
        return Recovery(_fieller(x, y, level, comparisons), denominator)
    each = simultaneous(level, comparisons)
    draws = draw_resamples(counts.size, enough_resamples(each), seed)
    low, high = resampled_limits(top[0], bottom[0], draws, each)
    ratio = float(top.sum() / bottom.sum())
    interval = Interval(ratio, float(low), float(high), DOCUMENTS_ONLY, level, comparisons)
    return Recovery(interval, denominator)


def verdict(
    loss: ArrayLike,
    foreign: ArrayLike,
    trunc: ArrayLike,
    tokens: ArrayLike,
    *,
    tolerance: float = TOLERANCE,
    level: float = LEVEL,
    comparisons: int = 1,
    seed: int = 0,
) -> Verdict:
    """Say whether a method extrapolates to one length, merely tolerates it, or neither.

    It *extrapolates* where both info, the loss with a foreign prefix minus that with the true one,
    and gain, TRUNC minus the loss with the whole context, lie above 0 with their intervals. Where
    not, it *tolerates* if the upper bound of the tax, the loss with a foreign prefix minus TRUNC,
    is within the tolerance (a negative tax is no harm).

    Args:
        loss: ``[S, D]``, sums in nats, with the whole true context.
        foreign: The same with a foreign prefix.
        trunc: The same given the last L tokens alone.
        tokens: ``[D]``, targets of each document.
        tolerance: In nats per token.
        level: Of the intervals; of all encodings together where there are several.
        comparisons: How many encodings.
        seed: Of the resampling of documents, where there is one training seed.

    Raises:
        UserError: shapes that disagree, values that are not finite, or no tokens.
    """
    whole, counts = checked(loss, tokens)
    other, _ = checked(foreign, tokens)
    truncated, _ = checked(trunc, tokens)
    if not whole.shape == other.shape == truncated.shape:
        seeds = ", ".join(str(len(array)) for array in (whole, other, truncated))
        raise UserError(f"{seeds} seeds of loss, foreign prefix and TRUNC; give the same of each")
    info, gain, tax = (
        primary_interval(difference, counts, level=level, comparisons=comparisons, seed=seed)
        for difference in (other - whole, truncated - whole, other - truncated)
    )
    word: Literal["extrapolates", "tolerates", "neither"] | None
    if tax.high is None:
        word = None
    elif info.above(0) and gain.above(0):
        word = "extrapolates"
    else:
        word = "tolerates" if tax.high <= tolerance else "neither"
    return Verdict(word, info, gain, tax)


@dataclasses.dataclass(frozen=True, eq=False)
class _Curve:
    lengths: tuple[int, ...]  # increasing
    values: Array  # [K, S, D]
    tokens: Array
    defined: dict[int, Array]
    undefined: dict[int, str]  # why


def _curve(nll: ArrayLike, tokens: ArrayLike, lengths: Sequence[int]) -> _Curve:
    values = np.asarray(nll, np.float64)
    if values.ndim != 3 or len(values) != len(lengths) or not len(lengths):
        raise UserError(
            f"values of shape {values.shape} for {len(lengths)} lengths; give "
            "[lengths, seeds, documents]"
        )
    if len(set(lengths)) < len(lengths) or min(lengths) < 1:
        raise UserError(f"lengths {list(lengths)}; give each once, of at least 1 token")
    order = np.argsort(lengths)
    ordered = tuple(int(lengths[index]) for index in order)
    defined, undefined = {}, {}
    counts = np.asarray(tokens, np.float64)
    for index, length in zip(order, ordered, strict=True):
        bad = int((~np.isfinite(values[index])).any(-1).sum())
        if bad:
            undefined[length] = f"undefined at {length} for {bad} of {values.shape[1]} seeds"
        else:
            defined[length], counts = checked(values[index], tokens)
    return _Curve(ordered, values[order], counts, defined, undefined)


def _void(loss: float, lowest: float | None, beyond: float) -> str:
    if lowest is None or loss - lowest <= beyond:
        return ""
    return f"its reference is {loss - lowest:.3g} nats above the lowest, more than {beyond:g}"


def _fieller(x: Array, y: Array, level: float, comparisons: int) -> Interval:
    """Give the ratio of means of pairs ``[S]``, where y's own interval excludes 0."""
    seeds = len(x)
    df = seeds - 1
    (xx, xy), (_, yy) = np.cov(x, y)
    scale = student_quantile(df, simultaneous(level, comparisons)) ** 2 / seeds
    # The ratios r of which a r^2 - 2 b r + c <= 0.
    a = y.mean() ** 2 - scale * yy
    b = x.mean() * y.mean() - scale * xy
    c = x.mean() ** 2 - scale * xx
    half = np.sqrt(max(b**2 - a * c, 0.0))
    low, high = (b - half) / a, (b + half) / a
    ratio = float(x.mean() / y.mean())
    return Interval(ratio, float(low), float(high), FIELLER, level, comparisons, float(df))


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths))
