"""What a run says of its costs and of what its encoding learns."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

import posenc
import train
from posenc import watching
from posenc.encodings import make_sampler
from posenc.metrics import Metrics
from posenc.runs import Run, RunConfig
from posenc.transformer import Transformer, TransformerConfig, preset

pytestmark = pytest.mark.fast


def abstract(config, encoding, length):
    return nnx.eval_shape(lambda: Transformer(config, encoding, length))


def test_operations_are_those_of_every_matrix_product():
    """Three times the forward pass, counted product by product, two operations each."""
    config = TransformerConfig(
        vocab_size=31, layers=3, width=16, heads=2, kv_heads=1, tied_head=False
    )
    length, inner = 10, config.inner_width
    projections = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * inner
    attention = 2 * length * 16
    products = 3 * (projections + attention) + 31 * 16

    def counted(encoding):
        model = abstract(config, encoding, length)
        return watching.flops_a_token(model, length, make_sampler("sequential"))

    for plain in ("nope", "rope", "alibi", "wpe"):
        assert counted(plain) == 3 * 2 * products
    # FIRE's network is linear between 32 bends: products give value and slope of 33 pieces.
    pieces = 3 * 2 * 33 * 32 * config.heads / length
    assert counted("fire") - counted("nope") == pytest.approx(3 * 2 * pieces, rel=1e-12)


def test_products_are_counted_within_loops_branches_and_maps():
    a, b = np.zeros((2, 3), np.float32), np.zeros((3, 3), np.float32)

    def program(a, b):
        chained, _ = jax.lax.scan(lambda x, _: (x @ b, None), a, length=5)
        chosen = jax.lax.cond(a[0, 0] > 0, lambda: a @ b @ b, lambda: a @ b)
        batched = jax.vmap(lambda row: row @ b)(a)
        return jax.jit(lambda: chained + chosen + batched)()

    one = 2 * 2 * 3 * 3
    assert watching.operations(jax.make_jaxpr(program)(a, b).jaxpr) == (5 + 2 + 1) * one

    def unending(b):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ b, b)

    with pytest.raises(ValueError, match="unknown length"):
        watching.operations(jax.make_jaxpr(unending)(b).jaxpr)


def test_seconds_add_up_over_the_starts_of_a_run(tmp_path):
    """What was done after the checkpoint that a run goes on from is not counted."""
    config = RunConfig("nope", "nano", preset("nano"), "manuals-small")
    for after, seconds, expected in ((0, (1.5, 3.0), 3.0), (10, (2.0, 2.25), 2.25)):
        metrics = Metrics(tmp_path, after)
        assert metrics.seconds == (1.5 if after else 0.0)
        for step, taken in zip((after + 10, after + 20), seconds, strict=True):
            metrics.write(step, loss=1.0, seconds=taken)
            metrics.write(step, valid_nll_16=1.0)
        metrics.close()
        run = Run(tmp_path, config, {})
        assert run.seconds(after + 20) == expected
    assert (run.seconds(10), run.seconds(9)) == (1.5, None)


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
