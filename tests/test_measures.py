"""What losses at several lengths say, against definitions written out and against SciPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from eval.measures import (
    EffectiveLength,
    Endpoint,
    endpoint,
    log_weights,
    paired_endpoints,
    recovery,
    reference,
    tolerated,
    used,
    verdict,
)
from eval.stats import bootstrap_documents, paired
from posenc.errors import UserError

L = 64
LENGTHS = (32, 64, 128, 256, 512, 1024)
TOKENS = np.array([64.0, 128, 16, 320])
SPREAD = np.array([-0.01, 0.0, 0.01])  # of three seeds, about each mean


def curve(means, spread=SPREAD):
    """Sums [K, S, D] whose means per token at each length are these, with that over seeds."""
    per_token = np.asarray(means, float)[:, None] + np.asarray(spread)
    documents = np.linspace(-1, 1, len(TOKENS))
    documents -= documents @ TOKENS / TOKENS.sum()
    return (per_token[..., None] + documents) * TOKENS


@pytest.mark.fast
def test_the_reference_is_the_lowest_loss_up_to_the_training_length():
    result = reference(curve([3, 2.5, 2.2, 2, 2, 2]), TOKENS, LENGTHS, L)
    assert (result.length, result.loss) == (64, pytest.approx(2.5))
    result = reference(curve([2.4, 2.5, 2, 2, 2, 2]), TOKENS, LENGTHS, L)
    assert (result.length, result.loss) == (32, pytest.approx(2.4))
    # By the mean over seeds, though most seeds are best elsewhere; the longer one of equals.
    seeds = np.array([[2, 2, 2], [1.9, 1.9, 2.3]])[..., None] * TOKENS
    assert reference(seeds, TOKENS, (32, 64), L).length == 32
    assert reference(np.repeat(curve([2]), 2, 0), TOKENS, (32, 64), L).length == 64


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=2, max_size=8, unique=True).map(sorted))
def test_weights_are_those_of_the_trapezoid_rule(lengths):
    values, x = np.cos(lengths), np.log(lengths)
    expected = integrate.trapezoid(values, x) / (x[-1] - x[0])
    assert log_weights(lengths) @ values == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert log_weights(lengths).sum() == pytest.approx(1)


@pytest.mark.fast
def test_the_endpoint_of_a_loss_that_grows_with_log_length():
    """Mean over log T of c log(T / L), in closed form: c log(16) / 2."""
    means = [2.9, *(2.5 + 0.3 * np.log(T / L) for T in LENGTHS[1:])]
    result = endpoint(curve(means), TOKENS, LENGTHS, L)
    assert result.interval.estimate == pytest.approx(0.3 * np.log(16) / 2)
    assert (result.lengths, result.reference.length, result.why) == (LENGTHS[1:], 64, "")
    # Each seed is moved alike at all lengths: its own reference takes that out.
    assert result.interval.high - result.interval.low == pytest.approx(0, abs=1e-9)


def test_the_endpoint_is_that_of_each_seed_and_orders_lengths_itself():
    rng = np.random.default_rng(0)
    nll = curve([3, 2.5, 2.6, 2.7, 2.9, 3.5]) + rng.normal(size=(6, 3, 4))
    result = endpoint(nll, TOKENS, LENGTHS, L)
    x = np.log(LENGTHS[1:])
    per_seed = []
    for seed in range(3):
        losses = [nll[k, seed].sum() / TOKENS.sum() for k in range(6)]
        excess = [loss - losses[1] for loss in losses[1:]]
        per_seed.append(integrate.trapezoid(excess, x) / np.log(16))
    expected = stats.ttest_1samp(per_seed, 0).confidence_interval(0.95)
    np.testing.assert_allclose([result.interval.low, result.interval.high], expected, rtol=1e-9)
    order = [4, 0, 5, 2, 1, 3]
    again = endpoint(nll[order], TOKENS, [LENGTHS[k] for k in order], L)
    assert again.interval == result.interval
    # Two encodings: the paired difference of the seeds' endpoints.
    other = endpoint(nll + rng.normal(size=nll.shape), TOKENS, LENGTHS, L)
    compared = paired_endpoints(result, other, TOKENS, comparisons=2)
    assert compared == paired(result.sums, other.sums, TOKENS, comparisons=2)
    second = other.sums.sum(1) / TOKENS.sum()
    np.testing.assert_allclose(compared.per_seed, np.array(per_seed) - second, rtol=1e-9)


def test_an_endpoint_over_a_part_of_the_range_is_none():
    nll = curve([3, 2.5, 2.6, 2.7, 2.9, 3.5])
    short = endpoint(nll[:-1], TOKENS, LENGTHS[:-1], L)
    assert (short.interval, short.sums, short.why) == (None, None, "not evaluated at 1024")
    assert endpoint(nll[::5], TOKENS, LENGTHS[::5], L).why == "not evaluated at 64"
    broken = nll.copy()
    broken[3, 1, 2] = np.nan
    result = endpoint(broken, TOKENS, LENGTHS, L)
    assert (result.interval, result.why) == (None, "undefined at 256 for 1 of 3 seeds")
    # Lengths between the ends may be missing, but then it compares with its like alone.
    gap = endpoint(nll[[0, 1, 2, 5]], TOKENS, (32, 64, 128, 1024), L)
    assert gap.lengths == (64, 128, 1024)
    whole = endpoint(nll, TOKENS, LENGTHS, L)
    with pytest.raises(UserError, match="different lengths, 64, 128, 1024 and 64, 128, 256"):
        paired_endpoints(gap, whole, TOKENS)
    with pytest.raises(UserError, match="no endpoint to compare: undefined at 256"):
        paired_endpoints(whole, result, TOKENS)
    wide = endpoint(nll, TOKENS, LENGTHS, L, reach=4)
    assert wide.lengths == (64, 128, 256)


def test_tolerated_is_the_last_before_the_loss_leaves_the_margin():
    nll = curve([3, 2.5, 2.49, 2.54, 2.56, 2.5])
    result = tolerated(nll, TOKENS, LENGTHS, L)
    assert (result.length, result.sign, str(result)) == (256, "=", "256")
    assert result.why == "up to 0.06 nats above the reference at 512"
    # The shorter length than the reference's is worse, and is not asked.
    assert [length for length, _ in result.intervals] == [128, 256, 512, 1024]
    assert result.intervals[1][1].estimate == pytest.approx(0.04)
    assert str(tolerated(nll, TOKENS, LENGTHS, L, margin=0.03)) == "128"
    assert str(tolerated(nll, TOKENS, LENGTHS, L, margin=0.07)) == ">= 1024"
    assert tolerated(nll[:4], TOKENS, LENGTHS[:4], L).sign == ">="
    assert str(tolerated(curve([3, 2.5, 2.6, 2.5]), TOKENS, LENGTHS[:4], L)) == "64"
    # From a reference below L, L itself is asked.
    assert str(tolerated(curve([2.4, 2.5, 2.4]), TOKENS, LENGTHS[:3], L)) == "32"


def test_tolerated_is_by_the_upper_bound():
    nll = curve([3, 2.5, 2.52, 2.52])
    nll[2] += curve([0], [-0.01, 0, 0.01])[0] - curve([0], [0, 0, 0])[0]
    high = 0.02 + stats.t.ppf(0.975, 2) * 0.01 / np.sqrt(3)
    for margin, length in ((high * 1.001, ">= 256"), (high * 0.999, "64")):
        assert str(tolerated(nll, TOKENS, LENGTHS[:4], L, margin=margin)) == length
    # More encodings compared, wider intervals.
    assert str(tolerated(nll, TOKENS, LENGTHS[:4], L, margin=high, comparisons=3)) == "64"


def test_tolerated_stops_where_the_encoding_is_undefined():
    nll = curve([3, 2.5, 2.5, np.nan, np.nan, np.nan])
    result = tolerated(nll, TOKENS, LENGTHS, L)
    assert (result.length, result.sign) == (128, "=")
    assert result.why == "undefined at 256 for 3 of 3 seeds"
    assert result.intervals[-1] == (1024, None)


def test_a_poor_reference_voids_both_lengths():
    nll = curve([3, 2.5, 2.5])
    void = tolerated(nll, TOKENS, LENGTHS[:3], L, lowest_reference=2.2)
    assert (void.length, void.sign, str(void)) == (None, "void", "void")
    assert void.why == "its reference is 0.3 nats above the lowest, more than 0.25"
    assert tolerated(nll, TOKENS, LENGTHS[:3], L, lowest_reference=2.26).length == 128
    info = curve([0, 0, 1], [0, 0, 0])
    references = {"loss_reference": 2.5, "lowest_reference": 2.2}
    assert used(info, TOKENS, LENGTHS[:3], L, **references).why == void.why
    assert used(info, TOKENS, LENGTHS[:3], L, **references, void_beyond=0.5).length == 128
    with pytest.raises(UserError, match="both loss_reference and lowest_reference"):
        used(info, TOKENS, LENGTHS[:3], L, loss_reference=2.5)


def test_used_is_the_longest_whose_far_half_gives_something():
    def of(*info, **options):
        return used(curve(info, 0.01 * np.arange(3)), TOKENS, LENGTHS[: len(info)], L, **options)

    # Seeds differ alike at all lengths: only the first increment, from 0, has a width.
    result = of(0, 0, 0.2, 0.3, 0.35, 0.35)
    assert (result.length, result.sign, result.without) == (512, "=", ())
    assert result.why == "no gain from it to 1024 is shown"
    assert [interval.estimate for _, interval in result.intervals] == pytest.approx(
        [0.21, 0.1, 0.05, 0], abs=1e-9
    )
    assert str(of(0, 0, 0.2, 0.3, 0.35, 0.36)) == ">= 1024"
    none = of(0, 0, 0.0, -0.1)
    assert (str(none), none.why) == ("<= 64", "no gain beyond it is shown")
    late = of(0, 0, 0.0, 0.1, 0.1, 0.2)
    assert (str(late), late.without) == (">= 1024", (128, 512))
    # By the lower bound: 0.01 +- 2.48 * 0.01 holds 0; what is said of info up to L is not read.
    assert str(of(9, 9, 0.0)) == "<= 64"
    assert str(of(9, 9, 0.016)) == ">= 128"


def test_used_asks_where_the_half_is_known():
    info = curve([0.2, 0.3, 0.5], [0, 0, 0])
    # 192 reaches back past the reach of its half, which has nothing foreign; 700 has no half.
    result = used(info, TOKENS, (96, 192, 700), L)
    assert [(n, pytest.approx(i.estimate)) for n, i in result.intervals] == [(96, 0.2), (192, 0.1)]
    assert (result.length, result.sign) == (192, ">=")
    broken = curve([0, 0.2, np.nan, 0.4], [0, 0, 0])
    result = used(broken, TOKENS, (64, 128, 256, 512), L)
    assert (result.length, result.sign) == (128, "=")
    assert result.intervals[1:] == ((256, None), (512, None))
    assert result.why == "undefined at 256 for 3 of 3 seeds"
    with pytest.raises(UserError, match="no length beyond 64 whose half is evaluated"):
        used(info[:2], TOKENS, (32, 64), L)


def test_one_seed_is_judged_by_its_documents_and_says_so():
    rng = np.random.default_rng(0)
    nll = curve([3, 2.5, 2.51, 2.52], [0]) + rng.normal(size=(4, 1, 4))
    result = tolerated(nll, TOKENS, LENGTHS[:4], L, seed=3)
    interval = result.intervals[0][1]
    assert interval.method == "documents only"
    expected = bootstrap_documents(nll[2] - nll[1], TOKENS, seed=3)
    assert (interval.low, interval.high) == (expected.low, expected.high)
    lone = tolerated(nll[..., :1], TOKENS[:1], LENGTHS[:4], L)
    assert (str(lone), lone.why) == ("void", "no interval: one document")
    info = nll[..., :1] - nll[1, :, :1]
    assert used(info, TOKENS[:1], LENGTHS[:4], L).why == "no interval: one document"
    one = verdict(nll[0, :, :1], nll[1, :, :1], nll[2, :, :1], TOKENS[:1])
    assert one.word is None


def pairs(seeds, seed=0):
    """Sums of TRUNC, loss and train-long, [S, D]: 60% of the gain is recovered, about."""
    rng = np.random.default_rng(seed)
    gain = 0.5 + 0.03 * rng.normal(size=(seeds, 1))
    loss = 3 - 0.6 * gain + 0.03 * rng.normal(size=(seeds, 1))
    wobble = 0.02 * rng.normal(size=(3, seeds, 4))
    return tuple((x + e) * TOKENS for x, e in zip((3.0, loss, 3 - gain), wobble, strict=True))


@pytest.mark.parametrize("seeds", [3, 6])
@pytest.mark.parametrize("comparisons", [1, 4])
def test_fiellers_limits_are_the_ratios_that_a_t_test_just_rejects(seeds, comparisons):
    trunc, loss, long = pairs(seeds, seed=seeds)
    result = recovery(trunc, loss, long, TOKENS, comparisons=comparisons)
    top, bottom = ((x.sum(1)) / TOKENS.sum() for x in (trunc - loss, trunc - long))
    assert result.interval.estimate == pytest.approx(top.mean() / bottom.mean())
    for limit in (result.interval.low, result.interval.high):
        p = stats.ttest_1samp(top - limit * bottom, 0).pvalue
        assert p == pytest.approx(0.05 / comparisons, rel=1e-6)
    assert result.interval.low < result.interval.estimate < result.interval.high


def test_recovery_of_a_sure_gain_is_an_ordinary_interval():
    """A denominator without spread: Student's interval of the numerator, divided."""
    trunc, loss, _ = pairs(4)
    result = recovery(trunc, loss, trunc - 0.5 * TOKENS, TOKENS)
    top = (trunc - loss).sum(1) / TOKENS.sum()
    expected = np.array(stats.ttest_1samp(top, 0).confidence_interval(0.95)) / 0.5
    np.testing.assert_allclose([result.interval.low, result.interval.high], expected, rtol=1e-9)


def test_nothing_is_recovered_of_nothing():
    trunc, loss, long = pairs(4)
    same = recovery(trunc, loss, trunc + np.array([[-1], [1], [-1], [1]]), TOKENS)
    assert (same.interval, same.why) == (None, "TRUNC minus train-long may be 0")
    assert same.denominator.holds(0)
    worse = recovery(long, loss, trunc, TOKENS)
    assert (worse.interval, worse.why) == (None, "TRUNC minus train-long is below 0")
    with pytest.raises(UserError, match="4, 3, 4 seeds of TRUNC, loss and train-long"):
        recovery(trunc, loss[:3], long, TOKENS)


def test_recovery_with_one_seed_resamples_documents():
    trunc, loss, long = pairs(1, seed=2)
    result = recovery(trunc, loss, long, TOKENS, seed=4)
    generator = np.random.default_rng(4)
    draws = np.concatenate([generator.multinomial(4, [0.25] * 4, 1000) for _ in range(10)])
    ratios = [
        sum(n * x for n, x in zip(row, (trunc - loss)[0], strict=True))
        / sum(n * x for n, x in zip(row, (trunc - long)[0], strict=True))
        for row in draws
    ]
    expected = np.quantile(ratios, [0.025, 0.975])
    np.testing.assert_allclose([result.interval.low, result.interval.high], expected, rtol=1e-9)
    assert result.interval.method == result.denominator.method == "documents only"
    lone = recovery(trunc[:, :1], loss[:, :1], long[:, :1], TOKENS[:1])
    assert (lone.interval, lone.why) == (None, "one document")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("loss", "foreign", "trunc", "word"),
    [
        (2.0, 2.5, 2.4, "extrapolates"),  # info 0.5, gain 0.4, tax 0.1
        (2.4, 2.5, 2.4, "neither"),  # far context helps, but no more than leaving it out
        (2.41, 2.42, 2.4, "tolerates"),
        (2.4, 2.4, 2.4, "tolerates"),
        (4.2, 4.2, 2.4, "neither"),  # rope at 16x: a tax, and no information
        (2.4, 2.2, 2.4, "tolerates"),  # a negative tax is no harm
        (2.395, 2.4, 2.4, "tolerates"),  # 0.005 +- 0.025 may be nothing
    ],
)
def test_a_method_extrapolates_only_by_its_intervals(loss, foreign, trunc, word):
    def sums(mean, spread):
        return curve([mean], spread)[0]

    result = verdict(sums(loss, SPREAD), sums(foreign, [0, 0, 0]), sums(trunc, [0, 0, 0]), TOKENS)
    assert result.word == word
    assert result.info.estimate == pytest.approx(foreign - loss, abs=1e-9)
    assert result.gain.estimate == pytest.approx(trunc - loss, abs=1e-9)
    assert result.tax.estimate == pytest.approx(foreign - trunc, abs=1e-9)


def test_a_method_tolerates_only_by_its_upper_bound():
    loss, foreign, trunc = curve([2.4], [0, 0, 0]), curve([2.43]), curve([2.4], [0, 0, 0])
    high = 0.03 + stats.t.ppf(0.975, 2) * 0.01 / np.sqrt(3)
    for tolerance, word in ((high * 0.999, "neither"), (high * 1.001, "tolerates")):
        result = verdict(loss[0], foreign[0], trunc[0], TOKENS, tolerance=tolerance)
        assert (result.word, result.tax.high) == (word, pytest.approx(high))


def test_verdicts_want_the_same_seeds():
    x = np.ones((3, 2))
    with pytest.raises(UserError, match="3, 3, 2 seeds of loss, foreign prefix and TRUNC"):
        verdict(x, x, x[:2], [1, 1])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reference(curve([2, 3]), TOKENS, (64,), L), r"shape \(2, 3, 4\) for 1 lengths"),
        (lambda: reference(curve([2])[0], TOKENS, (64, 65, 66), L), r"give \[lengths, seeds"),
        (lambda: reference(curve([2, 3]), TOKENS, (64, 64), L), "give each once"),
        (lambda: reference(curve([2, 3]), TOKENS, (0, 64), L), "at least 1 token"),
        (lambda: reference(curve([2]), TOKENS, (128,), L), "only at 128; score 64 too"),
        (lambda: reference(curve([np.nan]), TOKENS, (64,), L), "up to the training length 64"),
        (lambda: reference(curve([2]), TOKENS[:2], (64,), L), r"tokens of shape \(2,\)"),
        (lambda: log_weights([64]), "give two or more"),
        (lambda: log_weights([64, 32]), "increasing"),
    ],
)
def test_what_cannot_be_right_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_documents_without_targets_say_nothing():
    """As of a slice that some documents have no token of."""
    nll = curve([3, 2.5, 2.6, 2.7, 2.9, 3.5])
    padded = np.concatenate([nll, np.zeros((6, 3, 1))], -1)
    tokens = np.append(TOKENS, 0)
    before: Endpoint = endpoint(nll, TOKENS, LENGTHS, L)
    assert endpoint(padded, tokens, LENGTHS, L).interval == before.interval
    again: EffectiveLength = used(padded, tokens, LENGTHS, L)
    assert again == used(nll, TOKENS, LENGTHS, L)
