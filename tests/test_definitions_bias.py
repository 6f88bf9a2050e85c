"""The definitions of the biases against numbers worked out apart from them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from definitions import bias
from definitions.case import Case

pytestmark = pytest.mark.fast


def case_of(heads: int, length: int, positions=None, **parameters) -> Case:
    """Zero queries: the logits are the bias alone."""
    zeros = np.zeros((heads, length, 4))
    positions = np.arange(length) if positions is None else np.asarray(positions)
    parameters = {name: np.asarray(value, np.float64) for name, value in parameters.items()}
    return Case(np.zeros((length, 4 * heads)), zeros, zeros, zeros, positions, parameters, 1024)


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (16, [0.5 * h for h in range(1, 17)]),
    ],
)
def test_alibi_slopes(heads, exponents):
    expected = [2.0**-e for e in exponents]
    np.testing.assert_allclose(bias.alibi_slopes(heads), expected, rtol=1e-15)


def test_alibi_slopes_of_twelve_heads_in_decimals():
    expected = [0.70711, 0.35355, 0.17678, 0.08839]
    np.testing.assert_allclose(bias.alibi_slopes(12)[8:], expected, atol=5e-6)


def test_alibi_uses_position_values():
    logits = bias.alibi(case_of(8, 3, positions=[5, 7, 100]))
    np.testing.assert_allclose(logits[1, 2, :3], [-95 / 4, -93 / 4, 0])
    learned = bias.alibi(case_of(2, 3, slopes=[1.0, 3.0]))
    np.testing.assert_allclose(learned[:, 2, 0], [-2.0, -6.0])


def test_t5_first_distance_of_each_bucket():
    buckets = bias.t5_bucket(np.arange(1000))
    first = [int(np.argmax(buckets == b)) for b in range(32)]
    far = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert first == list(range(16)) + far
    assert np.all(np.diff(buckets) >= 0)


@pytest.mark.parametrize(
    ("distance", "bucket"),
    [(0, 0), (15, 15), (18, 16), (19, 17), (112, 30), (113, 31), (10**6, 31)],
)
def test_t5_bucket(distance, bucket):
    assert bias.t5_bucket(np.array(distance)) == bucket


def test_t5_reads_the_table_by_head():
    table = np.arange(64.0).reshape(32, 2)
    logits = bias.t5(case_of(2, 3, positions=[0, 18, 37], table=table))
    np.testing.assert_array_equal(logits[:, 1, 0], [32, 33])
    np.testing.assert_array_equal(logits[:, 2, :], [[44, 34, 0], [45, 35, 1]])


def test_kerple_by_hand():
    log = bias.kerple_log(case_of(2, 4, r1=[2.0, 0.0], r2=[1.0, -1.0]))
    np.testing.assert_allclose(log[0, 3], [-2 * math.log(4), -2 * math.log(3), -2 * math.log(2), 0])
    # Both parameters of the other head lie below the clamp.
    np.testing.assert_allclose(log[1, 3, 0], -0.01 * math.log(1.03))
    power = bias.kerple_power(case_of(2, 4, r1=[0.5, 0.0], r2=[5.0, 0.5]))
    np.testing.assert_allclose(power[0, 3], [-4.5, -2.0, -0.5, 0])
    np.testing.assert_allclose(power[1, 3], [-0.01 * 3**0.5, -0.01 * 2**0.5, -0.01, 0])


def test_kerple_power_of_exponent_one_is_alibi():
    slopes = bias.alibi_slopes(8)
    case = case_of(8, 6, r1=np.maximum(slopes, 1e-2), r2=np.ones(8))
    # The last two slopes, 2^-7 and 2^-8, lie below the clamp of r1.
    np.testing.assert_allclose(bias.kerple_power(case)[:6], bias.alibi(case)[:6])


@pytest.mark.parametrize(
    ("query", "key", "ratio"), [(10, 3, 0.13416), (2000, 1000, 0.87023), (600, 0, 1.0)]
)
def test_fire_ratio(query, key, ratio):
    value = bias.fire_ratio(np.array(float(query - key)), np.array(float(query)))
    np.testing.assert_allclose(value, ratio, atol=5e-6)


def test_fire_by_hand():
    case = case_of(
        2,
        2,
        positions=[1000, 2000],
        c=-0.1,
        multiplier=-1.0,
        **{
            "hidden.kernel": [[1.0, -1.0]],
            "hidden.bias": [0.0, 0.5],
            "out.kernel": [[2.0, 3.0], [100.0, 100.0]],
            "out.bias": [0.25, 0.0],
        },
    )
    # x = 0.87023: the hidden units are x and relu(0.5 - x) = 0.
    np.testing.assert_allclose(
        bias.fire(case)[:, 1, 0], [2 * 0.87023 + 0.25, 3 * 0.87023], atol=2e-5
    )
    # x = 0: the hidden units are 0 and 0.5.
    np.testing.assert_allclose(bias.fire(case)[:, 0, 0], [50.25, 50.0])


@pytest.mark.parametrize(
    ("head", "distance", "value"),
    [
        (1, 1, -2.170),
        (1, 16, -33.51),
        (1, 1024, -76.36),
        (12, 1, -0.181),
        (12, 128, -5.126),
        (12, 1024, -6.364),
    ],
)
def test_sandwich(head, distance, value):
    result = bias.sandwich_bias(np.array(distance), heads=12)[head - 1]
    np.testing.assert_allclose(result, value, rtol=3e-4, atol=5e-4)


def test_sandwich_is_zero_at_distance_zero():
    logits = bias.sandwich(case_of(4, 3))
    np.testing.assert_allclose(logits[:, range(3), range(3)], 0.0, atol=1e-12)


def test_window_counts_slots():
    open_keys = np.isfinite(bias.window(case_of(1, 5, positions=[0, 50, 60, 70, 80]), 2, sinks=1))
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 0, 1, 1],
    ]
    np.testing.assert_array_equal(np.tril(open_keys[0]), expected)
