"""PromotingASHA under a controller that is played: random reports, failures, delays and interruptions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from ray.tune.search import ConcurrencyLimiter, Searcher
from ray.tune.search.search_generator import SearchGenerator

from horovod_tune.search import PromotingASHA

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
    """Suggests nothing in particular."""

    def suggest(self, trial_id: str) -> dict[str, Any]:
        return {}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        pass


class Controller:
    """Plays Tune: one event after the other, in a random order."""

    def __init__(self, seed: int, saves: bool, failures: float, nans: float) -> None:
        self.random = np.random.default_rng(seed)
        self.saves, self.failures, self.nans = saves, failures, nans
        self.limiter = ConcurrencyLimiter(Counts(), max_concurrent=AT_ONCE)
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
        """Do what Tune does in a step; return whether the search is over."""
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
    if nans == 1:
        return
    lengths = sorted(trial.epoch for trial in ended)
    if not failures:
        assert lengths[-1] == EPOCHS, lengths
    if not failures and not nans:
        assert sum(lengths) < 0.7 * EPOCHS * SAMPLES, "the worse ones have not been trained to the end"
        assert not saves or controller.most_paused > AT_ONCE, "those that wait take no place"
        if saves and not interrupted:
            finished = [trial.quality for trial in ended if trial.epoch == EPOCHS]
            assert min(finished) == min(trial.quality for trial in ended), "the best one has been"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "most"}, "mode must be 'min' or 'max', got 'most'"),
        ({"grace_period": 0}, "grace_period must be above 0 and at most max_t=100"),
        ({"grace_period": 5, "max_t": 3}, "at most max_t=3, which is finite; got 5"),
        ({"max_t": math.inf}, "max_t=inf"),
        ({"max_t": 0}, "max_t must be above 0, got 0"),
        ({"max_t": "9"}, "max_t must be a number, got '9'"),
        ({"reduction_factor": None}, "reduction_factor must be a number, got None"),
        ({"time_attr": None}, "time_attr must be the name of a reported value, got None"),
        ({"metric": ["a"]}, r"metric must be the name of one reported value, got \['a'\]"),
        ({"reduction_factor": 1}, "reduction_factor must be above 1, got 1"),
        ({"reduction_factor": math.nan}, "got nan"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromotingASHA(**arguments)


def test_without_a_metric_it_says_so() -> None:
    scheduler = PromotingASHA()
    with pytest.raises(ValueError, match="needs a metric and a mode"):
        scheduler.on_trial_add(None, Trial("a", 0.0))  # type: ignore[arg-type]


def test_a_report_without_the_time_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
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
