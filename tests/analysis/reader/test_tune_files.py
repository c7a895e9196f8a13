"""Broken, half-written and hostile experiment folders: each costs its own part and is named."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from pathlib import Path

import pytest
from made_experiments import edit_state, read
from ray import tune

from horovod_tune.analysis import analyze
from horovod_tune.analysis.reader.records import Domain
from horovod_tune.experiment_metadata import space_metadata


def folder_of(home: Path, number: int) -> Path:
    return home / f"train_abcd1_{number:05d}"


def test_a_report_that_is_broken_or_half_written_costs_that_report(home):
    result = folder_of(home, 2) / "result.json"
    lines = result.read_bytes()[:-40].split(b"\n")
    lines[3] = b"\xff\xfe\x00 no JSON"
    result.write_bytes(b"\n".join(lines))
    analysis = read(home)
    assert [str(problem) for problem in analysis.problems] == [
        "abcd1_00002: result.json: line 4 is not a report; that report is left out",
        "abcd1_00002: result.json: ends in a half-written report; that report is left out",
    ]
    assert len(analysis.trials[2].rows) == 25


def test_nan_that_tune_wrote_as_text_is_nan(home):
    """Its encoder does so with NumPy's 32-bit NaN: a diverged trial must not win by its earlier value."""
    result = folder_of(home, 1) / "result.json"
    first, second = map(json.loads, result.read_text().splitlines()[:2])
    second |= {"loss": "null", "valid": {"loss": "null"}, "config": {"lr": "null"}}
    result.write_text(f"{json.dumps(first | {'loss': -9.0})}\n{json.dumps(second)}\n")
    analysis = read(home)
    assert analysis.best_value == read_value(analysis) > -9.0
    row = analysis.trials[1].rows[1]
    assert math.isnan(row["loss"]) and math.isnan(row["valid"]["loss"]) and row["config"]["lr"] == "null"


def test_a_lost_result_file_leaves_the_last_report(home):
    (folder_of(home, 3) / "result.json").unlink()
    analysis = read(home)
    (problem,) = analysis.problems
    assert "abcd1_00003: result.json is missing or empty" in str(problem)
    row = analysis.dataframe().set_index("trial_id").loc["abcd1_00003"]
    assert row["iterations"] == 27
    assert row["loss"] == row["best_loss"]
    assert "abcd1_00003" not in set(analysis.history()["trial_id"])


def test_a_broken_state_file_leaves_the_trials_folders(home):
    (state,) = home.glob("experiment_state-*.json")
    state.write_text(state.read_text()[:500])
    analysis = read(home)
    assert len(analysis.trials) == 6
    assert analysis.best_value == read_value(analysis)
    assert any("not readable as JSON" in problem.what for problem in analysis.problems)


def read_value(analysis):
    values = [trial.rows[-1]["loss"] for trial in analysis.trials]
    return min(value for value in values if value == value)


def test_one_broken_trial_in_the_state_costs_that_trials_state_only(home):
    (state,) = home.glob("experiment_state-*.json")
    whole = json.loads(state.read_text())
    whole["trial_data"][4][0] = '{"trial_id": "abcd'
    whole["trial_data"] += [["{", "{}"], 5, ["[]", "{}"], None]
    state.write_text(json.dumps(whole))
    analysis = read(home)
    assert len(analysis.trials) == 6, "its folder still has it"
    assert any("trial 4 of the state file" in problem.where for problem in analysis.problems)


def test_the_newest_state_file_that_can_be_read_counts(home):
    (home / "experiment_state-2026-11-21_09-00-00.json").write_text("{")
    analysis = read(home)
    assert len(analysis.trials) == 6
    assert [problem.where for problem in analysis.problems] == ["experiment_state-2026-11-21_09-00-00.json"]


def test_a_trial_that_has_not_begun_is_a_row_without_values(home):
    nothing = dict.fromkeys(("start_time", "last_result", "last_result_time"))
    edit_state(home, 5, {"status": "PENDING"}, **nothing)
    (folder_of(home, 5) / "result.json").unlink()
    row = read(home).dataframe().set_index("trial_id").loc["abcd1_00005"]
    assert row["status"] == "PENDING"
    assert row["loss"] != row["loss"]
    assert row["iterations"] == 0


class Evil:
    def __reduce__(self):
        return (os.system, (f"touch {os.environ['EVIL_MARK']}",))


def test_no_pickle_in_an_experiment_is_ever_run(home, tmp_path, monkeypatch):
    mark = tmp_path / "ran"
    monkeypatch.setenv("EVIL_MARK", str(mark))
    for name in ("tuner.pkl", "basic-variant-state-2026-11-20_12-00-00.json"):
        (home / name).write_bytes(pickle.dumps({"_tune_config": Evil(), "config": {"lr": Evil()}}))
    for number in range(6):
        (folder_of(home, number) / "params.pkl").write_bytes(pickle.dumps(Evil()))
        (folder_of(home, number) / "error.pkl").write_bytes(pickle.dumps(Evil()))
    (folder_of(home, 0) / "params.json").unlink()
    evil = {"_type": "CLOUDPICKLE_FALLBACK", "value": pickle.dumps(Evil()).hex()}
    edit_state(home, 0, {"placement_group_factory": evil["value"], "config": {"lr": 0.1, "evil": evil}})
    analysis = read(home)
    assert analysis.best_value == read_value(analysis)
    assert analysis.trials[0].config["evil"] == "<object>"
    assert not mark.exists()
    pickle.loads(pickle.dumps(Evil()))
    assert mark.exists(), "the pickle would have run its command"


def test_an_object_in_a_configuration_is_as_in_params_json(home):
    where = {"_type": "CLOUDPICKLE_FALLBACK", "value": pickle.dumps(Path("/a")).hex()}
    edit_state(home, 0, {"config": {"lr": 0.1, "where": where}})
    (folder_of(home, 0) / "params.json").write_text(json.dumps({"lr": 0.1, "where": "/a"}))
    assert read(home).trials[0].config["where"] == "/a"


def test_without_our_metadata_the_metric_has_to_be_given(home):
    analysis = analyze(home)
    assert analysis.metric == "loss", "the state file has it"
    with pytest.raises(ValueError, match="mode="):
        _ = analysis.best_config
    assert analyze(home, metric="accuracy", mode="max").best_value > 0


def test_the_space_and_searcher_are_found_in_what_the_driver_wrote(experiments):
    record = analyze(experiments / "asha").record
    assert record.domains["lr"].text == "loguniform(0.0001, 0.1)"
    assert record.domains["lr"].log
    assert record.domains["net/act"] == Domain("categorical", "choice(['relu', 'tanh'])")
    assert record.domains["net/width"].text == "randint(8, 64)"
    assert record.domains["pair/1"].text == "uniform(0, 1)"
    assert record.constants["constant"] == "always"
    assert record.scheduler == "AsyncHyperBandScheduler(max_t=9, reduction_factor=3)"
    assert record.num_samples == 9
    assert [bundle["CPU"] for bundle in record.trials[0].resources if bundle] == [1.0]


def test_the_ends_of_a_range_are_written_exactly():
    space = space_metadata({"seed": tune.randint(0, 2**31 - 1), "lr": tune.loguniform(1e-5, 1.0)})["space"]
    texts = [domain["text"] for domain in space.values()]
    assert texts == ["randint(0, 2147483647)", "loguniform(1e-05, 1)"]


def test_our_own_searchers_state_has_metric_mode_and_name(home):
    state = {"format": "horovod_tune.BayesOptSearch", "metric": "loss", "mode": "min"}
    (home / "searcher-state-2026-11-20_12-00-00.json").write_text(json.dumps(state))
    record = analyze(home).record
    assert (record.searcher, record.metric, record.mode) == ("BayesOptSearch", "loss", "min")
    (home / "searcher-state-2026-11-20_12-00-00.json").write_text('{"format": "horovod_tune.B", broken')
    assert "not readable" in str(analyze(home).problems[0])


@pytest.mark.parametrize("state", [b"[3]", b"\x80\x04.", b"PK\x03\x04\xff", b'{"limits": [[0, 1]]}'])
def test_a_searcher_of_someone_else_may_save_its_state_in_any_format(home, state):
    (home / "searcher-state-2026-11-20_12-00-00.pkl").write_bytes(state)
    assert analyze(home).problems == ()


def test_metric_and_mode_that_the_progress_callback_left_are_used(home):
    facts = home / "horovod_tune_run-abcd1_00000.json"
    facts.write_text(json.dumps({"metric": "loss", "mode": "min", "versions": {"ray": "2.60.0"}}))
    assert analyze(home).best_value == read_value(read(home))
    facts.write_text(json.dumps({"metric": "accuracy", "mode": "max"}))
    assert analyze(home).record.mode is None, "the state has another metric"
    facts.write_text("{")
    assert "horovod_tune_run-abcd1_00000.json: not readable" in str(analyze(home, mode="min").problems[0])


def test_of_several_drivers_metadata_the_last_written_counts_in_a_copy_too(home):
    for number, moment in enumerate((1e9, 2e9, None)):
        facts = home / f"horovod_tune_run-abcd1_0000{number}.json"
        facts.write_text(json.dumps({"written": moment, "ended": moment == 2e9}))
        os.utime(facts, (9e8 - number, 9e8 - number))
    assert analyze(home).record.metadata["ended"] is True


def test_a_file_of_another_program_in_the_folder_is_no_activity_of_the_search(home):
    before = read(home).record.last_write
    (home / "report.html").touch()
    os.utime(home / "report.html", (before + 1000, before + 1000))
    assert read(home).record.last_write == before


@pytest.mark.parametrize(("known", "status"), [(27, "PENDING"), (26, "RUNNING"), (None, "RUNNING")])
def test_a_trial_that_waits_to_continue_is_pending(home, known, status):
    edit_state(home, 0, {"status": "PENDING"}, last_result={"training_iteration": known} if known else {})
    assert read(home).trials[0].status == status


@pytest.mark.long
def test_between_two_trials_of_a_sequential_search_it_runs(home, monkeypatch):
    facts = home / "horovod_tune_run-abcd1_00000.json"
    facts.write_text(json.dumps({"ended": False}))
    assert all(trial.status == "TERMINATED" for trial in analyze(home).trials)
    last_write = analyze(home).record.last_write
    monkeypatch.setattr("horovod_tune.analysis.results.time.time", lambda: last_write + 60)
    assert analyze(home).state == "running", "more trials may come"
    monkeypatch.setattr("horovod_tune.analysis.results.time.time", lambda: last_write + 661)
    assert analyze(home).state == "interrupted", "its driver was killed"
    for known in ({"ended": True}, {}):
        facts.write_text(json.dumps(known))
        assert analyze(home).state == "finished"


def staged(home: Path, ray_folder: Path) -> Path:
    """The driver's own copy of an experiment, where Ray's session keeps it."""
    place = ray_folder / "session_2026-11-20_12-00-00_1_1" / "artifacts" / "2026-11-20" / home.name
    shutil.copytree(home, place / "driver_artifacts")
    return place / "driver_artifacts"


def unfinished(home: Path, reports: int) -> None:
    """Make the experiment a running one, with so many reports of each trial in the storage."""
    (state,) = home.glob("experiment_state-*.json")
    state.write_text(state.read_text().replace("TERMINATED", "RUNNING"))
    for result in home.glob("*/result.json"):
        result.write_text("".join(result.read_text().splitlines(keepends=True)[:reports]))


def test_what_the_driver_has_not_copied_yet_is_read_from_its_own_folder(home, tmp_path, monkeypatch):
    unfinished(home, 20)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "ray"))
    staged(home, tmp_path / "ray")
    unfinished(home, 5)
    assert [len(trial.rows) for trial in read(home).trials] == [20] * 6


def test_trials_that_began_after_the_last_copy_are_found_if_all_in_the_copy_have_ended(
    home, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "ray"))
    staged(home, tmp_path / "ray")
    (state,) = home.glob("experiment_state-*.json")
    whole = json.loads(state.read_text())
    state.write_text(json.dumps(whole | {"trial_data": whole["trial_data"][:1]}))
    for number in range(1, 6):
        shutil.rmtree(folder_of(home, number))
    assert [len(trial.rows) for trial in read(home).trials] == [27] * 6


@pytest.mark.parametrize("of_another_search", [False, True])
def test_a_finished_experiment_and_another_one_are_not_read_from_a_drivers_folder(
    home, tmp_path, monkeypatch, of_another_search
):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "ray"))
    other = staged(home, tmp_path / "ray")
    if of_another_search:
        unfinished(home, 5)
        (state,) = other.glob("experiment_state-*.json")
        state.rename(other / "experiment_state-2026-11-20_13-00-00.json")
    (other / "train_abcd1_00000" / "result.json").write_text("{" * 10**6)
    assert read(home).problems == ()


def test_another_search_of_the_same_name_and_second_is_not_mixed_in(home, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "ray"))
    other = staged(home, tmp_path / "ray")
    (state,) = other.glob("experiment_state-*.json")
    state.write_text(state.read_text().replace("abcd1", "ffff1"))
    assert [trial.trial_id for trial in read(home).trials] == [f"abcd1_{n:05}" for n in range(6)]
