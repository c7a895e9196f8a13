"""Experiment folders that others made: by older releases of Ray, incomplete, copied, of two searches."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from made_experiments import changed, edit_state, made_experiment, read

from horovod_tune.analysis import Analysis, analyze
from horovod_tune.analysis.reader import folders
from horovod_tune.analysis.reader.folders import open_folder
from horovod_tune.analysis.run_summary import wall_text


def state_file(home: Path) -> Path:
    return next(home.glob("experiment_state-*.json"))


def test_of_an_older_release_the_trials_own_files_are_read(tmp_path):
    state = {"checkpoints": ["{}"], "runner_data": {}, "stats": {"start_time": 1610629211.0}}
    name = "experiment_state-2021-01-14_05-00-11.json"
    (tmp_path / name).write_text(json.dumps(state))
    for number, error in enumerate((None, "ValueError: lr")):
        home = tmp_path / f"train_aa000_0000{number}"
        home.mkdir()
        row = {"loss": 1 / (number + 1), "training_iteration": 3, "trial_id": f"aa000_0000{number}"}
        (home / "result.json").write_text(json.dumps(row | {"done": error is None}) + "\n")
        (home / "params.json").write_text('{"lr": 0.1}')
        if error:
            (home / "error.txt").write_text(error)
    analysis = read(tmp_path)
    assert [trial.status for trial in analysis.trials] == ["TERMINATED", "ERROR"]
    assert analysis.trials[1].error == "ValueError: lr"
    assert analysis.best_value == 0.5 and analysis.best_config == {"lr": 0.1} and analysis.state == "unknown"
    [problem] = map(str, analysis.problems)
    assert problem.startswith(f"{name}: written by Ray before 2.7")


def test_an_unreadable_state_file_is_named_where_nothing_else_is_there(tmp_path):
    (tmp_path / "experiment_state-2021-01-14_05-00-11.json").write_text("{}")
    with pytest.raises(ValueError, match=r"can be read at .*: experiment_state-2021.*: holds no trials"):
        read(tmp_path)


@pytest.mark.parametrize("with_params", [True, False])
def test_reports_are_read_from_progress_csv_where_result_json_is_missing(home, with_params):
    trial = read(home).trials[2]
    folder = home / trial.folder_name
    (folder / "result.json").unlink()
    if not with_params:
        (folder / "params.json").unlink()
    table = "loss,training_iteration,trial_id,done,config/lr\n"
    table += f"1.5,1,{trial.trial_id},False,0.25\n-0.5,2,{trial.trial_id},True,0.25\n"
    (folder / "progress.csv").write_text(table)
    state_file(home).unlink()
    analysis = read(home)
    assert analysis.best_value == -0.5 and analysis.best_trial.trial_id == trial.trial_id
    assert [row["loss"] for row in analysis.best_trial.rows] == [1.5, -0.5]
    assert analysis.best_config["lr"] == (trial.config["lr"] if with_params else 0.25)
    assert not analysis.problems


def test_a_table_does_not_turn_names_into_numbers(tmp_path):
    for trial_id in ("1e234567", "00123456", "12345_00000"):
        folder = tmp_path / f"train_{trial_id}"
        folder.mkdir()
        (folder / "progress.csv").write_text(f"loss,trial_id,config/sizes\n0.5,{trial_id},64_64\n")
    trials = read(tmp_path).trials
    assert [trial.trial_id for trial in trials] == ["00123456", "12345_00000", "1e234567"]
    assert [trial.config for trial in trials] == [{"sizes": "64_64"}] * 3


@pytest.mark.parametrize("moved", [True, False])
def test_a_trials_second_folder_is_no_second_trial(home, moved):
    before = read(home)
    folder = home / before.best_trial.folder_name
    (folder.rename if moved else partial(shutil.copytree, folder))(home / "the best")
    analysis = read(home)
    assert analysis.best_trial.rows == before.best_trial.rows and len(analysis.trials) == len(before.trials)
    what = f"the best: a second folder of trial {before.best_trial.trial_id}; it is "
    assert what + ("used" if moved else "left out") in map(str, analysis.problems)


def test_a_clock_that_is_set_back_makes_no_time_negative(home):
    for path in home.glob("*/result.json"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[-1]["timestamp"] -= 7200
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, trial in enumerate(read(home).trials):
        edit_state(home, number, last_result_time=trial.rows[-1]["timestamp"])
    analysis = read(home)
    assert analysis.dataframe()["duration_s"].min() >= 0 and "-" not in (wall_text(analysis) or "-")


def test_a_field_of_progress_csv_that_is_too_long_costs_the_reports_from_there_on(home):
    folder = home / read(home).trials[2].folder_name
    (folder / "result.json").unlink()
    (folder / "progress.csv").write_text(f"loss,note\n1.5,short\n0.5,{'x' * 200_000}\n")
    analysis = read(home)
    assert [row["loss"] for row in analysis.trials[2].rows] == [1.5]
    assert [str(problem) for problem in analysis.problems] == [
        "abcd1_00002: progress.csv: report 2 is not readable (field larger than field limit (131072)); "
        "it and those after it are left out"
    ]


def test_a_file_that_vanishes_while_its_folder_is_listed_is_left_out_alone(home, monkeypatch):
    names, scandir = sorted(os.listdir(home)), os.scandir

    def listed_before(place: str):
        with scandir(place) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        (home / names[0]).unlink()
        return nullcontext(entries)

    monkeypatch.setattr(folders.os, "scandir", listed_before)
    found = [entry.name for entry in open_folder(home).entries()]
    monkeypatch.undo()
    assert found == names[1:]


def test_a_subfolder_that_may_not_be_listed_is_passed_over_and_an_odd_name_is_named(home, monkeypatch):
    def refused(place: str, scandir=os.scandir):
        if Path(place).name == "lost+found":
            raise PermissionError(13, "Permission denied", place)
        return scandir(place)

    monkeypatch.setattr(folders.os, "scandir", refused)
    (home / "lost+found").mkdir()
    (home / os.fsdecode(b"searcher-state-\xff")).touch()
    (problem,) = read(home).problems
    assert str(problem) == "searcher-state-\\xff: its name is not UTF-8; it is left out"


def test_a_trials_own_folder_is_named_as_such_and_uris_are_decoded(home):
    copy = shutil.copytree(home, home / "my exp%20")
    assert analyze(copy.as_uri()).path == str(copy)
    trial = next(copy.glob("*/result.json")).parent
    with pytest.raises(ValueError, match="it is a trial's own folder: pass the folder that contains it"):
        analyze(trial)


def test_a_trial_of_an_earlier_search_that_never_reported_is_not_the_newest_ones(home):
    state = json.loads(state_file(home).read_text())
    trial = json.loads(state["trial_data"][0][0])
    trial |= {"trial_id": "old_0", "relative_logdir": "train_old_0", "status": "ERROR"}
    state["trial_data"] = [[json.dumps(trial), json.dumps({"error_filename": "error.txt"})]]
    (home / "experiment_state-2026-11-19_12-00-00.json").write_text(json.dumps(state))
    folder = home / "train_old_0"
    folder.mkdir()
    (folder / "params.json").write_text("{}")
    (folder / "error.txt").write_text("RuntimeError: wrong file name\n")
    with pytest.warns(UserWarning, match="2 searches"):
        assert "old_0" not in [each.trial_id for each in read(home).trials]
    first = analyze(home, metric="loss", mode="min", run="2026-11-19_12-00-00")
    assert [(each.trial_id, each.status) for each in first.trials] == [("old_0", "ERROR")]


def test_what_many_trials_have_in_common_is_one_line(home):
    for folder in home.glob("train_*"):
        (folder / "result.json").unlink()
    (problem,) = read(home).problems
    assert problem.where == "6 trials" and "abcd1_00000, abcd1_00001, abcd1_00002 and 3 more" in problem.what


def test_a_trial_that_never_reported_has_no_last_report(home):
    edit_state(home, 0, last_result={"trial_id": "abcd1_00000", "pid": 3})
    (home / "train_abcd1_00000" / "result.json").unlink()
    analysis = read(home)
    assert analysis.trials[0].last_result is None
    assert [problem.what for problem in analysis.problems] == ["no reports"]


def test_a_copied_folder_is_interrupted_and_one_that_is_written_now_runs(home, tmp_path):
    edit_state(home, 0, {"status": "RUNNING"})
    assert read(home).state == "running"
    copied = shutil.copytree(home, tmp_path / "copied", copy_function=shutil.copyfile)
    analysis = read(copied)
    assert analysis.state == "interrupted"
    assert analysis.record.last_write == max(trial.end_time for trial in analysis.trials)
    state = json.loads(state_file(home).read_text())
    state["stats"] = {"start_time": state["runner_data"]["_start_time"] - 3600}
    state_file(home).write_text(json.dumps(state))
    assert read(home).state == "interrupted", "the earlier of its two start times counts"


def test_a_search_whose_state_file_is_lost_is_not_called_finished(home):
    state_file(home).unlink()
    old = time.time() - 3600
    for path in home.rglob("*"):
        os.utime(path, (old, old))
    analysis = read(home)
    assert analysis.state == "unknown"
    first = min(trial.start_time for trial in analysis.trials)
    assert analysis.record.start_time == first, "nothing else is known of the search's start"


def configured(*configs: dict) -> Analysis:
    made = made_experiment(len(configs))
    trials = tuple(replace(t, config=config) for t, config in zip(made.trials, configs, strict=True))
    return changed(made, trials=trials, domains={})


def test_a_list_is_one_option():
    found = configured({"sizes": [64, 64]}, {"sizes": [128]}, {"sizes": [64, 64]}).varying_parameters
    assert [(one.name, one.categories) for one in found] == [("sizes", ("[128]", "[64, 64]"))]


def test_the_address_of_an_object_is_no_option():
    text = "<__main__.Net object at 0x7f0c4c0b3d{:02x}>"
    assert configured(*({"net": text.format(n)} for n in range(3))).varying_parameters == []
