"""Rows of a study with known sums by document, which the tests of reports share."""

import math
import zlib

import numpy as np
from test_report import row

LENGTHS = (32, 64, 128, 256, 512, 1024)
TOKENS = np.array([128, 64, 96, 128, 32, 128, 160, 64])
ENDLESS = ("alibi", "rope", "nope")
TABLE = "wpe(max_position=64)"
# By how much the loss rises with each doubling beyond L = 64, and lies above alibi's.
SLOPES = {"alibi": (0.0, 0.0), "rope": (0.4, 0.1), "nope": (0.2, 0.3), TABLE: (0.0, 0.2)}


def sums_of(encoding, length, seed, foreign=False):
    """Give the sums in nats over each document."""
    rng = np.random.default_rng([seed, length, zlib.crc32(encoding.encode()), foreign])
    slope, above = SLOPES[encoding]
    seeds = 0.02 * math.sin(3 * seed)
    documents = 0.2 * np.cos(np.arange(len(TOKENS)))
    nll = 2 + above + slope * max(0.0, math.log2(length / 64)) + seeds + documents
    nll = nll + (0.05 if foreign else 0) + 0.01 * rng.normal(size=len(TOKENS))
    return nll * TOKENS


def study(encodings=(*ENDLESS, TABLE), seeds=(0, 1, 2), lengths=LENGTHS, **changes):
    """Give rows of the primary protocol, of a foreign prefix and by position."""
    rows = []
    for encoding in encodings:
        for seed in seeds:
            for length in lengths:
                undefined = encoding == TABLE and length > 64
                for protocol in ("nll_by_context", "foreign_prefix"):
                    if protocol == "foreign_prefix" and length <= 64:
                        continue
                    sums = sums_of(encoding, length, seed, protocol == "foreign_prefix")
                    nll = None if undefined else float(sums.sum() / TOKENS.sum())
                    own = {
                        "document_index": list(range(len(TOKENS))),
                        "document_nll": sums.tolist(),
                        "document_tokens": TOKENS.tolist(),
                    }
                    rows.append(
                        row(
                            encoding,
                            length,
                            nll,
                            seed=seed,
                            protocol=protocol,
                            tokens=int(TOKENS.sum()),
                            documents=len(TOKENS),
                            **({} if undefined else own),
                            **changes,
                        )
                    )
            for start, stop in ((1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)):
                rows.append(
                    row(
                        encoding,
                        64,
                        2 + 1 / stop,
                        seed=seed,
                        protocol="per_position",
                        context=None,
                        targets=None,
                        position_from=start,
                        position_to=stop,
                        **changes,
                    )
                )
    return rows
