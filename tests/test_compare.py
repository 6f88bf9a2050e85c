"""Two encodings in three lines: the numbers by SciPy, the names that are taken, and refusals."""

import re

import numpy as np
import pytest
from scipy import stats
from study_rows import TOKENS, study, sums_of

from eval.__main__ import main
from eval.report.comparing import compare_encodings
from eval.report.rows import write_rows
from posenc.errors import UserError

NUMBER = r"([+-]?\d+\.\d+)"
LIMITS = rf"\[{NUMBER}, {NUMBER}\]"
FULL = rf"{NUMBER} {LIMITS}"


def numbers(pattern, line):
    return [tuple(map(float, found)) for found in re.findall(pattern, line)]


def gaps(length, seeds):
    return np.array(
        [(sums_of("rope", length, s) - sums_of("alibi", length, s)).sum() for s in seeds]
    ) / TOKENS.sum()  # fmt: skip


def t_interval(values):
    return values.mean(), *stats.t.interval(0.95, len(values) - 1, values.mean(), stats.sem(values))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_three_lines_agree_with_scipy(count):
    seeds, lengths = range(count), (64, 128, 1024)
    rows = study(("alibi", "rope"), seeds, (32, *lengths))
    first, second, third = compare_encodings(rows, "rope", "alibi")
    best = {
        name: min((32, 64), key=lambda n: np.mean([sums_of(name, n, s).sum() for s in seeds]))
        for name in ("rope", "alibi")
    }
    loss = {
        name: np.array([[sums_of(name, n, s).sum() / TOKENS.sum() for s in seeds] for n in lengths])
        - [sums_of(name, best[name], s).sum() / TOKENS.sum() for s in seeds]
        for name in ("rope", "alibi")
    }
    area = {
        name: np.trapezoid(curve, np.log(lengths), axis=0) / np.log(16)
        for name, curve in loss.items()
    }
    expected = t_interval(area["rope"] - area["alibi"])
    assert first.startswith("rope minus alibi, endpoint: ")
    assert f"{count} seeds; 95%, t over seeds" in first
    assert numbers(FULL, first)[0] == pytest.approx(expected, abs=6e-4)
    for length, found in zip((32, *lengths), numbers(FULL, second), strict=True):
        assert found == pytest.approx(t_interval(gaps(length, seeds)), abs=6e-4)
    if count > 2:
        correlation = np.corrcoef(area["rope"], area["alibi"])[0, 1]
        told = float(re.search(f"pairs {NUMBER};", third)[1])
        assert told == pytest.approx(correlation, abs=6e-3)
    else:
        assert "no correlation of the pairs (2 seeds; from 3)" in third
    if count >= 8:
        p = stats.ttest_rel(area["rope"], area["alibi"]).pvalue
        assert float(re.search("p ([^;]*);", third)[1]) == pytest.approx(p, rel=6e-3)
    else:
        assert "no p-value below 8 seeds" in third
    # Other documents as well as other seeds: never narrower than seeds alone.
    crossed = numbers(f"documents {LIMITS}", third)[0]
    assert crossed[0] <= expected[1] + 1e-3
    assert crossed[1] >= expected[2] - 1e-3


def test_one_seed_is_documents_only():
    first, second, third = compare_encodings(study(("alibi", "rope"), (0,)), "alibi", "rope")
    assert "1 seed; 95%, documents only, bootstrap" in first
    assert third.startswith("one seed:")
    estimates = [found[0] for found in numbers(FULL, second)]
    assert estimates == pytest.approx(
        [-gaps(n, (0,))[0] for n in (32, 64, 128, 256, 512, 1024)], abs=6e-4
    )
    rng = np.random.default_rng(5)
    draws = rng.integers(0, len(TOKENS), (4000, len(TOKENS)))
    gap = sums_of("alibi", 1024, 0) - sums_of("rope", 1024, 0)
    resampled = gap[draws].sum(1) / TOKENS[draws].sum(1)
    assert numbers(FULL, second)[-1][1:] == pytest.approx(
        tuple(np.quantile(resampled, [0.025, 0.975])), abs=2e-3
    )


def test_without_an_endpoint_the_longest_common_length_is_told():
    rows = study(("alibi", "rope"), (0, 1), (64, 128, 256))
    first = compare_encodings(rows, "rope", "alibi")[0]
    assert "at T = 256 (no endpoint to compare: not evaluated at 1024)" in first
    assert numbers(FULL, first)[0] == pytest.approx(t_interval(gaps(256, (0, 1))), abs=6e-4)


def test_specs_are_taken_in_any_spelling_and_labels_whole():
    rows = study(("alibi", "rope"), (0, 1))
    fancy = [{**r, "encoding": "rope(theta=5000)"} if r["encoding"] == "rope" else r for r in rows]
    asked = compare_encodings(fancy, "rope( theta = 5000.0 )", "alibi")
    assert asked[0].startswith("rope(theta=5000) minus alibi")
    both = rows + [{**r, "run": r["run"] + "-t", "settings": "tuned"} for r in rows]
    with pytest.raises(UserError, match=r"'rope' is 2 lines: .*'rope, shared'; 'rope, tuned'"):
        compare_encodings(both, "rope", "alibi")
    found = compare_encodings(both, "rope, tuned", "alibi, tuned")
    assert found[1:] == compare_encodings(rows, "rope", "alibi")[1:]


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    rows = study(("alibi", "rope"), (0, 1))
    with pytest.raises(UserError, match="no line is 'fire': the lines are 'alibi'; 'rope'"):
        compare_encodings(rows, "fire", "rope")
    with pytest.raises(UserError, match="are both rope"):
        compare_encodings(rows, "rope", "rope")
    apart = [r for r in rows if (r["encoding"] == "rope") == (r["seed"] == 0)]
    with pytest.raises(UserError, match="train seeds that both have"):
        compare_encodings(apart, "rope", "alibi")
    mixed = [{**r, "train_tokens": 5} if r["encoding"] == "rope" else r for r in rows]
    write_rows(mixed, tmp_path)
    words = ["compare", str(tmp_path), "--encodings", "rope", "alibi"]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "differ in train_tokens" in capsys.readouterr().err
    main([*words, "--allow-mixed"])
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 3
    assert said.err.startswith("not comparable, and mixed on request: train_tokens: ")
