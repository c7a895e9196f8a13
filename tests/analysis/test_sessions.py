"""A search that was resumed: its drivers' sessions are known, and what was between them is no training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_experiments import START, made_experiment

from horovod_tune.analysis import plots, series
from horovod_tune.analysis.report import render
from horovod_tune.analysis.report.run_summary import run_summary, usage, wall_time_s
from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.trial_details import spans

LATER = START + 1000.0  # the second driver's start


@pytest.fixture
def resumed() -> Analysis:
    """Two trials side by side, 10 s a report; the second one's last two reports came after a resume."""
    made = made_experiment(2, asha=False)
    trials = []
    for trial in made.trials:
        times = [START + 10, START + 20, START + 30, START + 40]
        if trial.number == 1:
            times[2:] = [LATER + 15, LATER + 25]
        told = [
            {"timestamp": int(time), "time_this_iter_s": 10.0, "time_total_s": 10.0 * number}
            for number, time in enumerate(times, start=1)
        ]
        alone = {"world_size": 1, "hosts": "one:1", "start_s": 0.0}
        rows = tuple(row | one | alone for row, one in zip(trial.rows, told, strict=False))
        trials.append(replace(trial, rows=rows, last_result=rows[-1], start_time=START, end_time=times[-1]))
    record = replace(made.record, trials=tuple(trials), sessions=(START, LATER), start_time=START)
    return Analysis(record, made.folder, metric="loss", mode="min")


def test_a_trial_trained_in_the_sessions_and_not_between_them(resumed):
    first, second = resumed.trials
    assert spans(first, (START, LATER)) == [(START, START, START + 40)]
    before, after = spans(second, (START, LATER))
    assert before == (START, START, pytest.approx(START + 20, abs=1))  # Tune writes whole seconds
    assert after == (LATER + 5, LATER + 5, LATER + 25)


def test_the_timeline_has_the_gap_and_no_more_rows_than_ran_at_once(resumed):
    found = series.timeline(resumed)
    assert len(found.rows) == 2 and len(found.bars) == 3
    assert found.gaps == ((40.0, 1000.0),)
    assert min(bar.begin for bar in found.bars) == 0.0
    figure = plots.timeline(resumed)
    (shape,) = figure.layout.shapes
    assert (shape.x0 * 60, shape.x1 * 60) == pytest.approx((40.0, 1000.0))


def test_curves_over_time_are_broken_by_the_gap(resumed):
    figure = plots.learning_curves(resumed, "time")
    assert [int(np.isnan(trace.y).sum()) for trace in figure.data] == [0, 1]
    assert not any(np.isnan(trace.y).any() for trace in plots.learning_curves(resumed).data)


def test_wall_and_cpu_time_leave_the_gap_out(resumed):
    assert wall_time_s(resumed) == 65.0
    assert usage(resumed).cpu == pytest.approx(2 * 80 / 3600, rel=0.02), "two CPUs a trial"
    assert dict(run_summary(resumed))["Wall time"] == "1 min 5 s in 2 sessions"
    assert "in 2 sessions" in render(resumed)
