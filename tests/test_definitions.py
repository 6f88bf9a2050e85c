"""Every encoding beside its definition: values, and gradients by parameters and inputs.

The definitions (``tests/definitions``) are float64 NumPy, written from the papers' formulas and not
from the code under test. Gradients are held against directional derivatives of the definition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from definitions import bias, rotary, scaling
from definitions.case import Case, scaled_product

from posenc.attention import visibility
from posenc.encodings import REGISTRY, Dimensions, Side, build
from posenc.encodings.rotary import Rotary
from posenc.training import split

LENGTH, CONTEXT = 12, 16
EPS = 2.0**-24


@dataclasses.dataclass(frozen=True)
class Entry:
    """A spec and its definition.

    ``logits`` may be a definition of logits, or with ``gives`` of ``weights`` or ``outputs``.
    ``phases``: it turns by position times a frequency that is at most so many radians a position.
    """

    spec: str
    definition: Callable[[Case], np.ndarray]
    heads: int = 4
    head_width: int = 8
    gives: str = "logits"
    phases: float = 0.0
    tolerance: float = 64.0

    def __str__(self) -> str:
        size = "" if (self.heads, self.head_width) == (4, 8) else f"@{self.heads}x{self.head_width}"
        return self.spec + size


def with_(definition: Callable[..., np.ndarray], **options: Any) -> Callable[[Case], np.ndarray]:
    return lambda case: definition(case, **options)


def scaled(which: str, **options: Any) -> Callable[[Case], np.ndarray]:
    """RoPE with the frequencies and the attention factor of a way to rescale."""

    def definition(case: Case) -> np.ndarray:
        inv_freq, factor = getattr(scaling, which)(case.head_width, 10_000.0, **options)
        return rotary.rope(case, inv_freq=inv_freq, attention_factor=factor)

    return definition


LONG = [1.0, 1.5, 2.5, 4.0]
SHORT = [1.0, 1.0, 1.25, 1.5]

# RoPE and its kin turn by at most one radian a position.
ROTARY = [
    Entry("rope", rotary.rope),
    Entry("rope", rotary.rope, heads=1, head_width=2),
    Entry("rope", rotary.rope, heads=12, head_width=4),
    Entry("rope(theta=500000)", with_(rotary.rope, theta=500_000.0)),
    Entry("rope(pairing=interleaved)", with_(rotary.rope, pairing="interleaved")),
    Entry("rope(partial=0.5)", with_(rotary.rope, partial=0.5)),
    Entry("rope(partial=0.25, pairing=interleaved)", with_(rotary.rope, partial=0.25)),
    Entry("p_rope", rotary.p_rope),
    Entry("p_rope(p=0.3)", with_(rotary.p_rope, p=0.3), head_width=16),
    Entry("p_rope(p=0)", scaled_product),
    Entry("p_rope(p=1, pairing=interleaved)", with_(rotary.rope, pairing="interleaved")),
    Entry("xpos", rotary.xpos),
    Entry(
        "xpos(gamma=0.2, pairing=interleaved, scale_base=64)",
        with_(rotary.xpos, gamma=0.2, scale_base=64.0, pairing="interleaved"),
    ),
    Entry("rope(scaling=linear(factor=4))", scaled("linear", factor=4)),
    Entry("rope(scaling=ntk(factor=4))", scaled("ntk", factor=4)),
    Entry("rope(scaling=ntk(factor=8))", rotary.rope, heads=1, head_width=2),
    Entry(
        "rope(scaling=ntk_by_parts(factor=4))",
        scaled("ntk_by_parts", factor=4, original=CONTEXT, ramp="index"),
    ),
    Entry(
        "rope(scaling=ntk_by_parts(factor=4, original=512, ramp=rotations))",
        scaled("ntk_by_parts", factor=4, original=512),
        head_width=32,
    ),
    Entry(
        "rope(scaling=yarn(factor=4, original=1024))",
        scaled("yarn", factor=4, original=1024),
        head_width=32,
    ),
    Entry(
        "rope(scaling=yarn(factor=8, original=1024, ramp=rotations))",
        scaled("yarn", factor=8, original=1024, ramp="rotations"),
        head_width=32,
    ),
    Entry(
        "rope(scaling=yarn(factor=2, original=300, truncate=false, attention_factor=1.5))",
        scaled("yarn", factor=2, original=300, truncate=False, attention_factor=1.5),
        head_width=32,
    ),
    Entry(
        "rope(scaling=yarn(factor=2, low=4, high=4))",
        scaled("yarn", factor=2, original=CONTEXT, beta_fast=4, beta_slow=4),
    ),
    Entry("rope(scaling=yarn(factor=1))", rotary.rope),
    Entry("rope(scaling=llama3(original=256))", scaled("llama3", original=256), head_width=32),
    Entry(
        "rope(scaling=llama3(factor=4, low_freq_factor=2, high_freq_factor=2, original=256))",
        scaled("llama3", factor=4, low_freq_factor=2, high_freq_factor=2, original=256),
        head_width=32,
    ),
    Entry(
        "rope(scaling=dynamic_ntk(chunk=1, factor=2, original=4))",
        with_(rotary.dynamic_rope, theta=10_000.0, factor=2, original=4, chunk=1),
    ),
    Entry(
        "rope(scaling=dynamic_ntk(chunk=8, original=8), pairing=interleaved)",
        with_(
            rotary.dynamic_rope,
            theta=10_000.0,
            factor=1,
            original=8,
            chunk=8,
            pairing="interleaved",
        ),
    ),
    Entry(
        f"rope(scaling=longrope(chunk=1, factor=4, factors={LONG}, original=6, short={SHORT}))",
        with_(
            rotary.longrope_switch,
            theta=10_000.0,
            short_factors=SHORT,
            long_factors=LONG,
            factor=4,
            original=6,
            chunk=1,
        ),
    ),
]
ROTARY = [dataclasses.replace(entry, phases=1.0) for entry in ROTARY]

BIASES = [
    Entry("alibi", bias.alibi),
    Entry("alibi", bias.alibi, heads=1),
    Entry("alibi", bias.alibi, heads=12, head_width=2),
    Entry("nope", scaled_product),
]

ENTRIES = [*ROTARY, *BIASES]

POSITIONS = {
    "ordinary": np.arange(LENGTH, dtype=np.int32),
    "far": 100_000 + np.arange(LENGTH, dtype=np.int32),
    "jumping": np.array([0, 1, 2, 7, 30, 31, 99, 512, 513, 700, 4000, 4001], np.int32),
}


class Ours:
    """One layer of an encoding, and the case that its definition reads."""

    def __init__(self, entry: Entry):
        self.entry = entry
        heads, head_width = entry.heads, entry.head_width
        self.dims = Dimensions(heads * head_width, heads, head_width, CONTEXT)
        self.encodings = build(entry.spec, 1, self.dims, jax.random.key(0))
        self.merge, parameters = split(self.encodings)
        random = np.random.default_rng(1)
        # Away from the initial values, at which a gradient may vanish.
        self.variables = {
            name: np.asarray(value, np.float32)
            + 0.3 * random.standard_normal(value.shape).astype(np.float32)
            for name, value in parameters.items()
        }
        shape = (LENGTH, heads, head_width)
        for name in ("q", "k", "v"):
            self.variables[name] = random.standard_normal(shape).astype(np.float32)
        self.variables["x"] = random.standard_normal((LENGTH, self.dims.width)).astype(np.float32)
        self.cotangent = random.standard_normal((heads, LENGTH, LENGTH))
        if entry.gives == "outputs":
            self.cotangent = random.standard_normal(shape)
        if entry.gives == "embeddings":
            self.cotangent = random.standard_normal(self.variables["x"].shape)
        self.run = jax.jit(self.compute)
        self.gradient = jax.jit(jax.grad(self.loss, allow_int=True))

    def compute(self, variables: dict[str, Any], positions: Any) -> jax.Array:
        """Give logits [H, T, T], weights, or outputs [T, H, D] as attention computes them."""
        own = {name: value for name, value in variables.items() if name not in "qkvx"}
        encodings = self.merge(own)
        positions = positions[None]
        if self.entry.gives == "embeddings":
            return encodings.embed(variables["x"][None], positions, {})[0]
        encoding = encodings.at(0)
        segments = jnp.ones((1, LENGTH), jnp.int32)
        features, _ = encoding.features(
            variables["x"][None], positions, segments, encoding.start_state(1)
        )
        prepared = encodings.prepared_at(encodings.prepare(positions, {}), 0)
        slots = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        shared = (positions, {}, slots, segments, features, prepared)
        queries = Side(variables["q"][None], None, *shared)
        keys = Side(variables["k"][None], None, *shared)
        queries = dataclasses.replace(queries, rotated=encoding.rotate_queries(queries))
        keys = dataclasses.replace(keys, rotated=encoding.rotate_keys(keys))
        visible = visibility(
            queries, keys, causal=True, reach=encoding.reach, sinks=encoding.sinks, ranks=slots
        )
        scores = encoding.scores(queries, keys, visible)
        carry = encoding.start_carry(1, LENGTH)
        logits, _ = encoding.logits(scores, scores, queries, keys, visible, carry)
        if self.entry.gives == "logits":
            # A key that is out of sight is -inf in a definition.
            return jnp.where(visible, logits, -jnp.inf)[0]
        weights = encoding.weights(logits, visible)
        if self.entry.gives == "weights":
            return weights[0]
        return encoding.mix(weights, variables["v"][None], queries, keys)[0]

    def loss(self, variables: dict[str, Any], positions: Any) -> jax.Array:
        given = self.compute(variables, positions)
        return jnp.sum(jnp.where(jnp.isfinite(given), given, 0.0) * self.cotangent)

    def case(self, variables: dict[str, np.ndarray], positions: np.ndarray) -> Case:
        wide = {name: np.asarray(value, np.float64) for name, value in variables.items()}
        own = {n.removeprefix("parts.0."): v for n, v in wide.items() if n not in "qkvx"}
        q, k, v = (np.moveaxis(wide[name], 1, 0) for name in "qkv")
        return Case(wide["x"], q, k, v, positions, own, CONTEXT)

    def defined(self, variables: dict[str, np.ndarray], positions: np.ndarray) -> np.ndarray:
        """Give what the definition gives, what nobody may see being -inf (logits) or 0."""
        given = np.array(self.entry.definition(self.case(variables, positions)), np.float64)
        if self.entry.gives in ("logits", "weights"):
            future = np.triu(np.ones((LENGTH, LENGTH), bool), 1)
            given[:, future] = -np.inf if self.entry.gives == "logits" else 0.0
        return given

    def defined_loss(self, variables: dict[str, np.ndarray], positions: np.ndarray) -> float:
        given = self.defined(variables, positions)
        return float(np.sum(np.where(np.isfinite(given), given, 0.0) * self.cotangent))


MADE: dict[str, Ours] = {}


def ours(entry: Entry) -> Ours:
    return MADE.setdefault(str(entry), Ours(entry))


def bound(entry: Entry, made: Ours, positions: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """How far float32 may take a value: some roundings of it, and what phases err by.

    A phase at position p errs by ``4 p 2^-24`` radians a side, and a scaled product by no more than
    that times ``|q| |k| / sqrt(D)``.
    """
    norms = [np.linalg.norm(made.variables[side].astype(np.float64), axis=-1).T for side in "qk"]
    unit = np.einsum("ht,hs->hts", *norms) / np.sqrt(entry.head_width)
    if entry.gives != "logits":
        unit = np.full_like(wanted, unit.max())
    size = np.where(np.isfinite(wanted), np.abs(wanted), 0.0)
    phase = 8 * entry.phases * np.max(np.abs(positions)) * unit
    return EPS * (entry.tolerance * (unit + size + 1) + phase)


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_values_are_those_of_the_definition(entry, where):
    made, positions = ours(entry), POSITIONS[where]
    got = np.asarray(made.run(made.variables, positions), np.float64)
    wanted = made.defined(made.variables, positions)
    assert np.array_equal(np.isfinite(got), np.isfinite(wanted))
    seen = np.isfinite(wanted)
    error = np.abs(np.where(seen, got, 0) - np.where(seen, wanted, 0))
    excess = error / bound(entry, made, positions, wanted)
    assert excess.max() <= 1, f"{excess.max():.3g} times the bound; {error.max():.3g} off"


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_gradients_are_those_of_the_definition(entry):
    made, positions = ours(entry), POSITIONS["jumping"]
    gradient = made.gradient(made.variables, positions)
    random = np.random.default_rng(2)
    for name, value in made.variables.items():
        direction = random.standard_normal(value.shape)
        step = 1e-6
        wide = {n: np.asarray(v, np.float64) for n, v in made.variables.items()}
        beside = [
            made.defined_loss({**wide, name: wide[name] + sign * step * direction}, positions)
            for sign in (1, -1)
        ]
        wanted = (beside[0] - beside[1]) / (2 * step)
        got = float(np.sum(np.asarray(gradient[name], np.float64) * direction))
        # Sums of some thousand float32 terms, and phases at position 4,001.
        size = 1 + np.linalg.norm(np.asarray(gradient[name])) * np.linalg.norm(direction)
        near = (2e-5 + 8 * entry.phases * positions.max() * EPS) * size
        assert abs(got - wanted) <= near, f"{name}: {got} beside {wanted}"


def test_every_registered_encoding_has_a_definition():
    names = {part for entry in ENTRIES for part in REGISTRY if entry.spec.split("(")[0] == part}
    assert set(REGISTRY) - names == {"wpe", "sinusoidal"}


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rotary_pairings_are_one_function_under_a_permutation_of_channels(pairing):
    width = 8
    order = np.arange(width).reshape(2, -1).T.ravel()  # half's pairs, side by side
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, width)), jnp.float32)
    angles = jnp.asarray(np.random.default_rng(1).standard_normal((1, 5, 1, width // 2)))
    from posenc.encodings.rotary import rotate

    half = rotate(x, jnp.cos(angles), jnp.sin(angles), "half")
    interleaved = rotate(x[..., order], jnp.cos(angles), jnp.sin(angles), "interleaved")
    np.testing.assert_array_equal(half[..., order], interleaved)
    assert issubclass(REGISTRY["rope"], Rotary)
