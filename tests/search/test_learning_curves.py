"""Trials that report several times: what a search learns from running and stopped ones."""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conformance import METRIC, Loop, Outcome, searcher
from ray import tune
from ray.tune.schedulers import ASHAScheduler, TrialScheduler
from ray.tune.search import ConcurrencyLimiter, Searcher

from horovod_tune.search import BayesOptSearch, optimizer
from horovod_tune.search.curve_rows import axis, rows_of
from horovod_tune.search.gp.acquisition import Posterior
from horovod_tune.search.history import Ending, Trial

SPACE = {"x": tune.uniform(0.0, 1.0), "y": tune.uniform(0.0, 1.0), "z": tune.uniform(0.0, 1.0)}
EPOCHS = 27


def curve(config: dict[str, Any]) -> list[float]:
    """Losses that fall towards a bowl; the further from its bottom, the more slowly."""
    floor = (config["x"] - 0.7) ** 2 + (config["y"] - 0.2) ** 2 + 0.3 * (config["z"] - 0.5) ** 2
    speed = 0.5 + 0.5 * config["x"]
    return [floor + 2.0 * epoch**-speed for epoch in range(1, EPOCHS + 1)]


def final(config: dict[str, Any]) -> float:
    return curve(config)[-1]


def asha(
    search: Searcher, trials: int, workers: int = 4, curve: Callable[[dict[str, Any]], list[float]] = curve
) -> list[dict[str, Any]]:
    """Run trials under Tune's ASHA, a report of each worker in turn; return the configurations."""
    limited = ConcurrencyLimiter(search, workers)
    assert limited.set_search_properties(METRIC, "min", SPACE)
    scheduler = ASHAScheduler(metric=METRIC, mode="min", max_t=EPOCHS, grace_period=1, reduction_factor=3)
    live: list[tuple[int, int, int, SimpleNamespace]] = []
    configs: list[dict[str, Any]] = []
    clock = 0
    while live or len(configs) < trials:
        while len(live) < workers and len(configs) < trials:
            config = limited.suggest(f"t{len(configs)}")
            assert config is not None
            trial = SimpleNamespace(trial_id=f"t{len(configs)}", losses=curve(config))
            scheduler.on_trial_add(None, trial)
            heapq.heappush(live, (clock + 1, len(configs), 1, trial))
            configs.append(config)
        clock, number, epoch, trial = heapq.heappop(live)
        result = {METRIC: trial.losses[epoch - 1], "training_iteration": epoch}
        if scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP or epoch == EPOCHS:
            limited.on_trial_complete(trial.trial_id, result | {"done": True})
        else:
            limited.on_trial_result(trial.trial_id, result)
            heapq.heappush(live, (clock + 1, number, epoch + 1, trial))
    return configs


@pytest.mark.slow
def test_under_asha_it_finds_what_ends_best_and_logs_once_that_it_uses_curves(caplog: Any) -> None:
    found = [asha(searcher(seed), 25) for seed in range(3)]
    said = [message for message in caplog.messages if "learns from the curves" in message]
    assert len(said) == 3 and "'training_iteration'" in said[0]
    blind = [asha(searcher(seed, random_search_steps=25), 25) for seed in range(3)]
    best, best_blind = (np.median([min(map(final, c)) for c in configs]) for configs in (found, blind))
    lowest = 0.113  # at x = 0.79, y = 0.2, z = 0.5
    assert best - lowest < 0.3 * (best_blind - lowest)


def test_a_running_trial_already_teaches() -> None:
    """The same trials, all still running; in one search the last of them has bad reports."""
    assert after_some_epochs(set()).suggest("next") != after_some_epochs(set(), 5.0).suggest("next")


def after_some_epochs(ended: set[int], worse: float = 0.0) -> BayesOptSearch:
    """Return a search with the results of six trials, some of which were stopped; the last may be worse."""
    search = searcher()
    search.set_search_properties(METRIC, "min", SPACE)
    configs = [search.suggest(f"t{number}") for number in range(6)]
    for number, config in enumerate(configs):
        assert config is not None
        for epoch in (1, 2, 3) if number else range(1, EPOCHS + 1):
            value = curve(config)[epoch - 1] + worse * (number == 5)
            result = {METRIC: value, "training_iteration": epoch}
            search.on_trial_result(f"t{number}", result)
        if number in ended:
            search.on_trial_complete(f"t{number}", result)
    return search


def test_a_stopped_trial_counts_as_one_that_waits_at_a_rung() -> None:
    """What is expected of its end counts, or others like it would be asked for again and again."""
    suggested = [after_some_epochs(ended).suggest("next") for ended in (set(), {3, 4}, {0, 1, 2, 3, 4, 5})]
    assert suggested[0] == suggested[1] == suggested[2]


def test_of_very_many_unfinished_trials_the_most_promising_are_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = after_some_epochs({0, 1, 2, 3, 4, 5})
    seen: list[np.ndarray] = []

    def watched(model: Any, pending: np.ndarray, *rest: Any, expected: int, **named: Any) -> Posterior:
        seen.append(pending[:expected, :3].round(9))
        return Posterior(model, pending, *rest, expected=expected, **named)

    monkeypatch.setattr(optimizer, "Posterior", watched)
    monkeypatch.setattr(optimizer, "_MOST_EXPECTED", 2)
    assert search.suggest("next") is not None
    best = sorted(list(search._history.trials.values())[1:6], key=lambda trial: trial.curve[3.0])[:2]
    assert {tuple(row) for row in seen[0]} == {tuple(np.round(trial.point, 9)) for trial in best}


def test_one_report_a_trial_is_no_curve(caplog: Any) -> None:
    search = searcher()
    search.set_search_properties(METRIC, "min", SPACE)
    with caplog.at_level(logging.INFO, logger="horovod_tune.search"):
        Loop(search, None).run(9, lambda c: {METRIC: final(c), "training_iteration": EPOCHS})
    assert "learns from the curves" not in caplog.text


def test_reports_without_a_number_or_a_time_are_left_out() -> None:
    search = searcher()
    search.set_search_properties(METRIC, "min", SPACE)
    search.suggest("t")
    for report in (
        {METRIC: math.nan, "training_iteration": 1},
        {METRIC: "good", "training_iteration": 2},
        {METRIC: 0.5, "training_iteration": None},
        {METRIC: 0.5},
        {"training_iteration": 5},
    ):
        search.on_trial_result("t", report)
    assert search._history.trials["t"].curve == {}


@pytest.mark.parametrize(
    ("of_search", "of_scheduler", "expected"),
    [("epoch", None, {8.0: 0.5}), (None, "epoch", {8.0: 0.5}), ("training_iteration", "epoch", {1.0: 0.5})],
)
def test_time_is_what_was_named_or_the_schedulers_and_ends_with_the_tuners_stop_criterion(
    of_search: str | None, of_scheduler: str | None, expected: dict[float, float]
) -> None:
    search = searcher(time_attr=of_search)
    if of_scheduler is not None:
        search.set_time_attr(of_scheduler)
    search.set_search_properties(METRIC, "min", SPACE, stop={"epoch": 40, "training_iteration": 40})
    search.suggest("t")
    search.on_trial_result("t", {METRIC: 0.5, "training_iteration": 1, "epoch": 8})
    assert search._history.trials["t"].curve == expected and search._optimizer.horizon == 40


@pytest.mark.parametrize("ended", [False, True])
def test_reports_without_the_time_are_logged_once(ended: bool, caplog: pytest.LogCaptureFixture) -> None:
    search = searcher(time_attr="epochs")
    search.set_search_properties(METRIC, "min", SPACE)
    for number in range(3):
        search.suggest(str(number))
        report = {METRIC: 0.5, "training_iteration": 1, "epoch": 1}
        (search.on_trial_complete if ended else search.on_trial_result)(str(number), report)
    [said] = [record.message for record in caplog.records if "time_attr" in record.message]
    assert "a report of trial 0 has no number for the time_attr 'epochs'" in said
    assert "the report has ['epoch', " in said


def test_rows_end_at_the_known_end_and_results_from_elsewhere_are_whole_trainings() -> None:
    running = Trial("a", (0.1,), curve={1.0: 3.0, 2.0: 2.0})
    known = Trial("b", (0.2,), Ending.SCORED, value=1.0)
    rows = rows_of([running, known], horizon=50.0)
    assert (rows.trials, list(rows.values)) == ([0, 0, 1], [3.0, 2.0, 1.0])
    assert rows.target == rows.times[2] == axis(50.0)
    assert rows_of([running, known], horizon=None).target == axis(2.0)


def run(
    search: BayesOptSearch, trials: int, outcome: Callable[[dict[str, Any]], Outcome]
) -> list[dict[str, Any]]:
    """Run trials one after the other in a square."""
    square = {"x": tune.uniform(0.0, 1.0), "y": tune.uniform(0.0, 1.0)}
    return Loop(search, square, in_flight=1).run(trials, outcome)


@pytest.mark.slow
def test_diverged_trials_that_report_huge_losses_do_not_hide_the_rest() -> None:
    def loss(config: dict[str, Any]) -> float:
        return 1e6 if config["x"] > 0.6 else 1.0 - config["x"] + (config["y"] - 0.5) ** 2

    searches = [run(searcher(seed), 25, loss) for seed in range(3)]
    assert np.median([min(map(loss, configs)) for configs in searches]) < 0.43
    assert np.median([sum(config["x"] > 0.6 for config in configs[10:]) for configs in searches]) <= 9


@pytest.mark.long
def test_known_failures_are_avoided_from_the_second_point_on() -> None:
    """Three quarters of the space fail; the quasi-random start keeps away from where trials have failed."""

    def fails(config: dict[str, Any]) -> bool:
        return config["x"] > 0.5 or config["y"] > 0.5

    def outcome(config: dict[str, Any]) -> float | Exception:
        return RuntimeError("crash") if fails(config) else 1.0 + config["x"]

    searches = [run(searcher(seed, random_search_steps=16), 16, outcome) for seed in range(5)]
    assert np.median([sum(map(fails, configs)) for configs in searches]) <= 9, "a plain sequence has 12 of 16"


def distance(config: dict[str, Any]) -> float:
    return (config["x"] - 0.3) ** 2 + (config["y"] - 0.6) ** 2


#: What curves add to the distance, by how they continue after one: to the end they fall, overfit, rise, ...
COURSES: dict[str, Callable[[int], float]] = {
    "falling": lambda k: 1 / (k + 1),
    "overfitting": lambda k: 1 / (k + 1) + 0.02 * k,
    "rising": lambda k: 0.05 * k,
    "rising a little": lambda k: 0.002 * k,
    "falling and rising": lambda k: 0.05 * abs(k - 4),
    "up and down": lambda k: 0.3 * (k % 3),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("course", "mode"), [*((course, "min") for course in COURSES), ("falling and rising", "max")]
)
def test_curves_of_any_course_lead_to_the_best(course: str, mode: str) -> None:
    """An early report that no end can reach is not what has to be beaten: nothing would be expected."""
    sign = 1.0 if mode == "min" else -1.0

    def reports(config: dict[str, Any]) -> tuple[dict[str, float], ...]:
        values = [sign * (distance(config) + COURSES[course](k)) for k in range(9)]
        return tuple({METRIC: value, "training_iteration": k + 1} for k, value in enumerate(values))

    found = run(BayesOptSearch(metric=METRIC, mode=mode), 30, reports)
    assert sum(distance(config) < 0.005 for config in found[-10:]) >= 7


@pytest.mark.slow
@pytest.mark.parametrize("course", ["overfitting", "rising", "falling and rising"])
def test_curves_of_any_course_lead_to_the_best_where_many_are_stopped(course: str) -> None:
    def curve(config: dict[str, Any]) -> list[float]:
        return [distance(config) + COURSES[course](k) for k in range(EPOCHS)]

    found = asha(BayesOptSearch(metric=METRIC, mode="min"), trials=40, curve=curve)
    assert sum(distance(config) < 0.01 for config in found[-15:]) >= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "last"),
    [(range(9, 0, -1), None), (range(1, 10), 1), (range(1, 10), 5)],
    ids=["that go down", "and a last report of the first", "and a last report of one between"],
)
def test_times_that_go_back_do_not_keep_it_from_the_best(times: range, last: int | None) -> None:
    def reports(config: dict[str, Any]) -> tuple[dict[str, float], ...]:
        end = distance(config)
        found = tuple({METRIC: end + 1 / (k + 1), "epoch": time} for k, time in enumerate(times))
        return found if last is None else (*found, {METRIC: end, "epoch": last})

    found = run(BayesOptSearch(metric=METRIC, mode="min", time_attr="epoch"), 30, reports)
    assert sum(distance(config) < 0.005 for config in found[-10:]) >= 7
