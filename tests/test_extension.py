"""Trained rotations made to go on by other distances, windows, or no encoding at all."""

import functools

import jax
import numpy as np
import pytest
from definitions import bias, extension, rotary, scaling, temperature
from definitions.case import Case, scaled_product
from test_definitions import POSITIONS, Entry, Ours, check_values

from posenc import conformance as checks
from posenc.encodings import Dimensions, EncodingError, build, parse_part
from posenc.transformer import Transformer, TransformerConfig

pytestmark = pytest.mark.fast


def with_logn(definition):
    return lambda case, **options: temperature.logn(definition(case, **options), case)


def of(definition, **options):
    return lambda case: definition(case, **options)


def window_of(case: Case, size: int, sinks: int, base=scaled_product) -> np.ndarray:
    seen = np.isfinite(bias.window(case, size, sinks))
    return np.where(seen, base(case), -np.inf)


def yarn(case):
    inv_freq, factor = scaling.yarn(case.head_width, 10_000.0, 4, case.context_length)
    return {"inv_freq": inv_freq, "attention_factor": factor}


POLICIES = [
    ("rope", "self_extend(group=4, window=5)", of(extension.self_extend, group=4, window=5)),
    (
        "rope",
        "self_extend(group=3, window=8, logn=true)",
        of(with_logn(extension.self_extend), group=3, window=8),
    ),
    (
        "rope(pairing=interleaved)",
        "rerope(window=4, logn=false)",
        of(extension.rerope, window=4, pairing="interleaved"),
    ),
    ("rope", "rerope(window=6)", of(with_logn(extension.rerope), window=6)),
    ("rope", "leaky_rerope(k=8, window=4)", of(with_logn(extension.leaky_rerope), window=4, k=8)),
    (
        "rope",
        "leaky_rerope(k=3, logn=false, window=2.5)",
        of(extension.leaky_rerope, window=2.5, k=3),
    ),
    (
        "rope",
        "lm_infinite(n_global=2, n_local=5)",
        of(extension.lm_infinite, n_global=2, n_local=5),
    ),
    (
        "rope",
        "lm_infinite(limit=3, n_global=1, n_local=7)",
        of(extension.lm_infinite, n_global=1, n_local=7, limit=3),
    ),
    ("rope", "window(size=4)", of(window_of, size=4, sinks=0, base=rotary.rope)),
    ("alibi", "window(sinks=2, size=3)", of(window_of, size=3, sinks=2, base=bias.alibi)),
    ("rope+logn(length=3)", "drop", lambda case: temperature.logn(scaled_product(case), case, 3)),
    (
        "alibi",
        "drop(factor=4, slope=0.412)",
        lambda case: scaled_product(case) * (1 + 0.412 * np.log(4)),
    ),
    ("rope", "yarn(factor=4)", lambda case: rotary.rope(case, **yarn(case))),
]


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize(
    ("spec", "policy", "definition"),
    POLICIES,
    ids=[f"{spec} by {policy}" for spec, policy, _ in POLICIES],
)
def test_a_policy_gives_what_its_definition_gives(spec, policy, definition, where):
    if policy.startswith("lm_infinite") and where == "jumping":
        where = "ordinary"  # its definition counts positions where attention counts slots
    check_values(Ours(Entry(spec, definition, policy=policy, phases=1.0)), POSITIONS[where])


CONFIG = TransformerConfig(vocab_size=31, layers=2, width=32, heads=4, init_std=0.2)


LAWFUL = [
    "self_extend(group=4, window=9)",
    "lm_infinite(n_global=3, n_local=9)",
    *(
        pytest.param(policy, marks=pytest.mark.slow)
        for policy in (
            "rerope(window=7)",
            "leaky_rerope(k=4, window=7)",
            "window(sinks=3, size=9)",
            "dynamic_ntk(chunk=8)",
        )
    ),
]


@pytest.mark.parametrize("policy", LAWFUL)
def test_extended_models_decode_as_they_read_and_take_blocks_packing_and_padding(policy):
    """What a policy makes is an encoding like any other: the laws hold for it."""
    for check in (
        checks.cached_equals_full,
        checks.packed_equals_separate,
        checks.left_padded_equals_unpadded,
        checks.later_tokens_change_nothing,
        checks.blocks_equal_dense,
    ):
        assert check(subject_of(policy))


@functools.cache
def subject_of(policy):
    return Extended("rope", policy)


class Extended(checks.Subject):
    def __init__(self, encoding, policy):
        self.policy = policy
        super().__init__(encoding)

    def make(self, layers=2):
        model = super().make(layers)
        model.encoding.extend(parse_part(self.policy), checks.LENGTH)
        return model


@pytest.mark.parametrize(
    ("spec", "policy", "message"),
    [
        ("alibi", "rerope(window=3)", "needs a rotation to act on, and alibi has none"),
        ("xpos", "rerope(window=3)", "xpos has no extension policy 'rerope'; it has: linear"),
        ("rope,xpos", "rerope(window=3)", "xpos has no extension policy 'rerope'"),
        ("rope,rope(learned=true)", "rerope(window=3)", "rope has no extension policy 'rerope'"),
        ("heads(of=[rope, xpos])", "rerope(window=3)", "xpos has no extension policy 'rerope'"),
        ("heads(of=[rope, nope])", "lm_infinite(n_local=3)", "rope acts on which slots are seen"),
        ("dape(base=rope, version=2)", "lm_infinite(n_local=3)", "dape reads every slot between"),
        ("rope(theta=1)", "yarn(factor=2)", "needs theta above 1, and got 1: take ramp=rotations"),
        ("rope", "rerope(window=0)", r"rerope\(window=0.0\): it must be at least 1"),
        ("rope", "self_extend(group=2)", r"self_extend lacks an option: self_extend\(window=...\)"),
        ("rope", "window(size=0)", "a query sees itself"),
        ("rope", "drop(slope=0.4)", r"drop lacks an option: drop\(factor=...\)"),
        ("rope", "leaky_rerope(window=4, k=0.5)", "it must be at least 1"),
        ("rope(scaling=linear(factor=2))", "yarn(factor=2)", "rope has linear already"),
        ("fox", "window(size=4, sinks=1)", "fox reads every slot between a key and its query"),
        ("wpe", "window(size=4)", "wpe has no extension policy 'window'"),
    ],
)
def test_policies_that_make_no_sense_are_refused(spec, policy, message):
    encodings = build(spec, 2, Dimensions(32, 4, 8, 16), jax.random.key(0))
    with pytest.raises(EncodingError, match=message):
        encodings.extend(parse_part(policy), 64)


def test_drop_leaves_a_model_without_the_encoding_and_window_one_that_sees_less():
    tokens, positions = np.arange(24)[None] % 31, np.arange(24)[None]
    for spec in ("rope", "wpe", "alibi+logn", "heads(of=[rope, alibi])"):
        model, plain = Transformer(CONFIG, spec, 24), Transformer(CONFIG, "nope", 24)
        model.encoding.extend(parse_part("drop"), 96)
        np.testing.assert_array_equal(model(tokens, positions), plain(tokens, positions))
    # Of heads of their own, what tells of no position stays.
    model = Transformer(CONFIG, "heads(of=[sink, ssmax])+heads(of=[alibi, nope])", 24)
    left = Transformer(CONFIG, "heads(of=[sink, ssmax])", 24)
    model.encoding.extend(parse_part("drop"), 96)
    np.testing.assert_array_equal(model(tokens, positions), left(tokens, positions))
    model = Transformer(CONFIG, "rope,nope", 24)
    model.encoding.extend(parse_part("window(size=5)"), 96)
    named = Transformer(CONFIG, "rope+window(size=5),nope+window(size=5)", 24)
    np.testing.assert_array_equal(model(tokens, positions), named(tokens, positions))


def test_a_window_of_the_base_is_one_of_the_whole():
    """What is seen under a policy of an inner rotation, by the zero gradients of the unseen."""
    model = Transformer(CONFIG, "dape(base=rope),nope", 24)
    model.encoding.extend(parse_part("lm_infinite(n_local=4, n_global=2)"), 96)
    part = model.encoding.parts[0]
    assert (part.reach, part.sinks, part.shift_invariant) == (3, 2, "no")


def test_a_second_way_to_extend_a_rotation_is_refused():
    for first, second in (
        ("rerope(window=4)", "dynamic_ntk"),
        ("rerope(window=4)", "leaky_rerope(window=4, k=2)"),
        ("linear(factor=2)", "rerope(window=4)"),
    ):
        encodings = build("rope", 1, Dimensions(32, 4, 8, 16), jax.random.key(0))
        encodings.extend(parse_part(first), 64)
        with pytest.raises(EncodingError, match="on top of it has no definition"):
            encodings.extend(parse_part(second), 64)


@pytest.mark.parametrize("built_for", [24, 20, 7])
def test_rules_by_length_leave_what_lies_within_the_length_alone(built_for):
    """Unless told otherwise, no position within L counts as one beyond it."""
    tokens, positions = np.arange(built_for + 1)[None] % 31, np.arange(built_for + 1)[None]
    plain = Transformer(CONFIG, "rope", built_for)(tokens, positions)
    long = "[2, 3, 4, 5]"
    for policy in ("dynamic_ntk(factor=3)", f"longrope(factors={long})"):
        model = Transformer(CONFIG, "rope", built_for)
        model.encoding.extend(parse_part(policy), 96)
        got = model(tokens, positions)
        np.testing.assert_allclose(got[:, :built_for], plain[:, :built_for], atol=2e-6)
        assert np.abs(got[:, built_for] - plain[:, built_for]).max() > 1e-3


def test_the_released_rule_takes_each_window_s_own_length():
    model = Transformer(CONFIG, "rope(scaling=dynamic_ntk(scale_from=total))", 8)
    tokens = np.arange(48).reshape(2, 24) % 31
    positions = np.tile(np.arange(24), (2, 1))
    segments = np.ones((2, 24), int)
    segments[1, 12:], positions[1, 12:] = 0, 0
    both = model(tokens, positions, segments)
    np.testing.assert_allclose(both[:1], model(tokens[:1], positions[:1]), atol=1e-5)
    short = model(tokens[1:, :12], positions[1:, :12])
    np.testing.assert_allclose(both[1:, :12], short, atol=1e-5)
