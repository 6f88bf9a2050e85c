"""A small study as result rows, drawn from known numbers, and a reader of the page made of it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np

LENGTHS = (32, 64, 128, 256, 512, 1024)
LIMITED = "wpe(max_position=64)"
# What 16 times the training length costs, with the true context and with a foreign one.
SLOPES = {"rope": (0.5, 0.52), "alibi": (-0.05, 0.005), LIMITED: (0.0, 0.0)}
TOKENS = np.array([64, 128, 128, 32, 96, 128, 64, 128])
PROBES = ("index_probe", "distance_probe", "keys_probe")


def certificate(encoding, seed, train_length=64, **changes):
    return {
        **{"schema": 1, "run": f"tiny-{encoding}-T{train_length}-seed{seed}", "encoding": encoding},
        **{"model": "tiny", "sharing": "all", "positions": "sequential", "parameters": 117_120},
        **{"seed": seed, "train_tokens": 819_200, "train_flops": 6.5e11, "train_seconds": 17.2},
        **{"seeds_at_once": 1, "train_length": train_length, "checkpoint": "last"},
        **{"checkpoint_step": 400, "config_hash": "d444f045a7b4a9dd", "recipe_hash": "3df42fb4"},
        "data": {
            **{"bos": "document", "name": "manuals", "version": "1", "sha256": "ab" * 32},
            **{"split_rule": "documents", "split_version": "1", "tokenizer": "bytes"},
        },
        "trained_with": {
            **{"commit": "0123456789abcdef", "dirty": False, "device": "1 x cpu (cpu)"},
            **{"versions": {"jax": "0.10.2"}, "matmul_precision": None},
        },
        **{"commit": "fedcba9876543210", "dirty": False, "versions": {"jax": "0.10.2"}},
        **{"device": "1 x cpu (cpu)", "dtype": "float32", "matmul_precision": "highest"},
        **{"bos": "keep", "longest_length": 1024, "block_spacing": 64},
        **{"blocks_per_document": 16, "tokens_per_document": 4096},
        **{"settings": "shared", "tuning": None},
        **changes,
    }


def measured(base, protocol, length, sums=None, nll=None, reason=None, **changes):
    nll = float(sums.sum() / TOKENS.sum()) if sums is not None else nll
    documents = (
        {}
        if sums is None
        else {
            **{"document_index": list(range(len(TOKENS))), "document_nll": sums.tolist()},
            "document_tokens": TOKENS.tolist(),
        }
    )
    return {
        **base,
        **{"protocol": protocol, "length": length, "context": length - 8, "targets": 8},
        **{"blocks": 96, "position_from": None, "position_to": None, "extend": None},
        **{"defined": reason is None, "reason": reason, "nll": nll, "excess_nll": None},
        **{"tokens": int(TOKENS.sum()), "windows": 96, "documents": len(TOKENS)},
        "notes": ["few documents"],
        **documents,
        **changes,
    }


def study(encodings=SLOPES, seeds=(0, 1, 2), bound=True, more=True, **changes):
    """Rows of each encoding and seed at every length, with controls; a train-long run of rope."""
    rows = []
    for encoding in encodings:
        true, foreign = SLOPES.get(encoding, (0.1, 0.1))
        for seed in seeds:
            rng = np.random.default_rng([seed, len(encoding)])
            base = certificate(encoding, seed, **changes)
            documents = 2.4 + 0.2 * np.random.default_rng(7).normal(size=len(TOKENS))
            own = documents + 0.02 * rng.normal()

            def sums(excess, own=own, rng=rng):
                return (own + excess + 0.01 * rng.normal(size=len(TOKENS))) * TOKENS

            for length in LENGTHS:
                beyond = max(0.0, np.log2(length / 64)) / 4
                lost = "no position beyond 63" if encoding == LIMITED and length > 64 else None
                excess = 0.1 * 32 / length + true * beyond
                kept = {"last_validations": {"64": [2.8, 2.5, 2.52, 2.49, 2.51 + 0.01 * seed]}}
                rows.append(
                    measured(
                        base,
                        "nll_by_context",
                        length,
                        None if lost else sums(excess),
                        reason=lost,
                        **kept,
                    )
                )
                if not more:
                    continue
                rows.append(
                    measured(
                        base,
                        "non_overlapping",
                        length,
                        reason=lost,
                        nll=None if lost else 2.6 + excess + 0.01 * seed,
                    )
                )
                if length > 64 and not lost:
                    rows.append(
                        measured(base, "foreign_prefix", length, sums(0.05 + foreign * beyond))
                    )
                    rows += [
                        measured(base, probe, length, sums(0.05 + 0.1 * n * beyond))
                        for n, probe in enumerate(PROBES)
                    ]
                if not lost:
                    rows += [
                        measured(
                            base,
                            "slice",
                            length,
                            nll=2.0 + n + excess + 0.1 * seed,
                            slice=name,
                            ngram=4,
                            distance_from=low,
                            distance_to=high,
                        )
                        for n, (name, low, high) in enumerate(
                            [("novel", None, None), ("repeated", 1, 64), ("repeated", 64, None)]
                        )
                    ]
            if more:
                longest = 64 if encoding == LIMITED else 1024
                rows += [
                    measured(
                        base,
                        "per_position",
                        longest,
                        nll=3 - 0.1 * n + 0.01 * seed,
                        position_from=1 << n,
                        position_to=2 << n,
                    )
                    for n in range(longest.bit_length() - 1)
                ]
    for seed in seeds if bound and more else ():
        rng = np.random.default_rng([seed, 99])
        base = certificate("rope", seed, train_length=256, **changes)
        for length in (64, 256):
            sums_long = (2.1 + 0.02 * rng.normal() + 0.1 * rng.normal(size=len(TOKENS))) * TOKENS
            rows.append(measured(base, "nll_by_context", length, sums_long))
    return rows


def picked(rows, encoding, protocol, length, train_length=64):
    """Sums of documents, a row a seed."""
    found = [
        row
        for row in rows
        if (row["encoding"], row["protocol"], row["length"], row["train_length"])
        == (encoding, protocol, length, train_length)
    ]
    return np.array([row["document_nll"] for row in sorted(found, key=lambda row: row["seed"])])


class Reader(HTMLParser):
    """Tables by id, text and headings by section, and every tag with its attributes."""

    def __init__(self, page: str):
        super().__init__()
        self.tables: dict[str, tuple[list[str], list[list[str]]]] = {}
        self.sections: dict[str, str] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.styles, self.scripts = "", "", ""
        self._table, self._section, self._cell, self._open = None, None, None, []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag not in ("meta", "link"):
            self._open.append(tag)
        if tag == "section":
            self._section = attributes["id"]
            self.sections[self._section] = ""
        elif tag == "table":
            self._table = self.tables[attributes["id"]] = ([], [])
        elif tag == "tr" and "tbody" in self._open:
            self._table[1].append([])
        elif tag in ("th", "td"):
            self._cell = ""

    def handle_endtag(self, tag):
        if tag in ("th", "td"):
            head = "thead" in self._open
            (self._table[0] if head else self._table[1][-1]).append(self._cell.strip())
            self._cell = None
        elif tag == "section":
            self._section = None
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] in ("style", "script"):
            name = "styles" if self._open[-1] == "style" else "scripts"
            setattr(self, name, getattr(self, name) + data)
            return
        self.text += data
        if self._section:
            self.sections[self._section] += data
        if self._cell is not None:
            self._cell += data

    def cell(self, table, column, *first):
        """The text under a column, in the one line that begins with these cells."""
        header, lines = self.tables[table]
        (line,) = [line for line in lines if tuple(line[: len(first)]) == tuple(map(str, first))]
        return line[header.index(column)]


def numbers(text):
    """The numbers of a cell, in order: an estimate, and the limits of its interval."""
    found = re.findall(r"[\u2212-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", text)
    return [float(one.replace("\u2212", "-").replace(",", "")) for one in found]
