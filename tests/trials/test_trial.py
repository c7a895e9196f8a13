"""Real trials: real Ray, real Horovod, real Gloo, 2 ranks each."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from horovod_tune import DistributedTrainableCreator
from horovod_tune.errors import ResourcesUnavailable

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ray_session")]


def results_of(trial):
    lines = Path(trial.path, "result.json").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.contract
def test_the_guides_first_example_reports_rank_zero_once_per_report(tune_run):
    def training_function(config):
        import horovod.torch as hvd
        from ray import tune

        hvd.init()
        for _ in range(config["epochs"]):
            tune.report(test=1, rank=hvd.rank())

    from ray import tune

    trainable = DistributedTrainableCreator(training_function, num_slots=2)
    analysis = tune_run(
        trainable,
        num_samples=2,
        config={"epochs": tune.grid_search([1, 2, 3]), "lr": tune.grid_search([0.1, 0.2])},
        metric="test",
        mode="max",
    )
    assert len(analysis.trials) == 12
    assert analysis.best_config["epochs"] in (1, 2, 3)
    for trial in analysis.trials:
        results = results_of(trial)
        assert [result["training_iteration"] for result in results] == list(
            range(1, trial.config["epochs"] + 1)
        )
        assert {result["rank"] for result in results} == {0}
        assert trial.status == "TERMINATED"


def test_ranks_form_one_world_and_average_their_gradients(tune_run):
    def train(config):
        import horovod.torch as hvd
        import torch

        from horovod_tune import report

        hvd.init()
        report(
            rank=hvd.rank(),
            size=hvd.size(),
            local=hvd.local_size(),
            mean=hvd.allreduce(torch.tensor(float(hvd.rank()))),
            types=[type(v).__name__ for v in (config["lr"], config["name"])],
        )

    config = {"lr": 0.5, "name": "x"}
    analysis = tune_run(DistributedTrainableCreator(train, num_workers=2), config=config)
    (result,) = results_of(analysis.trials[0])
    assert (result["rank"], result["size"], result["local"], result["mean"]) == (0, 2, 2, 0.5)
    assert result["types"] == ["float", "str"]


def test_a_function_that_reports_on_rank_zero_only_works_too(tune_run):
    def train(config):
        import horovod.torch as hvd
        import torch

        from horovod_tune import report

        hvd.init()
        for step in range(3):
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"t{step}")
            if hvd.rank() == 0:
                report(total=total, step=step)

    analysis = tune_run(DistributedTrainableCreator(train, num_slots=2), num_samples=2)
    for trial in analysis.trials:
        assert [(r["step"], r["total"]) for r in results_of(trial)] == [(0, 2.0), (1, 2.0), (2, 2.0)]


def test_ranks_that_report_more_often_than_rank_zero_are_let_go_at_its_end(tune_run):
    def train(config):
        import horovod.torch as hvd

        from horovod_tune import report

        hvd.init()
        for _ in range(1 + 3 * hvd.rank()):
            report(rank=hvd.rank())

    analysis = tune_run(DistributedTrainableCreator(train, num_slots=2))
    assert [result["rank"] for result in results_of(analysis.trials[0])] == [0]


def test_yielded_and_returned_metrics_count_as_reports_as_in_tunes_functions(tune_run):
    def train(config):
        yield {"loss": 2}
        yield {"loss": 1}

    analysis = tune_run(DistributedTrainableCreator(train, num_slots=2))
    assert [result["loss"] for result in results_of(analysis.trials[0])] == [2, 1]


def test_tunes_own_context_and_report_work_in_every_rank(tune_run):
    def train(config):
        from ray import tune

        context = tune.get_context()
        tune.report(
            {
                "id": context.get_trial_id(),
                "name": context.get_trial_name(),
                "dir": context.get_trial_dir(),
                "experiment": context.get_experiment_name(),
                "cpus": context.get_trial_resources().required_resources["CPU"],
                "none": tune.get_checkpoint() is None,
            }
        )

    analysis = tune_run(DistributedTrainableCreator(train, num_slots=2))
    (trial,) = analysis.trials
    (result,) = results_of(trial)
    assert (result["id"], result["name"]) == (trial.trial_id, str(trial))
    assert (result["experiment"], result["cpus"], result["none"]) == ("experiment", 2.0, True)
    assert result["dir"].endswith(os.path.basename(trial.path))


@pytest.mark.contract
def test_a_trial_that_a_scheduler_stops_runs_no_further_step(tune_run, tmp_path):
    from ray.tune.schedulers import AsyncHyperBandScheduler

    log = tmp_path / "steps"
    log.mkdir()

    def train(config):
        import horovod.torch as hvd
        import torch

        from horovod_tune import report

        hvd.init()
        for step in range(1, 9):
            hvd.allreduce(torch.zeros(1), name="step")  # no rank is a step behind when the trial is stopped
            (log / f"{config['quality']}-{hvd.rank()}-{step}").touch()
            report(score=config["quality"])

    from ray import tune

    scheduler = AsyncHyperBandScheduler(max_t=8, grace_period=2, reduction_factor=2)
    analysis = tune_run(
        DistributedTrainableCreator(train, num_slots=2),
        config={"quality": tune.grid_search([4, 3, 2, 1])},
        metric="score",
        mode="max",
        scheduler=scheduler,
        max_concurrent_trials=1,
    )
    stopped = 0
    for trial in analysis.trials:
        reports = len(results_of(trial))
        stopped += reports < 8
        for rank in (0, 1):
            assert len(list(log.glob(f"{trial.config['quality']}-{rank}-*"))) == reports
    assert stopped == 3


def test_what_a_rank_prints_is_in_its_own_file_of_the_trials_directory(tune_run):
    def train(config):
        import os
        import sys

        import horovod.torch as hvd

        from horovod_tune import report

        hvd.init()
        print("python", hvd.rank())
        os.write(2, b"library %d\n" % hvd.rank())
        sys.stderr.write("error\n")
        report(done_with=1)

    analysis = tune_run(DistributedTrainableCreator(train, num_slots=2), num_samples=2)
    for trial in analysis.trials:
        for rank in (0, 1):
            text = Path(trial.path, f"rank_{rank}.log").read_text()
            assert text.count(f"python {rank}\n") == 1
            assert text.count(f"library {rank}\n") == 1


def test_resources_are_what_the_ranks_hold_and_nothing_for_the_coordinator(tune_run):
    def train(config):
        import ray

        from horovod_tune import report

        report(free=ray.available_resources().get("CPU", 0.0))

    trainable = DistributedTrainableCreator(train, num_slots=1, num_cpus_per_slot=3)
    analysis = tune_run(trainable)
    (result,) = results_of(analysis.trials[0])
    assert result["free"] == 1.0


def test_a_trial_that_can_never_fit_is_an_error_and_not_a_wait(tune_run):
    trainable = DistributedTrainableCreator(lambda config: None, num_slots=5)
    with pytest.raises(ResourcesUnavailable, match=r"5 CPU, which this cluster can never give.*4 CPU"):
        tune_run(trainable)


def test_random_samplers_and_stop_criteria_work_as_everywhere_in_tune(tune_run):
    from ray import tune

    def train(config):
        from horovod_tune import report

        while True:
            report(loss=config["a"] + config["b"])

    analysis = tune_run(
        DistributedTrainableCreator(train, num_slots=2),
        config={
            "a": tune.uniform(0, 1),
            "b": tune.choice([1, 2]),
            "c": tune.sample_from(lambda spec: spec.config.a * 2),
            "const": "hello",
        },
        num_samples=3,
        stop={"training_iteration": 4},
        metric="loss",
        mode="min",
    )
    assert [len(results_of(trial)) for trial in analysis.trials] == [4, 4, 4]
    assert all(trial.config["c"] == trial.config["a"] * 2 for trial in analysis.trials)


def test_time_budget_ends_an_endless_search(tune_run):
    def train(config):
        import time

        from horovod_tune import report

        while True:
            time.sleep(0.05)
            report(loss=1.0)

    trainable = DistributedTrainableCreator(train, num_slots=2)
    analysis = tune_run(trainable, num_samples=-1, time_budget_s=4, max_concurrent_trials=2)
    assert analysis.trials


def test_a_metric_that_cannot_be_sent_fails_the_trial_by_name(tune_run):
    def train(config):
        import threading

        from horovod_tune import report

        report(loss=1.0, lock=threading.Lock())

    analysis = tune_run(DistributedTrainableCreator(train, num_slots=2), raise_on_failed_trial=False)
    assert "metric 'lock' cannot be sent" in Path(analysis.trials[0].error_file).read_text()


def test_the_tuner_takes_the_trainable_as_tune_run_does(tmp_path):
    from ray import tune

    def train(config):
        from horovod_tune import report

        report(loss=config["x"])

    tuner = tune.Tuner(
        DistributedTrainableCreator(train, num_slots=2),
        param_space={"x": tune.grid_search([3, 1, 2])},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(storage_path=str(tmp_path), name="tuner", verbose=0),
    )
    assert tuner.fit().get_best_result().config["x"] == 1
