"""Every encoding beside arrays that other libraries computed for it.

``golden/make_encodings.py`` wrote the arrays and says which library, class and function each is of;
neither it nor torch is needed here. Parameters are those that the peer was given.

Tolerances are in units of 2^-24, the rounding of float32. A phase at position p errs by up to
``4 p`` of them, a peer's as much as ours; so does a logit, times ``|q| |k| / sqrt(D)`` and twice,
for the query and for the key.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from posenc.attention import visibility
from posenc.encodings import (
    Dimensions,
    PositionalEncoding,
    Side,
    alibi_slopes,
    build,
    sequential_positions,
)
from posenc.training import split

pytestmark = pytest.mark.fast

EPS = reference.EPS
FILE = pathlib.Path(__file__).parent / "golden" / "encodings.npz"


@functools.cache
def golden() -> dict[str, np.ndarray]:
    with np.load(FILE) as arrays:
        return dict(arrays)


def variant(name: str) -> dict[str, Any]:
    """Give a variant's arrays by name, and its settings as a dictionary."""
    given = {
        key.removeprefix(name + "/"): value
        for key, value in golden().items()
        if key.startswith(name + "/")
    }
    given["settings"] = json.loads(str(given.get("settings", "{}")))
    return given


def variants(method: str) -> list[str]:
    """Give all variants of a method."""
    return sorted({name.rsplit("/", 1)[0] for name in golden() if name.startswith(method + "/")})


LAYER = variant("inputs/layer")
HEADS, LENGTH, HEAD_WIDTH = LAYER["q"].shape
POSITIONS = {"near": np.arange(LENGTH, dtype=np.int32), "far": LAYER["positions"]}
CAUSAL = np.tri(LENGTH, dtype=bool)


# One layer of ours.


def encoding_of(
    spec: str,
    parameters: dict[str, np.ndarray] | str | None = None,
    heads: int = HEADS,
    head_width: int = HEAD_WIDTH,
    context: int = 1024,
) -> PositionalEncoding:
    """Give an encoding whose parameters are, one and all, those given; or ``"initial"`` ones."""
    dims = Dimensions(heads * head_width, heads, head_width, context)
    encodings = build(spec, 1, dims, jax.random.key(0))
    if parameters == "initial":
        return encodings.at(0)
    merge, own = split(encodings)
    given = {f"parts.0.{name}": jnp.asarray(v) for name, v in (parameters or {}).items()}
    assert {name: value.shape for name, value in own.items()} == {
        name: value.shape for name, value in given.items()
    }
    return merge(given).at(0)


def side_of(encoding: PositionalEncoding, x: np.ndarray, positions: Any, features: Any) -> Side:
    """Give vectors ``x [H, T, D]`` as one side of an attention."""
    positions = jnp.asarray(positions)[None]
    return Side(
        x=jnp.moveaxis(jnp.asarray(x), 0, 1)[None],
        rotated=None,
        positions=positions,
        streams={},
        slots=jnp.arange(positions.shape[1], dtype=jnp.int32)[None],
        segments=jnp.ones(positions.shape, jnp.int32),
        features=features,
        prepared=encoding.prepare(positions, {}),
    )


def layer(
    encoding: PositionalEncoding,
    gives: str = "logits",
    where: str | np.ndarray = "near",
    q: np.ndarray = LAYER["q"],
    k: np.ndarray = LAYER["k"],
    features: Any = None,
) -> np.ndarray:
    """Give ``logits`` (0 where none is seen, as in the file) or ``weights``, ``[H, T, T]``.

    Of the shared inputs, unless others are given; so are ``features``.
    """
    positions = POSITIONS[where] if isinstance(where, str) else where
    if features is None:
        x = np.resize(LAYER["x"], (len(positions), encoding.dims.width))
        features, _ = encoding.features(
            jnp.asarray(x)[None],
            jnp.asarray(positions)[None],
            jnp.ones((1, len(positions)), jnp.int32),
            encoding.start_state(1),
        )
    queries, keys = (side_of(encoding, x, positions, features) for x in (q, k))

    @jax.jit
    def run(queries: Side, keys: Side) -> tuple[jax.Array, jax.Array]:
        queries = dataclasses.replace(queries, rotated=encoding.rotate_queries(queries))
        keys = dataclasses.replace(keys, rotated=encoding.rotate_keys(keys))
        visible = visibility(
            queries,
            keys,
            causal=True,
            reach=encoding.reach,
            sinks=encoding.sinks,
            ranks=keys.slots,
        )
        scores = encoding.scores(queries, keys, visible)
        carry = encoding.start_carry(1, len(positions))
        logits, _ = encoding.logits(scores, scores, queries, keys, visible, carry)
        weights = encoding.weights(logits, visible)
        return jnp.where(visible, logits, 0.0)[0], weights[0]

    logits, weights = run(queries, keys)
    return np.asarray(logits if gives == "logits" else weights, np.float64)


def bias_of(encoding: PositionalEncoding, positions: np.ndarray) -> np.ndarray:
    """Give what is added to the logits of null queries and keys, ``[H, T, T]``."""
    nothing = np.zeros((encoding.dims.heads, len(positions), encoding.dims.head_width), np.float32)
    return layer(encoding, where=positions, q=nothing, k=nothing)


def bias_at(encoding: PositionalEncoding, distances: np.ndarray) -> np.ndarray:
    """Give the bias at some increasing distances, ``[H, distances]``: the last row of a square."""
    positions = np.concatenate([distances[-1] - distances[::-1], distances[-1:]])
    return bias_of(encoding, positions.astype(np.int32))[:, -1, -2::-1]


def norms(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x.astype(np.float64), axis=-1)


def sizes(q: np.ndarray = LAYER["q"], k: np.ndarray = LAYER["k"]) -> np.ndarray:
    """Give ``|q| |k| / sqrt(D)``, ``[H, T, T]``."""
    return norms(q)[:, :, None] * norms(k)[:, None, :] / HEAD_WIDTH**0.5


def assert_near(got: np.ndarray, expected: np.ndarray, bound: Any, what: str = "") -> None:
    """Compare; ``bound`` is in units of 2^-24."""
    assert got.shape == expected.shape
    error = np.abs(got - expected.astype(np.float64))
    excess = error / (EPS * np.broadcast_to(bound, error.shape))
    # NaN is not below anything.
    assert excess.max() <= 1, f"{what} {excess.max():.3g} times the bound; {error.max():.3g} off"


def logits_bound(
    logits: np.ndarray, expected: np.ndarray, turned: Any = None, size: np.ndarray | None = None
) -> np.ndarray:
    """Give what logits may differ by, in units of 2^-24.

    A product of 16 terms, scaled and summed with a few others, takes some 16 + 8 roundings of
    ``size`` and of the logit on our side; as many on the peer's if ``expected`` is float32.
    ``turned`` are the positions that turn both sides, by one radian a position at most.
    """
    size = sizes() if size is None else size
    bound = 24 * (size + np.abs(logits) + 1)
    if turned is not None:
        bound = bound + 4 * np.add.outer(turned, turned) * size
    return bound * (1 if expected.dtype == np.float64 else 2)


def assert_same_logits(got: np.ndarray, expected: np.ndarray, **more: Any) -> None:
    """Compare logits as ``logits_bound`` says."""
    assert_near(got, expected, logits_bound(expected, expected, **more))


def assert_same_weights(
    got: np.ndarray, expected: np.ndarray, logits: np.ndarray, **more: Any
) -> None:
    """Compare softmax weights: a weight's relative error is its logit's and its row's mean."""
    bound = CAUSAL * logits_bound(logits, expected, **more)
    assert_near(got, expected, 2 * np.max(bound, axis=-1, keepdims=True) * expected + 2)
    np.testing.assert_array_equal(got[:, ~CAUSAL], 0)


def test_no_method_is_left_out():
    methods = {name.split("/")[0] for name in golden() if "/" in name}
    bias = {"alibi", "t5", "kerple", "sandwich", "forgetting"}
    inside = {"xpos", "pope", "shaw", "transformer_xl", "path", "cope", "selective"}
    others = {"inputs", "rope", "sinusoidal", "opt", "stick_breaking", "log_n"}
    assert {name for name in methods if not name.startswith("rope_")} == bias | inside | others
    # Of these, posenc has no form: Ministral's factor grows in steps, and NeMo's third parameter is
    # an exponent within KERPLE's logarithm.
    assert {"log_n/ministral3", "kerple/nemo-three-parameters"} <= {
        *variants("log_n"),
        *variants("kerple"),
    }


# Rotary: frequencies.


def scaling_spec(kind: str, given: dict[str, Any]) -> str:
    """Give the spec of what ``rope_<kind>`` was told."""
    options = {"factor": given["factor"]} if "factor" in given else {}
    renamed = {
        "yarn": {"truncate": "truncate", "attention_factor": "attention_factor"},
        "longrope": {"long_factor": "factors", "short_factor": "short"},
        "llama3": {name: name for name in ("low_freq_factor", "high_freq_factor")},
    }
    renamed["yarn"] |= {"beta_fast": "high", "beta_slow": "low"}
    renamed["longrope"] |= {"attention_factor": "attention_factor"}
    for theirs, ours in renamed.get(kind, {}).items():
        if theirs in given:
            options[ours] = given[theirs]
    if kind == "yarn" and "mscale_all_dim" in given:
        # DeepSeek's two temperatures are one attention factor: the ratio of ``0.1 m ln s + 1``.
        one, other = (
            0.1 * given[m] * np.log(given["factor"]) + 1 for m in ("mscale", "mscale_all_dim")
        )
        options["attention_factor"] = float(one / other)
    written = ", ".join(f"{name}={json.dumps(value)}" for name, value in options.items())
    return f"{'dynamic_ntk' if kind == 'dynamic' else kind}({written})"


def rotary_of(name: str) -> PositionalEncoding:
    """Give our encoding of a variant of RoPE."""
    kind, given = name.split("/")[0].removeprefix("rope_"), variant(name)["settings"]
    options = {"theta": given["theta"]}
    share = given.get("partial_rotary_factor", 1.0)
    if kind == "proportional":
        method, options["p"] = "p_rope", share
        if "factor" in given:  # of the frequencies that are kept: all are divided
            options["scaling"] = f"linear(factor={given['factor']})"
    else:
        method, options["partial"] = "rope", share
        if kind != "default":
            options["scaling"] = scaling_spec(kind, given)
    written = ", ".join(f"{key}={value}" for key, value in options.items())
    context = given.get("context", 1024)
    return encoding_of(
        f"{method}({written})", heads=2, head_width=given["head_dim"], context=context
    )


FREQUENCIES = sorted({name.rsplit("/", 1)[0] for name in golden() if name.endswith("/inv_freq")})


def test_no_kind_of_frequencies_is_left_out():
    kinds = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional", "ntk")
    assert {name.split("/")[0] for name in FREQUENCIES} == {f"rope_{kind}" for kind in kinds}
    assert len(FREQUENCIES) == 48


@pytest.mark.parametrize("name", FREQUENCIES)
def test_rotary_frequencies(name):
    expected = variant(name)
    encoding = rotary_of(name)
    inv_freq, attention_factor = encoding.frequencies()
    if "lengths" in expected:
        inv_freq = encoding._frequencies_at(jnp.asarray(expected["lengths"]))
    if "attention_factor" in expected:  # of Python's floats
        assert attention_factor == pytest.approx(expected["attention_factor"], rel=1e-15)
    # A power ``b^-e``, e up to 1, in float32: the rounding of e counts ln b times, and the power
    # and what is multiplied with it a few times more. NTK's base is b s^(D / (D - 2)). A blend
    # ``gamma + (1 - gamma) / s`` where gamma is next to 0 has its rounding s times over.
    given = expected["settings"]
    base, factor = given["theta"], given.get("factor", 1.0)
    over = np.max(expected.get("lengths", 1024) / given.get("context", 1024)) * factor
    bound = np.log(base * max(over, 1.0) ** (64 / 62)) + 8
    if name.startswith(("rope_yarn", "rope_llama3")):
        bound += 4 * factor
    shown = expected["inv_freq"]
    assert_near(np.asarray(inv_freq, np.float64), shown, bound * np.abs(shown) + (shown == 0))


def test_dynamic_frequencies_are_those_of_training_within_its_length():
    for name in variants("rope_dynamic"):
        expected = variant(name)
        within = expected["lengths"] <= expected["settings"]["context"]
        assert within.any()
        for row in expected["inv_freq"][within]:
            np.testing.assert_array_equal(row, expected["inv_freq"][0])


# Rotary: application.

ROTATED = {
    "llama": "rope",
    "llama-yarn": "rope(scaling=yarn(factor=4))",
    "gpt-neox": "rope(partial=0.25)",
    "gptj": "rope(pairing=interleaved)",
    "gptj-partial": "rope(pairing=interleaved, partial=0.25)",
    "rotary-embedding-torch": "rope(pairing=interleaved)",
}


def test_no_rotation_is_left_out():
    assert variants("rope") == sorted(f"rope/{name}" for name in ROTATED)


@pytest.mark.parametrize("name", ROTATED)
def test_rotated_queries_and_keys(name):
    expected, inputs = variant(f"rope/{name}"), variant("inputs/rotary")
    positions = inputs["positions"]
    encoding = encoding_of(ROTATED[name], heads=1, head_width=64, context=1024)
    _, factor = encoding.frequencies()
    for which, rotate in (("q", encoding.rotate_queries), ("k", encoding.rotate_keys)):
        x, wanted = inputs[which], expected[f"{which}_rotated"]
        got = np.asarray(rotate(side_of(encoding, x[None], positions, None)))[0, :, 0]
        width, interleaved = encoding.rotated, encoding.pairing == "interleaved"
        first, second = (
            (x[:, :width:2], x[:, 1:width:2])
            if interleaved
            else (x[:, : width // 2], x[:, width // 2 : width])
        )
        pair = factor * np.hypot(first, second).astype(np.float64)
        pair = np.repeat(pair, 2, -1) if interleaved else np.concatenate([pair, pair], -1)
        # Both phases are float32, and err by so much of a pair; besides, a few roundings of it.
        bound = (2 * 4 * positions[:, None] + 8) * pair
        assert_near(got[:, :width], wanted[:, :width], bound, which)
        np.testing.assert_array_equal(got[:, width:], wanted[:, width:])


@pytest.mark.parametrize("name", variants("xpos"))
def test_xpos(name):
    expected = variant(name)
    given = expected["settings"]
    where = given.get("positions", "near")
    encoding = encoding_of(f"xpos(pairing={given['pairing']}, scale_base={given['scale_base']})")
    # The peers scale the two sides of all rows from one place, each from another, which the logits
    # cannot tell.
    got = layer(encoding, where=where)
    assert_same_logits(got, expected["logits"], turned=POSITIONS[where])


def test_no_xpos_is_left_out():
    assert len(variants("xpos")) == 5


# Polar.


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, x.astype(np.float64))


@pytest.mark.parametrize("name", variants("pope"))
def test_pope(name):
    expected = variant(name)
    given, phase = expected["settings"], expected["bias"]
    width, where = given.get("rotary_width", HEAD_WIDTH), given.get("positions", "near")
    if name.endswith("clamped"):
        assert phase.min() < -2 * np.pi
        assert phase.max() > 0
    encoding = encoding_of("pope", {"phase": phase}, head_width=width)
    q, k = LAYER["q"], LAYER["k"]
    got = layer(encoding, where=where, q=q[..., :width], k=k[..., :width])
    # Beyond the treated channels PoPE-pytorch multiplies the others as they are; the scale is that
    # of all.
    rest = np.tril(q[..., width:].astype(np.float64) @ np.swapaxes(k[..., width:], 1, 2))
    got = (got * width**0.5 + rest) / HEAD_WIDTH**0.5
    size = sizes(softplus(q), softplus(k)) + sizes()
    assert_same_logits(got, expected["logits"], turned=POSITIONS[where], size=size)


def test_no_pope_is_left_out():
    assert len(variants("pope")) == 5


# At the embedding.


def sinusoids(spec: str) -> np.ndarray:
    """Give what is added to a null embedding at the far positions."""
    encoding = encoding_of(spec)
    nothing = jnp.zeros((1, LENGTH, HEADS * HEAD_WIDTH))
    return np.asarray(encoding.embed(nothing, jnp.asarray(POSITIONS["far"])[None], {}))[0]


SINUSOIDAL = {
    "xlm": "sinusoidal(scale=1)",
    "roformer": "sinusoidal(scale=1, layout=concatenated)",
    "x-transformers": "sinusoidal(layout=concatenated)",
    # fairseq and tensor2tensor divide the exponent by M/2 - 1.
    "m2m-100": "sinusoidal(scale=1, layout=concatenated, spacing=tensor2tensor)",
    "whisper": "sinusoidal(scale=1, layout=concatenated, spacing=tensor2tensor)",
}


def test_no_sinusoid_is_left_out():
    assert variants("sinusoidal") == sorted(f"sinusoidal/{name}" for name in SINUSOIDAL)


@pytest.mark.parametrize("name", SINUSOIDAL)
def test_sinusoids(name):
    expected = variant(f"sinusoidal/{name}")["table"]
    scale = 32**-0.5 if name == "x-transformers" else 1.0
    # Phases of both, of a sine of slope 1 at most, and a few roundings.
    bound = scale * (2 * 4 * POSITIONS["far"][:, None] + 4)
    assert_near(sinusoids(SINUSOIDAL[name]), expected, bound)


@pytest.mark.parametrize("name", variants("opt"))
def test_wpe_with_reserved_rows(name):
    expected = variant(name)
    mask, given = expected["mask"], expected["settings"]
    offset, cached = given["offset"], given["cache_length"]
    # As in the file, a row of the table is its own number.
    rows, width = 16 + offset, HEADS * HEAD_WIDTH
    table = np.repeat(np.arange(rows, dtype=np.float32)[:, None], width, axis=1)
    encoding = encoding_of(f"wpe(offset={offset}, max_position=16)", {"table": table})
    positions = sequential_positions(mask)[:, cached:]
    nothing = jnp.zeros((*positions.shape, width))
    ours = np.asarray(encoding.embed(nothing, jnp.asarray(positions), {}))
    # Where there is padding, OPT reads row 1 and we whatever row there is: nobody sees it.
    real = mask[:, cached:] == 1
    assert (expected["rows"][~real] == 1).all()
    for channel in (0, width - 1):
        np.testing.assert_array_equal(ours[..., channel][real], expected["rows"][real])


# Biases that depend on the distance alone.


def test_alibi_slopes():
    for row, heads in enumerate(golden()["alibi/mpt/heads"].tolist()):
        mpt, falcon = (golden()[f"alibi/{peer}/slopes"][row] for peer in ("mpt", "falcon"))
        assert not mpt[heads:].any()
        ours = alibi_slopes(heads)
        # A power of 2 in float32, and a division.
        assert_near(mpt[:heads], ours, 8 * ours, f"mpt, {heads} heads")
        # Falcon rounds its slopes to bfloat16 (and adds the bias before it scales, so that its
        # model has these divided by sqrt(D)); the paper and its released code do neither.
        rounded = ours.astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(falcon[:heads], rounded)


def test_alibi_bias():
    expected = variant("alibi/x-transformers")
    ours = bias_of(encoding_of("alibi", heads=6), expected["positions"])
    # x-transformers' is symmetric about the diagonal; what lies above it no causal model sees.
    wanted = np.tril(expected["bias"])
    assert wanted.min() < -500
    assert_near(ours, wanted, 8 * np.abs(wanted) + (wanted == 0))


# Relative positions inside the product.


def test_shaw():
    expected = variant("shaw/wav2vec2-bert")
    table, given = expected["table"], expected["settings"]
    left, right = given["left"], given["right"]
    assert (len(table), right) == (left + 1, 0)
    # Our table goes on to keys that come later, which are not seen.
    unseen = np.full((left, HEAD_WIDTH), 1000, np.float32)
    encoding = encoding_of(f"shaw(clip={left})", {"key_table": np.concatenate([table, unseen])})
    size = sizes(k=LAYER["k"]) * (1 + norms(table).max() / norms(LAYER["k"]).min())
    assert_same_logits(layer(encoding), expected["logits"], size=size)


@pytest.mark.parametrize("name", variants("transformer_xl"))
def test_transformer_xl(name):
    expected = variant(name)
    u, v, projection = (expected[key] for key in ("u", "v", "projection"))
    if expected["settings"]["sinusoids"] == "interleaved":
        # Transformer-XL has all sines first: the projection's rows in that order.
        projection = np.concatenate([projection[0::2], projection[1::2]])
    kernel = projection.reshape(len(projection), -1)
    encoding = encoding_of("transformer_xl", {"u": u, "v": v, "position.kernel": kernel})
    # The second key is a projection of M/2 sines and cosines.
    keys = norms(LAYER["k"])[:, None] + np.linalg.norm(kernel, 2) * (len(kernel) / 2) ** 0.5
    queries = norms(LAYER["q"]) + np.maximum(norms(u), norms(v))[:, None]
    size = queries[..., None] * keys / HEAD_WIDTH**0.5
    more = {"turned": POSITIONS["near"], "size": size}
    if "logits" in expected:
        assert_same_logits(layer(encoding), expected["logits"], **more)
    else:
        got, logits = layer(encoding, "weights"), layer(encoding)
        assert_same_weights(got, expected["weights"], logits, **more)


# Encodings made of the logits.


def sum_over_later_keys(x: np.ndarray) -> np.ndarray:
    """Give the sum over this key and all up to the query."""
    return np.cumsum((x * CAUSAL)[..., ::-1], axis=-1)[..., ::-1] * CAUSAL


def test_cope():
    expected = variant("cope/x-transformers")
    given, table, wanted = expected["settings"], expected["table"], expected["logits"]
    # As in the paper's listing: gates of scaled scores, and the embeddings' products as they are.
    # The authors' released code, which is ours unless told otherwise, divides those by sqrt(D) too.
    assert (given["gate_scaled"], given["scaled"]) == (True, False)
    paper = encoding_of(f"cope(positions={given['positions']}, scale=paper)", {"table": table.T})
    larger = {"table": HEAD_WIDTH**0.5 * table.T}
    released = encoding_of(f"cope(positions={given['positions']})", larger)
    # A sigmoid's slope is 1/4 at most: so much may a distance err, which moves the product between
    # those of neighbouring embeddings.
    distance = sum_over_later_keys(logits_bound(np.zeros(()), wanted) / 4 + 4)
    q = LAYER["q"].astype(np.float64)
    slope = np.abs(q @ np.diff(table, axis=0).T).max(axis=-1, keepdims=True)
    size = sizes() + norms(q)[..., None] * norms(table).max()
    bound = logits_bound(wanted, wanted, size=size) + slope * distance
    assert_near(layer(paper), wanted, bound)
    assert_near(layer(released), wanted, bound)


def test_selective():
    expected = variant("selective/x-transformers")["logits"]
    # Whatever the first head's logits err by is added up over all earlier queries.
    bound = logits_bound(layer(encoding_of("nope")), expected)
    assert_near(layer(encoding_of("selective")), expected, bound + np.cumsum(bound[:1], axis=1))


@pytest.mark.parametrize("name", variants("stick_breaking"))
def test_stick_breaking(name):
    expected = variant(name)
    weights, current = expected["weights"], expected["settings"]["attend_current"]
    encoding = encoding_of(f"stick_breaking(attend_current={json.dumps(current)})")
    got = layer(encoding, "weights")
    # A share's logarithm errs as its logit does, and a weight's as those of all later keys do.
    later = sum_over_later_keys(logits_bound(layer(encoding_of("nope")), weights) + 2)
    assert_near(got, weights, weights * later + 1)
    assert_near(1 - got.sum(-1), expected["remainder"], (weights * later + 1).sum(-1))
    assert (np.diagonal(weights, axis1=1, axis2=2) > 0).all() == current


# Products of reflections.


@pytest.mark.parametrize("name", variants("path"))
def test_path(name):
    expected = variant(name)
    w = jnp.moveaxis(expected["w"], 0, 1)[None]
    features = w, jnp.moveaxis(expected["beta"], 0, 1)[None]
    spec, gates = "path", 0.0
    if "log_gate" in expected:
        # fla scales the gates' sum by 1/sqrt(D) with the rest. The paper's PaTH-FoX adds FoX's
        # bias, which is not scaled, and so does posenc: here the gates are scaled beforehand.
        gates = expected["log_gate"] / HEAD_WIDTH**0.5
        spec, features = "path+fox", (features, jnp.moveaxis(gates, 0, 1)[None])
        gates = np.abs(gates).sum(axis=-1)[:, None, None]
    # What is given are the vectors and their strengths, not what makes them of the input.
    encoding = encoding_of(spec, "initial")
    got = layer(encoding, "weights", features=features)
    logits = layer(encoding, features=features)
    # Up to 19 reflections, none of which lengthens a vector, each of them a product of 16 terms.
    assert_same_weights(got, expected["weights"], logits, size=LENGTH * sizes() + gates)


# Factors on the rows.


def test_log_n():
    expected = variant("log_n/inkling2")
    positions, scale = expected["positions"], expected["scale"]
    encoding = encoding_of(f"logn(length={expected['settings']['length']})")
    ones = np.ones((HEADS, len(positions), HEAD_WIDTH), np.float32)
    rows = layer(encoding, where=positions, q=ones, k=ones)[:, :, 0] / HEAD_WIDTH**0.5
    # A logarithm below 12 divided by one, or a smaller one times a quotient.
    assert_near(rows, np.broadcast_to(scale, rows.shape), 8 * scale)


@pytest.mark.parametrize("name", [name for name in variants("t5") if "buckets" in name])
def test_t5_buckets(name):
    expected = variant(name)
    given = expected["settings"]
    spec = f"t5(buckets={given['buckets']}, max_distance={given['max_distance']})"
    # Each row of the table is its own number.
    table = np.repeat(np.arange(given["buckets"], dtype=np.float32)[:, None], HEADS, axis=1)
    found = bias_at(encoding_of(spec, {"table": table}), expected["distances"])
    np.testing.assert_array_equal(found, np.broadcast_to(expected["buckets"], found.shape))


def test_t5_bias():
    # T5 adds it to logits that are not scaled, and x-transformers multiplies it by sqrt(D) where
    # they are. Ours is T5's own, added to scaled ones, as ports to GPT have it.
    expected = variant("t5/bias")
    given = expected["settings"]
    spec = f"t5(buckets={given['buckets']}, max_distance={given['max_distance']})"
    found = bias_of(encoding_of(spec, {"table": expected["table"]}), POSITIONS["near"])
    np.testing.assert_array_equal(found, expected["bias"])


def test_kerple_log():
    expected = variant("kerple/nemo-log")
    r1, r2 = expected["b"], expected["a"]
    assert (expected["p"] == 1).all()
    found = bias_at(encoding_of("kerple_log", {"r1": r1, "r2": r2}), expected["distances"])
    # Rounding within the logarithm, of it, and of the product.
    assert_near(found, expected["bias"], 8 * (r1[:, None] + np.abs(expected["bias"])))


def test_kerple_power_of_exponent_1_is_alibi():
    # No peer has the power kernel (NeMo's third parameter is an exponent within the logarithm).
    expected = variant("alibi/x-transformers")
    slopes = alibi_slopes(6).astype(np.float32)
    # KERPLE holds its parameters above 0.01.
    heads = slopes > 0.01
    assert heads.sum() == 5
    encoding = encoding_of("kerple_power", {"r1": slopes, "r2": np.ones_like(slopes)}, heads=6)
    found, wanted = bias_of(encoding, expected["positions"]), np.tril(expected["bias"])
    # Ours is an exponential of a logarithm, whose rounding counts as many times as it is large.
    bound = (np.log(1024) + 8) * np.abs(wanted) + 1
    assert_near(found[heads], wanted[heads], bound[heads])


@pytest.mark.parametrize("name", variants("sandwich"))
def test_sandwich(name):
    expected = variant(name)
    heads, width = (expected["settings"][key] for key in ("heads", "dimension"))
    distances = expected["distances"]
    found = bias_at(encoding_of(f"sandwich(width={width})", heads=heads), distances)
    # A sum of w/2 cosines that nearly cancels w/2, divided by 8 h / H. The peer's phases grow with
    # the distance; ours are those of two positions, of half a turn at most. Either cosine takes
    # some 12 roundings, and their sum as large a rounding for every doubling of its terms.
    inv_freq = 10_000.0 ** (-2 * np.arange(1, width // 2 + 1) / width)
    bound = 4 * distances * inv_freq.sum() + 2 * width / 2 * (12 + np.log2(width))
    slopes = 8 * np.arange(1, heads + 1) / heads
    assert_near(found, expected["bias"], bound / slopes[:, None] + 4 * np.abs(found))


# Biases that depend on the tokens.


def gates_of(name: str, sign: float = 1.0) -> dict[str, np.ndarray]:
    """Give a gate's parameters; torch has kernels ``[outputs, inputs]``."""
    expected = variant(name)
    return {
        "gate.kernel": sign * expected["kernel"].T,
        "gate.bias": sign * expected["gate_bias"],
    }


# ln sigmoid(z) is -softplus(-z): Cable is FoX with the gates' sign changed.
GATED = {"fox": 1.0, "cable": -1.0}


@pytest.mark.parametrize("method", GATED)
def test_forgetting_bias(method):
    expected = variant("forgetting/x-transformers")["bias"]
    encoding = encoding_of(method, gates_of("forgetting/x-transformers", GATED[method]))
    nothing = np.zeros_like(LAYER["q"])
    # A gate is a sum of 32 products and a bias of up to 5; up to 19 are added up.
    gates = np.abs(LAYER["x"]) @ np.abs(variant("forgetting/x-transformers")["kernel"]).T + 5
    bound = 8 * (np.cumsum(gates, axis=0).T[:, :, None] + np.abs(expected))
    assert_near(layer(encoding, q=nothing, k=nothing), expected, bound)


def test_forgetting_weights():
    expected = variant("forgetting/fla")["weights"]
    encoding = encoding_of("fox", gates_of("forgetting/fla"))
    got, logits = layer(encoding, "weights"), layer(encoding)
    assert_same_weights(got, expected, logits)


# The tolerances.

MUTANTS = {
    "rope, theta 0.1% larger": (
        test_rotated_queries_and_keys,
        ("llama",),
        "rope",
        "rope(theta=10010)",
    ),
    "rope, the other pairing": (test_rotated_queries_and_keys, ("gptj",), "interleaved", "half"),
    "p_rope, one frequency fewer": (
        test_rotary_frequencies,
        ("rope_proportional/d64-p75",),
        "theta=10000.0, p=0.75",
        "theta=10000.0, p=0.72",
    ),
    "yarn, whole channels": (
        test_rotary_frequencies,
        ("rope_yarn/d64-s4-untruncated",),
        "truncate=false",
        "truncate=true",
    ),
    "yarn, the paper's ramp": (
        test_rotary_frequencies,
        ("rope_yarn/d64-s4",),
        "yarn(",
        "yarn(ramp=rotations, ",
    ),
    "llama3, one token longer": (
        test_rotary_frequencies,
        ("rope_llama3/d128-s8",),
        "llama3(",
        "llama3(original=8193, ",
    ),
    "xpos, gamma 0.01 larger": (test_xpos, ("xpos/torchscale-far",), "xpos(", "xpos(gamma=0.41, "),
    "xpos, theta 1% larger": (test_xpos, ("xpos/torchscale",), "xpos(", "xpos(theta=10100, "),
    "pope, theta 1% larger": (test_pope, ("pope/pope-pytorch",), "pope", "pope(theta=10100)"),
    "sinusoidal, theta 0.1% larger": (
        test_sinusoids,
        ("xlm",),
        "scale=1",
        "scale=1, theta=10010",
    ),
    "transformer_xl, theta 1% larger": (
        test_transformer_xl,
        ("transformer_xl/xlnet",),
        "transformer_xl",
        "transformer_xl(theta=10100)",
    ),
    "cope, as released": (test_cope, (), "paper", "ram"),
    "logn, one token longer": (test_log_n, (), "1024", "1025"),
}


@pytest.mark.parametrize(("test", "given", "old", "new"), MUTANTS.values(), ids=MUTANTS)
def test_the_tolerance_tells_a_small_departure_apart(test, given, old, new, monkeypatch):
    changed = []

    def mutant(spec: str, *args: Any, **more: Any) -> PositionalEncoding:
        changed.append(old in spec)
        return original(spec.replace(old, new), *args, **more)

    original = encoding_of
    monkeypatch.setitem(globals(), "encoding_of", mutant)
    with pytest.raises(AssertionError, match="times the bound"):
        test(*given)
    assert any(changed)
