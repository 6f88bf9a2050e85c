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
        ("xpos", "rerope(window=3)", "needs a rotation to act on, and xpos has none"),
        ("rope", "rerope(window=0)", r"rerope\(window=0.0\): it must be at least 1"),
        ("rope", "self_extend(group=2)", r"self_extend lacks an option: self_extend\(window=...\)"),
        ("rope", "window(size=0)", "a query sees itself"),
        ("rope", "drop(slope=0.4)", r"drop lacks an option: drop\(factor=...\)"),
        ("rope", "leaky_rerope(window=4, k=0.5)", "it must be at least 1"),
        ("rope(scaling=linear(factor=2))", "yarn(factor=2)", "rope is scaled by linear already"),
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
    for spec in ("rope", "wpe", "alibi+logn"):
        model, plain = Transformer(CONFIG, spec, 24), Transformer(CONFIG, "nope", 24)
        model.encoding.extend(parse_part("drop"), 96)
        np.testing.assert_array_equal(model(tokens, positions), plain(tokens, positions))
    model = Transformer(CONFIG, "rope,nope", 24)
    model.encoding.extend(parse_part("window(size=5)"), 96)
    named = Transformer(CONFIG, "rope+window(size=5),nope+window(size=5)", 24)
    np.testing.assert_array_equal(model(tokens, positions), named(tokens, positions))
