"""A report's numbers against SciPy on the sums that rows hold; and what may stand side by side."""

import math
import re

import numpy as np
import pytest
from scipy import stats as scipy_stats

from eval.measures import TOLERANCE
from eval.report.analysis import analyse, compare
from eval.report.comparable import check_comparable, differences
from eval.report.latex import latex_table
from eval.report.lines import lines_of
from eval.report.methods import methods
from eval.report.page import losses
from eval.report.page.data import PageData
from eval.report.page.markup import html
from eval.report.rows import checked
from eval.report.summary import csv_table, interval_tables
from posenc.errors import UserError

pytestmark = pytest.mark.fast

L, LENGTHS = 64, (32, 64, 128, 256, 512, 1024)
TOKENS = np.array([16, 8, 16, 12, 4])
TEXT = {"name": "manuals", "version": "1", "sha256": "ab", "tokenizer": "bytes", "bos": "document"}


def row(encoding, seed, length, sums, protocol="nll_by_context", **changes):
    nll = None if sums is None else float(np.sum(sums) / TOKENS.sum())
    defined = nll is not None
    return {
        "schema": 1,
        "run": f"{encoding}-seed{seed}",
        "encoding": encoding,
        "model": "tiny",
        "sharing": "all",
        "positions": "sequential",
        "settings": "shared",
        "seed": seed,
        "protocol": protocol,
        "length": length,
        "context": length - 8,
        "targets": 8,
        "extend": None,
        "defined": defined,
        "reason": None if defined else f"no position beyond {L - 1}",
        "nll": nll,
        "excess_nll": None,
        "notes": [],
        "tokens": int(TOKENS.sum()),
        "train_length": L,
        "train_tokens": 1000,
        "data": TEXT,
        "bos": "keep",
        "commit": "c0ffee",
        "document_index": list(range(len(TOKENS))) if defined else None,
        "document_nll": list(map(float, sums)) if defined else None,
        "document_tokens": TOKENS.tolist() if defined else None,
        **changes,
    }


def study(loss, foreign=None, seeds=(0, 1, 2), encoding="rope", spread=0.02, **changes):
    """Rows whose loss by length is given, with noise that is each seed's and document's own."""
    rows = []
    for seed in seeds:
        rng = np.random.default_rng([seed, len(encoding)])
        noise = TOKENS * (rng.normal(0, spread) + rng.normal(0, spread, len(TOKENS)))
        for length in LENGTHS:
            tiny = TOKENS * rng.normal(0, 1e-3, len(TOKENS))
            mean = loss(length, seed)
            sums = None if mean is None else mean * TOKENS + noise + tiny
            rows.append(row(encoding, seed, length, sums, **changes))
            if foreign is not None and length > L:
                sums = foreign(length) * TOKENS + noise + rng.normal(0, 1e-3, len(TOKENS))
                rows.append(row(encoding, seed, length, sums, "foreign_prefix", **changes))
    return rows


def flat(length, seed):
    return 2.0


def falling(length, seed):
    return 2.0 - 0.1 * math.log2(length / L)


def rising(length, seed):
    return 2.0 + max(0.0, 0.5 * math.log2(length / L))


def per_seed(rows, length, protocol="nll_by_context", encoding="rope"):
    return [
        sum(one["document_nll"]) / TOKENS.sum()
        for one in rows
        if (one["protocol"], one["length"], one["encoding"]) == (protocol, length, encoding)
    ]


def test_losses_have_the_interval_of_a_t_test_over_seeds():
    rows = study(rising)
    (finding,) = analyse(rows).findings
    for point in finding.points:
        values = per_seed(rows, point.length)
        wanted = scipy_stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert point.loss.estimate == pytest.approx(np.mean(values))
        assert (point.loss.low, point.loss.high) == pytest.approx(tuple(wanted))
        assert point.summary.median == pytest.approx(np.median(values))
        assert (point.summary.best, point.summary.worst) == pytest.approx(
            (min(values), max(values))
        )
    assert finding.reference.length == 64
    assert str(finding.tolerated) == "64"
    assert finding.missing == {"used": "not scored with a foreign prefix"}
    # The endpoint: trapezoids in log T of the loss over that at L.
    above = {n: np.array(per_seed(rows, n)) - per_seed(rows, 64) for n in LENGTHS}
    area = np.trapezoid([above[n] for n in LENGTHS[1:]], np.log(LENGTHS[1:]), axis=0) / np.log(16)
    assert finding.endpoint.interval.estimate == pytest.approx(area.mean())


def test_verdicts_follow_from_the_three_differences():
    cases = {
        "extrapolates": (falling, lambda n: 2.2),
        "tolerates": (flat, lambda n: 2.0),
        "neither": (rising, lambda n: 2.0 + 0.5 * math.log2(n / L)),
    }
    for word, (loss, foreign) in cases.items():
        rows = study(loss, foreign)
        (finding,) = analyse(rows).findings
        point = finding.at(512)
        assert point.verdict.word == word
        far, near = np.mean(per_seed(rows, 512, "foreign_prefix")), np.mean(per_seed(rows, L))
        true = np.mean(per_seed(rows, 512))
        assert point.verdict.tax.estimate == pytest.approx(far - near)
        assert point.verdict.info.estimate == pytest.approx(far - true)
        assert point.verdict.gain.estimate == pytest.approx(near - true)
        assert point.probes["foreign_prefix"].estimate == pytest.approx(far - near)
        assert finding.at(64).verdict is None
        assert str(finding.used) == (">= 1024" if word == "extrapolates" else "<= 64")


def test_a_poor_reference_voids_both_lengths_in_every_text():
    poor = study(lambda n, s: falling(n, s) + 0.3, lambda n: 2.5, encoding="alibi")
    rows = study(falling, lambda n: 2.2) + poor
    analysis = analyse(rows)
    good, bad = analysis.findings
    assert [str(one) for one in (good.tolerated, good.used)] == [">= 1024"] * 2
    assert [str(one) for one in (bad.tolerated, bad.used)] == ["void"] * 2
    above = bad.reference.loss - good.reference.loss
    why = f"its reference is {above:.3g} nats above the lowest, more than 0.25"
    assert bad.used.why == bad.tolerated.why == why
    lines = csv_table(analysis).splitlines()
    assert [x.count(",void") for x in lines if x.startswith("alibi,")] == [2] * len(LENGTHS)
    assert latex_table(analysis).count("& void") == 2
    assert interval_tables(analysis).count("| void") == 2
    # Where no length's half was scored, the reference is what voids it.
    half = [row for row in rows if row["length"] in (32, 64, 512)]
    good, bad = analyse(half).findings
    assert (good.used, str(bad.used)) == (None, "void")
    assert "no length beyond 64 whose half is evaluated" in good.missing["used"]


def test_a_foreign_prefix_that_no_document_gives_is_the_reason_why_a_length_is_not_asked():
    rows, why = study(flat), "no other test document has the 960 tokens of a foreign prefix"
    rows += [
        row("rope", seed, length, None, "foreign_prefix", reason=why)
        for seed in range(3)
        for length in LENGTHS
        if length > L
    ]
    analysis = analyse(checked(rows))
    (finding,) = analysis.findings
    assert (finding.used, finding.missing) == (None, {"used": why})
    text = interval_tables(analysis)
    assert f"- no used length: {why}: " in text
    assert f"- no verdict at 1024: {why}: " in text


def test_a_seed_that_failed_is_a_failure_and_its_length_undefined():
    def some(length, seed):
        return math.inf if (length, seed) == (256, 1) else 2.0 + 0.2 * (length == 128) * (seed == 2)

    (finding,) = analyse(study(some)).findings
    assert finding.at(256).loss is None
    assert finding.at(256).why == "not finite for 1 of 3 seeds"
    assert finding.at(256).success.estimate == pytest.approx(2 / 3)
    assert finding.at(128).success.estimate == pytest.approx(2 / 3)  # by more than the tolerance
    assert TOLERANCE < 0.2
    assert finding.at(64).success.estimate == 1
    # Where an encoding ends, its own reason stands.
    ends = study(lambda n, s: None if n > L else 2.0, encoding="wpe")
    (finding,) = analyse(ends).findings
    assert finding.at(128).why == "no position beyond 63"
    assert finding.endpoint.why


def test_a_seed_that_diverged_in_training_is_a_failure_of_its_line_and_in_no_mean():
    rows = study(flat, frozen_seeds=[3], run="one") + study(flat, encoding="alibi")
    analysis = analyse(rows)
    own, other = analysis.findings
    assert (own.subject.seeds, own.subject.frozen) == ((0, 1, 2), (3,))
    assert own.at(64).loss.estimate == pytest.approx(np.mean(per_seed(rows, 64)))
    wanted = scipy_stats.binomtest(3, 4).proportion_ci(method="wilson")
    success = own.at(64).success
    assert (success.estimate, success.low, success.high) == pytest.approx((0.75, *wanted))
    assert (other.at(64).success.estimate, other.subject.frozen) == (1.0, ())
    page = PageData(rows, analysis, [], lines_of(rows, "nll_by_context"))
    text = "".join(map(html, losses.seeds(page)))
    assert text.count("3 of 4, 1 diverged") == text.count("3 of 3") == len(LENGTHS)
    assert "diverged in training, and in no mean: seed 3: `rope`." in interval_tables(analysis)
    said = "Training diverged for seed 3 of `one`: in no mean, and a failure"
    assert said in methods(rows, analysis)
    assert all(one.name != "frozen_seeds" for one in differences(rows))
    with pytest.raises(UserError, match=r"frozen_seeds is \[True\], not a list of seeds"):
        checked([{**rows[0], "frozen_seeds": [True]}])


def test_what_training_at_a_length_gains_is_recovered_by_as_much():
    def short(length, seed):
        return 2.0 - (0.3 if length > L else 0.0)

    rows = study(short) + study(lambda n, s: 1.6, train_length=1024, run="long")
    analysis = analyse(rows)
    own, bound = analysis.findings
    trunc, loss, long = (
        np.mean([sum(r["document_nll"]) / TOKENS.sum() for r in rows if choose(r)])
        for choose in (
            lambda r: (r["train_length"], r["length"]) == (L, L),
            lambda r: (r["train_length"], r["length"]) == (L, 1024),
            lambda r: (r["train_length"], r["length"]) == (1024, 1024),
        )
    )
    assert own.at(1024).recovery.interval.estimate == pytest.approx((trunc - loss) / (trunc - long))
    assert own.at(512).recovery is None
    assert bound.at(1024).recovery is None
    assert analysis.comparisons == ()  # the bound is beside what is compared
    # Another budget is no bound.
    other = study(short) + study(lambda n, s: 1.6, train_length=1024, train_tokens=2, run="long")
    assert analyse(other).findings[0].at(1024).recovery is None


def test_a_policy_is_measured_against_the_last_tokens_of_the_model_as_it_was_trained():
    rows = study(flat, lambda n: 2.1)
    longer = study(lambda n, s: 1.5, lambda n: 1.9, extend="yarn")
    plain, policy = analyse(rows + longer).findings
    assert plain.subject.policy is None
    assert policy.subject.policy == "yarn"
    trunc = np.mean(per_seed(rows, L))
    foreign = np.mean(per_seed(longer, 512, "foreign_prefix"))
    assert policy.at(512).verdict.tax.estimate == pytest.approx(foreign - trunc)


def test_differences_are_those_of_a_paired_t_test():
    a, b = study(rising, encoding="alibi"), study(flat)
    analysis = analyse(b + a)
    (comparison,) = analysis.comparisons
    assert (comparison.a, comparison.b, comparison.seeds) == ("alibi", "rope", (0, 1, 2))
    for length, found in comparison.by_length.items():
        one, two = per_seed(a, length, encoding="alibi"), per_seed(b, length)
        wanted = scipy_stats.ttest_rel(one, two).confidence_interval(0.95)
        assert found.interval.estimate == pytest.approx(np.mean(one) - np.mean(two))
        assert (found.interval.low, found.interval.high) == pytest.approx(tuple(wanted))
    swapped = compare(analysis.findings[0], analysis.findings[1])
    assert swapped.endpoint.interval.estimate == pytest.approx(
        -comparison.endpoint.interval.estimate
    )
    # Only the seeds that both have; and another baseline by its label.
    few = analyse(study(flat, seeds=(1, 2, 5)) + a, baseline="alibi").comparisons[0]
    assert (few.a, few.b, few.seeds) == ("rope", "alibi", (1, 2))
    with pytest.raises(UserError, match=r"seeds 7 and alibi 0, 1, 2: train seeds that both have"):
        analyse(a + study(flat, seeds=(7,)))
    with pytest.raises(UserError, match=r"no line is called 'fox': rope, alibi"):
        analyse(b + a, baseline="fox")


def test_slices_by_other_ngrams_stay_apart_and_other_masks_are_refused():
    def sliced(loss, **changes):
        rows = study(flat, **{"protocol": "slice", "slice": "novel", **changes})
        return [{**one, "nll": loss + one["seed"]} for one in rows if one["length"] == 64]

    rows = study(flat) + sliced(3.0, ngram=4) + sliced(5.0, ngram=8)
    page = PageData(rows, analyse(rows), [], lines_of(rows, "nll_by_context"))
    text = "".join(map(html, losses.slices(page)))
    found = re.findall(r"novel(, n = \d).*?>(\d\.\d{3})<", text)
    assert found == [(", n = 4", "4.000"), (", n = 8", "6.000")]  # means over seeds 0, 1, 2
    masked = {"slice": "mask", "ngram": None, "mask_sha256": "a" * 64}
    one, other = sliced(3.0, **masked), sliced(4.0, **{**masked, "mask_sha256": "b" * 64})
    # Runs that were scored without a mask are beside one another as ever.
    assert check_comparable(one + study(flat, encoding="alibi")) == []
    for several in (one + other, one + [{**row, "encoding": "alibi"} for row in other]):
        with pytest.raises(UserError, match=r"they differ in mask_sha256: a{64} .*, b{64} .*apart"):
            check_comparable(several)
        (difference,) = check_comparable(several, allow_mixed=True)
        assert (difference.name, difference.forbidden) == ("mask_sha256", True)
    rows = study(flat) + one + other
    page = PageData(rows, analyse(rows), [], lines_of(rows, "nll_by_context"))
    text = "".join(map(html, losses.slices(page)))
    assert re.findall(r"mask (a+|b+).*?>(\d\.\d{3})<", text) == [
        ("a" * 12, "4.000"),
        ("b" * 12, "5.000"),
    ]


def test_two_lines_have_simultaneous_intervals_against_the_third():
    rows = study(flat) + study(flat, encoding="alibi") + study(flat, encoding="nope")
    first, second = analyse(rows).comparisons
    assert (
        first.by_length[64].interval.comparisons == second.by_length[64].interval.comparisons == 2
    )
    values = np.subtract(per_seed(rows, 64, encoding="alibi"), per_seed(rows, 64))
    wanted = scipy_stats.ttest_1samp(values, 0).confidence_interval(1 - 0.05 / 2)
    assert first.by_length[64].interval.low == pytest.approx(wanted.low)


def test_other_targets_and_rows_without_sums_are_refused():
    rows = study(flat)
    other = study(flat, encoding="alibi")
    for one in other:
        one["document_tokens"] = [t + 1 for t in one["document_tokens"]]
    with pytest.raises(UserError, match="rope and alibi were scored on different targets"):
        analyse(rows + other)
    # As many tokens each, of other documents.
    other = study(flat, encoding="alibi")
    for one in other:
        one["document_index"] = [n + 1 for n in one["document_index"]]
    with pytest.raises(UserError, match="rope and alibi were scored on different targets"):
        analyse(rows + other)
    rows[0]["document_index"] = [9, *rows[0]["document_index"][1:]]
    with pytest.raises(UserError, match="has other targets than elsewhere"):
        analyse(rows)
    old = [{**one, "document_nll": None} for one in study(flat)]
    with pytest.raises(UserError, match="no row has sums by document"):
        analyse(old)


def test_what_runs_differ_in_is_named_and_some_of_it_refused():
    rows = study(flat, trained_with={"device": "cpu", "versions": {"jax": "1"}})
    more = study(flat, encoding="alibi", trained_with={"device": "cpu", "versions": {"jax": "2"}})
    found = check_comparable(rows + more)
    assert [(one.name, one.forbidden) for one in found] == [("trained_with.versions.jax", False)]
    assert found[0].values == {
        "1": ("rope-seed0", "rope-seed1", "rope-seed2"),
        "2": ("alibi-seed0", "alibi-seed1", "alibi-seed2"),
    }
    other = study(flat, encoding="alibi", data={**TEXT, "tokenizer": "bpe.json"}, train_tokens=9)
    mixed = [one.name for one in differences(rows + other) if one.forbidden]
    assert mixed == ["data.tokenizer", "train_tokens"]
    with pytest.raises(
        UserError,
        match=r"differ in data.tokenizer: bytes \(rope-seed0 and others\), bpe.json \(alibi-seed0 "
        r"and others\); train_tokens: 1000 .*report them apart, or give --allow-mixed",
    ):
        check_comparable(rows + other)
    assert [one.forbidden for one in check_comparable(rows + other, allow_mixed=True)][:2] == [
        True
    ] * 2
    # What a row does not say is not the same as what another says.
    (silent,) = differences(study(flat) + study(flat, encoding="alibi", dtype="float32"))
    assert silent.values["not given"] == ("rope-seed0", "rope-seed1", "rope-seed2")
    assert silent.forbidden
