"""PromotingASHA under a simulated controller: random reports, failures, delays and interruptions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    ResourceChangingScheduler,
)
from ray.tune.search import ConcurrencyLimiter, Searcher
from ray.tune.search.search_generator import SearchGenerator

from horovod_tune.ray_compat.schedules import time_attr_of
from horovod_tune.search import PromotingASHA
from horovod_tune.search.promoting_asha import Rungs

EPOCHS, SAMPLES, AT_ONCE = 9, 30, 3


class Trial:
    def __init__(self, trial_id: str, quality: float) -> None:
        self.trial_id, self.quality, self.status = trial_id, quality, "PENDING"
        self.epoch, self.saved, self.checkpoint = 0, 0, None
        self.last_result: dict[str, Any] = {}
        self.reports: list[dict[str, Any]] = []
        self.pauses = False

    def set_status(self, status: str) -> None:
        self.status = status


class Counts(Searcher):
    """Suggests nothing in particular; records which trials it is told the end of."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []

    def suggest(self, trial_id: str) -> dict[str, Any]:
        return {}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        self.ended.append(trial_id)


class Controller:
    """Simulates Tune: one event after the other, in a random order."""

    def __init__(self, seed: int, saves: bool, failures: float, nans: float, batches: bool = False) -> None:
        self.random = np.random.default_rng(seed)
        self.saves, self.failures, self.nans = saves, failures, nans
        self.search = Counts()
        self.limiter = ConcurrencyLimiter(self.search, max_concurrent=AT_ONCE, batch=batches)
        self.search_alg = SearchGenerator(self.limiter)
        self.trials: list[Trial] = []
        self.most_paused, self.interrupted = 0, False
        self.scheduler = self.new_scheduler()

    @staticmethod
    def new_scheduler() -> PromotingASHA:
        return PromotingASHA(metric="loss", mode="min", max_t=EPOCHS, grace_period=1)

    def get_trials(self) -> list[Trial]:
        return self.trials

    def stop_trial(self, trial: Trial) -> None:
        if trial.status == "RUNNING":
            self.scheduler.on_trial_complete(self, trial, trial.last_result)  # type: ignore[arg-type]
        else:
            self.scheduler.on_trial_remove(self, trial)  # type: ignore[arg-type]
        self.limiter.on_trial_complete(trial.trial_id)
        trial.status = "TERMINATED"

    def step(self) -> bool:
        """Do what Tune does in a step; return True if the search is over."""
        if len(self.trials) < SAMPLES and not any(trial.status == "PENDING" for trial in self.trials):
            trial = Trial(f"t{len(self.trials)}", self.random.random())
            if self.limiter.suggest(trial.trial_id) is not None:
                self.trials.append(trial)
                self.scheduler.on_trial_add(self, trial)  # type: ignore[arg-type]
        if len(self.trials) == SAMPLES:
            self.search_alg.set_finished()
        chosen: Any = self.scheduler.choose_trial_to_run(self)
        if chosen is not None:
            assert chosen.status in ("PENDING", "PAUSED")
            chosen.status, chosen.pauses = "RUNNING", False
            if chosen.checkpoint is None:
                chosen.epoch = 0
            chosen.epoch = chosen.saved
        # A trial that fails while it is saved in order to wait has to run until its next report.
        waiting = self.scheduler._rungs.waiting | self.scheduler._failed_waiting
        trains = [t for t in self.trials if t.status == "RUNNING" and t.trial_id not in waiting]
        # Those that failed so and had been tried again when the search was interrupted run with the others.
        assert len(trains) <= AT_ONCE * (2 if self.interrupted and self.failures else 1)
        runs = [trial for trial in self.trials if trial.status == "RUNNING"]
        self.most_paused = max(self.most_paused, sum(trial.status == "PAUSED" for trial in self.trials))
        if runs:
            self.event(runs[self.random.integers(len(runs))])
        return len(self.trials) == SAMPLES and all(t.status in ("TERMINATED", "ERROR") for t in self.trials)

    def event(self, trial: Trial) -> None:
        fails, pauses, trial.pauses = self.random.random() < self.failures, trial.pauses, False
        if pauses and not fails:  # its save is over
            trial.status = "PAUSED"
            return
        if fails:
            self.scheduler.on_trial_error(self, trial)  # type: ignore[arg-type]
            if self.random.random() < 0.5:  # tried again
                trial.status = "PENDING"
                self.scheduler.on_trial_add(self, trial)  # type: ignore[arg-type]
            else:
                self.limiter.on_trial_complete(trial.trial_id, error=True)
                trial.status = "ERROR"
            return
        trial.epoch += 1
        value = math.nan if self.random.random() < self.nans else trial.quality + 1 / trial.epoch
        result = {"loss": value, "training_iteration": trial.epoch, "should_checkpoint": self.saves}
        decision = self.scheduler.on_trial_result(self, trial, result)  # type: ignore[arg-type]
        trial.last_result = result
        trial.reports.append(result)
        if self.saves:
            trial.checkpoint, trial.saved = "saved", trial.epoch  # type: ignore[assignment]
        if decision == "STOP" or trial.epoch == EPOCHS:
            self.stop_trial(trial)
        trial.pauses = decision == "PAUSE"

    def interrupt(self) -> None:
        """Begin again with a new scheduler, as `Tuner.restore` does."""
        before, self.scheduler, self.interrupted = self.scheduler, self.new_scheduler(), True
        for trial in self.trials:
            if trial.status in ("RUNNING", "PAUSED", "PENDING"):
                trial.status, trial.pauses = "PENDING", False
            self.scheduler.on_trial_add(self, trial)  # type: ignore[arg-type]
        if not self.failures and not self.nans:
            assert self.scheduler._rungs.values == before._rungs.values


@pytest.fixture(autouse=True)
def reports_of_played_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod_tune.search.promoting_asha.reports_of", lambda trial: trial.reports)


@pytest.mark.parametrize("interrupted", [False, True], ids=["", "interrupted"])
@pytest.mark.parametrize(
    ("saves", "failures", "nans"),
    [(True, 0, 0), (False, 0, 0), (True, 0.1, 0), (False, 0.1, 0), (True, 0.05, 0.1), (True, 0, 1)],
    ids=["saves", "saves nothing", "fails", "saves nothing and fails", "NaN at times", "NaN always"],
)
@pytest.mark.parametrize("seed", range(10))
def test_every_search_ends(seed: int, saves: bool, failures: float, nans: float, interrupted: bool) -> None:
    controller = Controller(seed, saves, failures, nans)
    for number in range(5000):
        if controller.step():
            break
        if interrupted and number in (40, 90):
            controller.interrupt()
    else:
        statuses = [(trial.trial_id, trial.status, trial.epoch) for trial in controller.trials]
        pytest.fail(f"still not over: {statuses}, waiting {controller.scheduler._rungs.waiting}")
    ended = [trial for trial in controller.trials if trial.status == "TERMINATED"]
    failed = [trial.trial_id for trial in controller.trials if trial.status == "ERROR"]
    assert set(failed) <= set(controller.search.ended), "the search is told of each failure"
    if nans == 1:
        return
    lengths = sorted(trial.epoch for trial in ended)
    if not failures:
        assert lengths[-1] == EPOCHS, lengths
    if not failures and not nans:
        assert sum(lengths) < 0.7 * EPOCHS * SAMPLES, "the worse ones have not been trained to the end"
        assert not saves or controller.most_paused > AT_ONCE, "those that wait take no slot"
        if saves and not interrupted:
            finished = [trial.quality for trial in ended if trial.epoch == EPOCHS]
            assert min(finished) == min(trial.quality for trial in ended), "the best one has been"


@pytest.mark.parametrize("failures", [0, 0.1])
@pytest.mark.parametrize("seed", range(10))
def test_a_limiter_of_batches_waits_for_no_paused_trial(seed: int, failures: float) -> None:
    controller = Controller(seed, True, failures, 0.3, batches=True)
    assert any(controller.step() for _ in range(5000)), controller.limiter.live_trials


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "most"}, "mode must be one of max, min, got 'most'"),
        ({"grace_period": 0}, r"grace_period \(with max_t=100\) must be more than 0 and at most 100, got 0"),
        ({"grace_period": 5, "max_t": 3}, "at most 3, got 5"),
        ({"max_t": math.inf}, "max_t must be a finite number, got inf"),
        ({"max_t": 0}, "max_t must be more than 0, got 0"),
        ({"time_attr": None}, "time_attr must be the name of a reported value, got None"),
        ({"metric": ["a"]}, r"metric must be the name of a reported value, got \['a'\]"),
        ({"metric": ""}, "metric must be the name of a reported value, got ''"),
        ({"reduction_factor": 1.0000001}, "reduction_factor must be at least 1.1, got 1.0000001"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromotingASHA(**arguments)


def test_without_a_metric_it_is_an_error() -> None:
    scheduler = PromotingASHA()
    with pytest.raises(ValueError, match="needs a metric and a mode"):
        scheduler.on_trial_add(None, Trial("a", 0.0))  # type: ignore[arg-type]


def test_a_report_without_the_time_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = PromotingASHA(time_attr="epochs", metric="loss", mode="min", max_t=9)
    trial: Any = Trial("a", 0.0)
    for epoch in (1, 2):
        assert scheduler.on_trial_result(None, trial, {"loss": 0.5, "epoch": epoch}) == "CONTINUE"
    [record] = caplog.records
    assert "time_attr 'epochs'" in record.message and "it reported ['epoch', 'loss']" in record.message


def test_the_tuners_metric_is_taken_but_not_a_second_one() -> None:
    scheduler = PromotingASHA(mode="max")
    assert not scheduler.set_search_properties("loss", "min")
    assert scheduler.set_search_properties("accuracy", None) and scheduler.metric == "accuracy"


def test_with_one_rung_only_the_end_counts() -> None:
    controller = Controller(0, saves=True, failures=0, nans=0)
    controller.scheduler = PromotingASHA(metric="loss", mode="min", max_t=EPOCHS, grace_period=EPOCHS)
    while not controller.step():
        pass
    assert {trial.epoch for trial in controller.trials} == {EPOCHS}


def waiting_at_a_rung(*losses: float) -> tuple[Controller, list[Trial]]:
    """Return trials that are paused at the first rung, and one more that runs."""
    controller = Controller(0, saves=True, failures=0, nans=0)
    controller.trials = [Trial(f"t{number}", loss) for number, loss in enumerate((*losses, 0.0))]
    for trial in controller.trials:
        controller.scheduler.on_trial_add(controller, trial)  # type: ignore[arg-type]
        trial.status = "RUNNING"
    for trial in controller.trials[:-1]:
        assert report(controller, trial, 1, trial.quality) == "PAUSE"
        trial.status, trial.checkpoint = "PAUSED", "saved"  # type: ignore[assignment]
    return controller, controller.trials


def report(controller: Controller, trial: Any, time: int, loss: float) -> str:
    trial.last_result = {"loss": loss, "training_iteration": time, "should_checkpoint": True}
    return controller.scheduler.on_trial_result(controller, trial, trial.last_result)  # type: ignore[arg-type]


def test_a_trial_that_is_paused_for_other_resources_continues() -> None:
    controller, (_, runs) = waiting_at_a_rung(1.0)
    runs.status = "PAUSED"
    assert controller.scheduler.choose_trial_to_run(controller) is runs


def test_a_report_of_nan_at_a_rung_lets_the_best_third_continue() -> None:
    controller, (best, _, runs) = waiting_at_a_rung(1.0, 2.0)
    assert report(controller, runs, 1, math.nan) == "STOP"
    assert controller.scheduler.choose_trial_to_run(controller) is best


@pytest.mark.parametrize("restored", [False, True])
def test_a_training_that_ends_with_nan_does_not_end_those_that_wait(restored: bool) -> None:
    controller, (best, _, runs) = waiting_at_a_rung(1.0, 2.0)
    assert report(controller, runs, EPOCHS, math.nan) == "STOP"
    runs.reports = [runs.last_result]
    controller.stop_trial(runs)
    if restored:
        controller.interrupt()
    controller.search_alg.set_finished()
    assert controller.scheduler.choose_trial_to_run(controller) is best


def test_the_best_third_continues_whenever_it_came():
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


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (ASHAScheduler(max_t=52), "training_iteration"),
        (ASHAScheduler(time_attr="epoch", max_t=20), "epoch"),
        (PromotingASHA(time_attr="samples", max_t=5e4), "samples"),
        (HyperBandScheduler(max_t=81), "training_iteration"),
        (HyperBandForBOHB(max_t=27), "training_iteration"),
        (ResourceChangingScheduler(ASHAScheduler(max_t=9)), "training_iteration"),
        (PopulationBasedTraining(hyperparam_mutations={"x": [1, 2]}), None),
        (MedianStoppingRule(), None),
        (FIFOScheduler(), None),
        ("asha", None),
        (None, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_time_attribute_of_a_scheduler_that_ends_trainings(scheduler: Any, expected: Any) -> None:
    assert time_attr_of(scheduler) == expected


def test_one_that_waits_higher_up_is_not_continued_for_its_place_lower_down() -> None:
    rungs = Rungs([1, 2], factor=2)
    for trial, time in (("a", 2), ("b", 2), ("c", 1), ("d", 1)):
        rungs.reach(trial, time, -ord(trial))
    assert [rungs.next(), rungs.next()] == ["a", None]
