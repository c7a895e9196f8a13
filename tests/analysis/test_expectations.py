"""What is shown of trials that were not trained to the end: their expected ends, and where they stand."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_experiments import RUNGS, made_experiment, written

from horovod_tune.analysis import analyze, plots
from horovod_tune.analysis.expectations import expectations, standings
from horovod_tune.analysis.reader.records import PredictedCurve, Predictions, RungTimes
from horovod_tune.analysis.report.sections import trials_table
from horovod_tune.analysis.results import Analysis


def shown(analysis: Analysis) -> str:
    terminal = pytest.importorskip("horovod_tune.analysis.terminal")
    stream = io.StringIO()
    terminal.Console(file=stream, width=160).print(terminal.view(analysis, width=160))
    return stream.getvalue()


def predicted(analysis: Analysis, time_attr: str = "training_iteration", **status: Any) -> Analysis:
    """The experiment with predictions to iteration 27 of all trials that ended earlier; `status` if given."""
    curves, trials = {}, []
    for trial in analysis.trials:
        last = trial.rows[-1]["training_iteration"]
        if last < 27 and trial.status != "ERROR":
            times = tuple(float(t) for t in np.geomspace(last, 27, 5))
            end = trial.rows[-1]["loss"]
            middle = tuple(float(m) for m in np.linspace(end, end - 0.4, 5))
            curves[trial.trial_id] = PredictedCurve(
                times, middle, tuple(m - 0.1 for m in middle), tuple(m + 0.1 for m in middle)
            )
        trials.append(replace(trial, **status) if last < 27 else trial)
    predictions = Predictions("loss", time_attr, curves)
    return made_with(analysis, trials=tuple(trials), predictions=predictions)


def made_with(analysis: Analysis, **changed: Any) -> Analysis:
    record = replace(analysis.record, **changed)
    return Analysis(record, analysis.folder, metric=analysis.metric, mode=analysis.mode)


def test_a_real_search_leaves_what_it_expects_and_where_its_trials_stand(experiments):
    found = analyze(experiments / "promoting")
    assert found.state == "finished" and {trial.status for trial in found.trials} == {"TERMINATED"}
    assert found.record.rungs == (1, 2, 4)
    expected, stands = expectations(found), standings(found)
    ended = {number for number, trial in enumerate(found.trials) if len(trial.rows) < 6}
    # How many continue to the end is a matter of the order in which they report.
    assert set(expected) == set(stands) == ended and len(ended) >= 4
    misses = []
    for number in ended:
        assert expected[number].iterations[0] == len(found.trials[number].rows) == stands[number].time
        assert expected[number].iterations[-1] == pytest.approx(6)
        assert np.all(expected[number].low <= expected[number].middle)
        assert np.all(expected[number].middle <= expected[number].high)
        # loss = skill + exp(-step): what it would have come to is known.
        last = found.trials[number].rows[-1]
        would = last["loss"] - np.exp(-last["training_iteration"]) + np.exp(-6)
        misses.append(abs(expected[number].middle[-1] - would))
    assert np.median(misses) < 0.6
    first = min(stands.values(), key=lambda stand: (-stand.time, stand.place))
    assert f"{first.place} of {first.of} at 4" in " ".join(shown(found).split())
    assert "expected: loss at iteration 6" in shown(found)


def test_the_best_of_a_rung_is_number_1_whichever_way_is_better():
    analysis = made_experiment(40)
    for mode, best in (("min", min), ("max", max)):
        seen = Analysis(analysis.record, analysis.folder, metric="loss", mode=mode)
        stands = standings(seen)
        at_one = {n: seen.trials[n].rows[0]["loss"] for n, stand in stands.items() if stand.time == 1}
        went_on = [t.rows[0]["loss"] for t in seen.trials if len(t.rows) > 1]
        better = [v for v in went_on if best(v, *at_one.values()) == v]
        first = best(at_one, key=at_one.__getitem__)
        assert stands[first].place >= 1 + len(better)
        assert {stand.of for stand in stands.values() if stand.time == 1} == {40}


def test_what_is_expected_of_waiting_trials_is_drawn_dashed_and_in_the_table():
    analysis = predicted(made_experiment(40), status="PAUSED")
    figure = plots.learning_curves(analysis)
    dashed = [trace for trace in figure.data if trace.line.dash == "dash"]
    assert len(dashed) == len(expectations(analysis)) > 0
    assert {trace.x[-1] for trace in dashed} == {27}
    assert "dashed: as the search expects" in figure.layout.title.subtitle.text
    table = trials_table(analysis)
    assert "expected loss" in table and " at 27" not in table.split("<tr")[-1]
    number = next(iter(standings(analysis)))
    assert f">{standings(analysis)[number].text}" in table


def test_what_was_reported_since_is_not_expected_any_more():
    analysis = made_experiment(30)
    number = next(n for n, trial in enumerate(analysis.trials) if len(trial.rows) == 9)
    trial = analysis.trials[number]
    old = PredictedCurve(
        (1.0, 5.0, 15.0, 27.0), (1.0, 0.8, 0.6, 0.5), (0.9, 0.7, 0.5, 0.4), (1.1, 0.9, 0.7, 0.6)
    )
    seen = made_with(analysis, predictions=Predictions("loss", "training_iteration", {trial.trial_id: old}))
    found = expectations(seen)[number]
    assert found.iterations.tolist() == [9, 15, 27] and found.middle[0] == pytest.approx(0.72)
    done = replace(old, times=(1.0, 3.0, 5.0, 9.0))
    seen = made_with(analysis, predictions=Predictions("loss", "training_iteration", {trial.trial_id: done}))
    assert not expectations(seen)


def test_another_metric_and_failed_trials_have_no_expectations():
    analysis = predicted(made_experiment(60))
    assert expectations(analysis)
    other = Analysis(analysis.record, analysis.folder, metric="accuracy", mode="max")
    assert not expectations(other) and "expected" not in shown(other)
    assert not expectations(predicted(made_experiment(60), status="ERROR"))


def test_a_time_of_ones_own_goes_on_at_its_pace():
    """Every iteration of these trials is two epochs."""
    analysis = made_experiment(30)
    trials = [
        replace(trial, rows=tuple(row | {"epoch": 2 * row["training_iteration"]} for row in trial.rows))
        for trial in analysis.trials
    ]
    number = next(n for n, trial in enumerate(trials) if len(trial.rows) == 9)
    curve = PredictedCurve((18.0, 54.0), (1.0, 0.5), (0.9, 0.4), (1.1, 0.6))
    predictions = Predictions("loss", "epoch", {trials[number].trial_id: curve})
    seen = made_with(analysis, trials=tuple(trials), predictions=predictions)
    found = expectations(seen)[number]
    assert found.iterations.tolist() == [9, 27]
    assert (found.middle[-1], found.low[-1], found.high[-1], found.end) == (0.5, 0.4, 0.6, 54.0)
    assert "expected: loss at epoch 54" in shown(seen)


def test_a_time_that_begins_at_0_goes_on_at_its_pace_too():
    analysis = made_experiment(30)
    trials = [
        replace(trial, rows=tuple(row | {"done": row["training_iteration"] - 1} for row in trial.rows))
        for trial in analysis.trials
    ]
    number = next(n for n, trial in enumerate(trials) if len(trial.rows) == 3)
    curve = PredictedCurve((2.0, 9.0), (1.0, 0.5), (0.9, 0.4), (1.1, 0.6))
    predictions = Predictions("loss", "done", {trials[number].trial_id: curve})
    seen = made_with(analysis, trials=tuple(trials), predictions=predictions)
    assert expectations(seen)[number].iterations.tolist() == [3, 10]


def test_rungs_of_another_time_are_said_in_it():
    """Every iteration of these trials is two epochs, and the rungs are after 2, 6 and 18 of them."""
    analysis = made_experiment(40)
    trials = [
        replace(trial, rows=tuple(row | {"epoch": 2 * row["training_iteration"]} for row in trial.rows))
        for trial in analysis.trials
    ]
    epochs = RungTimes("epoch", tuple(2.0 * rung for rung in RUNGS))
    seen = made_with(analysis, trials=tuple(trials), rung_times=epochs)
    expected, found = standings(analysis), standings(seen)
    assert found.keys() == expected.keys() and seen.record.rungs == ()
    for number, stand in found.items():
        other = expected[number]
        assert (stand.time, stand.place, stand.of) == (2 * other.time, other.place, other.of)
    assert any(re.fullmatch(r"\d+ of 40 at 2", stand.text) for stand in found.values())
    # The table shows the best ones, which have come to the last rungs.
    assert re.search(r"\d of \d+ at 18", shown(seen)) and not re.search(r"\d of \d+ at 9", shown(seen))


@pytest.mark.parametrize(
    "damage",
    [
        {"times": "soon"},
        {"times": [1, 2, 3]},
        {"middle": [1, None]},
        {"middle": [1, float("nan")]},
        {"high": [1, float("inf")]},
        {"low": []},
        {"trial_id": 7},
        {"trial_id": None},
        {"times": [], "middle": [], "low": [], "high": []},
        {"times": [{}, 2]},
    ],
    ids=str,
)
def test_a_damaged_curve_is_none(tmp_path: Path, damage: dict[str, Any]):
    home = written(made_experiment(12), tmp_path)
    number = next(n for n, trial in enumerate(analyze(home).trials) if len(trial.rows) == 1)
    whole = {"times": [1, 27], "middle": [1, 0.5], "low": [0.9, 0.4], "high": [1.1, 0.6]}
    state = {"format": "horovod_tune.BayesOptSearch", "metric": "loss", "mode": "min"}
    for curve, expected in ((whole, {number}), (whole | damage, set())):
        entry = {"trial_id": analyze(home).trials[number].trial_id} | curve
        state["predictions"] = {"time_attr": "training_iteration", "curves": [entry, "nothing", None]}
        (home / "searcher-state-2026-11-20_12-00-00.json").write_text(json.dumps(state))
        found = analyze(home)
        assert set(expectations(found)) == expected and not found.problems
        shown(found)
