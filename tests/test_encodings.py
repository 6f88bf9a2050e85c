import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from reference import EPS, phase_bound

from posenc.encodings import (
    ALiBi,
    Dimensions,
    EncodingError,
    LearnedAbsolute,
    NoPE,
    PositionOutOfRange,
    RoPE,
    Side,
    Sinusoidal,
    alibi_slopes,
    build,
    parse_part,
)
from posenc.encodings.polar import PoPE
from posenc.encodings.rotary import FoPE, HoPE
from posenc.encodings.scaling import spectrum

pytestmark = pytest.mark.fast

BATCH, HEADS, HEAD_WIDTH = 2, 2, 64
LARGE = [0, 1, 2, 3, 255, 257, 1000, 1023, 4097, 65_535, 100_000, 131_072]
ODD = [131_072, 5, 5, 99_999, 0, 77, 76, 1, 1, 4096, 12_345, 3]  # repeats, jumps and falls
POSITIONS = {
    "one row": np.array([LARGE], np.int32),
    "a row each": np.array([LARGE, ODD], np.int32),
    "float32": np.array([[p + 0.25 * (p < 2**20) for p in LARGE], ODD], np.float32),
}
positions_of_all_kinds = pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
pairings = pytest.mark.parametrize("pairing", ["half", "interleaved"])


def dims(width=HEADS * HEAD_WIDTH, heads=HEADS, context_length=8):
    return Dimensions(width, heads, width // heads, context_length)


def make(cls, size=None, **options):
    return cls(size or dims(), nnx.Rngs(0), **options)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def side_of(encoding, x, positions, *, keys, segments=None):
    """Make one side as attention does: prepare, then rotate."""
    length = x.shape[1]
    side = Side(
        x=jnp.asarray(x),
        rotated=None,
        positions=jnp.asarray(positions),
        streams={},
        slots=jnp.arange(length, dtype=jnp.int32)[None],
        segments=jnp.ones((1, length), jnp.int32) if segments is None else jnp.asarray(segments),
        prepared=encoding.prepare(jnp.asarray(positions), {}),
    )
    rotated = encoding.rotate_keys(side) if keys else encoding.rotate_queries(side)
    return dataclasses.replace(side, rotated=rotated)


def logits_of(encoding, queries, keys, positions, key_positions=None):
    query_side = side_of(encoding, queries, positions, keys=False)
    key_side = side_of(
        encoding, keys, positions if key_positions is None else key_positions, keys=True
    )
    visible = jnp.ones((1, 1, queries.shape[1], keys.shape[1]), bool)
    scores = encoding.scores(query_side, key_side, visible)
    logits, carry = encoding.logits(scores, scores, query_side, key_side, visible, None)
    assert carry is None
    return np.asarray(logits)


def dot_bound(queries, keys, rotation=0):
    """Give [B, H, t, S]: how far float32 may take the scaled product of two sides.

    D products and their sum err by D + 2 roundings of ||q|| ||k||; a side that was rotated has
    itself ``rotation`` roundings of its norm.
    """
    width = queries.shape[-1]
    norms = [np.linalg.norm(side.astype(np.float64), axis=-1) for side in (queries, keys)]
    product = np.einsum("bth,bsh->bhts", *norms)
    return (width + 2 + 2 * rotation) * EPS * product / np.sqrt(width)


def rotary_bound(queries, keys, furthest):
    """Give what a phase error of 4 p 2^-24 in every channel may change in a logit, and rounding.

    Channel pairs of radii r and s err by r s times the error of their phase. Cosine, sine, two
    products and a sum put each rotated coordinate within 4 roundings of |a| + |b| <= sqrt(2) r, so
    that the pair is within 8 roundings of r.
    """
    half = queries.shape[-1] // 2
    radii = [
        np.hypot(x[..., :half].astype(np.float64), x[..., half:].astype(np.float64))
        for x in (queries, keys)
    ]
    product = np.einsum("bthm,bshm->bhts", *radii)
    phase = phase_bound(furthest) * product / np.sqrt(queries.shape[-1])
    return phase + dot_bound(queries, keys, rotation=8)


def assert_within(actual, expected, bound):
    error = np.abs(np.asarray(actual, np.float64) - expected)
    worst = np.max(error - bound)
    assert worst <= 0, f"beyond the bound by {worst}; the largest error is {error.max()}"


def assert_phases(cosines, sines, positions, frequencies):
    """Read phases [..., n, F] off cosines and sines: within 4 p 2^-24 of p times the frequency."""
    exact = np.asarray(positions, np.float64)[..., None] * frequencies
    read = np.arctan2(np.asarray(sines, np.float64), np.asarray(cosines, np.float64))
    error = np.abs((read - exact + np.pi) % (2 * np.pi) - np.pi)
    bound = phase_bound(positions)[..., None] + 1e-12 * (1 + exact)  # float64's own rounding
    assert np.max(error - bound) <= 0, np.max(error - bound)


# Learned absolute.


@pytest.mark.parametrize(
    "positions", [[[0, 7, 3, 3, 6, 1]], [[0, 7, 3, 3, 6, 1], [7, 7, 7, 2, 1, 0]]]
)
def test_wpe_adds_the_row_of_each_position(positions):
    encoding = make(LearnedAbsolute, dims(6, 1))
    x = normal(BATCH, 6, 6)
    actual = encoding.embed(jnp.asarray(x), jnp.asarray(positions, jnp.int32), {})
    expected = reference.wpe(x, encoding.table[...], positions)
    np.testing.assert_array_equal(np.asarray(actual), expected.astype(np.float32))


def test_wpe_of_gpt2_size_starts_as_released():
    encoding = make(LearnedAbsolute, dims(768, 12, context_length=1024))
    table = np.asarray(encoding.table[...], np.float64)
    assert table.size == 786_432
    # Four standard errors of the mean and of the deviation of so many normal numbers.
    assert abs(table.mean()) < 4 * 0.01 / np.sqrt(table.size)
    assert abs(table.std() - 0.01) < 4 * 0.01 / np.sqrt(2 * table.size)


def test_wpe_has_as_many_rows_as_asked_for():
    encoding = make(LearnedAbsolute, dims(4, 1, context_length=8), max_position=100_001)
    x = normal(1, 3, 4)
    positions = [[100_000, 0, 99_999]]
    expected = reference.wpe(x, encoding.table[...], positions)
    actual = encoding.embed(jnp.asarray(x), jnp.asarray(positions), {})
    np.testing.assert_array_equal(np.asarray(actual), expected.astype(np.float32))
    assert encoding.max_position == 100_001


def test_wpe_gradient_reaches_every_row_that_occurs():
    encoding = make(LearnedAbsolute, dims(4, 1))
    positions = np.array([[7, 0, 3, 3], [2, 7, 7, 3]])
    cotangent = normal(BATCH, 4, 4, seed=1)
    graph, state = nnx.split(encoding)

    def loss(state):
        x = jnp.zeros((BATCH, 4, 4))
        return jnp.sum(nnx.merge(graph, state).embed(x, jnp.asarray(positions), {}) * cotangent)

    gradient = np.asarray(jax.grad(loss)(state)["table"][...])
    expected = np.zeros((8, 4))
    for b in range(BATCH):
        for t in range(4):
            expected[positions[b, t]] += cotangent[b, t]
    assert_within(gradient, expected, 4 * EPS * np.abs(cotangent).sum())
    assert np.all(np.abs(gradient[7]) > 0.01)
    np.testing.assert_array_equal(gradient[[1, 4, 5, 6]], 0)


@pytest.mark.parametrize("culprit", [8, 100_000, -1])
def test_wpe_out_of_range_names_value_limit_and_ways_out(culprit):
    encoding = make(LearnedAbsolute)
    with pytest.raises(PositionOutOfRange) as caught:
        encoding.check_positions(np.array([[0, 7, culprit, 3]]))
    message = str(caught.value)
    assert f"position {culprit} " in message
    assert "wpe" in message
    assert "positions 0 to 7" in message
    if culprit < 0:  # no table is large enough
        assert message.endswith("give whole positions from 0 to 7")
        return
    assert "stay below 8" in message
    assert "max_position" in message
    assert "--extend" in message
    for policy in ("clamp", "interpolate", "wrap", "fresh"):
        assert policy in message


def test_wpe_says_which_positions_are_representable():
    encoding = make(LearnedAbsolute)
    encoding.check_positions(np.array([[0, 7, 7, 3]]))  # raises nothing
    mask = encoding.representable(jnp.asarray([[0, 7, 8, -1], [131_072, 3, -8, 6]]))
    expected = [[True, True, False, False], [False, True, False, True]]
    np.testing.assert_array_equal(np.asarray(mask), expected)


def test_wpe_reads_a_clamped_row_on_the_device():
    encoding = make(LearnedAbsolute, dims(4, 1))
    actual = encoding.embed(jnp.zeros((1, 4, 4)), jnp.asarray([[-3, 8, 131_072, 5]]), {})
    np.testing.assert_array_equal(np.asarray(actual)[0], np.asarray(encoding.table)[[0, 7, 7, 5]])


def test_wpe_refuses_positions_that_are_not_whole():
    encoding = make(LearnedAbsolute, dims(4, 1))
    with pytest.raises(EncodingError, match=r"whole positions.*float32"):
        encoding.embed(jnp.zeros((1, 2, 4)), jnp.asarray([[0.5, 1.0]]), {})


def test_wpe_refuses_positions_that_are_not_whole_on_the_host():
    with pytest.raises(PositionOutOfRange, match=r"0\.5"):
        make(LearnedAbsolute).check_positions(np.array([[1.0, 0.5]], np.float32))


@pytest.mark.parametrize("policy", ["clamp", "wrap", "interpolate"])
@pytest.mark.parametrize(("rows", "length"), [(8, 9), (8, 29), (1, 5), (2, 3)])
def test_wpe_extended(policy, rows, length):
    encoding = make(LearnedAbsolute, dims(4, 1), max_position=rows)
    grown = encoding.extended(policy, length)
    table, expected = (
        np.asarray(grown.table),
        reference.wpe_extended(encoding.table, policy, length),
    )
    assert grown.max_position == len(table) == length
    if policy == "interpolate":
        # The share, its complement, two products and a sum: 4 roundings of each neighbour.
        assert_within(table, expected, 8 * EPS * np.abs(expected).max(axis=0))
        np.testing.assert_array_equal(table[0], np.asarray(encoding.table)[0])
        np.testing.assert_array_equal(table[-1], np.asarray(encoding.table)[-1])
    else:
        np.testing.assert_array_equal(table, expected.astype(np.float32))
    x = jnp.zeros((1, 1, 4))
    last = grown.embed(x, jnp.asarray([[length - 1]]), {})
    np.testing.assert_array_equal(np.asarray(last)[0, 0], table[-1])
    grown.check_positions(np.array([0, length - 1]))
    with pytest.raises(PositionOutOfRange, match=f"position {length} .*0 to {length - 1}"):
        grown.check_positions(np.array([length]))
    assert encoding.max_position == rows, "the trained table itself must stay"


def test_wpe_extended_with_fresh_rows():
    encoding = make(LearnedAbsolute, dims(64, 1), init_std=0.5)
    tables = [
        np.asarray(encoding.extended("fresh", 1032, **options).table, np.float64)
        for options in ({}, {"seed": 0}, {"seed": 3}, {"seed": 3})
    ]
    for table in tables:
        np.testing.assert_array_equal(table[:8], np.asarray(encoding.table))
        new = table[8:]
        assert abs(new.mean()) < 4 * 0.5 / np.sqrt(new.size)
        assert abs(new.std() - 0.5) < 4 * 0.5 / np.sqrt(2 * new.size)
    np.testing.assert_array_equal(tables[0], tables[1])
    np.testing.assert_array_equal(tables[2], tables[3])
    # Two seeds are independent draws: their correlation is within four standard errors of 0.
    correlation = np.corrcoef(tables[0][8:].ravel(), tables[2][8:].ravel())[0, 1]
    assert abs(correlation) < 4 / np.sqrt(tables[0][8:].size)


@pytest.mark.parametrize("policy", ["clamp", "wrap", "interpolate", "fresh"])
@pytest.mark.parametrize("length", [1, 7, 8])
def test_wpe_extended_to_a_length_it_has_keeps_its_rows(policy, length):
    encoding = make(LearnedAbsolute, dims(4, 1))
    same = encoding.extended(policy, length)
    np.testing.assert_array_equal(np.asarray(same.table), np.asarray(encoding.table))


def test_extension_messages():
    encoding = make(LearnedAbsolute, dims(4, 1))
    with pytest.raises(EncodingError, match="wpe has no extension policy 'stretch'") as caught:
        encoding.extended("stretch", 16)
    for policy in ("clamp", "interpolate", "wrap", "fresh"):
        assert policy in str(caught.value)
    with pytest.raises(EncodingError, match="clamp has no option 'seed'"):
        encoding.extended("clamp", 16, seed=1)
    with pytest.raises(EncodingError, match="fresh has no option 'std'"):
        encoding.extended("fresh", 16, std=1)
    with pytest.raises(EncodingError, match="rope has no extension policy 'clamp'; it has: linear"):
        make(RoPE).extended("clamp", 16)


@pytest.mark.parametrize("option", ["length", "policy"])
def test_an_extension_option_may_not_pass_for_an_argument(option):
    encodings = build("wpe", 1, dims(4, 1), jax.random.key(0))
    with pytest.raises(EncodingError, match=f"clamp has no option '{option}'"):
        encodings.extend(parse_part(f"clamp({option}=3)"), 16)


def test_encodings_extend_the_parts_that_end_too_early():
    encodings = build("wpe+alibi,wpe(max_position=32)", 2, dims(4, 1), jax.random.key(0))
    before = [np.asarray(encodings.parts[i].table) for i in (0, 2)]
    assert encodings.max_position == 8
    assert encodings.extend(parse_part("wrap"), 20) == ["wpe"]
    assert encodings.max_position == 20
    x = normal(1, 3, 4)
    actual = encodings.embed(jnp.asarray(x), jnp.asarray([[19, 8, 7]]), {})
    expected = x + before[0][[3, 0, 7]] + before[1][[19, 8, 7]]
    assert_within(actual, expected, 2 * EPS * (np.abs(x).max() + 1))
    encodings.check_positions(np.array([19]))
    with pytest.raises(PositionOutOfRange, match=r"position 20 .*0 to 19"):
        encodings.check_positions(np.array([0, 20]))


# Sinusoidal.


def sinusoidal_bound(expected, positions, scale):
    """The phase's error, two roundings of the wave and two of its product, and one of the sum."""
    return scale * (phase_bound(positions)[..., None] + 4 * EPS) + EPS * np.abs(expected)


@positions_of_all_kinds
@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
def test_sinusoidal_adds_the_waves_of_each_position(layout, positions):
    x = normal(BATCH, len(LARGE), 128)
    for options, scale in (({}, 128**-0.5), ({"scale": 2.0, "theta": 500.0}, 2.0)):
        encoding = make(Sinusoidal, layout=layout, **options)
        actual = encoding.embed(jnp.asarray(x), jnp.asarray(positions), {})
        theta = options.get("theta", 10_000.0)
        expected = reference.sinusoidal(x, positions, theta, layout, scale)
        assert_within(actual, expected, sinusoidal_bound(expected, positions, scale))


@positions_of_all_kinds
def test_sinusoidal_phases(positions):
    encoding = make(Sinusoidal, scale=1.0)
    x = jnp.zeros((len(positions), len(LARGE), 128))
    waves = np.asarray(encoding.embed(x, jnp.asarray(positions), {}))
    frequencies = np.array([10_000.0 ** (-2 * m / 128) for m in range(64)])
    assert_phases(waves[..., 1::2], waves[..., 0::2], positions, frequencies)


def test_sinusoidal_anchors():
    size = dims(4, 1)
    positions = jnp.asarray([[0, 1, 100]])
    waves = np.asarray(make(Sinusoidal, size, scale=1.0).embed(jnp.zeros((1, 3, 4)), positions, {}))
    expected = [
        [0, 1, 0, 1],
        [0.8414710, 0.5403023, 0.0099998, 0.9999500],  # sin 1, cos 1, sin 0.01, cos 0.01
        [-0.5063656, 0.8623189, 0.8414710, 0.5403023],  # sin 100, cos 100, sin 1, cos 1
    ]
    bound = phase_bound([0, 1, 100])[:, None] + 4 * EPS + 0.5e-7
    assert_within(waves[0], expected, bound)
    # Width 768: of norm sqrt(384) = 19.5959 unscaled, and sqrt(1/2) by default.
    for options, norm in (({"scale": 1.0}, 19.5959), ({}, 0.70711)):
        encoding = make(Sinusoidal, dims(768, 12), **options)
        waves = np.asarray(encoding.embed(jnp.zeros((1, 3, 768)), positions, {}), np.float64)
        np.testing.assert_allclose(np.linalg.norm(waves, axis=-1), norm, rtol=1e-5)


def test_sinusoidal_of_width_2_is_one_wave():
    waves = make(Sinusoidal, dims(2, 1), scale=1.0).embed(
        jnp.zeros((1, 3, 2)), jnp.asarray([[0, 1, 131_072]]), {}
    )
    expected = [[np.sin(p), np.cos(p)] for p in (0.0, 1.0, 131_072.0)]
    # The frequency is 1: the phase is exact.
    assert_within(np.asarray(waves)[0], expected, 4 * EPS)


# Rotations.


@positions_of_all_kinds
@pairings
def test_rope_rotates_by_position(pairing, positions):
    x = normal(BATCH, len(LARGE), HEADS, HEAD_WIDTH)
    for theta in (10_000.0, 500_000.0):
        encoding = make(RoPE, pairing=pairing, theta=theta)
        per_batch = np.broadcast_to(positions, (BATCH, len(LARGE)))
        expected = np.array(
            [
                [
                    [
                        reference.rope(x[b, t, h], per_batch[b, t], theta, pairing)
                        for h in range(HEADS)
                    ]
                    for t in range(len(LARGE))
                ]
                for b in range(BATCH)
            ]
        )
        bound = np.empty(x.shape)
        for m in range(HEAD_WIDTH // 2):
            pair = list(reference.rope_pair(m, HEAD_WIDTH, pairing))
            a, b = np.moveaxis(x[..., pair].astype(np.float64), -1, 0)
            turned = np.hypot(a, b) * phase_bound(per_batch)[..., None]
            bound[..., pair] = (turned + 4 * EPS * (np.abs(a) + np.abs(b)))[..., None]
        for keys in (False, True):
            actual = side_of(encoding, x, positions, keys=keys).rotated
            assert_within(actual, expected, bound)


@positions_of_all_kinds
@pairings
def test_rope_phases(pairing, positions):
    first, second = np.array(
        [reference.rope_pair(m, HEAD_WIDTH, pairing) for m in range(HEAD_WIDTH // 2)]
    ).T
    x = np.zeros((len(positions), len(LARGE), 1, HEAD_WIDTH), np.float32)
    x[..., first] = 1
    turned = np.asarray(side_of(make(RoPE, pairing=pairing), x, positions, keys=True).rotated)
    frequencies = np.array(
        [reference.rope_frequency(m, HEAD_WIDTH) for m in range(HEAD_WIDTH // 2)]
    )
    assert_phases(turned[:, :, 0, first], turned[:, :, 0, second], positions, frequencies)


def test_rope_pairings_agree_under_the_permutation():
    x = normal(BATCH, len(LARGE), HEADS, HEAD_WIDTH)
    # Interleaved channel c holds what half holds in channel order[c].
    order = [reference.rope_pair(c // 2, HEAD_WIDTH, "half")[c % 2] for c in range(HEAD_WIDTH)]
    positions = POSITIONS["a row each"]
    half = side_of(make(RoPE), x, positions, keys=False).rotated
    interleaved = side_of(make(RoPE, pairing="interleaved"), x[..., order], positions, keys=False)
    np.testing.assert_array_equal(np.asarray(half)[..., order], np.asarray(interleaved.rotated))


@positions_of_all_kinds
def test_rope_logits(positions):
    queries, keys = (normal(BATCH, len(LARGE), HEADS, HEAD_WIDTH, seed=s) for s in (1, 2))
    actual = logits_of(make(RoPE), queries, keys, positions)
    per_batch = np.broadcast_to(positions, (BATCH, len(LARGE)))
    expected = np.empty(actual.shape)
    for b, h, i, j in np.ndindex(*actual.shape):
        places = per_batch[b, i], per_batch[b, j]
        expected[b, h, i, j] = reference.rope_logit(queries[b, i, h], keys[b, j, h], *places)
    furthest = np.maximum(per_batch[:, None, :, None], per_batch[:, None, None, :])
    assert_within(actual, expected, rotary_bound(queries, keys, furthest))


@pairings
def test_rope_logits_depend_on_the_difference_of_positions(pairing):
    queries, keys = (normal(BATCH, 12, HEADS, HEAD_WIDTH, seed=s) for s in (1, 2))
    positions = np.array([[0, 1, 2, 3, 5, 8, 13, 8, 1000, 500, 4095, 4096]], np.int32)
    base = logits_of(make(RoPE, pairing=pairing), queries, keys, positions)
    # The bound's radii pair channels as `half` does.
    order = [reference.rope_pair(m, HEAD_WIDTH, pairing) for m in range(HEAD_WIDTH // 2)]
    order = np.array(order).T.ravel()
    for shift in (1, 1000, 100_000):
        moved = logits_of(make(RoPE, pairing=pairing), queries, keys, positions + shift)
        furthest = np.maximum(positions[:, None, :, None], positions[:, None, None, :]) + shift
        bound = rotary_bound(queries[..., order], keys[..., order], furthest)
        rounding = dot_bound(queries, keys, rotation=8)  # a second one, of the unshifted logits
        assert_within(moved, base.astype(np.float64), bound + rounding)


def test_rope_anchors():
    anchors = {0: ("1", 0), 1: ("0.749894", 6), 15: ("0.0133352", 7), 31: ("0.000133352", 9)}
    x = np.zeros((1, 1, 1, 64), np.float32)
    x[..., :32] = 1
    turned = np.asarray(side_of(make(RoPE), x, np.array([[1]]), keys=False).rotated, np.float64)
    for m, (printed, digits) in anchors.items():
        theta = np.arctan2(turned[0, 0, 0, 32 + m], turned[0, 0, 0, m])
        tolerance = 0.5 * 10.0**-digits * (digits > 0) + 4 * EPS * float(printed)
        assert abs(theta - float(printed)) <= tolerance, (m, theta)
    assert f"{2 * np.pi / spectrum(64, 10_000.0)[31]:.2f}" == "47117.24"


def test_rope_of_head_width_2_is_one_rotation():
    x = normal(1, 3, 1, 2)
    positions = np.array([[0, 1, 131_072]])
    expected = [
        [np.cos(p) * a - np.sin(p) * b, np.sin(p) * a + np.cos(p) * b]
        for p, (a, b) in zip(positions[0].astype(float), x[0, :, 0].astype(float), strict=True)
    ]
    for pairing in ("half", "interleaved"):
        encoding = make(RoPE, dims(2, 1), pairing=pairing)
        actual = np.asarray(side_of(encoding, x, positions, keys=False).rotated)[0, :, 0]
        # The frequency is 1: the phase is exact.
        assert_within(actual, expected, 4 * EPS * np.abs(x[0, :, 0]).sum(-1, keepdims=True))


# Biases.


def test_alibi_slopes_are_the_released_ones():
    root = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    anchors = {
        1: [2.0**-8],
        2: [2.0**-4, 2.0**-8],
        3: [2.0**-4, 2.0**-8, 2.0**-2],
        8: [2.0**-h for h in range(1, 9)],
        12: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256, *root],
        16: [2.0 ** (-h / 2) for h in range(1, 17)],
    }
    for heads, expected in anchors.items():
        np.testing.assert_allclose(alibi_slopes(heads), expected, rtol=1e-15)
        np.testing.assert_allclose(reference.alibi_slopes(heads), expected, rtol=1e-15)
    np.testing.assert_allclose(
        alibi_slopes(12)[8:], [0.70711, 0.35355, 0.17678, 0.08839], atol=5e-6
    )
    for heads in range(1, 41):
        expected = reference.alibi_slopes(heads)
        np.testing.assert_allclose(alibi_slopes(heads), expected, rtol=1e-15)


def alibi_logits(heads, logits, positions):
    encoding = make(ALiBi, dims(2 * heads, heads))
    length = logits.shape[-1]
    side = side_of(encoding, np.zeros((BATCH, length, heads, 2), np.float32), positions, keys=True)
    visible = jnp.ones((1, 1, length, length), bool)
    result, carry = encoding.logits(logits, logits, side, side, visible, None)
    assert carry is None
    return result


@positions_of_all_kinds
@pytest.mark.parametrize("heads", [1, 8, 12])
def test_alibi_subtracts_slope_times_distance(heads, positions):
    given = normal(BATCH, heads, len(LARGE), len(LARGE))
    actual = alibi_logits(heads, jnp.asarray(given), positions)
    per_batch = np.broadcast_to(positions, (BATCH, len(LARGE)))
    bias = np.array([reference.alibi_bias(row, row, heads) for row in per_batch])
    expected = given + bias
    # Roundings of the slope, of its product with the distance, and of the sum; a float32 difference
    # of fractional positions is one more.
    assert_within(actual, expected, 3 * EPS * np.abs(bias) + EPS * np.abs(expected))
    if heads != 12 and positions.dtype == np.int32:  # slopes are powers of two: only the sum rounds
        np.testing.assert_array_equal(np.asarray(actual), expected.astype(np.float32))


def test_alibi_anchors():
    positions = np.array([[0, 1, 4096, 131_071]])
    actual = np.asarray(alibi_logits(8, jnp.zeros((1, 8, 4, 4)), positions))
    assert actual[0, 0, 1, 0] == -0.5
    assert actual[0, 7, 1, 0] == -(2.0**-8)
    assert actual[0, 0, 3, 0] == -65_535.5  # bfloat16 would give -65536
    assert actual[0, 7, 3, 2] == -495.99609375
    assert actual[0, 3, 2, 2] == 0
    assert actual[0, 0, 0, 3] == 0  # a later position is at distance 0


@pytest.mark.parametrize("heads", [1, 8, 12])
def test_alibi_is_exactly_shift_invariant(heads):
    given = jnp.asarray(normal(BATCH, heads, len(ODD), len(ODD)))
    for dtype in (np.int32, np.float32):
        positions = np.array([[0, 1, 7, 3, 3, 900, 20, 31_000, 2, 1, 0, 8191], ODD]).astype(dtype)
        base, moved = (np.asarray(alibi_logits(heads, given, positions + s)) for s in (0, 100_000))
        np.testing.assert_array_equal(base.view(np.int32), moved.view(np.int32))
        bias = np.array([reference.alibi_bias(row, row, heads) for row in positions])
        assert_within(moved, given + bias, 2 * EPS * np.abs(bias) + EPS * np.abs(given + bias))


# Mixtures of frequencies.


def test_mixtures_are_drawn_as_released():
    size = dims(768, 12, context_length=2048)
    encoding = make(FoPE, size, theta=500.0, gain=0.5, mixed=16)
    every = spectrum(64, 500.0)
    assert encoding.kept == np.sum(every >= 2 * np.pi / 2048) == 30
    own = np.zeros((30, 16))
    own[2 * np.arange(15), np.arange(15)] = 1  # in steps of ceil(30 / 16)
    deviation = 0.5 * np.sqrt(2 / (30 * 16 + 12 * 16))
    noises = []
    for mix in (encoding.cos_mix, encoding.sin_mix):
        noise = np.asarray(mix[...], np.float64) - own
        assert noise.shape == (12, 30, 16)
        # Four standard errors of the mean and of the deviation of so many normal numbers.
        assert abs(noise.mean()) < 4 * deviation / np.sqrt(noise.size)
        assert abs(noise.std() - deviation) < 4 * deviation / np.sqrt(2 * noise.size)
        noises.append(noise.ravel())
    assert abs(np.corrcoef(*noises)[0, 1]) < 4 / np.sqrt(noises[0].size)
    assert not jax.tree.leaves(nnx.state(encoding, nnx.Param))


@pytest.mark.parametrize(("length", "kept"), [(512, 16), (1024, 18)])
def test_each_pair_keeps_its_own_frequency_in_a_mixture(length, kept):
    # At the length of the paper's models these are a quarter of the head width, as released.
    encoding = make(FoPE, dims(768, 12, context_length=length), gain=0.0)
    for mix in (encoding.cos_mix, encoding.sin_mix):
        np.testing.assert_array_equal(mix[...], np.tile(np.eye(kept), (12, 1, 1)))


# bfloat16 activations: the float32 result, rounded once.


def assert_rounded_once(actual, wide):
    assert actual.dtype == jnp.bfloat16
    expected = np.asarray(wide).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(actual).view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (LearnedAbsolute, {"max_position": 131_073, "init_std": 1.0}),
        (Sinusoidal, {"scale": 1.0}),
        (Sinusoidal, {"layout": "concatenated"}),
    ],
)
def test_embeddings_in_bfloat16(cls, options):
    encoding = make(cls, dims(16, 2), **options)
    positions = jnp.asarray(POSITIONS["a row each"])
    x = jnp.asarray(normal(BATCH, len(LARGE), 16), jnp.bfloat16)
    for given in (x, jnp.zeros_like(x)):
        wide = encoding.embed(given.astype(jnp.float32), positions, {})
        assert_rounded_once(encoding.embed(given, positions, {}), wide)


@pairings
def test_rotations_in_bfloat16(pairing):
    encoding = make(RoPE, pairing=pairing)
    positions = POSITIONS["a row each"]
    x = jnp.asarray(normal(BATCH, len(LARGE), HEADS, HEAD_WIDTH), jnp.bfloat16)
    for keys in (False, True):
        wide = side_of(encoding, x.astype(jnp.float32), positions, keys=keys).rotated
        assert_rounded_once(side_of(encoding, x, positions, keys=keys).rotated, wide)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (RoPE, {"learned": True}),
        (HoPE, {"length": 64}),
        (FoPE, {"length": 64, "zero_freq_sin": 1.0}),
        (PoPE, {"init": "uniform"}),
    ],
)
def test_other_rotations_in_bfloat16(cls, options):
    encoding = make(cls, **options)
    positions = POSITIONS["a row each"]
    x = jnp.asarray(normal(BATCH, len(LARGE), HEADS, HEAD_WIDTH), jnp.bfloat16)
    for keys in (False, True):
        wide = side_of(encoding, x.astype(jnp.float32), positions, keys=keys).rotated
        assert_rounded_once(side_of(encoding, x, positions, keys=keys).rotated, wide)


def test_bias_in_bfloat16():
    given = jnp.asarray(normal(BATCH, 12, len(LARGE), len(LARGE)), jnp.bfloat16)
    positions = POSITIONS["a row each"]
    wide = alibi_logits(12, given.astype(jnp.float32), positions)
    actual = alibi_logits(12, given, positions)
    assert_rounded_once(actual.astype(jnp.bfloat16), wide)


# All hooks together, against attention by its definition.

SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0, 0], [0, 0, 3, 3, 3, 3, 3, 3, 3, 5]], np.int32)
PACKED = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 0, 0], [0, 0, 7, 3, 3, 50, 1, 99, 98, 4]], np.int32)


@pytest.mark.parametrize(
    ("spec", "logit"),
    [
        ("nope", reference.scaled_product),
        ("wpe(max_position=100, init_std=1.0)", reference.scaled_product),
        ("sinusoidal(scale=1.0)", reference.scaled_product),
        ("rope", reference.rope_logits()),
        ("rope(theta=100.0, pairing=interleaved)", reference.rope_logits(100.0, "interleaved")),
        ("alibi", reference.alibi_logits(4)),
        ("rope+alibi", reference.alibi_logits(4, reference.rope_logits())),
        (
            "alibi+nope+rope+wpe(max_position=100)",
            reference.alibi_logits(4, reference.rope_logits()),
        ),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_hooks_make_the_attention_of_the_definition(spec, logit, causal):
    encodings = build(spec, 1, dims(32, 4), jax.random.key(0))
    encoding = encodings.at(0)
    positions = jnp.asarray(PACKED)
    x = np.asarray(encodings.embed(jnp.asarray(normal(2, 10, 32)), positions, {}))
    queries = keys = values = x.reshape(2, 10, 4, 8)
    sides = [
        side_of(encoding, queries, positions, keys=is_keys, segments=SEGMENTS)
        for is_keys in (False, True)
    ]
    slots = np.arange(10)
    visible = np.array([reference.visibility(slots, slots, s, s, causal) for s in SEGMENTS])
    visible = jnp.asarray(visible[:, None])
    scores = encoding.scores(*sides, visible)
    carry = encoding.start_carry(2, 10)
    logits, _ = encoding.logits(scores, scores, *sides, visible, carry)
    weights = encoding.weights(logits, visible)
    actual = np.asarray(encoding.mix(weights, jnp.asarray(values), *sides))
    expected = reference.attention(
        queries, keys, values, logit, PACKED, query_segments=SEGMENTS, causal=causal
    )
    # A logit's error e changes a weight by a factor e^(2e), and so the mean by 3e of the largest
    # value; a softmax and a mean over 10 slots take 20 roundings more.
    furthest = np.full((2, 1, 10, 10), 99.0) if "rope" in spec else np.zeros((2, 1, 10, 10))
    bias = 3 * EPS * 99 if "alibi" in spec else 0.0
    # Pairs differ between the pairings: the product of the norms is above both.
    norms = [np.linalg.norm(a.astype(np.float64), axis=-1) for a in (queries, keys)]
    norm_product = np.einsum("bth,bsh->bhts", *norms)
    error = phase_bound(furthest) * norm_product / np.sqrt(8)
    error = (error + dot_bound(queries, keys, rotation=8) + bias).max()
    bound = (3 * error + 20 * EPS) * np.abs(values).max()
    assert bound < 1e-2
    assert_within(actual, expected, bound)
    np.testing.assert_array_equal(actual[SEGMENTS == 0], 0)  # padding sees nothing


def test_nope_leaves_everything_as_it_is():
    encoding = make(NoPE)
    x = normal(BATCH, 12, 128)
    positions = POSITIONS["a row each"]
    embedded = encoding.embed(jnp.asarray(x), jnp.asarray(positions), {})
    np.testing.assert_array_equal(np.asarray(embedded), x)
    heads = x.reshape(BATCH, 12, HEADS, HEAD_WIDTH)
    for keys in (False, True):
        rotated = side_of(encoding, heads, positions, keys=keys).rotated
        np.testing.assert_array_equal(np.asarray(rotated), heads)
    scores = jnp.asarray(normal(BATCH, HEADS, 12, 12))
    side = side_of(encoding, heads, positions, keys=False)
    logits, _ = encoding.logits(scores, scores, side, side, jnp.ones((1, 1, 12, 12), bool), None)
    np.testing.assert_array_equal(np.asarray(logits), np.asarray(scores))


@pytest.mark.parametrize("cls", [Sinusoidal, RoPE, ALiBi, NoPE])
def test_unbounded_encodings_know_every_position(cls):
    encoding = make(cls)
    assert encoding.max_position is None
    assert encoding.representable(jnp.asarray([[0, 131_072]])) is None
    encoding.check_positions(np.array([0, 131_072, 2**31 - 1]))  # raises nothing


# Construction.


@pytest.mark.parametrize(
    ("cls", "size", "options", "message"),
    [
        (RoPE, dims(21, 3), {}, "head width is 7 .*width 21 / 3 heads.*even"),
        (RoPE, dims(1, 1), {}, "head width is 1 "),
        (RoPE, None, {"pairing": "neox"}, "no pairing 'neox': half, interleaved"),
        (RoPE, None, {"theta": 0.0}, "theta > 0, and got 0"),
        (RoPE, None, {"theta": -10_000.0}, "theta > 0, and got -10000"),
        (Sinusoidal, dims(9, 1), {}, "even model width, and got 9"),
        (Sinusoidal, None, {"layout": "half"}, "no layout 'half': interleaved, concatenated"),
        (Sinusoidal, None, {"theta": -1.0}, "theta > 0, and got -1"),
        (LearnedAbsolute, None, {"max_position": 0}, r"max_position=0\)"),
        (LearnedAbsolute, None, {"max_position": -3}, r"max_position=-3\)"),
    ],
)
def test_construction_errors_name_the_value_and_the_way_out(cls, size, options, message):
    with pytest.raises(EncodingError, match=message):
        make(cls, size, **options)
