"""PromotingASHA on trials of two ranks, under Tune's own controller."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
from counting import train
from ray import tune
from ray.tune.search import ConcurrencyLimiter

from horovod_tune import DistributedTrainableCreator
from horovod_tune.analysis import analyze
from horovod_tune.search import BayesOptSearch, PromotingASHA

pytestmark = [pytest.mark.slow, pytest.mark.processes]

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS, SAMPLES = 9, 10
# All but the last two trials are given: a search that keeps improving continues nearly every one.
# The good ones come early: of these at most four continue from the first rung, whichever of two comes first.
POINTS = [{"x": x} for x in (0.05, 0.95, 0.5, 0.6, 0.1, 0.7, 0.8, 0.3)]


def given_points():
    return ConcurrencyLimiter(BayesOptSearch(points_to_evaluate=POINTS, random_state=1), max_concurrent=2)


class Watched(PromotingASHA):
    """Records how many trials train or are about to, whenever Tune selects what to run."""

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


@pytest.mark.contract
def test_trials_wait_and_the_best_continue(tune_run):
    scheduler, search = Watched(time_attr="step", max_t=STEPS, grace_period=1), given_points()
    analysis = tune_run(
        DistributedTrainableCreator(train, num_slots=2),
        config={"x": tune.uniform(0, 1), "steps": STEPS},
        metric="loss",
        mode="min",
        num_samples=SAMPLES,
        search_alg=search,
        scheduler=scheduler,
    )
    assert search.searcher._time_attr == "step", "as its scheduler has it"
    assert [trial.status for trial in analysis.trials] == ["TERMINATED"] * SAMPLES
    steps = [history["step"].tolist() for history in analysis.trial_dataframes.values() if len(history)]
    for each in steps:
        assert each == list(range(1, len(each) + 1)), "no step twice, none left out"
    lengths = sorted(map(len, steps))
    assert set(lengths) <= {1, 3, STEPS} and lengths[-1] == STEPS
    assert lengths.count(1) >= 4 and sum(lengths) < 0.6 * STEPS * SAMPLES, lengths
    best = analysis.get_best_trial(scope="all")
    assert best.last_result["step"] == STEPS, "the best has been trained to the end"
    assert scheduler.most <= 2, "a trial that continues takes a slot of the limiter"
    assert scheduler.most_waiting >= 3, "those that wait hold none"
    assert "1: 10 trials" in scheduler.debug_string()
    seen = analyze(analysis)
    assert seen.state == "finished", "the end of those that waited is recorded"
