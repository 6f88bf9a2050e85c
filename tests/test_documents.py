"""What the documents show is true: the README's example, and the demo by its command line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eval.report.rows import read_rows
from posenc.optimizer import OptimizerConfig
from posenc.runs import RunConfig, config_hash, recipe_hash
from posenc.transformer import preset
from studies.documents import nth_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EVALUATIONS = ("-m eval score", "-m eval report", "-m eval compare", "-m eval audit")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The encoding that the README shows, as the file that it tells the reader to write."""
    code = next(block for block in blocks("python") if "class " in block)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    (tmp_path / "my_encoding.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_readmes_encoding_is_complete_and_holds_the_laws(example):
    from posenc.conformance import conformance

    results = list(conformance("my_encoding:SqrtBias"))
    assert not {result.check: result.error for result in results if result.error}


def test_the_readmes_encoding_computes_what_it_says(example):
    import jax
    import jax.numpy as jnp

    from posenc.encodings import Dimensions, Side, build

    encoding = build(
        "my_encoding:SqrtBias(slope=0.5)", 1, Dimensions(8, 2, 4, 16), jax.random.key(0)
    ).at(0)
    places = jnp.arange(5)[None]
    side = Side(None, None, places, {}, places, jnp.ones((1, 5), jnp.int32))
    logits, _ = encoding.logits(jnp.zeros((1, 2, 5, 5)), None, side, side, None, None)
    expected = [[-0.5 * max(i - j, 0) ** 0.5 for j in range(5)] for i in range(5)]
    np.testing.assert_allclose(logits[0], np.broadcast_to(expected, (2, 5, 5)), atol=1e-6)


def test_the_readmes_use_as_a_library_runs():
    code = next(block for block in blocks("python") if "posenc.generate" in block)
    scope = {}
    exec(compile(code, "README.md", "exec"), scope)
    # The whole model's likeliest next token is the first that decoding on the cache gives.
    assert scope["tokens"][0, 0] == np.argmax(np.asarray(scope["logits"])[0, -1])
    assert scope["tokens"].size == 20


def test_every_command_of_the_readme_names_what_there_is():
    """Each subcommand and option that the README shows is one that the program has."""
    shown = [line for block in blocks("(?:bash|sh)") for line in block.splitlines()]
    for program in ("train.py", *EVALUATIONS, "-m posenc"):
        assert any(program in line for line in shown), program
    helps = {}
    for line in shown:
        for program in ("train.py", *EVALUATIONS):
            if f"python {program}" in line:
                if program not in helps:
                    words = [sys.executable, *program.split(), "--help"]
                    helps[program] = subprocess.run(
                        words, cwd=ROOT, capture_output=True, text=True, check=True
                    ).stdout
                for option in re.findall(r"--[a-z-]+", line):
                    assert option in helps[program], (program, option)


def test_the_demo_at_toy_size(tmp_path):
    words = [
        *(sys.executable, "-m", "studies.demo", "--out", str(tmp_path), "--steps", "4"),
        *("--model", "nano", "--train-length", "16", "--batch-size", "4"),
        *("--multiples", "1", "2", "--tokens-per-document", "64"),
    ]
    first = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert first.returncode == 0, first.stderr
    out = first.stdout
    assert "takes about 10 minutes" in out
    assert re.search(r"(seen|not seen) +rope loses heavily beyond the training length: [+-]\d", out)
    assert "seen      wpe has no vector to offer beyond its table: 1 of 1 longer lengths" in out
    report = tmp_path / "report"
    assert f"figure: {report / 'figure.png'}" in out
    assert {p.name for p in report.iterdir() if p.is_file()} == {
        *("rows.jsonl", "rows.csv", "table.md", "figure.png", "figure.pdf")
    }
    rows = read_rows(report)
    wpe = {
        r["length"]: r for r in rows if r["encoding"] == "wpe" and r["protocol"] == "nll_by_context"
    }
    assert (wpe[16]["defined"], wpe[32]["defined"]) == (True, False)
    assert len({r["run"] for r in rows}) == 5

    # Again: nothing that is finished is repeated, and the numbers are the same.
    before = (report / "rows.jsonl").read_text()
    second = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("finished before, left as it is") == 5

    def numbers(text):
        return [json.loads(line)["nll"] for line in text.splitlines()]

    assert numbers((report / "rows.jsonl").read_text()) == numbers(before)

    # From the rows alone: the same figure, byte for byte.
    rebuilt = tmp_path / "rebuilt"
    words = [sys.executable, "-m", "eval", "report", str(report / "rows.jsonl"), "--out"]
    subprocess.run([*words, str(rebuilt)], cwd=ROOT, check=True, capture_output=True)
    for name in ("figure.png", "figure.pdf", "rows.jsonl", "rows.csv"):
        assert (rebuilt / name).read_bytes() == (report / name).read_bytes()
    # The same tables, and below them those with intervals.
    assert (rebuilt / "table.md").read_text().startswith((report / "table.md").read_text())


def test_committed_results_rebuild_the_committed_figure(tmp_path):
    from eval.report import write_report

    rows = read_rows(ROOT / "docs" / "demo" / "rows.jsonl")
    write_report(rows, tmp_path)
    assert (tmp_path / "table.md").read_text() == (ROOT / "docs/demo/table.md").read_text()
    assert nth_table((tmp_path / "table.md").read_text(), 1) in README
    assert not any(row["dirty"] for row in rows)
    # A run's hashes are those of its config, whatever options came since.
    for row in rows:
        config = RunConfig(
            encoding=row["encoding"],
            preset="tiny",
            model=preset("tiny"),
            data="manuals-small",
            steps=1000,
            optimizer=OptimizerConfig(learning_rate=3e-3),
            eval_every=250,
            checkpoint_every=250,
        )
        assert row["config_hash"] == config_hash(config, row["data"])
        assert row["recipe_hash"] == recipe_hash(config)
