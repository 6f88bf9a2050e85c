"""What a run says of its costs and of what its encoding learns."""

import json

import jax
import numpy as np
import pytest

import posenc
import train
from posenc import watching
from posenc.transformer import Transformer, TransformerConfig, count_parameters

pytestmark = pytest.mark.fast


def test_operations_are_those_of_every_matrix_product():
    """Three times the forward pass, counted product by product, two operations each."""
    config = TransformerConfig(
        vocab_size=31, layers=3, width=16, heads=2, kv_heads=1, tied_head=False
    )
    length, inner = 10, config.inner_width
    parameters = count_parameters(Transformer(config, "nope", length))
    projections = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * inner
    attention = 2 * length * 16
    products = 3 * (projections + attention) + 31 * 16
    norms = parameters - 3 * projections - 2 * 31 * 16
    got = watching.flops_a_token(config, parameters, length)
    assert got == 3 * 2 * (products + norms)


def test_utilisation_is_known_of_known_devices(monkeypatch):
    assert watching.utilisation(1e12) is None

    class Device:
        device_kind = "TPU v4"

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert watching.utilisation(27.5e12) == pytest.approx(0.1)


def test_what_encodings_learn_is_logged_and_a_trace_is_written(tmp_path, common):
    options = {**common, "encoding": ("kerple_log",), "steps": 14, "checkpoint_every": 14}
    arguments = train.Arguments(out=tmp_path, seeds=2, profile=2, **options)
    (folder,) = train.main(arguments)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["step"] == 14 and "valid_nll_16" in row]
    assert [row["seed"] for row in last] == [0, 1]
    for row in last:
        part = posenc.load(folder, seed=row["seed"]).encoding.parts[0]
        for name in ("r1", "r2"):
            values = np.asarray(getattr(part, name)[...], np.float64)
            assert row[f"encoding.parts.0.{name}.mean"] == pytest.approx(values.mean())
            assert row[f"encoding.parts.0.{name}.rms"] == pytest.approx(np.sqrt((values**2).mean()))
    assert all(row["tokens_per_second_per_device"] > 0 for row in rows if "loss" in row)
    assert any(path.stat().st_size for path in (folder / "profile").rglob("*.xplane.pb"))
