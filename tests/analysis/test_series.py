"""The numbers behind the plots: curves, best so far, timelines, hyperparameters."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from made_experiments import START, changed, made_experiment

from horovod_tune.analysis import Analysis, analyze, plots
from horovod_tune.analysis.plots.learning_curves import best_steps, thinned
from horovod_tune.analysis.plots.scheduling import timeline_bars
from horovod_tune.analysis.plots.style import metric_axis
from horovod_tune.analysis.report import render
from horovod_tune.analysis.run_summary import run_summary, usage
from horovod_tune.analysis.trial_details import spans
from horovod_tune.scoring import parse_limit


def test_the_best_so_far_only_gets_better_and_ends_with_the_search():
    analysis = made_experiment(40)
    for against in ("time", "trials"):
        xs, ys = best_steps(analysis, against)
        assert (np.diff(ys[:-1]) < 0).all()
        assert (np.diff(xs) > 0).all()
        assert ys[-1] == analysis.scores["best"].min()
    assert xs[-1] == 40
    with pytest.raises(ValueError, match='against must be "time" or "trials", got \'days\''):
        best_steps(analysis, "days")


def test_the_best_so_far_meets_the_limits():
    made = made_experiment(40)
    best = made.best_value
    limits = [parse_limit(f"{made.metric} > {best + 0.1}")]
    limited = Analysis(made.record, made.folder, metric=made.metric, mode=made.mode, limits=limits)
    for against in ("time", "trials"):
        _, ys = best_steps(limited, against)
        assert ys.min() > best + 0.1


def test_ranks_never_share_a_row_at_one_time():
    bars, rows, unit = timeline_bars(made_experiment(80))
    assert unit == "hosts' slots"
    assert all(row.startswith("node-") for row in rows)
    assert len(bars) == 160, "two ranks per trial"
    for _, held in bars.groupby("row"):
        assert (held["end"] <= held["begin"].shift(-1, fill_value=math.inf) + 0.01).all()


def test_if_ranks_are_unknown_a_row_is_a_slot_for_one_trial(experiments):
    bars, _, unit = timeline_bars(analyze(experiments / "random"))
    assert unit == "trials at once"
    assert len(bars) == 4 and (bars["begin"] == bars["trained"]).all()


def test_start_up_is_part_of_the_first_reports_time_if_it_fits():
    trial = made_experiment(1).trials[0]
    assert trial.rows[0]["start_s"] == 2.5
    assert spans(trial, [])[0][:2] == (trial.start_time, trial.start_time + 2.5)
    rows = tuple(row | {"start_s": 60.0} for row in trial.rows)
    slow = replace(trial, rows=rows, last_result=rows[-1])
    assert spans(slow, [])[0][:2] == (trial.start_time - 60.0, trial.start_time)
    assert spans(replace(trial, start_time=None), []) == []


def test_diverged_trials_do_not_flatten_the_others():
    def limits(values, mode):
        axis, note = metric_axis(np.array(values), mode, "loss")
        return (*axis["range"], note)

    values = np.array([*np.linspace(0.1, 1.0, 50), 1e6])
    low, high, note = limits(values, "min")
    assert low < 0.1 and high < 2 and note == "1 of 51 values are outside the axis"
    low, high, note = limits(-values, "max")
    assert high > -0.1 and low > -2 and note == "1 of 51 values are outside the axis"
    assert limits(values, "max")[1] > 1e6, "the good end is always shown"
    assert limits([np.nan], "min")[:2] == (0.0, 1.0)
    assert limits([0.1, 0.11, 0.12, 9.0], "min")[2] == "", "a quarter of the values is not a few"
    low, high, _ = limits([2.0, 2.0], "min")
    assert low < 2.0 < high


def test_each_hyperparameter_has_its_axis():
    found = {one.name: one for one in made_experiment(30).varying_parameters}
    assert list(found) == ["lr", "momentum", "batch_size", "net/act", "net/width"]
    assert found["lr"].log and found["lr"].kind == "numeric"
    assert found["batch_size"].categories == ("16", "32", "64", "128")
    assert found["net/act"].categories == ("gelu", "relu", "tanh")
    assert found["net/width"].integer and not found["net/width"].log
    assert found["lr"].positions == pytest.approx(np.log10(found["lr"].values))


def test_without_a_recorded_space_axes_follow_from_the_values():
    analysis = made_experiment(30)
    found = {one.name: one for one in changed(analysis, domains={}).varying_parameters}
    assert found["lr"].log, "two decades of positive numbers"
    assert not found["momentum"].log
    assert found["batch_size"].kind == "numeric"


def test_a_hyperparameter_that_only_some_trials_have_is_missing_in_the_others():
    analysis = made_experiment(4)
    trials = [
        replace(t, config={"a": n} if n % 2 else {"b": True, "c": None if n else 1.0})
        for n, t in enumerate(analysis.trials)
    ]
    found = {one.name: one for one in changed(analysis, trials=tuple(trials), domains={}).varying_parameters}
    assert found["a"].values == (None, 1, None, 3)
    assert np.isnan(found["a"].positions[0])
    assert found["b"].categories == ("True",)
    assert found["c"].categories == ("1", "None"), "None is a choice like any other"
    assert found["c"].positions == pytest.approx([0.0, math.nan, 1.0, math.nan], nan_ok=True)


def test_thinning_keeps_the_ends_and_the_extremes():
    values = np.sin(np.linspace(0, 20, 5000))
    values[3210] = 7.0
    values[100] = np.nan
    kept = thinned(values, 50)
    assert len(kept) <= 50
    assert kept[0] == 0 and kept[-1] == 4999 and 3210 in kept
    assert list(thinned(values[:10], 50)) == list(range(10))


LATER = START + 1000.0  # the second driver's start


@pytest.fixture
def resumed() -> Analysis:
    """Two trials side by side, 10 s per report; the second one's last two reports came after a resume."""
    made = made_experiment(2, asha=False)
    trials = []
    for trial in made.trials:
        times = [START + 10, START + 20, START + 30, START + 40]
        if trial.number == 1:
            times[2:] = [LATER + 15, LATER + 25]
        reported = [
            {
                "timestamp": int(time),
                "time_this_iter_s": 10.0,
                "time_total_s": 10.0 * number,
                "start_s": 3.0 if time > LATER else 0.0,  # the second driver has no warm workers
            }
            for number, time in enumerate(times, start=1)
        ]
        on_one_host = {"world_size": 1, "hosts": "one:1"}
        rows = tuple(row | one | on_one_host for row, one in zip(trial.rows, reported, strict=False))
        trials.append(replace(trial, rows=rows, last_result=rows[-1], start_time=START, end_time=times[-1]))
    return changed(made, trials=tuple(trials), sessions=(START, LATER), start_time=START)


def test_a_trial_trained_in_the_sessions_and_not_between_them(resumed):
    first, second = resumed.trials
    assert spans(first, (START, LATER)) == [(START, START, START + 40)]
    before, after = spans(second, (START, LATER))
    assert before == (START, START, pytest.approx(START + 20, abs=1))  # Tune writes whole seconds
    assert after == (LATER + 2, LATER + 5, LATER + 25)


def test_a_paused_trial_did_not_train():
    rows = [
        {"timestamp": int(START + at), "time_this_iter_s": 10.0, "time_total_s": 10.0 * number}
        | {"iterations_since_restore": since, "start_s": 0.0}
        for number, (at, since) in enumerate(((10, 1), (20, 2), (110, 1), (120, 2)), start=1)
    ]
    trial = replace(made_experiment(1).trials[0], rows=tuple(rows), start_time=START, end_time=START + 120)
    before, after = spans(trial, (START,))
    assert before == (START, START, pytest.approx(START + 20, abs=1))  # Tune writes whole seconds
    assert after == (*[pytest.approx(START + 100, abs=1)] * 2, START + 120)
    failed = replace(trial, num_failures=1)
    assert spans(failed, (START,)) == [(START, START, START + 120)], "what was lost counts too"


def test_the_timeline_has_the_gap_and_no_more_rows_than_ran_at_once(resumed):
    bars, rows, _ = timeline_bars(resumed)
    assert len(rows) == 2 and len(bars) == 3
    assert resumed.session_gaps == [(START + 40.0, LATER)]
    assert bars["begin"].min() == 0.0
    figure = plots.timeline(resumed)
    (shape,) = figure.layout.shapes
    assert (shape.x0 * 60, shape.x1 * 60) == pytest.approx((40.0, 1000.0))


def test_gaps_do_not_overlap_if_a_driver_was_killed_before_any_report(resumed):
    begin, end = resumed.record.sessions
    again = changed(resumed, sessions=(begin, START + 500.0, end))
    assert again.session_gaps == [(START + 40.0, START + 500.0), (START + 500.0, LATER)]


def test_curves_over_time_are_broken_by_the_gap(resumed):
    figure = plots.learning_curves(resumed, "time")
    assert [int(np.isnan(trace.y).sum()) for trace in figure.data] == [0, 1]
    assert not any(np.isnan(trace.y).any() for trace in plots.learning_curves(resumed).data)


def test_wall_and_cpu_time_leave_the_gap_out(resumed):
    assert usage(resumed)[0] == pytest.approx(2 * 83, rel=0.02), "two CPUs per trial"
    assert dict(run_summary(resumed))["Wall time"] == "1 min 5 s in 2 sessions"
    assert "in 2 sessions" in render(resumed)
