"""`analyze` on experiments that Tune really wrote: finished, failed, interrupted, of every kind."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from made_experiments import START, changed, made_experiment, read, reporting, written
from pyarrow import fs as pafs

from horovod_tune.analysis import Analysis, analyze, results
from horovod_tune.analysis.plots.learning_curves import best_steps
from horovod_tune.analysis.reader.folders import Folder
from horovod_tune.analysis.results import MetricUnknown
from horovod_tune.analysis.trial_details import hosts_of

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "name", ["random", "asha", "failing", "diverging", "distributed", "pbt", "plain_run"]
)
def test_the_best_is_what_tune_calls_best_in_memory_and_at_its_path(experiments, seen_by_driver, name):
    seen = seen_by_driver[name]
    assert seen["ours"] == seen["tune"]
    given = {} if name != "plain_run" else {"mode": "min"}
    analysis = analyze(experiments / name, **given)
    assert analysis.best_trial.trial_id == seen["tune"]["trial"]
    assert analysis.best_config == seen["tune"]["config"]
    assert (analysis.state, analysis.problems) == ("finished", ())


def test_the_guides_attributes_are_there(experiments):
    analysis = analyze(experiments / "distributed")
    best = analysis.best_trial
    assert analysis.best_logdir == best.directory
    assert Path(analysis.best_logdir).is_dir()
    assert analysis.best_result["loss"] == best.last_result["loss"] == analysis.best_value
    one_row = analysis.best_result_df
    assert list(one_row.index) == [best.trial_id]
    assert one_row["loss"].item() == analysis.best_value
    assert one_row["config/lr"].item() == analysis.best_config["lr"]
    with analysis.best_checkpoint.as_directory() as folder:
        assert (Path(folder) / "steps").read_text() == "6"


def test_without_metric_and_mode_the_error_names_what_to_pass(experiments):
    with pytest.raises(
        ValueError, match=r"does not record its metric and mode.*reported: loss, accuracy, deep/loss"
    ):
        _ = analyze(experiments / "no_metric").best_config
    analysis = analyze(experiments / "no_metric", metric="deep/loss", mode="max")
    assert analysis.best_value == analysis.best_result["deep"]["loss"]
    with pytest.raises(ValueError, match="records metric 'loss', but not the mode of 'accuracy': pass"):
        _ = analyze(experiments / "distributed", metric="accuracy").best_config


def losses(*values: Sequence[float], **chosen: str) -> Analysis:
    """An experiment whose trials report these values."""
    return reporting(*([{"loss": value} for value in one] for one in values), metric="loss", **chosen)


@pytest.mark.parametrize(
    ("values", "mode", "scope", "winner"),
    [
        ([[2], [1], [1]], "min", "last", 1),
        ([[2], [2], [1]], "max", "last", 0),
        ([[NAN], [3], [-INF]], "min", "last", 1),
        ([[NAN], [INF]], "max", "last", None),
        ([[1, 9], [5, 5]], "min", "last", 1),
        ([[1, 9], [5, 5]], "min", "all", 0),
    ],
)
def test_nan_never_wins_and_of_equals_the_earlier_does(values, mode, scope, winner):
    assert losses(*values, mode=mode, scope=scope).best_number == winner


@pytest.mark.parametrize(
    ("values", "mode", "last", "best", "iteration"),
    [
        ((3, 1, 2), "min", 2, 1, 2),
        ((3, 1, 2), "max", 2, 3, 1),
        ((1, 1, 1), "min", 1, 1, 1),
        ((5, NAN, 4, NAN), "min", NAN, 4, 3),
        ((5, -INF), "min", -INF, 5, 1),
        ((NAN, INF), "max", INF, NAN, None),
        ((), "min", NAN, NAN, None),
    ],
)
def test_the_score_of_a_trial(values, mode, last, best, iteration):
    found = losses([0.5, 0.5], values, mode=mode).dataframe().iloc[1]
    assert (found["loss"], found["best_loss"]) == pytest.approx((last, best), nan_ok=True)
    assert found["best_iteration"] == iteration or (iteration is None and pd.isna(found["best_iteration"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "minimum"}, r'mode must be "min" or "max", got \'minimum\''),
        ({"scope": "first"}, r'scope must be "last" or "all", got \'first\''),
        ({"metric": ""}, "metric must be the name of a reported value, got ''"),
        ({"metric": ["a", "b"]}, r"metric must be the name of a reported value, got \['a', 'b'\]"),
        ({"limits": "loss <= 1"}, r'limits must be a list such as \["latency_ms <= 20"\], got \'loss <= 1\''),
        ({"limits": ""}, "limits must be a list such as .* got ''"),
        ({"limits": 3}, "limits must be a list such as .* got 3"),
        ({"limits": [("loss", "<=", 1)]}, "a limit is written like .* got .'loss', '<=', 1.$"),
        ({"experiment": ""}, "experiment must be a folder, got ''"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        analyze(**{"experiment": tmp_path, **arguments})


def test_the_error_for_an_unknown_metric_lists_those_reported(experiments):
    with pytest.raises(ValueError, match="no trial reported a number named 'los'; reported: loss, accuracy"):
        _ = analyze(experiments / "random", metric="los", mode="min").best_trial


def test_what_is_no_experiment_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"experiment must be a path, or what .* got int"):
        analyze(3)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        analyze(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no Tune experiment at"):
        analyze(tmp_path)


def test_a_folder_of_experiments_names_them(experiments):
    with pytest.raises(ValueError, match="it contains experiments: asha, distributed"):
        analyze(experiments)


def test_the_frame_of_trials_keeps_types(experiments):
    table = analyze(experiments / "random").dataframe()
    assert len(table) == 4
    assert table["config/net/width"].dtype == "int64"
    assert table["config/batch"].dtype == "int64"
    assert table["config/lr"].dtype == "float64"
    assert table["config/pair"].map(type).eq(list).all()
    assert set(table["status"]) == {"TERMINATED"}
    assert str(table["start"].dt.tz) == "UTC"
    assert ((table["end"] - table["start"]).dt.total_seconds() > 0).all()
    assert table["ranks"].isna().all(), "a plain function reports no ranks, and none are invented"
    assert (table["iterations"] == 4).all()
    diverging = analyze(experiments / "diverging").dataframe()
    assert diverging["accuracy"].isna().sum() == 1
    assert diverging["best_accuracy"].notna().all(), "it had been finite before"


@pytest.mark.parametrize(
    ("reported", "hosts"),
    [
        ("n1:2,n2:2", ["n1", "n1", "n2", "n2"]),
        ("n1:3,n2:1", ["n1", "n1", "n1", "n2"]),
        ("n1:2", None),  # of two ranks, where there are four
        ("n1:4000000000", None),
        ("n1,n2", None),
        ("", None),
        (3, None),
        (["n1", "n1", "n2", "n2"], None),
        (None, None),
    ],
)
def test_hosts_are_read_where_they_are_ours_and_not_a_metric_of_the_functions_own(reported, hosts):
    trial = made_experiment(1).trials[0]
    told = {**trial.last_result, "world_size": 4, "hosts": reported}
    assert hosts_of(replace(trial, last_result=told)) == hosts


def test_times_in_the_history_never_run_backwards(experiments):
    history = analyze(experiments / "random").history()
    assert len(history) == 16
    assert history["training_iteration"].dtype == "int64"
    assert history["deep/loss"].dtype == "float64"
    for _, rows in history.groupby("trial_id"):
        assert rows["time"].is_monotonic_increasing
        assert (rows["time"].astype("int64") // 10**9 == rows["timestamp"]).all(), (
            "within the second Tune wrote"
        )


def test_metrics_named_like_a_column_of_the_history_are_kept():
    analysis = made_experiment(2)
    told = {"time": 1.5, "attempt": "a", "elapsed_s": 2, "deep": {"time": 3}}
    trials = [replace(trial, rows=tuple(row | told for row in trial.rows)) for trial in analysis.trials]
    history = changed(analysis, trials=tuple(trials)).history()
    assert (history["reported_time"] == 1.5).all() and (history["reported_attempt"] == "a").all()
    assert (history["reported_elapsed_s"] == 2).all() and (history["deep/time"] == 3).all()
    assert str(history["time"].dt.tz) == "UTC" and (history["attempt"] == 1).all()


def test_a_metric_of_some_reports_only_is_known():
    rows = [{"loss": 1}, {"loss": 2, "bleu": 0.5}, {"loss": 3}]
    assert reporting(rows, rows, metric="bleu", mode="max").best_value == 0.5


def test_tunes_own_numbers_can_be_metric_and_limit():
    rows = [{"loss": 1, "time_total_s": seconds} for seconds in range(4)]
    limits = ["training_iteration >= 3"]
    analysis = reporting(rows, rows[:2], metric="time_total_s", mode="max", limits=limits)
    assert (analysis.best_number, analysis.best_value) == (0, 3.0)
    assert analysis.is_scored and "best_time_total_s" in analysis.dataframe()


def test_truth_values_are_numbers_but_done_is_tunes_own():
    rows = [{"fits": False, "done": False}, {"fits": True, "done": True}]
    analysis = reporting(rows, metric="fits", mode="max")
    assert analysis.best_value == 1.0
    assert "fits" in analysis.reported_numbers and "done" not in analysis.reported_numbers


def test_with_scope_all_a_metric_keeps_its_value_until_it_is_reported_again():
    told = [{"acc": 0.9, "lat": 30}, {"lat": 10}, {"acc": 0.8}, {"acc": math.nan}]
    analysis = reporting(told, metric="acc", mode="max", scope="all", limits=["lat <= 20"])
    assert (analysis.best_value, analysis.best_result["lat"]) == (0.9, 10)
    assert analysis.scores["best_iteration"].tolist() == [2]
    assert math.isnan(analysis.scores["last"][0])
    assert analysis.pareto_front({"acc": "max", "lat": "min"}).dataframe()["acc"].tolist() == [0.9]
    for against in ("time", "trials"):
        assert best_steps(analysis, against)[1][-1] == 0.9


def test_frames_by_trial_hold_the_same_reports(experiments):
    analysis = analyze(experiments / "asha")
    frames = analysis.trial_dataframes
    assert set(frames) == {trial.trial_id for trial in analysis.trials}
    assert sum(map(len, frames.values())) == len(analysis.history())
    assert all("config/lr" in rows for rows in frames.values())


def test_a_trial_that_was_started_again_counts_its_attempts(experiments):
    analysis = analyze(experiments / "failing")
    failed = analysis.dataframe().set_index("status").loc["ERROR"]
    assert failed["num_failures"] == 2
    assert failed["error"] == "RuntimeError: the <script>alert(1)</script> of <script>"
    rows = analysis.trial_dataframes[failed["trial_id"]]
    assert rows["attempt"].tolist() == [1, 1, 2, 2]
    text = analysis.errors()[failed["trial_id"]]
    assert text.count("Failure #") == 2
    assert "\x1b" not in text


def test_a_trial_that_continued_after_a_failure_has_not_failed():
    made, states = made_experiment(4), ("TERMINATED", "RUNNING", "ERROR", "UNKNOWN")
    trials = [replace(t, status=state, error="E: x") for t, state in zip(made.trials, states, strict=True)]
    errors = changed(made, trials=tuple(trials)).errors()
    assert list(errors) == [trial.trial_id for trial in made.trials[2:]]


def test_under_pbt_the_best_configuration_is_the_one_that_reported(experiments):
    analysis = analyze(experiments / "pbt")
    assert analysis.best_config == analysis.best_result["config"]
    assert "config/lr" in analysis.history()


def test_a_killed_experiment_is_read_from_what_the_driver_left(killed, monkeypatch):
    analysis = analyze(killed)
    table = analysis.dataframe()
    assert analysis.state == "running", "for eleven minutes it cannot be told from one that runs"
    assert (analysis.metric, analysis.mode) == ("loss", "min")
    assert len(table) >= 2
    assert len(analysis.history()) >= 4
    assert math.isfinite(analysis.best_value)
    assert not (table["status"] == "TERMINATED").all()
    monkeypatch.setattr(results.time, "time", lambda: analysis.record.last_write + 661)
    assert analysis.state == "interrupted"


def test_uris_and_filesystems_work_like_paths(experiments):
    expected = analyze(experiments / "random").best_value
    assert analyze(f"file://{experiments}/random").best_value == expected
    below = pafs.SubTreeFileSystem(str(experiments), pafs.LocalFileSystem())
    analysis = analyze("random", filesystem=below)
    assert analysis.best_value == expected
    assert analysis.best_logdir.startswith("random/")


def test_an_experiment_in_a_foreign_storage_is_read_through_its_filesystem(experiments):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(str(experiments / "distributed"), "/bucket/distributed", recursive=True)
    foreign = pafs.PyFileSystem(pafs.FSSpecHandler(memory))
    analysis = analyze("/bucket/distributed", filesystem=foreign)
    assert analysis.best_value == analyze(experiments / "distributed").best_value
    with analysis.best_checkpoint.as_directory() as folder:
        assert (Path(folder) / "steps").read_text() == "6"


def test_a_uri_keeps_its_query_at_its_end():
    folder = Folder(pafs.LocalFileSystem(), "bucket/run", "s3://bucket/run?region=eu-west-1")
    trial = folder.below("trial_1")
    assert (trial.path, trial.shown) == ("bucket/run/trial_1", "s3://bucket/run/trial_1?region=eu-west-1")
    record = made_experiment(1).trials[0]
    assert replace(record, directory=trial.shown).folder_name == "trial_1"


def test_a_moved_experiment_is_found_where_it_is_now(experiments, tmp_path):
    shutil.copytree(experiments / "distributed", tmp_path / "elsewhere")
    analysis = analyze(tmp_path / "elsewhere")
    assert analysis.best_logdir.startswith(str(tmp_path))
    assert analysis.best_checkpoint.path.startswith(str(tmp_path))


def test_reload_sees_what_was_added(experiments, tmp_path):
    shutil.copytree(experiments / "random", tmp_path / "growing")
    before = analyze(tmp_path / "growing")
    result = Path(before.best_logdir) / "result.json"
    last = result.read_text().splitlines()[-1].replace('"training_iteration": 4', '"training_iteration": 5')
    with result.open("a") as file:
        file.write(last + "\n")
    after = before.reload()
    assert len(after.history()) == len(before.history()) + 1
    assert isinstance(after.dataframe(), pd.DataFrame)


def test_a_trial_prints_without_its_reports():
    analysis = made_experiment(3)
    assert len(repr(analysis.best_trial)) < 300 and analysis.best_trial.trial_id in repr(analysis.best_trial)
    assert repr(analysis.record) == "<record of 'made': 3 trials, 0 problems>"


@pytest.mark.parametrize(
    ("done", "returned", "stop", "status"),
    [
        (False, True, {}, "terminated"),  # the function returned
        (True, True, {"training_iteration": 99}, "stopped"),  # by a scheduler
        (True, True, {"training_iteration": 2}, "terminated"),
        (True, True, {"valid/loss": 0.5}, "terminated"),
        (False, False, {"training_iteration": 2}, "terminated"),  # HyperBand pauses trials at their end
        (False, False, {}, "stopped"),  # while it was paused, or by the time budget
        (True, True, None, "terminated"),  # the search's state does not say what ends a trial
    ],
)
def test_a_stopped_trial_is_told_from_one_that_ended_by_itself(tmp_path, done, returned, stop, status):
    made = made_experiment(1)
    rows = tuple(row | {"done": False, "valid": {"loss": 0.7}} for row in made.trials[0].rows[:2])
    rows = (rows[0], rows[1] | {"done": done})
    trial = replace(made.trials[0], rows=rows, last_result=rows[1] | {"done": returned}, stop=stop)
    (read_again,) = read(written(changed(made, trials=(trial,)), tmp_path)).trials
    assert (read_again.shown_status, read_again.status) == (status, "TERMINATED")
    ranks = tuple({name: value for name, value in row.items() if name != "world_size"} for row in rows)
    assert replace(read_again, rows=ranks).shown_status == "terminated", "only known of distributed trials"


def test_the_end_of_a_failed_trial_is_its_failure_and_not_its_last_report(tmp_path):
    made = made_experiment(1)
    # Ten hours ahead of UTC; the reader does not know.
    rows = tuple(row | {"date": "2026-09-22_00-13-20", "timestamp": START} for row in made.trials[0].rows[:2])
    for occurred, after_s in (("2026-09-22_00-15-20", 120.0), ("2020-01-01_00-00-00", 0.0), ("x" * 19, 0.0)):
        error = f"Failure # 1 (occurred at {rows[0]['date']})\nE\nFailure # 2 (occurred at {occurred})\nE"
        failed = replace(made.trials[0], status="ERROR", error=error, rows=rows, start_time=START - 5.0)
        failed = replace(failed, end_time=START, last_result=rows[-1])
        again = read(written(changed(made, trials=(failed,)), tmp_path / occurred))
        assert again.trials[0].end_time == START + after_s
        assert again.spans["end"].max() == START + after_s


def test_numbers_are_shown_in_the_order_of_trials_if_no_metric_is_known():
    known = [[{"test": 1.0, "rank": 0}, {"rank": 1}], [], [{"test": 3.0}]]
    told = reporting(*known, metric="test", mode="min")
    assert told.unranked() == {}
    record = replace(told.record, metric=None, mode=None)
    without = Analysis(record, told.folder, metric=None, mode=None)
    assert without.unranked() == {"test": [1.0, None, 3.0], "rank": [1.0, None, None]}
    with pytest.raises(MetricUnknown, match=r'metric="NAME", mode="min" or "max"'):
        without.require_metric()
    only = Analysis(replace(record, trials=record.trials[2:]), told.folder, metric=None, mode=None)
    with pytest.raises(MetricUnknown, match=r'metric="test", mode="min" or "max"'):
        only.require_metric()
