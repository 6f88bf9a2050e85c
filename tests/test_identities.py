"""What one encoding becomes in another's special case, our own beside each other."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from definitions import polar, scaling
from definitions.case import scaled_product
from test_definitions import CONTEXT, EPS, LENGTH, POSITIONS, Entry, Ours, bound

from posenc.encodings import EncodingError
from posenc.training import split


@functools.cache
def layer(spec, heads=4, head_width=8, gives="logits"):
    return Ours(Entry(spec, scaled_product, heads, head_width, gives))


def computed(spec, positions, *, heads=4, head_width=8, gives="logits", x=None, **parameters):
    """Give what a layer computes of the same queries, keys and values for every spec.

    Its parameters are the initial ones where none are given.
    """
    made = layer(spec, heads, head_width, gives)
    own = split(made.encodings)[1] | {f"parts.0.{n}": jnp.asarray(p) for n, p in parameters.items()}
    random = np.random.default_rng(7)
    shape = (LENGTH, heads, head_width)
    own |= {side: random.standard_normal(shape).astype(np.float32) for side in "qkv"}
    own["x"] = x
    if x is None:
        own["x"] = random.standard_normal((LENGTH, heads * head_width)).astype(np.float32)
    return np.asarray(made.run(own, jnp.asarray(positions)))


def initial(spec, name, heads=4, head_width=8):
    made = layer(spec, heads, head_width)
    return np.asarray(split(made.encodings)[1][f"parts.0.{name}"])


# Rotations, absolute positions, and relative positions as vectors.


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize(
    ("spec", "same"),
    [
        ("p_rope(p=1)", "rope"),
        ("p_rope(p=0)", "nope"),
        ("hope(length=1000000000)", "rope"),
        ("hope(length=6)", "nope"),
        ("hope(length=70)", "p_rope(p=0.5)"),
        ("rope(learned=true)", "rope"),
        ("rope(learned=true, partial=0.5)", "rope(partial=0.5)"),
        ("rope(learned=true, scaling=yarn(factor=4))", "rope(scaling=yarn(factor=4))"),
        ("fope(gain=0, length=1000000000)", "rope"),
        ("fope(gain=0, length=1000, mixed=1)", "p_rope(p=0.25)"),
        ("fope(gain=0, length=60, pairing=interleaved)", "hope(length=60, pairing=interleaved)"),
        ("rope(scaling=linear(factor=1))", "rope"),
        ("rope(scaling=ntk(factor=1))", "rope"),
        ("rope(scaling=ntk_by_parts(factor=1))", "rope"),
        ("rope(scaling=yarn(factor=1))", "rope"),
        ("rope(scaling=llama3(factor=1))", "rope"),
        ("pope(scaling=yarn(factor=1))", "pope"),
        ("wpe(max_position=8)", "nope"),
        ("sinusoidal", "nope"),
    ],
)
def test_one_encoding_is_another_to_the_bit(spec, same, where):
    positions = POSITIONS[where]
    np.testing.assert_array_equal(computed(spec, positions), computed(same, positions))


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        ("rope(scaling=longrope(factors=[1, 1, 1, 1]))", "rope"),
        ("rope(scaling=longrope(factors=[1, 1, 1, 1], scale_from=total))", "rope"),
        ("rope(scaling=dynamic_ntk(original=1000000))", "rope"),
        ("pope(scaling=dynamic_ntk(original=1000000, scale_from=total))", "pope"),
        ("pope(scaling=dynamic_ntk(original=1000000))", "pope"),
    ],
)
@pytest.mark.parametrize("where", POSITIONS)
def test_one_encoding_is_another_up_to_phases(spec, same, where):
    # Counted from another origin, or in another order: each side errs by its own phases.
    positions = POSITIONS[where]
    got, wanted = computed(spec, positions), computed(same, positions)
    entry = Entry(same, scaled_product, phases=2.0)
    seen = np.isfinite(wanted)
    error = np.abs(np.where(seen, got, 0) - np.where(seen, wanted, 0))
    assert np.max(error / bound(entry, layer(same), positions, wanted.astype(np.float64))) <= 1


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize(("heads", "head_width"), [(4, 8), (1, 2)])
def test_vectors_of_relative_positions_that_are_nought_change_nothing(where, heads, head_width):
    positions, size = POSITIONS[where], {"heads": heads, "head_width": head_width}
    plain = computed("nope", positions, **size)
    table = np.zeros((33, head_width), np.float32)
    np.testing.assert_array_equal(computed("shaw", positions, **size, key_table=table), plain)
    nought = {name: np.zeros((heads, head_width), np.float32) for name in "uv"}
    kernel = np.zeros((heads * head_width, heads * head_width), np.float32)
    relative = computed(
        "transformer_xl", positions, **size, **nought, **{"position.kernel": kernel}
    )
    np.testing.assert_array_equal(relative, plain)
    mixed = computed("shaw(values=true)", positions, **size, gives="outputs", value_table=table)
    keys_alone = {"key_table": initial("shaw(values=true)", "key_table", **size)}
    np.testing.assert_array_equal(
        mixed, computed("shaw", positions, **size, gives="outputs", **keys_alone)
    )


@pytest.mark.parametrize(
    "spec", ["shaw(clip=3)", "shaw(clip=3, values=true)", "transformer_xl", "alibi+shaw"]
)
def test_far_out_relative_positions_are_the_same_to_the_bit(spec):
    near = np.array([3, 4, 5, 9, 9, 2, 70, 71, 72, 100, 40, 41], np.int32)
    gives = "outputs" if "values" in spec else "logits"
    wanted = computed(spec, near, gives=gives)
    for shift in (100_000, 2**30):
        np.testing.assert_array_equal(computed(spec, near + shift, gives=gives), wanted)


def test_shaw_cuts_fractions_towards_the_query():
    table = np.zeros((7, 8), np.float32)
    table[:, 0] = np.arange(7)
    positions = np.array([0, 0.25, 0.75, 1, 1.5, 1.75, 2, 2.5, 3.9, 1e5, 1e5, 0.5], np.float32)
    seen = np.tri(LENGTH, dtype=bool)
    got = computed("shaw(clip=3)", positions, key_table=table)
    added = got[:, seen] - computed("nope", positions)[:, seen]
    apart = positions[None, :] - positions[:, None]
    rows = np.sign(apart) * np.floor(np.minimum(np.abs(apart), 3)) + 3
    random = np.random.default_rng(7)
    q = random.standard_normal((LENGTH, 4, 8))[:, :, 0]
    wanted = q.T[:, :, None] * rows / 8**0.5
    np.testing.assert_allclose(added, wanted[:, seen], atol=64 * EPS)


def waves(options, positions):
    """Give a sinusoid alone, its amplitude 1."""
    nothing = np.zeros((LENGTH, 32), np.float32)
    return computed(f"sinusoidal({options}scale=1)", positions, gives="embeddings", x=nothing)


@pytest.mark.parametrize("spacing", ["vaswani", "tensor2tensor"])
def test_sinusoidal_layouts_are_one_function_under_a_permutation_of_channels(spacing):
    interleaved, concatenated = (
        waves(f"layout={layout}, spacing={spacing}, ", POSITIONS["jumping"])
        for layout in ("interleaved", "concatenated")
    )
    order = np.arange(32).reshape(-1, 2).T.ravel()  # all sines, then all cosines
    np.testing.assert_array_equal(interleaved[:, order], concatenated)


def test_the_longest_wave_of_tensor2tensor_is_theta_times_two_pi():
    quarter = np.full(LENGTH, 10_000 * np.pi / 2, np.float32)
    last = waves("spacing=tensor2tensor, ", quarter)[0, -2:]
    np.testing.assert_allclose(last, [1.0, 0.0], atol=1e-6)


def test_reserved_rows_shift_a_table_and_nothing_else():
    at = np.array([0, 7, 3, 3, 6, 1, 2, 4, 5, 0, 0, 7], np.int32)
    table = np.random.default_rng(0).standard_normal((10, 32)).astype(np.float32)
    shifted = computed("wpe(max_position=8, offset=2)", at, gives="embeddings", table=table)
    plain = computed("wpe(max_position=8)", at, gives="embeddings", table=table[2:])
    np.testing.assert_array_equal(shifted, plain)
    # Padding that counts from -1, as OPT's does, reads the last reserved row.
    padding = np.full(LENGTH, -1, np.int32)
    tokens = computed("nope", padding, gives="embeddings")
    padded = computed("wpe(max_position=8, offset=2)", padding, gives="embeddings", table=table)
    np.testing.assert_array_equal(padded, tokens + table[1])


@pytest.mark.parametrize("policy", ["clamp", "interpolate", "wrap", "fresh"])
def test_extended_tables_keep_their_reserved_rows(policy):
    encoding = layer("wpe(max_position=8, offset=3)").encodings.parts[0]
    without = Ours(Entry("wpe(max_position=8)", scaled_product)).encodings.parts[0]
    without.table[...] = encoding.table[3:]
    grown, alone = encoding.extended(policy, 13), without.extended(policy, 13)
    assert (grown.max_position, grown.table.shape) == (13, (16, 32))
    np.testing.assert_array_equal(grown.table[:3], encoding.table[:3])
    np.testing.assert_array_equal(grown.table[3:], alone.table[...])
    again = grown.extended(policy, 20)
    np.testing.assert_array_equal(again.table[:3], encoding.table[:3])


def test_a_polar_score_at_longer_distances_is_that_at_shorter_ones_with_longer_waves():
    positions = POSITIONS["jumping"]
    wanted = computed("pope", positions)
    longer = computed("pope(scaling=linear(factor=4))", 4 * positions)
    np.testing.assert_array_equal(longer, wanted)


@pytest.mark.parametrize("where", POSITIONS)
def test_a_polar_score_turns_as_the_length_at_its_query_says(where):
    spec = "pope(scaling=dynamic_ntk(chunk=4, original=8))"
    entry, positions = Entry(spec, scaled_product, phases=1.0), POSITIONS[where]
    made = layer(spec)
    case = made.case(made.variables, positions)
    case.parameters["phase"] = np.minimum(case.parameters["phase"], 0)
    wanted = np.empty((4, LENGTH, LENGTH))
    for row, position in enumerate(positions):
        length = (position // 4 + 1) * 4
        theta = 10_000.0 * max(length / 8, 1) ** (16 / 14)
        own, _ = scaling.dynamic_ntk(16, 10_000.0, 1, 8, length)
        np.testing.assert_allclose(theta ** (-np.arange(8) / 8), own, rtol=1e-12)
        wanted[:, row] = polar.pope(case, theta)[:, row]
    got = np.asarray(made.run(made.variables, jnp.asarray(positions)))
    seen = np.tri(LENGTH, dtype=bool)
    excess = np.abs(got - wanted) / bound(entry, made, positions, wanted)
    assert excess[:, seen].max() <= 1


def test_a_phase_that_left_its_range_is_held_and_comes_back():
    positions = jnp.asarray(POSITIONS["ordinary"])
    inside, outside = np.zeros((4, 8), np.float32), np.full((4, 8), 0.5, np.float32)
    inside[1], outside[1] = -2 * np.pi, -9.0
    np.testing.assert_array_equal(
        computed("pope", positions, phase=outside), computed("pope", positions, phase=inside)
    )
    made = layer("pope")
    gradients = [
        made.gradient({**made.variables, "parts.0.phase": jnp.asarray(phase)}, positions)
        for phase in (inside, outside)
    ]
    held, free = (np.asarray(gradient["parts.0.phase"]) for gradient in gradients)
    np.testing.assert_array_equal(free, held)
    assert np.abs(free).min() > 0


def test_context_is_what_hope_takes_for_its_length():
    positions = POSITIONS["jumping"]
    np.testing.assert_array_equal(
        computed("hope", positions), computed(f"hope(length={CONTEXT})", positions)
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("shaw(clip=-1)", "clip=-1.: it must be at least 0"),
        ("transformer_xl(theta=0)", "theta > 0, and got 0"),
        ("pope(init=ones)", "no init 'ones': zeros, uniform"),
        ("pope(theta=-1)", "theta > 0, and got -1"),
        ("hope(length=0)", "length=0.: it must be at least 1"),
        ("fope(length=0)", "fope.length=0.: it must be at least 1"),
        ("fope(gain=-0.1)", "gain=-0.1.: it must be at least 0"),
        ("fope(length=70, mixed=3)", "mixed=3.: of the 2 frequencies"),
        ("fope(scaling=dynamic_ntk)", "dynamic_ntk. by position .*scale_from=total"),
        ("rope(learned=true, scaling=dynamic_ntk)", "learned=true.* dynamic_ntk .*another scaling"),
        ("wpe(offset=-1)", "offset=-1.: it must be at least 0"),
        ("sinusoidal(spacing=fairseq)", "no spacing 'fairseq': vaswani, tensor2tensor"),
        ("sinusoidal(embedding_scale=0)", "embedding_scale=0.0.: it must be above 0"),
        ("shaw(values=true)+shaw", "shaw and shaw cannot be added in one layer"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(spec, message):
    with pytest.raises(EncodingError, match=message) as caught:
        layer(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["xpos", "fope", "rope(learned=true)"])
def test_an_extension_without_definition_is_refused_too(spec):
    encoding = layer(spec).encodings.parts[0]
    with pytest.raises(EncodingError, match="another scaling"):
        encoding.extended("dynamic_ntk", 64)


# Newest methods: sparse weights, logits by distance, rotations from content.


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize(("heads", "head_width"), [(4, 8), (1, 2)])
def test_accumulated_angles_that_are_nought_turn_nothing(where, heads, head_width):
    positions, size = POSITIONS[where], {"heads": heads, "head_width": head_width}
    up = np.zeros_like(initial("selective_rope", "up.kernel", **size))
    got = computed("selective_rope", positions, **size, **{"up.kernel": up})
    np.testing.assert_array_equal(got, computed("nope", positions, **size))


def test_the_same_angle_from_every_token_is_rope():
    x = np.tile(np.random.default_rng(0).standard_normal(32).astype(np.float32), (LENGTH, 1))
    kernels = {
        name: 30 * initial("selective_rope(conv=1)", name)
        for name in ("down.kernel", "up.kernel", "conv.kernel")
    }
    got = computed("selective_rope(conv=1)", POSITIONS["jumping"], x=x, **kernels)
    encoding = layer("selective_rope(conv=1)").encodings.parts[0]
    merge, parameters = split(encoding)
    encoding = merge({**parameters, **{name: jnp.asarray(k) for name, k in kernels.items()}})
    own, ones = jnp.asarray(x[None]), jnp.ones((1, LENGTH), jnp.int32)
    angles, _ = encoding.features(own, ones, ones, encoding.start_state(1))
    assert np.abs(angles).max() > 0.3
    wanted = computed("rope(learned=true)", POSITIONS["ordinary"], inv_freq=angles[0, 3])
    seen = np.tri(LENGTH, dtype=bool)
    np.testing.assert_allclose(got[:, seen], wanted[:, seen], atol=1e-5)


@pytest.mark.parametrize("where", POSITIONS)
def test_normal_logits_have_the_total_weight_that_is_scale_invariant(where):
    positions, seen = POSITIONS[where], np.tri(LENGTH, dtype=bool)
    for tau in (0.1, 10.0, 300.0):
        spec = f"scale_invariant(tau={tau})"
        plain, sized = (computed(s, positions)[0].astype(np.float64) for s in ("nope", spec))
        away = (positions[:, None] - positions[None, :])[seen]
        squared = 1 + 2 * np.log(away / tau + 1)
        low = sized[seen] - np.sqrt(squared) * plain[seen]
        # The mean of e^(a S + m), S being standard normal, is e^(m + a^2/2).
        np.testing.assert_allclose(
            np.exp(low + squared / 2) * (away / tau + 1), np.exp(0.5), rtol=3e-5
        )


def test_distances_far_below_tau_change_no_logit():
    positions = POSITIONS["jumping"]
    got = computed("scale_invariant(tau=1000000000000)", positions)
    np.testing.assert_allclose(got, computed("nope", positions), atol=1e-6)


def test_a_scale_that_does_not_adapt_is_one_number_and_one_that_is_gone_is_plain_entmax():
    positions = POSITIONS["ordinary"]
    x = np.random.default_rng(0).random((LENGTH, 32)).astype(np.float32)
    nought = np.zeros((32, 4), np.float32)
    gone = {"beta.kernel": nought - 100, "gamma.kernel": nought}
    plain = computed("asentmax(adaptive=false)", positions, x=x, gives="weights")
    got = computed("asentmax", positions, x=x, gives="weights", **gone)
    np.testing.assert_allclose(got, plain, atol=8 * EPS)
    same = {"beta.kernel": nought, "gamma.kernel": nought}
    got = computed("asentmax", positions, x=x, **same)
    wanted = (1 + np.log(2)) * computed("nope", positions, x=x)
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_weights_of_entmax_are_even_for_even_logits_and_those_of_one_key_are_one():
    positions = POSITIONS["ordinary"]
    weights = computed("asentmax(adaptive=false)", positions, gives="weights")
    np.testing.assert_array_equal(weights[:, 0, 0], 1)
    assert (weights[:, -1] == 0).any()
    made = layer("asentmax", gives="weights")
    variables = {**made.variables, "q": np.zeros_like(made.variables["q"])}
    even = np.asarray(made.run(variables, jnp.asarray(positions)))
    counts = np.arange(1, LENGTH + 1)
    wanted = np.broadcast_to(np.tri(LENGTH) / counts[:, None], even.shape)
    np.testing.assert_allclose(even, wanted, atol=8 * EPS)


# Biases from positions, and windows.


def test_learned_slopes_start_as_the_fixed_ones():
    for positions in POSITIONS.values():
        learned = computed("alibi(learned=true)", positions, heads=12)
        np.testing.assert_array_equal(learned, computed("alibi", positions, heads=12))


@pytest.mark.parametrize("where", POSITIONS)
def test_kerple_power_of_exponent_one_is_learned_alibi(where):
    positions, slopes = POSITIONS[where], np.array([0.01, 0.3, 1.0, 1.7], np.float32)
    wanted = computed("alibi(learned=true)", positions, slopes=slopes)
    got = computed("kerple_power", positions, r1=slopes, r2=np.ones(4, np.float32))
    # A distance is taken as e to its logarithm, which is 9 at the most and rounded itself.
    seen = np.isfinite(wanted)
    error = np.abs(np.where(seen, got, 0) - np.where(seen, wanted, 0))
    assert np.max(error / (np.where(seen, np.abs(wanted), 0) + 1)) <= 32 * EPS


def test_kerple_log_of_a_small_second_parameter_is_learned_alibi_held_above_it():
    # r1 ln(1 + 0.01 d), to first order 0.01 r1 d and never more.
    positions, r1 = POSITIONS["ordinary"], np.array([0.5, 1.0, 2.0, 4.0], np.float32)
    got = computed("kerple_log", positions, r1=r1, r2=np.full(4, 0.01, np.float32))
    linear = computed("alibi(learned=true)", positions, slopes=0.01 * r1)
    seen = np.isfinite(linear)
    over = np.where(seen, got, 0) - np.where(seen, linear, 0)
    assert over.min() >= -4 * EPS
    assert over.max() <= 4 * 0.11**2 / 2 + 4 * EPS


def test_a_table_of_multiples_of_the_slopes_is_alibi():
    positions = POSITIONS["ordinary"]
    slopes = initial("alibi(learned=true)", "slopes")
    table = -np.arange(64, dtype=np.float32)[:, None] * slopes
    wanted = computed("alibi", positions)
    for spec in ("t5(buckets=64)", "t5(buckets=64, max_distance=5000)"):
        np.testing.assert_array_equal(computed(spec, positions, table=table), wanted)


@pytest.mark.parametrize("where", POSITIONS)
def test_a_function_and_a_table_of_noughts_change_nothing(where):
    positions = POSITIONS[where]
    nought = {"out.kernel": np.zeros((32, 4), np.float32), "out.bias": np.zeros(4, np.float32)}
    plain = computed("nope", positions)
    np.testing.assert_array_equal(computed("fire", positions, **nought), plain)
    table = np.zeros((32, 4), np.float32)
    np.testing.assert_array_equal(computed("t5", positions, table=table), plain)


def test_fire_below_its_threshold_is_a_function_of_the_distance():
    at = POSITIONS["ordinary"]
    near, shifted, far = (computed("fire(threshold=600)", at + shift) for shift in (0, 500, 700))
    np.testing.assert_array_equal(shifted, near)
    seen = np.isfinite(near)
    assert np.abs(far[seen] - near[seen]).max() > 1e-3


@pytest.mark.parametrize("spec", ["alibi(learned=true)", "t5", "kerple_log", "kerple_power"])
def test_far_out_biases_are_the_same_to_the_bit(spec):
    near = np.array([3, 4, 5, 9, 9, 2, 70, 71, 72, 100, 40, 41], np.int32)
    for shift in (100_000, 2**30):
        np.testing.assert_array_equal(computed(spec, near + shift), computed(spec, near))


def test_a_window_of_all_slots_is_none():
    for positions in POSITIONS.values():
        wanted = computed("rope", positions)
        np.testing.assert_array_equal(computed("rope+window(size=12)", positions), wanted)
        some = computed("rope+window(size=5, sinks=7)", positions)
        np.testing.assert_array_equal(some[:, -1], wanted[:, -1])
        assert np.isneginf(some[:, -1]).sum() == 0


# Biases from content.


@pytest.mark.parametrize("where", ["ordinary", "far"])
@pytest.mark.parametrize("heads", [4, 8])
def test_fixed_gates_that_span_one_over_alibis_slopes_are_alibi(heads, where):
    # 2^-2, 2^-4, 2^-6 and 2^-8, or all of 2^-1 to 2^-8; distances count tokens.
    spec = f"fox(gate=fixed, longest=256, shortest={256 ** (1 / heads):g})"
    got, wanted = (computed(s, POSITIONS[where], heads=heads) for s in (spec, "alibi"))
    np.testing.assert_array_equal(got, wanted)


def test_learned_gates_start_as_the_fixed_ones():
    got, wanted = (
        computed(f"fox(gate={gate}, longest=99)", POSITIONS["ordinary"])
        for gate in ("bias", "fixed")
    )
    np.testing.assert_allclose(got, wanted, atol=64 * EPS)


def test_cable_is_fox_of_the_opposite_gate():
    positions = POSITIONS["ordinary"]
    random = np.random.default_rng(0)
    kernel, bias = random.standard_normal((32, 4)), random.standard_normal(4)
    gate = {"gate.kernel": kernel.astype(np.float32), "gate.bias": bias.astype(np.float32)}
    opposite = {name: -value for name, value in gate.items()}
    np.testing.assert_array_equal(
        computed("cable", positions, **gate), computed("fox", positions, **opposite)
    )


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize(("variant", "gates"), [("qk", 2), ("q", 1), ("k", 1)])
def test_slopes_with_gates_of_nothing_are_alibi(variant, gates, where):
    nothing = np.zeros((4, 8), np.float32)
    open_ = {name: nothing for name in ("v", "u") if {"v": "q", "u": "k"}[name] in variant}
    omega = np.full(4, np.log(np.expm1(1 / (gates * np.log(2)))), np.float32)
    got = computed(f"grape_a(variant={variant})", POSITIONS[where], omega=omega, **open_)
    wanted = computed("alibi", POSITIONS[where])
    np.testing.assert_allclose(got, wanted, rtol=16 * EPS, atol=64 * EPS)


def test_a_path_of_probes_of_nothing_is_a_gate_of_one_half():
    kernel = np.zeros((32, 32), np.float32)
    positions = POSITIONS["jumping"]
    got = computed("grape_ap", positions, **{"project.kernel": kernel}, alpha=np.ones(4, "f4"))
    zero = {"gate.kernel": np.zeros((32, 4), np.float32)}
    np.testing.assert_allclose(got, computed("fox", positions, **zero), atol=64 * EPS)


def test_counts_of_open_gates_are_clipped_relative_positions():
    # Scores above 20, so that each gate is 1; the query itself counts.
    q = 1 + np.abs(np.random.default_rng(0).standard_normal((LENGTH, 4, 8)).astype(np.float32))
    sides = {"q": q, "k": np.full_like(q, 8.0), "v": q, "x": np.zeros((LENGTH, 32), np.float32)}
    table = np.random.default_rng(1).standard_normal((8, 6)).astype(np.float32)
    after = np.zeros((4, 8), np.float32)  # keys after the query are out of sight
    rows = {
        "cope(positions=6)": {"table": table},
        "shaw(clip=4)": {"key_table": np.concatenate([table.T[:0:-1], after])},
    }
    positions = jnp.asarray(POSITIONS["ordinary"])
    got, wanted = (
        np.asarray(
            layer(spec).run(
                {**sides, **{f"parts.0.{n}": jnp.asarray(p) for n, p in own.items()}}, positions
            )
        )
        for spec, own in rows.items()
    )
    seen = np.tri(LENGTH, dtype=bool)
    np.testing.assert_allclose(got[:, seen], wanted[:, seen], rtol=16 * EPS)


def test_sticks_break_into_one_at_the_most_and_the_first_token_breaks_none():
    positions = POSITIONS["ordinary"]
    scores = computed("nope", positions).astype(np.float64)
    for option, own in (("", -1), ("(attend_current=true)", 0)):
        weights = computed(f"stick_breaking{option}", positions, gives="weights")
        assert (weights >= 0).all()
        kept = np.where(np.tri(LENGTH, k=own) > 0, 1 / (1 + np.exp(scores)), 1.0).prod(axis=-1)
        np.testing.assert_allclose(weights.sum(axis=-1), 1 - kept, atol=16 * EPS)
        assert weights[:, 0].any() == (own == 0)


def test_selection_of_nothing_changes_nothing():
    positions = POSITIONS["ordinary"]
    made, plain = layer("selective"), layer("nope")
    random = np.random.default_rng(0)
    sides = {s: np.abs(random.standard_normal((LENGTH, 4, 8)).astype(np.float32)) for s in "qkv"}
    sides["q"][:, 0] *= -1  # the first head has no score above 0
    sides["x"] = np.zeros((LENGTH, 32), np.float32)
    np.testing.assert_array_equal(made.run(sides, positions), plain.run(sides, positions))
    sides["q"][:, 0] *= -1
    assert np.any(made.run(sides, positions) != plain.run(sides, positions))


def test_adaptation_by_nothing_is_the_base_and_stands_inside_or_beside_it():
    positions = POSITIONS["jumping"]
    nothing = {"out.kernel": np.zeros((32, 4), np.float32), "out.bias": np.zeros(4, np.float32)}
    # Up to rounding: a compiler may scale and add the bias at once in one program of the two.
    np.testing.assert_allclose(
        computed("dape(base=alibi)", positions, **nothing),
        computed("alibi", positions),
        atol=16 * EPS,
    )
    np.testing.assert_allclose(
        computed("dape(base=alibi, residual=false)", positions, **nothing),
        computed("nope", positions),
    )
    inside, beside = layer("dape(base=alibi)"), layer("alibi+dape")
    values = inside.variables
    moved = {name.replace("parts.0.", "parts.1."): value for name, value in values.items()}
    np.testing.assert_array_equal(inside.run(values, positions), beside.run(moved, positions))


def test_convolutions_of_their_middle_taps_are_the_first_version():
    positions = POSITIONS["ordinary"]
    values = layer("dape(base=alibi)").variables
    wide = dict(values)
    for name in ("parts.0.hidden.kernel", "parts.0.out.kernel"):
        wide[name] = np.stack(
            [np.zeros_like(values[name]), values[name], np.zeros_like(values[name])]
        )
    one = layer("dape(base=alibi)").run(values, positions)
    two = layer("dape(base=alibi, version=2)").run(wide, positions)
    seen = np.tri(LENGTH, dtype=bool)
    np.testing.assert_allclose(np.asarray(two)[:, seen], np.asarray(one)[:, seen], atol=256 * EPS)


def test_a_path_without_strength_transports_nothing():
    shut = {"beta.kernel": np.zeros((32, 4), np.float32), "beta.bias": np.full(4, -200, "f4")}
    positions = POSITIONS["ordinary"]
    got, wanted = computed("path", positions, **shut), computed("nope", positions)
    np.testing.assert_allclose(got, wanted, atol=64 * EPS)
