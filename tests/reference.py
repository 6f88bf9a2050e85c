"""The definitions that the tests compare with: plain float64 NumPy, loops where they are clearest.

Written from the published formulas, never from the code under test. A logit function takes
``(head, query, key, query_position, key_position)`` with vectors ``[D]`` and gives a number.
"""

import math

import numpy as np

EPS = 2.0**-24  # unit roundoff of float32


def phase_bound(position):
    """Give the radians by which a float32 phase may err at a position: 4 p 2^-24."""
    return 4.0 * np.abs(np.asarray(position, np.float64)) * EPS


# Absolute, at the token embedding.


def wpe(x, table, positions):
    """h_p = x + table[p]; ``x`` [B, T, M], ``table`` [rows, M], ``positions`` [B or 1, T]."""
    x, table = np.asarray(x, np.float64), np.asarray(table, np.float64)
    batch, length, _ = x.shape
    positions = np.broadcast_to(positions, (batch, length))
    result = np.empty_like(x)
    for b in range(batch):
        for t in range(length):
            place = int(positions[b, t])
            assert 0 <= place < len(table), place
            result[b, t] = x[b, t] + table[place]
    return result


def wpe_extended(table, policy, length):
    """Give the first ``length`` rows that a policy makes of a table, row by row."""
    table = np.asarray(table, np.float64)
    rows = len(table)
    if length <= rows:
        return table[:length]
    result = np.empty((length, table.shape[1]))
    for p in range(length):
        if policy == "clamp":
            result[p] = table[min(p, rows - 1)]
        elif policy == "wrap":
            result[p] = table[p % rows]
        elif policy == "interpolate":  # ends meet ends: 0 -> 0, length - 1 -> rows - 1
            place = p * (rows - 1) / (length - 1)
            low = min(math.floor(place), rows - 1)
            high = min(low + 1, rows - 1)
            part = place - low
            result[p] = (1 - part) * table[low] + part * table[high]
        else:
            raise ValueError(policy)
    return result


def sinusoid(position, width, theta=10000.0, layout="interleaved", scale=1.0):
    """Vaswani et al., 2017: sin and cos of p theta^(-2m/M); [M]."""
    half = width // 2
    result = np.empty(width)
    for m in range(half):
        phase = float(position) * theta ** (-2 * m / width)
        at = (2 * m, 2 * m + 1) if layout == "interleaved" else (m, half + m)
        result[at[0]] = scale * math.sin(phase)
        result[at[1]] = scale * math.cos(phase)
    return result


def sinusoidal(x, positions, theta=10000.0, layout="interleaved", scale=1.0):
    """``x`` [B, T, M] plus the sinusoid of each of ``positions`` [B or 1, T]."""
    result = np.array(x, np.float64)
    batch, length, width = result.shape
    positions = np.broadcast_to(positions, (batch, length))
    for b in range(batch):
        for t in range(length):
            result[b, t] += sinusoid(positions[b, t], width, theta, layout, scale)
    return result


# Rotations of queries and keys.


def rope_frequency(m, width, theta=10000.0):
    """theta^(-2m/D), the radians a position that channel pair m turns by."""
    return theta ** (-2 * m / width)


def rope_pair(m, width, pairing="half"):
    """Give the two channels of pair m."""
    return (m, m + width // 2) if pairing == "half" else (2 * m, 2 * m + 1)


def rope(x, position, theta=10000.0, pairing="half"):
    """Rotate one vector [D] to one position."""
    x = np.asarray(x, np.float64)
    result = np.empty_like(x)
    for m in range(len(x) // 2):
        phase = float(position) * rope_frequency(m, len(x), theta)
        a, b = rope_pair(m, len(x), pairing)
        result[a] = math.cos(phase) * x[a] - math.sin(phase) * x[b]
        result[b] = math.sin(phase) * x[a] + math.cos(phase) * x[b]
    return result


def rope_logit(query, key, query_position, key_position, theta=10000.0, pairing="half"):
    """(R_i q) . (R_j k) / sqrt(D)."""
    turned = rope(query, query_position, theta, pairing), rope(key, key_position, theta, pairing)
    return float(turned[0] @ turned[1]) / math.sqrt(len(query))


# Biases.


def alibi_slopes(heads):
    """2^(-8h/H), h = 1..H, for a power of two; otherwise filled up from the next higher one."""
    lower = 1
    while lower * 2 <= heads:
        lower *= 2
    slopes = [2.0 ** (-8 * h / lower) for h in range(1, lower + 1)]
    higher = [2.0 ** (-8 * h / (2 * lower)) for h in range(1, 2 * lower + 1)]
    return np.array(slopes + higher[0::2][: heads - lower])


def alibi_bias(query_positions, key_positions, heads):
    """-slope max(p_i - p_j, 0); ``[H, t, S]`` of positions [t] and [S]."""
    slopes = alibi_slopes(heads)
    result = np.empty((heads, len(query_positions), len(key_positions)))
    for h in range(heads):
        for i, p in enumerate(query_positions):
            for j, s in enumerate(key_positions):
                result[h, i, j] = -slopes[h] * max(float(p) - float(s), 0.0)
    return result


# Logits of one pair, for ``attention``.


def scaled_product(head, query, key, query_position, key_position):
    """No positional encoding, or one that acts on the token embeddings alone."""
    return float(np.asarray(query, np.float64) @ np.asarray(key, np.float64)) / math.sqrt(
        len(query)
    )


def rope_logits(theta=10000.0, pairing="half"):
    """Give the logit function of RoPE."""

    def logit(head, query, key, query_position, key_position):
        return rope_logit(query, key, query_position, key_position, theta, pairing)

    return logit


def alibi_logits(heads, base=scaled_product):
    """Give the logit function of ALiBi, on top of another."""
    slopes = alibi_slopes(heads)

    def logit(head, query, key, query_position, key_position):
        distance = max(float(query_position) - float(key_position), 0.0)
        return base(head, query, key, query_position, key_position) - slopes[head] * distance

    return logit


# Attention.


def softmax(logits, visible):
    """Softmax over the visible entries of one row; zeros where there are none."""
    result = np.zeros(len(logits))
    seen = [j for j in range(len(logits)) if visible[j]]
    if not seen:
        return result
    top = max(logits[j] for j in seen)
    total = sum(math.exp(logits[j] - top) for j in seen)
    for j in seen:
        result[j] = math.exp(logits[j] - top) / total
    return result


def attention_head(queries, keys, values, logit, query_positions, key_positions, visible, head=0):
    """One head: [t, D], [S, D], [S, D'] and a boolean [t, S] -> [t, D']."""
    queries, keys, values = (np.asarray(a, np.float64) for a in (queries, keys, values))
    result = np.zeros((len(queries), values.shape[-1]))
    for i in range(len(queries)):
        row = [
            logit(head, queries[i], keys[j], query_positions[i], key_positions[j])
            if visible[i][j]
            else 0.0
            for j in range(len(keys))
        ]
        weights = softmax(row, visible[i])
        for j in range(len(keys)):
            if visible[i][j]:
                result[i] += weights[j] * values[j]
    return result


def sees(query_slot, key_slot, query_segment, key_segment, causal=True):
    """Say whether a query sees a key: same segment, no padding, and not later."""
    if query_segment != key_segment or key_segment == 0:
        return False
    return not causal or key_slot <= query_slot


def visibility(query_slots, key_slots, query_segments, key_segments, causal=True):
    """Give the boolean [t, S] of slots [t], [S] and segments [t], [S]."""
    return np.array(
        [
            [sees(i, j, a, b, causal) for j, b in zip(key_slots, key_segments, strict=True)]
            for i, a in zip(query_slots, query_segments, strict=True)
        ]
    )


def attention(
    queries,
    keys,
    values,
    logit,
    query_positions,
    key_positions=None,
    query_slots=None,
    key_slots=None,
    query_segments=None,
    key_segments=None,
    causal=True,
):
    """Attention by its definition, head by head: [B, t, H, D], [B, S, H, D] x 2 -> [B, t, H, D'].

    Positions and segments are [B or 1, n] and slots [n] or [1, n]. Left out, the keys' are the
    queries', slots count from 0 and all is one segment.
    """
    batch, rows, heads, _ = np.shape(queries)
    columns = np.shape(keys)[1]

    def per_batch(given, otherwise, length):
        return np.broadcast_to(otherwise if given is None else np.asarray(given), (batch, length))

    query_positions = per_batch(query_positions, None, rows)
    key_positions = per_batch(key_positions, query_positions, columns)
    query_slots = per_batch(query_slots, np.arange(rows), rows)
    key_slots = per_batch(key_slots, np.arange(columns), columns)
    query_segments = per_batch(query_segments, 1, rows)
    key_segments = per_batch(
        key_segments, query_segments if rows == columns else np.ones(columns, int), columns
    )
    result = np.zeros((batch, rows, heads, np.shape(values)[-1]))
    for b in range(batch):
        visible = visibility(
            query_slots[b], key_slots[b], query_segments[b], key_segments[b], causal
        )
        for h in range(heads):
            result[b, :, h] = attention_head(
                np.asarray(queries)[b, :, h],
                np.asarray(keys)[b, :, h],
                np.asarray(values)[b, :, h],
                logit,
                query_positions[b],
                key_positions[b],
                visible,
                head=h,
            )
    return result
