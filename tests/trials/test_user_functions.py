"""Training functions of every shape and with many mistakes, each through whole trials of two ranks."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import horovod_tune
from horovod_tune import DistributedTrainableCreator

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ray_session")]


def error_of(tune_run, train, **arguments) -> str:
    """Run one trial of ``train`` that is to fail; return its error file."""
    trainable = DistributedTrainableCreator(train, num_slots=2)
    (trial,) = tune_run(trainable, raise_on_failed_trial=False, **arguments).trials
    assert trial.status == "ERROR"
    return Path(trial.error_file).read_text()


def test_a_partial_of_a_generator_and_a_callable_object_report_what_they_yield(tune_run):
    def steps(config, count):
        yield from ({"step": step} for step in range(count))

    class Trainer:
        def __call__(self, config):
            yield {"step": 7}

    for func, last in ((functools.partial(steps, count=3), 2), (Trainer(), 7)):
        (trial,) = tune_run(DistributedTrainableCreator(func, num_slots=2)).trials
        assert trial.last_result["step"] == last


def test_sys_exit_is_an_error_that_says_what_to_do_instead(tune_run):
    def train(config):
        import sys

        horovod_tune.report(loss=1.0)
        sys.exit(0)

    text = error_of(tune_run, train)
    assert "SystemExit: 0" in text and "To end one early, return from the function." in text


def test_a_keyboard_interrupt_in_a_function_is_an_error_of_its_rank(tune_run):
    def train(config):
        raise KeyboardInterrupt

    text = error_of(tune_run, train)
    assert "of 2 on" in text and "KeyboardInterrupt" in text


def test_a_relative_path_is_explained_in_the_trials_error(tune_run, tmp_path, monkeypatch):
    def train(config):
        open("no-such-data.csv").close()

    text = error_of(tune_run, train)
    assert "'no-such-data.csv' is a relative path, and a rank starts in its trial's own directory" in text


def test_a_function_given_to_tune_without_the_factory_is_told_so(tune_run):
    def train(config):
        horovod_tune.report(loss=1.0)

    (trial,) = tune_run(train, raise_on_failed_trial=False).trials
    text = Path(trial.error_file).read_text()
    assert "Give Tune DistributedTrainableCreator(train, num_slots=...) in place of train" in text
