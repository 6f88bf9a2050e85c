"""Every encoding beside its definition: values, and gradients by parameters and inputs.

The definitions (``tests/definitions``) are float64 NumPy, written from the papers' formulas and not
from the code under test. Gradients are held against directional derivatives of the definition.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from definitions import (
    absolute,
    accumulated,
    bias,
    contextual,
    forgetting,
    grape,
    path,
    polar,
    relative,
    rotary,
    scaling,
    temperature,
)
from definitions.case import Case, scaled_product
from flax import nnx

from posenc.attention import visibility
from posenc.conformance import compiled_quickly
from posenc.encodings import REGISTRY, Dimensions, Side, build, parse_part
from posenc.encodings.rotary import rotate
from posenc.training import split

LENGTH, CONTEXT = 12, 16
EPS = 2.0**-24


@dataclasses.dataclass(frozen=True)
class Entry:
    """A spec and its definition.

    The definition is one of logits, or with ``gives`` of ``weights`` or ``outputs``.
    ``policy`` extends it for evaluation. ``phases``: it turns by position times a frequency that is
    at most so many radians a position.
    ``within``: parameters that are tried in an interval only, being held inside it.
    """

    spec: str
    definition: Callable[[Case], np.ndarray]
    heads: int = 4
    head_width: int = 8
    gives: str = "logits"
    policy: str = ""
    phases: float = 0.0
    tolerance: float = 64.0
    within: tuple[tuple[str, float, float], ...] = ()

    def __str__(self) -> str:
        size = "" if (self.heads, self.head_width) == (4, 8) else f"@{self.heads}x{self.head_width}"
        return self.spec + size + (f" by {self.policy}" if self.policy else "")


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

# Inside of where they are held: a finite difference across the border is no derivative.
LOG = (("r1", 0.02, 5.0), ("r2", 0.02, 5.0))
POWER = (("r1", 0.02, 5.0), ("r2", 0.02, 1.98))


BIASES_2 = [
    Entry("alibi(learned=true)", bias.alibi),
    Entry("alibi(learned=true)", bias.alibi, heads=1, head_width=1),
    Entry("alibi(learned=true)", bias.alibi, heads=12, head_width=2),
    Entry("t5", bias.t5),
    Entry("t5", bias.t5, heads=1, head_width=2),
    Entry("t5", bias.t5, heads=12, head_width=2),
    Entry("t5(buckets=8, max_distance=16)", with_(bias.t5, buckets=8, max_distance=16)),
    Entry("t5(buckets=7, max_distance=500)", with_(bias.t5, buckets=7, max_distance=500)),
    Entry("t5(buckets=2, max_distance=2)", with_(bias.t5, buckets=2, max_distance=2)),
    Entry("t5(buckets=64, max_distance=33)", with_(bias.t5, buckets=64, max_distance=33)),
    Entry("t5(max_distance=5000)", with_(bias.t5, max_distance=5000), heads=12, head_width=2),
    Entry("kerple_log", bias.kerple_log, within=LOG),
    Entry("kerple_log", bias.kerple_log, heads=1, head_width=2, within=LOG),
    Entry("kerple_log", bias.kerple_log, heads=12, head_width=2, within=LOG),
    Entry("kerple_power", bias.kerple_power, within=POWER),
    Entry("kerple_power", bias.kerple_power, heads=1, head_width=2, within=POWER),
    Entry("kerple_power", bias.kerple_power, heads=12, head_width=2, within=POWER),
    Entry("fire", bias.fire),
    Entry("fire", bias.fire, heads=1, head_width=2),
    Entry("fire", bias.fire, heads=12, head_width=2),
    Entry("fire(threshold=8, width=5)", with_(bias.fire, threshold=8.0)),
    Entry("fire(eps=0.1, shared=true, width=1)", with_(bias.fire, eps=0.1)),
    Entry("sandwich", bias.sandwich),
    Entry("sandwich", bias.sandwich, heads=1, head_width=2),
    # Of a sum of 128 terms, whose roundings are of its size at most and not at hand: w/2 H/8 = 96.
    Entry("sandwich", bias.sandwich, heads=12, head_width=2, tolerance=128),
    Entry("sandwich(width=2)", with_(bias.sandwich, width=2)),
    Entry("sandwich(width=64)", with_(bias.sandwich, width=64)),
    Entry("window(size=3)", with_(bias.window, size=3)),
    Entry("window(size=1)", with_(bias.window, size=1), heads=1, head_width=2),
    Entry("window(size=4, sinks=2)", with_(bias.window, size=4, sinks=2), heads=12, head_width=2),
    Entry("window(size=100)", scaled_product),
]


def composed(of: list[Callable[[Case], np.ndarray]], sizes: list[int]):
    """Each definition on heads of its own; parameters are told apart by ``parts.INDEX.``."""

    def definition(case: Case) -> np.ndarray:
        made, low = [], 0
        for index, (one, size) in enumerate(zip(of, sizes, strict=True)):
            at = slice(low, low + size)
            own = {
                name.removeprefix(f"parts.{index}."): value
                for name, value in case.parameters.items()
                if name.startswith(f"parts.{index}.")
            }
            sides = {side: getattr(case, side)[at] for side in "qkv"}
            made.append(one(dataclasses.replace(case, parameters=own, **sides)))
            low += size
        return np.concatenate(made)

    return definition


def on_scaled(definition: Callable[..., np.ndarray], base=scaled_product, **options: Any):
    return lambda case: definition(base(case), case, **options)


MIXTURES = [
    Entry("logn", on_scaled(temperature.logn)),
    Entry("logn(length=3)", on_scaled(temperature.logn, length=3)),
    Entry("alibi+logn(length=100)", on_scaled(temperature.logn, bias.alibi, length=100)),
    Entry("ssmax", on_scaled(temperature.ssmax)),
    Entry("ssmax", on_scaled(temperature.ssmax), heads=1),
    Entry(
        "temperature(factor=4)",
        lambda case: temperature.yarn_temperature(scaled_product(case), 4),
    ),
    Entry(
        "temperature(factor=4, power=1, slope=0.412)",
        lambda case: scaled_product(case) * (1 + 0.412 * np.log(4)),
    ),
    Entry("sink", on_scaled(temperature.learned_sink), gives="weights"),
    Entry(
        "sink(learned=false)",
        lambda case: temperature.learned_sink(
            scaled_product(case),
            dataclasses.replace(case, parameters={"sink": np.zeros(case.heads)}),
        ),
        gives="weights",
    ),
    Entry(
        "heads(of=[rope, alibi], sizes=[1, 3])",
        composed([rotary.rope, bias.alibi], [1, 3]),
        phases=1.0,
    ),
    Entry(
        "heads(of=[ssmax, xpos, nope], sizes=[1, 2, 1])",
        composed([on_scaled(temperature.ssmax), rotary.xpos, scaled_product], [1, 2, 1]),
        phases=1.0,
    ),
]


def adapted(base: Callable[[Case], np.ndarray], **options: Any) -> Callable[[Case], np.ndarray]:
    """DAPE of what ``base`` adds to the scaled product."""

    def definition(case: Case) -> np.ndarray:
        own = {name.removeprefix("base."): value for name, value in case.parameters.items()}
        added = base(dataclasses.replace(case, parameters=own)) - scaled_product(case)
        return contextual.dape(case, added, **options)

    return definition


def grape_ap_released(case: Case) -> np.ndarray:
    """GRAPE-AP with the slopes that the released code keeps in a buffer."""
    own = {**case.parameters, "alpha": grape.alibi_slopes(case.heads)}
    return grape.grape_ap(dataclasses.replace(case, parameters=own), released=True)


def path_fox(case: Case) -> np.ndarray:
    """PaTH-FoX, the parameters of both parts of the sum in one."""
    own = {name.removeprefix("parts.1."): value for name, value in case.parameters.items()}
    return path.path_fox(dataclasses.replace(case, parameters=own))


CONTEXTUAL = [
    Entry("fox", forgetting.fox),
    Entry("fox", forgetting.fox, heads=1, head_width=2),
    Entry("fox", forgetting.fox, heads=12, head_width=2),
    Entry("fox(gate=bias)", with_(forgetting.fox, gate="bias")),
    Entry(
        "fox(gate=fixed)",
        with_(forgetting.fox, gate="fixed", slopes=forgetting.fox_slopes(4, 2, CONTEXT)),
    ),
    Entry(
        "fox(gate=fixed, longest=300, shortest=0.5)",
        with_(forgetting.fox, gate="fixed", slopes=forgetting.fox_slopes(12, 0.5, 300)),
        heads=12,
        head_width=2,
    ),
    Entry(
        "fox(gate=fixed, longest=9, shortest=9)",
        with_(forgetting.fox, gate="fixed", slopes=np.array([1 / 9])),
        heads=1,
    ),
    Entry("cable", forgetting.cable),
    Entry("cable", forgetting.cable, heads=1, head_width=2),
    Entry("cable", forgetting.cable, heads=12, head_width=2),
    Entry("cable(scaled=false)", with_(forgetting.cable, scaled=False)),
    Entry("stick_breaking", contextual.stick_breaking, gives="weights"),
    Entry("stick_breaking", contextual.stick_breaking, heads=1, head_width=2, gives="weights"),
    Entry("stick_breaking", contextual.stick_breaking, heads=12, head_width=2, gives="weights"),
    Entry(
        "stick_breaking(attend_current=true)",
        with_(contextual.stick_breaking, attend_current=True),
        gives="weights",
    ),
    Entry("selective", contextual.selective),
    Entry("selective", contextual.selective, heads=1, head_width=2),
    Entry("selective", contextual.selective, heads=12, head_width=2),
    Entry("alibi+selective", lambda case: contextual.selective(case, bias.alibi(case))),
    Entry("cope", contextual.cope),
    Entry("cope", contextual.cope, heads=1, head_width=2),
    Entry("cope", contextual.cope, heads=12, head_width=2),
    Entry("cope(scale=paper)", with_(contextual.cope, scale="paper")),
    Entry("cope(positions=3)", with_(contextual.cope, positions=3)),
    Entry("cope(positions=1, scale=paper)", with_(contextual.cope, positions=1, scale="paper")),
    Entry("dape", adapted(scaled_product)),
    Entry("dape(base=alibi)", adapted(bias.alibi)),
    Entry("dape(base=alibi)", adapted(bias.alibi), heads=1, head_width=2),
    Entry("dape(base=alibi)", adapted(bias.alibi), heads=12, head_width=2),
    Entry("dape(base=alibi, residual=false, width=1)", adapted(bias.alibi, residual=False)),
    # At jumping positions its sums are of biases of up to 2,000, next to values of 1.
    Entry("dape(base=alibi, version=2)", adapted(bias.alibi, version=2), tolerance=512),
    Entry("dape(base=fox, version=2)", adapted(forgetting.fox, version=2)),
    Entry("dape(base=fox, version=2)", adapted(forgetting.fox, version=2), heads=1, head_width=2),
    # A sum of 72 terms, and one of 96 of those.
    Entry(
        "dape(base=fox, version=2)",
        adapted(forgetting.fox, version=2),
        heads=12,
        head_width=2,
        tolerance=128,
    ),
    Entry(
        "dape(base=fox, remask=false, residual=false, version=2)",
        adapted(forgetting.fox, version=2, residual=False, remask=False),
    ),
    Entry("grape_a", grape.grape_a),
    Entry("grape_a", grape.grape_a, heads=1, head_width=2),
    Entry("grape_a", grape.grape_a, heads=12, head_width=2),
    Entry("grape_a(variant=q)", with_(grape.grape_a, variant="q")),
    Entry("grape_a(variant=k)", with_(grape.grape_a, variant="k")),
    Entry("grape_a(released=false)", with_(grape.grape_a, normalize=False, slopes=np.ones(4))),
    Entry("grape_ap", grape.grape_ap),
    Entry("grape_ap", grape.grape_ap, heads=1, head_width=2),
    Entry("grape_ap(width=2)", grape.grape_ap, heads=12, head_width=2),
    Entry("grape_ap(released=true)", grape_ap_released),
    Entry("path", path.path),
    Entry("path", path.path, heads=1, head_width=2),
    Entry("path", path.path, heads=12, head_width=2),
    Entry("path(conv=1, rank=2)", path.path),
    Entry("path+fox", path_fox),
    Entry("path+fox", path_fox, heads=12, head_width=2),
]

TABLE = {"heads": 1, "head_width": 2, "gives": "embeddings"}

ABSOLUTE = [
    Entry("wpe(max_position=100012)", absolute.wpe, **TABLE),
    Entry("wpe(max_position=100012, offset=2)", with_(absolute.wpe, offset=2), **TABLE),
    Entry("sinusoidal", with_(absolute.sinusoidal, scale=32**-0.5)),
    Entry(
        "sinusoidal(embedding_scale=5.65685424949238, scale=1)",
        with_(absolute.sinusoidal, embedding_scale=32**0.5),
    ),
    Entry(
        "sinusoidal(layout=concatenated, scale=1, theta=500)",
        with_(absolute.sinusoidal, layout="concatenated", theta=500.0),
    ),
    Entry(
        "sinusoidal(layout=concatenated, scale=1, spacing=tensor2tensor)",
        with_(absolute.sinusoidal, layout="concatenated", spacing="tensor2tensor"),
    ),
    Entry(
        "sinusoidal(scale=2, spacing=tensor2tensor)",
        with_(absolute.sinusoidal, scale=2.0, spacing="tensor2tensor"),
        heads=12,
        head_width=2,
    ),
    Entry(
        "sinusoidal(scale=1, spacing=tensor2tensor)",
        with_(absolute.sinusoidal, spacing="tensor2tensor"),
        heads=1,
        head_width=2,
    ),
]
ABSOLUTE = [
    dataclasses.replace(entry, gives="embeddings", phases=float(entry.spec.startswith("sin")))
    for entry in ABSOLUTE
]

RELATIVE = [
    Entry("shaw", relative.shaw),
    Entry("shaw(clip=2)", with_(relative.shaw, clip=2)),
    Entry("shaw(clip=0)", with_(relative.shaw, clip=0)),
    Entry("shaw", relative.shaw, heads=1, head_width=2),
    Entry("shaw(clip=5)", with_(relative.shaw, clip=5), heads=12, head_width=4),
    Entry("shaw(values=true)", relative.shaw_outputs, gives="outputs"),
    Entry("shaw(clip=3)", with_(relative.shaw_outputs, clip=3), gives="outputs"),
    Entry(
        "shaw(clip=3, values=true)",
        with_(relative.shaw_outputs, clip=3),
        heads=12,
        head_width=2,
        gives="outputs",
    ),
    Entry("transformer_xl", relative.transformer_xl, phases=1.0),
    Entry("transformer_xl(theta=100)", with_(relative.transformer_xl, theta=100.0), phases=1.0),
    Entry("transformer_xl", relative.transformer_xl, heads=1, head_width=2, phases=1.0),
    Entry("transformer_xl", relative.transformer_xl, heads=12, head_width=4, phases=1.0),
]

PHASE = (("phase", -6.2, -0.01),)

TURNED = [
    Entry("pope", polar.pope, within=PHASE),
    Entry("pope(theta=500)", with_(polar.pope, theta=500.0), within=PHASE),
    Entry("pope(init=uniform)", polar.pope, within=PHASE, heads=12, head_width=3),
    Entry("pope", polar.pope, within=PHASE, heads=1, head_width=1),
    Entry("hope", rotary.hope),
    Entry(
        "hope(length=1000, pairing=interleaved)",
        with_(rotary.hope, length=1000, pairing="interleaved"),
        head_width=16,
    ),
    Entry("hope(length=6)", scaled_product),
    Entry("hope(length=3000, theta=50)", with_(rotary.rope, theta=50.0)),
    Entry("fope", rotary.fope),
    Entry("fope", rotary.fope, heads=1, head_width=2),
    Entry("fope(length=1000)", with_(rotary.fope, length=1000), head_width=16),
    Entry(
        "fope(gain=0.6, length=1000, mixed=4, theta=500, zero_freq_sin=1)",
        with_(rotary.fope, length=1000, theta=500.0, zero_freq_sin=1.0),
        head_width=16,
    ),
    Entry(
        "fope(length=1000, pairing=interleaved, zero_freq_sin=1)",
        with_(rotary.fope, length=1000, pairing="interleaved", zero_freq_sin=1.0),
        heads=12,
        head_width=16,
    ),
    Entry("fope(length=6)", scaled_product),
    Entry("rope(learned=true)", rotary.learned_rope),
    Entry(
        "rope(learned=true, pairing=interleaved)",
        with_(rotary.learned_rope, pairing="interleaved"),
        heads=12,
        head_width=4,
    ),
]
# Frequencies are tried up to 2, 0.3 times a normal number beside their initial ones.
TURNED = [
    dataclasses.replace(entry, phases=2.0 if "learned" in entry.spec else 1.0) for entry in TURNED
]


def asentmax_before_alibi(case: Case) -> np.ndarray:
    """ASEntmax of scores, to which ALiBi's bias comes unscaled."""
    scaled = temperature.adaptive_scale(scaled_product(case), case)
    return temperature.causal_entmax15(scaled + bias.alibi(case) - scaled_product(case), case)


def asentmax_beside_alibi(case: Case) -> np.ndarray:
    """Plain entmax with ALiBi on the first half of the heads, ASEntmax alone on the others."""
    half = case.heads // 2
    mixed = composed([bias.alibi, on_scaled(temperature.adaptive_scale)], [half, half])
    return temperature.causal_entmax15(mixed(case), case)


NEWEST = [
    Entry("scale_invariant", on_scaled(temperature.scale_invariant)),
    Entry("scale_invariant(tau=0.01)", on_scaled(temperature.scale_invariant, tau=0.01)),
    Entry(
        "scale_invariant(tau=1000)",
        on_scaled(temperature.scale_invariant, tau=1e3),
        heads=1,
        head_width=1,
    ),
    Entry("scale_invariant", on_scaled(temperature.scale_invariant), heads=12, head_width=2),
    # At the largest distance it multiplies by 3.6 what the phases err by.
    Entry(
        "p_rope+scale_invariant", on_scaled(temperature.scale_invariant, rotary.p_rope), phases=4.0
    ),
    Entry("asentmax", on_scaled(temperature.asentmax), gives="weights"),
    Entry("asentmax", on_scaled(temperature.adaptive_scale), head_width=4),
    Entry("asentmax", on_scaled(temperature.asentmax), heads=1, head_width=1, gives="weights"),
    Entry("asentmax", on_scaled(temperature.asentmax), heads=12, head_width=2, gives="weights"),
    Entry("asentmax(adaptive=false)", on_scaled(temperature.causal_entmax15), gives="weights"),
    Entry("asentmax+alibi", asentmax_before_alibi, gives="weights"),
    Entry(
        "heads(of=[asentmax(adaptive=false), asentmax])+heads(of=[alibi, nope])",
        asentmax_beside_alibi,
        gives="weights",
    ),
    Entry("selective_rope", accumulated.selective_rope),
    Entry("selective_rope", accumulated.selective_rope, heads=1, head_width=2),
    Entry("selective_rope", accumulated.selective_rope, heads=12, head_width=4),
    Entry(
        "selective_rope(conv=1, rank=1, theta=100)", with_(accumulated.selective_rope, base=100.0)
    ),
    Entry("selective_rope(gate=true)", with_(accumulated.selective_rope, gate=True)),
]

ENTRIES = [*ABSOLUTE, *RELATIVE, *TURNED, *CONTEXTUAL, *MIXTURES, *ROTARY, *BIASES, *BIASES_2]
ENTRIES += NEWEST

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
        if entry.policy:
            self.encodings.extend(parse_part(entry.policy), LENGTH)
        self.merge, parameters = split(self.encodings)
        random = np.random.default_rng(1)
        # Away from the initial values, at which a gradient may vanish.
        self.variables = {
            name: np.asarray(value, np.float32)
            + 0.3 * random.standard_normal(value.shape).astype(np.float32)
            for name, value in parameters.items()
        }
        for name, low, high in entry.within:
            name = f"parts.0.{name}"
            self.variables[name] = np.clip(self.variables[name], low, high)
        # What an encoding drew and does not train; a definition reads it like a parameter.
        drawn = nnx.to_flat_state(nnx.state(self.encodings, nnx.Not(nnx.Param)))
        self.drawn = {
            ".".join(map(str, name)): np.asarray(variable.get_value()) for name, variable in drawn
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
        # One program for both: compiling is what takes the time here.
        both = jax.value_and_grad(self.loss, allow_int=True, has_aux=True)
        self.both = compiled_quickly(lambda variables, positions: both(variables, positions))

    def run(self, variables: dict[str, Any], positions: Any) -> jax.Array:
        """Give what ``compute`` does, compiled."""
        return self.both(variables, positions)[0][1]

    def gradient(self, variables: dict[str, Any], positions: Any) -> dict[str, jax.Array]:
        """Give the gradient of ``loss``, compiled."""
        return self.both(variables, positions)[1]

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

    def loss(self, variables: dict[str, Any], positions: Any) -> tuple[jax.Array, jax.Array]:
        given = self.compute(variables, positions)
        return jnp.sum(jnp.where(jnp.isfinite(given), given, 0.0) * self.cotangent), given

    def case(self, variables: dict[str, np.ndarray], positions: np.ndarray) -> Case:
        wide = {name: np.asarray(value, np.float64) for name, value in variables.items()}
        wide |= {name: np.asarray(value, np.float64) for name, value in self.drawn.items()}
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


@functools.cache
def ours(entry: Entry) -> Ours:
    return Ours(entry)


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
    check_values(ours(entry), POSITIONS[where])


def check_values(made: Ours, positions: np.ndarray) -> None:
    """Hold what we compute against the definition, within the bound."""
    entry = made.entry
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
    # These read streams of tokens: tests/test_tokenwise.py.
    assert set(REGISTRY) - names == {"abacus", "coupled"}


def test_rotary_pairings_are_one_function_under_a_permutation_of_channels():
    width = 8
    order = np.arange(width).reshape(2, -1).T.ravel()  # half's pairs, side by side
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, width)), jnp.float32)
    angles = jnp.asarray(np.random.default_rng(1).standard_normal((1, 5, 1, width // 2)))
    half = rotate(x, jnp.cos(angles), jnp.sin(angles), "half")
    interleaved = rotate(x[..., order], jnp.cos(angles), jnp.sin(angles), "interleaved")
    np.testing.assert_array_equal(half[..., order], interleaved)
