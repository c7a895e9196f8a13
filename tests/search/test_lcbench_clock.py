"""The clock loop under which searches are compared on learning curves, with a task that is made up."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

spec = importlib.util.spec_from_file_location(
    "lcbench_clock", Path(__file__).parents[2] / "benchmarks" / "lcbench_clock.py"
)
assert spec is not None and spec.loader is not None
clock = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = clock  # a dataclass looks its module up
spec.loader.exec_module(clock)

EPOCHS = 4


class Curves:
    """A trial's configuration is its curve."""

    best_error = 1.0

    def curve(self, config: dict[str, Any]) -> tuple[np.ndarray, float]:
        return np.array(config["errors"]), config.get("seconds", 1.0)


class Script:
    """Suggests from a list, and decides by trial and epoch."""

    def __init__(
        self, suggestions: Iterable[tuple[Hashable, Any] | None], decisions: dict[tuple[Hashable, int], Any]
    ) -> None:
        self._suggestions, self._decisions = iter(suggestions), decisions
        self.reports: list[tuple[Hashable, int, float]] = []
        self.seconds: list[float] = []

    def suggest(self) -> tuple[Hashable, Any] | None:
        return next(self._suggestions, None)

    def report(self, report: Any) -> Any:
        self.reports.append((report.trial, report.epoch, report.error))
        self.seconds.append(report.seconds)
        return self._decisions.get((report.trial, report.epoch), clock.Decision.CONTINUE)


def simulate(script: Script, *, workers: int = 1, trainings: tuple[int, ...]) -> Any:
    return clock.simulate(Curves(), script, workers=workers, epochs=EPOCHS, trainings=trainings)


def test_a_paused_trial_goes_on_where_it_was_and_its_epochs_count_once() -> None:
    a, b = {"errors": [9, 8, 7, 6], "seconds": 2.0}, {"errors": [5, 4, 3, 2]}
    pauses: dict[tuple[Hashable, int], Any] = {("a", 2): clock.Decision.PAUSE, ("b", 1): clock.Decision.PAUSE}
    script = Script([("a", a), ("b", b), ("a", None), ("b", None)], pauses)
    outcome = simulate(script, trainings=(1, 2))
    assert script.reports == [
        ("a", 1, 9), ("a", 2, 8), ("b", 1, 5),
        ("a", 3, 7), ("a", 4, 6), ("b", 2, 4), ("b", 3, 3), ("b", 4, 2),
    ]  # fmt: skip
    assert script.seconds == [2, 4, 1, 6, 8, 2, 3, 4]
    assert outcome.trials == len(outcome.suggestion_seconds) == 2


def test_regret_is_that_of_the_smallest_error_so_far() -> None:
    script = Script([("a", {"errors": [3, 2, 9, 9]}), ("b", {"errors": [8, 8, 8, 1.5]})], {})
    assert simulate(script, trainings=(1, 2)).regrets == [1.0, 0.5]


def test_a_stopped_trial_makes_room_for_a_new_one() -> None:
    curves = [(number, {"errors": [number + 2.0] * EPOCHS}) for number in range(4)]
    script = Script(curves, {(number, 1): clock.Decision.STOP for number in range(4)})
    outcome = simulate(script, trainings=(1,))
    assert [(trial, epoch) for trial, epoch, _ in script.reports] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert outcome.trials == 4 and outcome.regrets == [1.0]


def test_workers_train_side_by_side_each_as_long_as_its_task_says() -> None:
    slow, fast = {"errors": [9] * EPOCHS, "seconds": 2.5}, {"errors": [9] * EPOCHS, "seconds": 1.0}
    script = Script([("slow", slow), ("fast", fast)], {})
    simulate(script, workers=2, trainings=(2,))
    assert [trial for trial, *_ in script.reports][:5] == ["fast", "fast", "slow", "fast", "fast"]


def test_a_search_that_waits_is_asked_again_after_a_report() -> None:
    a, b = {"errors": [9] * EPOCHS}, {"errors": [8] * EPOCHS}
    script = Script([("a", a), None, ("b", b)], {})
    simulate(script, workers=2, trainings=(2,))
    assert [trial for trial, *_ in script.reports] == ["a", "a", "b", "a", "b", "a", "b", "b"]


def test_a_search_that_neither_suggests_nor_waits_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="suggests nothing"):
        simulate(Script([], {}), trainings=(1,))


def test_only_a_paused_trial_is_resumed() -> None:
    a = {"errors": [9] * EPOCHS}
    with pytest.raises(RuntimeError, match="trial a cannot be resumed"):
        simulate(Script([("a", a), ("a", a)], {}), workers=2, trainings=(1,))
