"""PromotingASHA on trials of two ranks, under Tune's own controller."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import cloudpickle
import pytest
from ray import tune
from ray.tune.search import ConcurrencyLimiter

from horovod_tune import DistributedTrainableCreator
from horovod_tune.analysis import analyze
from horovod_tune.analysis.expectations import expectations, standings
from horovod_tune.search import BayesOptSearch, PromotingASHA
from horovod_tune.search.rungs import Rungs

pytestmark = [pytest.mark.slow, pytest.mark.processes]

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS, SAMPLES = 9, 10
# All but the last two trials are given: a search that keeps improving continues nearly every one.
# The good ones come early: of these at most four continue from the first rung, whichever of two comes first.
POINTS = [{"x": x} for x in (0.05, 0.95, 0.5, 0.6, 0.1, 0.7, 0.8, 0.3)]


def given_points(concurrent=2):
    return ConcurrencyLimiter(
        BayesOptSearch(points_to_evaluate=POINTS, random_state=1), max_concurrent=concurrent
    )


def train(config):
    import tempfile

    import horovod.torch as hvd

    from horovod_tune import get_checkpoint, report

    hvd.init()
    start = get_checkpoint()
    done = int(Path(start.path, "step").read_text()) if start is not None else 0
    for step in range(done + 1, STEPS + 1):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            report(loss=config["x"] + 1 / step, step=step, checkpoint=folder)


def train_slowly(config):
    time.sleep(1.5)
    train(config)


def train_with_commits(config):
    import horovod.torch as hvd

    from horovod_tune import commit, get_state, report

    hvd.init()
    state = get_state() or {"step": 0}
    while state["step"] < STEPS:
        step = state["step"] + 1
        report(loss=config["x"] + 1 / step, step=step)
        state = {"step": step}
        commit(state)


class Watched(PromotingASHA):
    """Notes how many trials train or are about to, whenever Tune asks what to run."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.most = self.most_waiting = 0

    def choose_trial_to_run(self, tune_controller):
        trials = tune_controller.get_trials()
        statuses = [trial.status for trial in trials]
        # One that is saved in order to wait still runs.
        trains = [trial for trial in trials if trial.trial_id not in self._rungs.waiting]
        self.most = max(self.most, sum(trial.status in ("RUNNING", "PENDING") for trial in trains))
        self.most_waiting = max(self.most_waiting, statuses.count("PAUSED"))
        return super().choose_trial_to_run(tune_controller)


class DriverDies(tune.Callback):
    """Raises an error once it is saved that four trials are paused, one beyond the first rung; once."""

    def __init__(self, folder):
        self._folder, self._dies_at = folder, None

    def on_step_end(self, iteration, trials, **info):
        marker = self._folder / "died"
        paused = [
            trial.last_result.get("training_iteration", 0) for trial in trials if trial.status == "PAUSED"
        ]
        if self._dies_at is None and len(paused) >= 4 and max(paused) > 1:
            self._dies_at = time.monotonic() + 3.0
        if self._dies_at is not None and time.monotonic() > self._dies_at and not marker.exists():
            marker.touch()
            raise RuntimeError("the driver dies")


def run(tune_run, function, scheduler=None, concurrent=2, **arguments):
    settings = {
        "config": {"x": tune.uniform(0, 1)},
        "metric": "loss",
        "mode": "min",
        "num_samples": SAMPLES,
        "search_alg": given_points(concurrent),
        "scheduler": scheduler or Watched(max_t=STEPS, grace_period=1),
    } | arguments
    return tune_run(DistributedTrainableCreator(function, num_slots=2), **settings)


def steps_of(analysis):
    return [history["step"].tolist() for history in analysis.trial_dataframes.values() if len(history)]


@pytest.mark.contract
def test_trials_wait_and_the_best_go_on(tune_run):
    scheduler, search = Watched(time_attr="step", max_t=STEPS, grace_period=1), given_points()
    analysis = run(tune_run, train, scheduler, search_alg=search)
    assert search.searcher._time_attr == "step", "as its scheduler has it"
    assert [trial.status for trial in analysis.trials] == ["TERMINATED"] * SAMPLES
    steps = steps_of(analysis)
    for each in steps:
        assert each == list(range(1, len(each) + 1)), "no step twice, none left out"
    lengths = sorted(map(len, steps))
    assert set(lengths) <= {1, 3, STEPS} and lengths[-1] == STEPS
    assert lengths.count(1) >= 4 and sum(lengths) < 0.6 * STEPS * SAMPLES, lengths
    best = analysis.get_best_trial(scope="all")
    assert best.last_result["step"] == STEPS, "the best has been trained to the end"
    assert scheduler.most <= 2, "a trial that goes on takes a place of the limiter"
    assert scheduler.most_waiting >= 3, "those that wait hold none"
    assert "1: 10 trials" in scheduler.debug_string()
    seen = analyze(analysis)
    assert seen.state == "finished", "that those that waited have ended is written down"
    stopped = [number for number, each in enumerate(steps) if len(each) < STEPS]
    assert set(expectations(seen)) == set(standings(seen)) == set(stopped)


def test_with_tunes_own_generator(tune_run):
    """It limits trials by itself."""
    scheduler = Watched(max_t=STEPS, grace_period=1)
    analysis = run(tune_run, train, scheduler, search_alg=None, max_concurrent_trials=2)
    assert [trial.status for trial in analysis.trials] == ["TERMINATED"] * SAMPLES
    steps = steps_of(analysis)
    assert all(each == list(range(1, len(each) + 1)) for each in steps)
    assert max(map(len, steps)) == STEPS
    assert sum(map(len, steps)) < 0.5 * STEPS * SAMPLES
    assert scheduler.most <= 2 and scheduler.most_waiting >= 3


def test_functions_that_only_commit_are_paused(tune_run):
    # At the second report the first step has been committed.
    scheduler = Watched(max_t=STEPS, grace_period=2)
    analysis = run(tune_run, train_with_commits, scheduler)
    assert [trial.status for trial in analysis.trials] == ["TERMINATED"] * SAMPLES
    for each in steps_of(analysis):
        assert sorted(set(each)) == list(range(1, each[-1] + 1)), "none started over"
        assert len(each) - len(set(each)) <= 2, (
            "after each pause the step since the last commit is done again"
        )
    assert scheduler.most_waiting >= 3


def test_an_interrupted_search_goes_on(ray_session, tmp_path, monkeypatch):
    # Not with every step: the copy of one state to the storage would meet the next one half written.
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "1")
    tuner = tune.Tuner(
        DistributedTrainableCreator(train_slowly, num_slots=2),
        param_space={"x": tune.uniform(0, 1)},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=SAMPLES,
            search_alg=given_points(),
            scheduler=PromotingASHA(max_t=STEPS, grace_period=1),
        ),
        run_config=tune.RunConfig(
            name="interrupted", storage_path=str(tmp_path), verbose=0, callbacks=[DriverDies(tmp_path)]
        ),
    )
    with pytest.raises(Exception, match="the driver dies"):
        tuner.fit()
    taken_up: dict[str, list[float]] = {}
    resume = Rungs.resume

    def noted(rungs, trial, reports):
        taken_up[trial] = [time for time, _ in reports]
        return resume(rungs, trial, reports)

    monkeypatch.setattr(Rungs, "resume", noted)
    restored = tune.Tuner.restore(
        str(tmp_path / "interrupted"), trainable=DistributedTrainableCreator(train_slowly, num_slots=2)
    )
    results = restored.fit()
    assert len(results) == SAMPLES and not results.errors
    for times in taken_up.values():
        assert times == list(range(1, len(times) + 1)), "all that a trial had reported is known again"
    assert len(taken_up) >= 4 and max(map(len, taken_up.values())) > 1
    histories = [result.metrics_dataframe["step"].tolist() for result in results]
    for each in histories:
        # The state was saved up to a second before the driver died: a trial may do its last steps again.
        again = [index for index in range(1, len(each)) if each[index] <= each[index - 1]]
        assert len(again) <= 1 and set(each) == set(range(1, max(each) + 1)), each
    assert max(map(max, histories)) == STEPS
    assert sum(max(each) == 1 for each in histories) >= 3, "those that waited wait again"
