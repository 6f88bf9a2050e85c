"""The windows that plans cut against ones written out, token by token, without a model."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval import passes, results, texts
from eval.controls import CONTROLS
from eval.protocols import NllByContext, PerPosition, Scores, Settings
from eval.slices import Slices
from posenc.data import ByteTokenizer

pytestmark = pytest.mark.fast

L, BOS = 8, -1
LADDER = (5, 8, 12, 20)
LONGEST = max(LADDER)


def named(sizes):
    """Documents of which each token tells its document and its place."""
    return [np.arange(1000 * n, 1000 * n + size) for n, size in enumerate(sizes)]


def blocks(documents, most, spacing):
    """Where blocks end: the first with just enough before it, the last at the document's end."""
    for document in documents:
        room = len(document) - LONGEST
        if room >= 0:
            count = min(most, 1 + room // spacing)
            for n in range(count):
                yield document, LONGEST + (room // 2 if count == 1 else n * room // (count - 1))


def written_out(name, length, documents, ends, prepend):
    """What each window of a protocol holds, said in its own words."""
    if name != "nll_by_context" and (length >= L if name == "aligned" else length <= L):
        return []
    short = name in ("index_probe", "distance_probe")
    found = []
    for number, (document, end) in enumerate(ends):
        window = document[end - (L if short else length) : end].tolist()
        if name == "foreign_prefix":
            others = [d for d in documents if d is not document and len(d) >= LONGEST - L]
            if not others:
                return []
            other = others[number % len(others)].tolist()[: LONGEST - L]
            window[: length - L] = other[len(other) - (length - L) :]
            if prepend:  # takes the place of the first true token, as it does in the last L alone
                del window[length - L]
                window.insert(0, BOS)
        elif prepend:
            window[0] = BOS
        found.append(window)
    return found


@pytest.mark.parametrize("protocol", [NllByContext(), *CONTROLS.values()], ids=lambda p: p.name)
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.integers(LONGEST - 2, LONGEST + 2) | st.integers(0, 60), min_size=1, max_size=4
    ),
    bos=st.sampled_from(["keep", "prepend", "none"]),
    with_bos=st.booleans(),
    most=st.integers(1, 3),
    spacing=st.integers(1, 9),
)
def test_no_window_of_a_block_is_shorter_than_it_says(
    protocol, sizes, bos, with_bos, most, spacing
):
    documents = named(sizes)
    chosen = Settings(LADDER, 1, spacing, most, 30, bos, L)
    ends = list(blocks(documents, most, spacing))
    for length in LADDER:
        plan = protocol.plan(sizes, length, chosen, with_bos)
        windows = [window.tokens(documents, BOS).tolist() for window in plan]
        assert windows == written_out(protocol.name, length, documents, ends, bos == "prepend")
        positions = protocol.positions(length, chosen)
        places = length if positions is None else len(positions)
        for window, tokens in zip(plan, windows, strict=True):
            assert window.length == len(tokens) == places
            assert window.first == places - 1


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    length=st.integers(2, 12),
    bos=st.sampled_from(["keep", "prepend", "none"]),
    with_bos=st.booleans(),
)
def test_the_curve_by_position_has_full_windows_alone(sizes, length, bos, with_bos):
    documents, wanted = named(sizes), []
    for document in documents:
        rest = document[:30].tolist()
        if bos == "keep" and with_bos:
            rest.insert(0, BOS)
        while rest:
            window = [BOS, *rest[: length - 1]] if bos == "prepend" else rest[:length]
            wanted += [window] if len(window) == length else []
            # The next one begins with the last token of this one, after a BOS with the next token.
            rest = rest[length - 1 :]
    plan = PerPosition().plan(sizes, length, Settings((length,), 1, 8, 5, 30, bos), with_bos)
    found = [window.tokens(documents, BOS).tolist() for window in plan]
    assert found == wanted


class Uneven(ByteTokenizer):
    """Says that token t has t % 4 bytes: some have none, as special tokens have."""

    def count_bytes(self, ids):
        return int((np.asarray(ids) % 4).sum())


def test_bits_per_byte_are_of_the_very_tokens_that_the_loss_is_of():
    documents = named((31, 40, 22))
    text = texts.TestText(documents, Uneven(), 4)
    chosen = Settings(LADDER, 2, 5, 3, 30, "prepend", L, 3)
    protocols = [*passes.PLAIN.values(), *CONTROLS.values()]
    seen, without = set(), 0
    for length in (5, 20):
        plans = {p.name: p.plan([31, 40, 22], length, chosen, True) for p in protocols}
        for name, plan in plans.items():
            one = passes.Pass(passes.Job(length), {name: plan}, length)
            # Every loss is a function of the token itself, 0.1 nats times its place in it.
            scored = [w.tokens(documents, 4)[w.first :] for w in plan]
            nll = np.float32(np.concatenate([*scored, []]) % 1000 / 10)
            slices = Slices(documents, 2, np.arange(93) % 3 == 0)
            scores = Scores(one.windows, nll)
            for row in results.scored_rows(one, scores, text, slices, chosen, by_position=True):
                seen.add(row["protocol"])
                if row["protocol"] == "slice":
                    assert row["bits_per_byte"] is None
                    continue
                nats = count = 0
                for window in plan:
                    tokens = window.tokens(documents, 4)
                    low, high = row["position_from"], row["position_to"]
                    for token in tokens[low or window.first : high]:
                        nats, count = nats + token % 1000 / 10, count + token % 4
                # Targets without a byte of text have no such number, and are no division by 0.
                wanted = pytest.approx(nats / math.log(2) / count, rel=1e-6) if count else None
                assert row["bits_per_byte"] == wanted
                without += count == 0
    assert seen == {*passes.PLAIN, *CONTROLS, "slice"}
    assert without


def test_a_block_never_has_its_own_document_before_it_and_few_others_are_said(capsys):
    chosen = Settings(LADDER, 1, 5, 3, 30, "none", L)
    counts = {(25,): 0, (25, 11): 0, (25, 12): 1, (25,) * 3: 2, (25,) * 11: 10}
    for sizes, others in counts.items():
        text = texts.TestText(named(sizes), ByteTokenizer(), BOS)
        texts.check_foreign(text, chosen)
        said = capsys.readouterr().err
        one = passes.Pass(passes.Job(20), {}, 20)
        one.plans["foreign_prefix"] = plan = CONTROLS["foreign_prefix"].plan(
            sizes, 20, chosen, False
        )
        before = {(window.document, window.other) for window in plan}
        assert all(document != other for document, other in before)
        scores = Scores(plan, np.ones(len(plan), np.float32))
        (row,) = results.scored_rows(one, scores, text, None, chosen, by_position=True)
        why = "no other test document has the 12 tokens of a foreign prefix"
        assert (row["defined"], row["reason"]) == (others > 0, None if others else why)
        assert (row["context"], row["targets"]) == (19, 1)
        if others == 0:
            assert said == (
                f"warning: {why}: its rows are undefined; give shorter --lengths, or a text with "
                "more long documents\n"
            )
        elif others < 10:
            number = "1 other test document is" if others == 1 else "2 other test documents are"
            assert said.startswith(f"warning: only {number} long enough to be the foreign prefix")
        else:
            assert said == ""
    texts.check_foreign(text, Settings((5, 8), 1, 5, 3, 30, "none", L))
    assert capsys.readouterr().err == ""  # nothing is foreign up to L
