"""The figure of read-outs draws the arrays, and the page holds it."""

import base64

import numpy as np
import pytest
from study_rows import study

from eval.report.attention import attention_figure, read_mechanism, read_outs_of
from eval.report.figure import rendered
from eval.report.full import write_full_report
from eval.report.rows import write_rows
from posenc.errors import UserError

pytestmark = pytest.mark.fast


def arrays(seed, lengths=(32, 64), layers=2, heads=3, learns=True):
    rng = np.random.default_rng(seed)
    found = {}
    for length in lengths:
        edges = np.array([0, 1, 2, 4, 8, 16, 32, 64][: int(np.log2(length)) + 2])
        buckets = len(edges) - 1
        found |= {
            f"edges_{length}": edges,
            f"mass_{length}": rng.random((layers, heads, buckets)),
            f"entropy_{length}": rng.random((layers, heads, buckets)),
            f"scale_{length}": rng.random((layers, heads)),
        }
    if learns:
        found["learned_parts.0.table.rms"] = np.array([[200, 2.0], [400, 3.0 + seed]])
        found["learned_parts.0.table.mean"] = np.zeros((2, 2))
    return found


def test_panels_hold_means_over_heads_and_seeds():
    seeds = [arrays(0), arrays(1)]
    hostile = r"my:A(x='$\frac{')"
    figure = attention_figure({"rope": seeds, hostile: [arrays(2, learns=False)]})
    # Drawing reads what may be mathematics.
    assert rendered(figure, "drawn").keys() == {"drawn.png", "drawn.pdf"}
    assert figure.axes[4].get_ylabel().replace(r"\$", "$").startswith(hostile)
    mass, entropy, scale, learned = figure.axes[:4]
    for name, axes in (("mass_64", mass), ("entropy_64", entropy)):
        wanted = (seeds[0][name] + seeds[1][name]).mean(axis=1) / 2
        drawn = [line.get_ydata() for line in axes.lines]
        np.testing.assert_allclose(drawn, wanted)
    # Buckets stand in their middle: [1, 2) at 1, [2, 4) at the root of 2 * 3.
    np.testing.assert_allclose(mass.lines[0].get_xdata()[1:3], [1, 6**0.5])
    for layer in range(2):
        wanted = [np.mean([one[f"scale_{n}"][layer].mean() for one in seeds]) for n in (32, 64)]
        np.testing.assert_allclose(scale.lines[layer].get_ydata(), wanted)
    (line,) = learned.lines
    assert [text.get_text() for text in learned.get_legend().get_texts()] == ["parts.0.table"]
    np.testing.assert_allclose(line.get_xdata(), [200, 400])
    np.testing.assert_allclose(line.get_ydata(), [1, (1.5 + 2.0) / 2])
    assert [text.get_text() for text in figure.axes[7].texts] == ["nothing is learned"]


def test_the_report_draws_what_stands_beside_its_rows(tmp_path):
    rows = study()
    names = list(dict.fromkeys(row["run"] for row in rows))
    beside = tmp_path / "beside"
    (beside / "mechanism").mkdir(parents=True)
    write_rows(rows, beside)
    for number, name in enumerate(names):
        np.savez(beside / "mechanism" / f"{name}.npz", **arrays(number))
    np.savez(beside / "mechanism" / "another-run.npz", **arrays(99))
    mechanism = read_mechanism([beside / "rows.jsonl"])
    assert read_mechanism([beside]).keys() == mechanism.keys() == {*names, "another-run"}
    read_outs = read_outs_of(rows, mechanism)
    assert sum(map(len, read_outs.values())) == len(names)
    paths = write_full_report(rows, tmp_path / "full", mechanism=mechanism)
    drawing = base64.b64encode(paths["figure-attention.png"].read_bytes()).decode()
    assert f"data:image/png;base64,{drawing}" in paths["index.html"].read_text()
    plain = write_full_report(rows, tmp_path / "plain")
    assert "figure-attention.png" not in plain
    assert "How the models attend" not in plain["index.html"].read_text()
    damaged = beside / "mechanism" / f"{names[0]}.npz"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(UserError, match=rf"cannot read .*{names[0]}.npz .*score with --probe"):
        read_mechanism([beside])
