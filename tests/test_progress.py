"""The time that is left, by a clock that the test sets."""

import numpy as np
import pytest
from rich.progress import Progress

from eval.protocols import Window
from eval.scoring import score_plan
from posenc import progress
from posenc.progress import Reporter

pytestmark = pytest.mark.fast


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_the_time_left_is_by_what_is_being_done_now(clock, capsys):
    report = Reporter("score", 1000, 0, None)
    # Half was kept, and found within 2 s; then 10 units take 11 s.
    for seconds, done, kept in ((1, 300, 300), (1, 500, 200), (11, 510, 0)):
        clock.now += seconds
        report.update(done, "tokens,", kept)
    # As many again were kept in between, which took 40 s to find: as fast as before.
    for seconds, done, kept in ((40, 700, 190), (11, 710, 0), (319, 1000, 0)):
        clock.now += seconds
        report.update(done, "tokens,", kept)
    assert capsys.readouterr().out.splitlines() == [
        "score: 510/1000 tokens, 539 s left",  # 490 units at 11 s for 10
        "score: 700/1000 tokens, 330 s left",
        "score: 710/1000 tokens, 319 s left",
        "score: 1000/1000 tokens, 0 s left",
    ]
    # Nothing is known before anything was done.
    report = Reporter("score", 1000, 0, None)
    clock.now += 60
    report.update(900, "tokens,", 900)
    assert capsys.readouterr().out == "score: 900/1000 tokens,\n"


def test_a_bar_says_the_same(clock):
    shown = []

    class Bar(Progress):
        def add_task(self, title, **fields):
            return 7

        def update(self, task, **fields):
            shown.append((task, fields["completed"], fields["left"]))

    report = Reporter("score", 1000, 0, Bar())
    for seconds, done, kept in ((5, 500, 500), (60, 510, 0)):
        clock.now += seconds
        report.update(done, kept=kept)
    assert shown == [(7, 500, ""), (7, 510, "0:49:00 left")]


def test_scores_that_are_kept_are_told_apart(tmp_path):
    windows = [Window(0, start, 4, 1, False) for start in range(5)]
    documents, told = [np.arange(20)], []

    class Two:
        rows = 2

        def score(self, some):
            if self.stop and len(told) > 1:
                raise KeyboardInterrupt
            return [np.float32(window[1:]) for window in some]

    def run(stop):
        told.clear()
        scorer = Two()
        scorer.stop = stop
        say = told.append
        return score_plan(
            lambda: scorer, windows, documents, 0, tmp_path, {}, lambda n, k: say((n, k))
        )

    with pytest.raises(KeyboardInterrupt):
        run(True)
    assert told == [(0, True), (8, False)]
    scores = run(False)
    assert told == [(8, True), (8, False), (4, False)]
    np.testing.assert_array_equal(scores.nll, np.add.outer(range(5), [1, 2, 3]).ravel())
    run(False)
    assert told == [(20, True)]
