"""Which trials wait at rungs, and which continue."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_tune.search.rungs import Rungs


def test_a_trial_waits_at_each_rung_once():
    rungs = Rungs([2, 6, 18], factor=3)
    assert [rungs.reach("a", time, 0.5) for time in (1, 2)] == [False, True]
    assert rungs.waiting == {"a"}
    assert rungs.best_waiting() == "a"
    assert [rungs.reach("a", time, 0.5) for time in (3, 2, 6)] == [False, False, True]


def test_the_best_third_goes_on_whenever_it_came():
    rungs = Rungs([2, 6], factor=3)
    went_on = []
    for trial, value in [
        ("late", 5.0),
        ("bad", 1.0),
        ("worse", 0.5),
        ("good", 6.0),
        ("fair", 2.0),
        ("poor", 0.1),
    ]:
        assert rungs.reach(trial, 2, value)
        went_on.append(rungs.next())
    assert went_on == [None, None, "late", "good", None, None]


def test_one_that_reports_seldom_counts_at_each_rung_that_it_passed():
    rungs = Rungs([2, 6], factor=2)
    assert rungs.reach("a", 10, 1.0)
    assert [rungs.rank("a"), rungs.values] == [(1, 1), [{"a": 1.0}, {"a": 1.0}]]


def test_the_one_that_came_furthest_goes_first():
    rungs = Rungs([1, 2], factor=2)
    for trial in "ab":
        rungs.reach(trial, 2, -ord(trial))
    for trial in "0c":
        rungs.reach(trial, 1, -ord(trial))
    assert [rungs.next(), rungs.next(), rungs.next()] == ["a", "0", None]


def test_one_that_has_ended_keeps_its_place_among_the_others():
    rungs = Rungs([1], factor=2)
    for trial, value in (("a", 1.0), ("b", 2.0)):
        rungs.reach(trial, 1, value)
    rungs.waiting.discard("b")
    assert rungs.next() is None, "the better half is a trial that has failed"


def test_those_of_an_interrupted_search_stand_where_they_stood():
    rungs = Rungs([1, 2], factor=2)
    assert rungs.resume("far", [(1, 1.5), (2, 0.1)])
    for trial, value in (("a", 1.0), ("b", 2.0)):
        assert rungs.resume(trial, [(1, value)])
    assert not rungs.resume("new", [(0.5, 3.0)])
    assert [rungs.rank(trial) for trial in ("far", "b")] == [(1, 1), (1, 3)]
    assert rungs.next() == "b", "it came after the one that went on, and is better"


@pytest.mark.parametrize("seed", range(20))
def test_about_as_many_go_on_as_should(seed):
    random = np.random.default_rng(seed)
    rungs, factor = Rungs([1, 3, 9], factor=3), 3
    done: dict[str, int] = {}
    for number in range(300):
        trial, rung = str(number), 0
        while trial is not None:
            assert rungs.reach(trial, [1, 3, 9][rung], float(random.normal()))
            trial = rungs.next()
            rung = done[trial] = done.get(trial, 0) + 1 if trial is not None else 0
            if rung == 3:
                break
    reached = [len(values) for values in rungs.values]
    assert reached[0] == 300
    assert 100 <= reached[1] <= 130 and reached[1] / factor - 1 <= reached[2] <= reached[1] / factor * 1.6
    # Nobody who should continue is left waiting.
    while (trial := rungs.next()) is not None:
        assert done.get(trial, 0) == 2, "after the last rung this test lets none go on"
