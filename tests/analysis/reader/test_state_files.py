"""Several searches of one name that write into one folder are distinguished."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_experiments import made_experiment, written

from horovod_tune.analysis import analyze
from horovod_tune.analysis.reader.records import TrialRecord
from horovod_tune.analysis.reader.state_files import Run, choose, runs_of

FIRST, SECOND = "2026-11-20_12-00-00", "2026-11-21_12-00-00"


def state(stamp: str, *trials: str) -> Run:
    known = tuple(TrialRecord(trial, n, trial, {}, "PENDING", "") for n, trial in enumerate(trials))
    return Run(known, (f"experiment_state-{stamp}.json",))


def test_a_restored_search_is_one_run_and_a_new_one_another():
    first, again, new = state("1", "a", "b"), state("2", "a", "b", "c"), state("3", "d")
    runs = runs_of([new, again, first])
    assert [(run.name, sorted(run.trial_ids)) for run in runs] == [("1", ["a", "b", "c"]), ("3", ["d"])]
    assert runs[0].trials == again.trials


def test_an_earlier_search_that_was_restored_last_is_the_newest():
    runs = runs_of([state("1", "a"), state("2", "b"), state("3", "a", "c")])
    assert [run.name for run in runs] == ["2", "1"]
    assert choose(runs) is runs[1]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two searches of one name: the first, of three trials, has the lower losses."""
    first, second = made_experiment(3, asha=False), made_experiment(2, asha=False, seed=1)
    trials = []
    for trial in second.trials:
        rows = tuple(row | {"loss": 100.0, "trial_id": f"new_{trial.number}"} for row in trial.rows)
        made = replace(trial, trial_id=f"new_{trial.number}", directory=f"/made/train_new_{trial.number}")
        trials.append(replace(made, rows=rows, last_result=rows[-1]))
    home = written(first, tmp_path)
    second.trials = tuple(trials)
    written(second, tmp_path / "other")
    for path in (tmp_path / "other" / "made").iterdir():
        target = f"experiment_state-{SECOND}.json" if path.is_file() else path.name
        path.rename(home / target)
    return home


def test_the_newest_search_counts_and_the_others_are_named(home):
    with pytest.warns(UserWarning, match=f"2 searches wrote into this folder.*{SECOND}.*--run: {FIRST}"):
        analysis = analyze(home, metric="loss", mode="min")
    assert [trial.trial_id for trial in analysis.trials] == ["new_0", "new_1"]
    assert analysis.best_value == 100.0
    assert (analysis.run, analysis.runs) == (SECOND, (FIRST, SECOND))
    assert analysis.problems == ()


def test_another_search_can_be_chosen_and_stays_chosen(home, recwarn):
    analysis = analyze(home, metric="loss", mode="min", run=FIRST)
    assert len(analysis.trials) == len(analysis.reload().trials) == 3
    assert analysis.best_value < 100
    assert not recwarn.list
    with pytest.raises(ValueError, match=f"no run '3' in this experiment; its runs: {FIRST}, {SECOND}"):
        analyze(home, run="3")


def test_a_trial_whose_state_is_lost_is_not_mixed_into_a_later_search(home):
    (home / f"experiment_state-{FIRST}.json").unlink()
    newest = home / f"experiment_state-{SECOND}.json"
    whole = json.loads(newest.read_text())
    whole["runner_data"]["_start_time"] += 10**6
    newest.write_text(json.dumps(whole))
    analysis = analyze(home, metric="loss", mode="min")
    assert [trial.trial_id for trial in analysis.trials] == ["new_0", "new_1"]
    assert all("began earlier" in problem.what for problem in analysis.problems)
    assert len(analysis.problems) == 3


def test_results_of_a_second_search_of_the_same_name_are_its_own(experiments):
    told = json.loads((experiments / "seen_by_driver.json").read_text())["twice"]
    assert told["first"] == [2, 1.0] and told["second"] == [2, 101.0]
    with pytest.warns(UserWarning, match="2 searches"):
        analysis = analyze(experiments / "twice")
    assert (analysis.best_value, analysis.metric, analysis.mode) == (101.0, "loss", "min"), (
        "tune.run passed metric and mode to the callback that the factory adds"
    )
    first = analyze(experiments / "twice", run=analysis.runs[0])
    assert (first.best_value, first.mode) == (1.0, "min")
