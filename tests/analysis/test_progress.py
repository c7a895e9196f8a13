"""Progress while a search runs: the bookkeeping on plain data, the callback within a real search."""

from __future__ import annotations

import io
import json
import math
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from pyarrow import fs as pafs
from ray import tune

pytest.importorskip("rich")

from horovod_tune.analysis import ProgressCallback, analyze
from horovod_tune.analysis import progress as progress_module
from horovod_tune.analysis.search_progress import Progress


def tune_trial(name: str, **more: object) -> SimpleNamespace:
    """One of Tune's trials."""
    about = {"status": "RUNNING", "stopping_criterion": {}, "config": {"x": 1}, "checkpoint": None}
    about |= {"evaluated_params": {"x": 1}, "error_file": None}
    about |= {"latest_checkpoint_result": SimpleNamespace(metrics={"training_iteration": 4})}
    return SimpleNamespace(trial_id=name, **about | more)


def earlier(name: str, status: str, last: float, best: float) -> SimpleNamespace:
    """One of Tune's trials, which an earlier session has run."""
    return tune_trial(
        name,
        status=status,
        config={"x": 1, "constant": "c"},
        last_result={"loss": last, "training_iteration": 4, "time_total_s": 8.0},
        metric_analysis={"loss": {"min": best, "max": 9.0, "last": last}},
        checkpoint="/c/checkpoint_000003" if name == "c" else None,
        storage=SimpleNamespace(
            experiment_fs_path="/results",
            experiment_driver_staging_path="/none",
            storage_filesystem=pafs.LocalFileSystem(),
        ),
    )


def going(total: int | None = 8, **more: object) -> Progress:
    progress = Progress(metric="loss", mode="min", total=total, began=0.0, **more)  # type: ignore[arg-type]
    for number in range(2):
        progress.started(
            tune_trial(f"t{number}", stopping_criterion={"training_iteration": 10}), 10.0 * number
        )
    return progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that the callback sees, as `now`."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(time=lambda: clock.now))
    return clock


def callback_of(total: int | None = None, **settings: object) -> tuple[ProgressCallback, io.StringIO]:
    """A callback as Tune has it when a search begins, and what it prints."""
    stream = io.StringIO()
    callback = ProgressCallback("loss", "min", **{"stream": stream, "live": False} | settings)  # type: ignore[arg-type]
    callback._metadata_written = True
    callback.setup(total_num_samples=total)
    return callback, stream


def test_the_best_so_far_is_shown_once_and_nan_never():
    progress = going()
    assert progress.reported("t0", {"loss": 2.0, "training_iteration": 1}, 12.0)
    assert not progress.reported("t1", {"loss": 2.0, "training_iteration": 1}, 13.0), "a tie"
    assert not progress.reported("t1", {"loss": math.nan, "training_iteration": 2}, 14.0)
    assert progress.reported("t1", {"loss": 1.0, "training_iteration": 3}, 15.0)
    assert (progress.best_trial, progress.best_value) == ("t1", 1.0)
    progress.restored(earlier("t2", "PENDING", np.float32(0.75), np.float32(0.5)), 16.0)
    assert (progress.best_trial, progress.best_value) == ("t2", 0.5)


def test_a_trials_time_left_follows_from_its_goal_and_its_pace():
    progress = going()
    trial = progress.trials["t0"]
    assert trial.left_s(5.0) is None, "no report, no pace"
    progress.reported("t0", {"training_iteration": 1}, 10.0)
    assert trial.left_s(10.0) is None, "one report, no pace"
    progress.reported("t0", {"training_iteration": 3}, 14.0)
    assert trial.left_s(14.0) == 7 * 2.0
    assert trial.left_s(15.0) == 13.0
    progress.started(tune_trial("t0"), 20.0)
    assert trial.left_s(20.0) is None, "it starts again"


def test_the_searchs_time_left_follows_from_ended_trials_and_its_budget():
    progress = going(total=8)
    assert progress.left_s(20.0) is None, "nothing has ended"
    progress.trials["t0"].stop("done", 30.0)
    progress.started(tune_trial("t2"), 30.0)
    # 5 trials of 30 s each to come, 20 s left of t1 and 30 s of t2, two at a time
    assert progress.left_s(30.0) == pytest.approx((5 * 30 + 10 + 30) / 2)
    progress = going(total=None, budget_s=60.0)
    assert (progress.left_s(20.0), progress.left_s(100.0)) == (40.0, 0.0)
    assert going(total=None).left_s(5.0) is None


def test_lines_have_what_is_known_and_no_more():
    progress = going(total=None)
    trial = progress.trials["t0"]
    assert progress.summary(20.0) == "0 trials ended · 2 running · 20 s"
    progress.reported("t0", {"loss": 0.5, "training_iteration": 4}, 20.0)
    assert trial.text("loss", 20.0) == "t0 running · iteration 4 of 10 · loss 0.5 · 20 s"
    trial.stop("failed", 25.0)
    assert "1 trial ended · 1 running · 1 failed" in progress.summary(25.0)
    assert progress.summary(25.0).endswith("best loss 0.5 (t0)")


def test_plain_lines_repeat_a_trial_no_more_often_than_asked_and_no_less(clock):
    callback, stream = callback_of(every_s=30.0)
    for second in range(100):
        clock.now = float(second)
        # Every better value that is due is t0's; t1, which improves all the time, gets its lines too.
        for name, loss in (("equal", 1.0), (f"t{int(second % 5 > 0)}", -second)):
            callback.on_trial_result(0, [], tune_trial(name), {"loss": loss, "training_iteration": second})
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("best so far")
    assert [sum(line.startswith(name) for line in lines) for name in ("equal", "t1")] == [4, 4], lines
    callback.setup()
    callback.on_trial_result(0, [], tune_trial("equal"), {"loss": 1.0, "training_iteration": 1})
    assert stream.getvalue().splitlines()[-1].startswith("equal"), "another search begins anew"


def test_a_terminal_without_rich_gets_plain_lines(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    callback, _ = callback_of(3, live=None, stream=terminal)
    placeholder = {"layer/kind": ("__ref_ph", "1")}  # Tune's, for an object
    trial = tune_trial("a", config={"layer": {"kind": SimpleNamespace}}, evaluated_params=placeholder)
    callback.on_trial_start(0, [trial], trial)
    assert terminal.getvalue() == "a started  layer/kind=<class 'types.SimpleNamespace'>\n"


@pytest.mark.long
def test_the_live_table_is_bounded_and_leaves_the_terminal_as_it_was(clock, monkeypatch):
    before, at_exit = sys.stdout, []
    hooks = SimpleNamespace(register=at_exit.append, unregister=at_exit.remove)
    monkeypatch.setattr(progress_module, "atexit", hooks)
    callback, stream = callback_of(500, live=True)
    for number in range(60):
        trial = tune_trial(f"trial{number}", evaluated_params={"[bold]": number})
        callback.on_trial_start(0, [], trial)
        clock.now = float(number)
        callback.on_trial_result(0, [], trial, {"loss": float(number), "training_iteration": 1})
        callback.on_step_end(0, [])
    assert len(at_exit) == 1
    callback.on_experiment_end([])
    assert "more running" in stream.getvalue() and "search ended" in stream.getvalue()
    assert "started" not in stream.getvalue()
    assert stream.getvalue().rstrip().count("\x1b[?25l") <= stream.getvalue().count("\x1b[?25h")
    assert sys.stdout is before and at_exit == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": "loss", "mode": "least"}, 'mode must be "min" or "max"'),
        ({"metric": "loss"}, "metric and mode must be given together, got metric='loss' and mode=None"),
        ({"metric": "", "mode": "min"}, "metric must be the name of a reported value, got ''"),
        ({"metric": 3, "mode": "min"}, "metric must be the name of a reported value, got 3"),
        ({"every_s": -1.0}, "every_s must be at least 0 seconds, got -1.0"),
        ({"every_s": "30"}, "every_s must be at least 0 seconds, got '30'"),
        ({"live": "no"}, "live must be True, False or None, got 'no'"),
        ({"stream": "out.txt"}, "stream must be an open file, got 'out.txt'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ProgressCallback(**arguments)


def test_a_trial_that_pauses_and_continues_is_shown():
    callback, stream = callback_of(3)
    trials = [tune_trial("a"), tune_trial("b")]
    for trial in trials:
        callback.on_trial_start(0, trials, trial)
        callback.on_trial_result(0, trials, trial, {"loss": 1.0, "training_iteration": 2})
    trials[0].status = "PAUSED"
    callback.on_step_end(1, trials)
    assert "1 running · 1 paused" in callback._progress.summary(0.0)
    trials[0].status, trials[0].config = "RUNNING", {"x": 5}
    callback.on_trial_start(2, trials, trials[0])
    callback.on_step_end(2, trials)
    assert stream.getvalue().splitlines()[-1] == "a starts over: it has saved no checkpoint"
    assert callback._progress.trials["a"].settings == "x=5", "changed by PopulationBasedTraining"
    assert "2 running ·" in callback._progress.summary(0.0)
    trials[1].latest_checkpoint_result.metrics["training_iteration"] = 1
    for trial, checkpoint in zip(trials, (None, "/b/checkpoint_000001"), strict=True):
        trial.checkpoint = checkpoint
        callback.on_trial_recover(3, trials, trial)
        callback.on_trial_start(3, trials, trial)
    lines = stream.getvalue().splitlines()
    assert lines[-3] == "a starts over: it has saved no checkpoint"
    assert lines[-1] == "b continues after iteration 1", "the checkpoint's"


def test_a_trial_that_was_stopped_is_told_from_one_that_ended_by_itself():
    callback, stream = callback_of()
    callback.ends = {"epoch": 30}
    callback.setup()
    goal = {"training_iteration": 3}
    trials = [tune_trial(name, stopping_criterion=goal) for name in "abcdef"]
    reports = ({"training_iteration": 2, "done": True}, {"training_iteration": 3, "done": True})
    reports = (
        *reports,
        {"training_iteration": 1, "done": False},
        {"epoch": 30, "done": True},
        {"done": False},
        {"epoch": 30, "done": False},
    )
    for trial, report in zip(trials, reports, strict=True):
        callback.on_trial_start(0, trials, trial)
        callback.on_trial_result(0, trials, trial, {"loss": 1.0} | report)
        trial.last_result = report
    trials[4].status = trials[5].status = "PAUSED"
    callback.on_step_end(0, trials)
    for trial in trials:
        callback.on_trial_complete(1, trials, trial)
        trial.status = "TERMINATED"
    callback.on_step_end(1, trials)
    ends = [line.split(" · ")[0] for line in stream.getvalue().splitlines() if " ended" not in line][-6:]
    assert ends == ["a stopped", "b done", "c done", "d done", "e stopped", "f done"]
    assert callback._progress.summary(0.0).startswith("6 trials ended · 2 stopped · ")


def test_a_start_line_has_every_hyperparameter_and_no_constant():
    """Tune's `evaluated_params` lack what was not drawn: `points_to_evaluate`, `sample_from`."""
    config = {"lr": 0.1, "a": 3.0, "net": {"width": 8}, "sizes": [4, 2], "data": "x", "opt": {"m": 0.5}}
    trial = tune_trial("a", evaluated_params={}, config=config)
    progress = Progress(searched=["lr", "a", "net/width", "sizes/1", "opt"])
    assert progress.started(trial, 0.0).settings == "lr=0.1 a=3 net/width=8 sizes/1=2 opt/m=0.5"
    assert Progress().started(trial, 0.0).settings.startswith("lr=0.1 a=3 net/width=8 sizes=[4, 2] data=x")


def test_the_time_left_is_without_cold_starts_and_not_a_guess_of_seconds():
    progress = Progress("loss", "min", total=4)
    for number in range(4):  # two at a time; the first two start for 20 s, all train for 60 s
        begin = 80.0 * (number // 2)
        progress.started(tune_trial(f"t{number}"), begin)
        start_s = 20.0 if number < 2 else 0.0
        result = {"loss": 1.0, "training_iteration": 1, "start_s": start_s}
        progress.reported(f"t{number}", result, begin + start_s + 30.0)
        if number < 2:
            progress.trials[f"t{number}"].stop("done", 80.0)
    assert progress.left_s(110.0) == pytest.approx(30.0)
    progress.trials["t2"].stop("done", 140.0)
    assert progress.left_s(138.0) == pytest.approx(1.0), "two ran at once"
    assert "left" in progress.summary(115.0) and "left" not in progress.summary(138.0)
    progress.trials["t3"].stop("paused", 138.0)
    assert progress.trials["t3"].trained_s(1000.0) == pytest.approx(58.0), "a pause is not training"


def test_lines_have_the_digits_that_tell_trials_apart():
    progress = Progress("loss", "min")
    for number in range(4):
        progress.started(tune_trial(f"t{number}"), 0.0)
        progress.reported(f"t{number}", {"loss": 1e8 + number, "training_iteration": 1}, 1.0)
    assert progress.summary(1.0).endswith("best loss 100000000 (t0)")
    assert "loss 100000003" in progress.trials["t3"].text("loss", 1.0, progress.digits)


def test_trials_that_end_with_the_search_count_as_ended():
    callback, stream = callback_of()
    trials = [earlier(name, "RUNNING", 1.0, 1.0) for name in ("a", "never started", "b")]
    trials[1].last_result, trials[1].metric_analysis = {}, {}
    for trial in (trials[0], trials[2]):
        callback.on_trial_start(0, trials, trial)
    trials[0].status = trials[1].status = "TERMINATED"  # at the end of time_budget_s Tune calls no other hook
    callback.on_step_end(1, trials)
    callback.on_step_end(1, trials)
    assert stream.getvalue().count("a stopped") == 1
    callback.on_experiment_end(trials)  # after Ctrl-C
    assert "search ended: 1 trial ended · 1 stopped · 1 interrupted · " in stream.getvalue()


def test_a_resumed_search_begins_from_the_restored_trials():
    callback, stream = callback_of(4)
    trials = [earlier("a", "TERMINATED", 1.0, 0.5), earlier("b", "TERMINATED", 2.0, 2.0)]
    trials += [earlier("c", "PENDING", 4.0, 3.0), earlier("d", "PENDING", 5.0, 5.0)]
    new = earlier("new", "PENDING", 0.0, 0.0)
    new.last_result, new.metric_analysis = {"trial_id": "new", "config": {}}, {}  # without reports
    trials.append(new)
    callback.on_step_begin(0, trials)
    assert callback._progress.summary(0.0).startswith("2 of 4 trials ended · ")
    callback.on_trial_start(0, trials, trials[3])
    trials[2].status = "RUNNING"
    callback.on_trial_start(0, trials, trials[2])
    callback.on_trial_result(0, trials, trials[2], {"loss": 3.0, "training_iteration": 5})
    trials[2].metric_analysis["loss"]["last"] = 3.0
    trials[2].status = "TERMINATED"
    callback.on_trial_complete(1, trials, trials[2])
    callback.on_experiment_end(trials)
    said = stream.getvalue()
    assert "c continues after iteration 4" in said and "new" not in callback._progress.trials
    assert said.startswith("continues results: 2 of 4 trials ended\n")
    assert "d starts over: it has saved no checkpoint" in said
    assert "search ended: 3 of 4 trials ended" in said
    assert "best loss 0.5 (a)" in said
    assert "best trial   a, loss 1 at its last report" in said
    assert "best config  {'x': 1, 'constant': 'c'}" in said


def test_a_resumed_search_with_nothing_left_to_do_counts_the_restored_trials():
    callback, stream = callback_of(1)
    callback.on_experiment_end([earlier("a", "TERMINATED", 1.0, 1.0)])
    assert "search ended: 1 of 1 trial ended" in stream.getvalue()
    assert "nan" not in stream.getvalue()


def test_a_search_that_ends_in_an_error_before_any_trial_prints_nothing():
    callback, stream = callback_of(3)
    try:
        raise ValueError("as Tune handles it")
    except ValueError:
        callback.on_experiment_end([])
    assert stream.getvalue() == ""


def test_a_change_of_an_elastic_trials_ranks_is_shown():
    callback, stream = callback_of(every_s=30.0)
    trial = tune_trial("a")
    for step, ranks in enumerate((4, 4, 3, 3, 4)):
        callback.on_trial_result(0, [], trial, {"loss": 1.0, "training_iteration": step, "world_size": ranks})
    lines = [line for line in stream.getvalue().splitlines() if "ranks" in line]
    assert lines == ["a continues with 3 ranks (before: 4)", "a continues with 4 ranks (before: 3)"]


def test_a_rank_that_an_elastic_trial_has_lost_is_named_once_also_if_it_was_replaced():
    callback, stream = callback_of(every_s=30.0)
    trial, why = tune_trial("a"), "rank 1 on n1 died: process 7: it was ended by SIGTERM"
    for step, (ranks, changes, change) in enumerate(((2, 0, ""), (2, 1, why), (2, 1, why), (1, 2, why))):
        more = {"world_size": ranks, "world_changes": changes, "world_change": change}
        callback.on_trial_result(0, [], trial, {"loss": 1.0, "training_iteration": step, **more})
    lines = [line for line in stream.getvalue().splitlines() if "continues" in line]
    assert lines == [f"a continues with 2 ranks: {why}", f"a continues with 1 rank (before: 2): {why}"]


def test_the_callback_travels_as_tune_pickles_it():
    copied = pickle.loads(pickle.dumps(ProgressCallback("loss", "min", stream=sys.stdout)))
    assert copied._stream is None


@pytest.mark.slow
@pytest.mark.parametrize("live", [False, True])
def test_a_real_search_shows_its_progress_besides_tunes_reporter(
    ray_session, tmp_path, monkeypatch, capsys, live
):
    def train(config):
        for step in range(3):
            if config["x"] == 2 and step == 1:
                raise RuntimeError("no [bold]such[/bold] luck")
            tune.report({"loss": config["x"] + 1 / (step + 1)})

    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "1")
    stream = io.StringIO()
    shown = ProgressCallback("loss", "min", every_s=0.0, live=live, stream=stream)
    run = {"storage_path": str(tmp_path), "callbacks": [shown], "stop": {"training_iteration": 3}}
    tune.Tuner(
        train,
        param_space={"x": tune.grid_search([0, 1, 2])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", reuse_actors=True),
        run_config=tune.RunConfig(name="search", verbose=1, **run),
    ).fit()
    said = stream.getvalue()
    assert "Trial status:" in said + capsys.readouterr().out, "Tune's own reporter"
    assert "search ended: 3 of 3 trials ended · 1 failed" in said
    assert said.count("failed · iteration 1 of 3") == 1
    assert said.count("\x1b[?25l") <= said.count("\x1b[?25h"), "the cursor is shown again"
    if not live:
        assert said.count(" started  x=") == 3 and said.count("done · iteration 3 of 3") == 2
        assert "best so far" in said
    (written,) = (tmp_path / "search").glob("horovod_tune_run-*.json")
    facts = json.loads(written.read_text())
    assert facts["versions"]["ray"] and facts["cluster"]["CPU"] > 1
    assert (facts["metric"], facts["mode"]) == ("loss", "min")
    assert analyze(tmp_path / "search").record.metadata == facts


def test_in_a_notebook_one_output_is_redrawn_in_place(monkeypatch, capsys, clock):
    display = pytest.importorskip("IPython.display")
    shown: list[str] = []
    output = SimpleNamespace(update=lambda html: shown.append(html.data))
    monkeypatch.setattr(display, "display", lambda *made, display_id: output)
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr("IPython.get_ipython", shell)
    callback, _ = callback_of(2, stream=None, live=None)
    evil = "<img src=x onerror=alert(1)>"
    trial = tune_trial("a", stopping_criterion={"training_iteration": 4}, config={"lr": evil})
    trial.evaluated_params = trial.config
    callback.on_trial_start(0, [], trial)
    callback.on_trial_result(0, [], trial, {"loss": 2.0, "training_iteration": 1})
    for moment in (1.1, 1.2, 1.3):
        clock.now = moment
        callback.on_step_end(0, [])
    assert len(shown) == 1, "not at every step of Tune's"
    assert "1/4" in shown[0] and "0 of 2 trials ended" in shown[0]
    assert evil not in shown[0]
    callback.on_trial_complete(0, [], trial)
    callback.on_experiment_end([])
    assert shown[-1] == "<div></div>"
    assert "search ended: 1 of 2 trials ended" in capsys.readouterr().out


def test_a_terminal_that_is_not_utf_8_gets_other_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1", write_through=True))
    progress_module._view(None, live=False).write("a · é ▁█ …")
    assert written.getvalue() == b"a \xb7 \xe9 _# ~\n"
