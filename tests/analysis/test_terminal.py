"""`show`, `export` and `report` as commands, and sparklines."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from made_experiments import changed, losing_ranks, made_experiment, reporting, written

from horovod_tune.analysis import Analysis, analyze, export
from horovod_tune.analysis.analysis_commands import add_parsers
from horovod_tune.analysis.printable import sparkline
from horovod_tune.scoring import parse_limit

pytest.importorskip("rich")
from horovod_tune.analysis import terminal


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return written(made_experiment(30), tmp_path)


def run(*words: object) -> int:
    parser = argparse.ArgumentParser(prog="horovod-tune")
    add_parsers(parser.add_subparsers(required=True))
    args = parser.parse_args([str(word) for word in words])
    return args.run(args)


def shown(analysis: Analysis, width: int = 160, **settings: object) -> str:
    stream = io.StringIO()
    view = terminal.view(analysis, width=width, **settings)
    terminal.Console(file=stream, width=width).print(view, crop=False)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 20, "▁▂▃▄▅▆▇█"),
        ([5, 5, 5], 20, "▁▁▁"),
        ([1, math.nan, 2, math.inf], 20, "▁·█·"),
        ([math.nan], 20, "·"),
        ([1e308, -1e308, 1e308], 1, "▁"),
        ([1e308, -1e308], 20, "·▁"),  # too far apart for a scale
        ([], 20, ""),
        ([0, 0, 4, 4, 8, 8, 12, 12], 4, "▁▃▆█"),
    ],
)
def test_a_sparkline_shows_the_shape(values, width, line):
    assert sparkline(values, width) == line


def test_the_best_comes_first_then_the_table_the_failures_and_the_facts():
    analysis = made_experiment(200)
    text = shown(analysis, rows=5)
    best = analysis.best_trial.trial_id
    assert text.index("best loss") < text.index("config = ") < text.index("checkpoint: none kept")
    table = text[text.index("curve") :]
    assert table.index(best) < table.index("not shown: 195 more trials")
    assert f"{len(analysis.errors())} failed" in text
    assert "CUDA out of memory <b>now</b>" in text
    assert "Searcher" in text
    assert any(block in table for block in "▂▃▄▅▆▇")


def test_a_trial_without_reports_has_no_values():
    analysis = reporting([{"loss": 1.5}], [{"loss": math.nan}], [], metric="loss", mode="min")
    lines = shown(analysis).splitlines()
    rows = [line for trial in analysis.trials for line in lines if line.startswith(trial.trial_id)]
    assert [row.split().count("nan") for row in rows] == [0, 2, 0]


def test_ranks_that_an_elastic_trial_lost_are_named():
    why = "rank 1 on n[1] died: process 7: it was ended by SIGKILL"
    lines = shown(losing_ranks(why)).splitlines()
    name = losing_ranks(why).trials[1].trial_id
    first = lines.index("Changes of ranks")
    assert lines[first + 1 : first + 4] == [
        f"  {name}, at iteration 2: {why}",
        f"  {name}, at iteration 4: {why}",
        "",
    ]


def test_if_no_trial_meets_the_limits_the_reason_and_the_values_are_shown():
    analysis = made_experiment(20)
    limits = [parse_limit("loss <= -1e9")]
    limited = Analysis(analysis.record, analysis.folder, metric="loss", mode="min", limits=limits)
    text = shown(limited)
    assert "has a finite last value of 'loss' within loss <= -1000000000" in text
    assert f"{limited.scores['last'][0]:.5g}" in text


def test_what_looks_like_markup_is_text():
    made = made_experiment(3)
    trials = tuple(replace(t, config={"[red]x[/red]": "[bold]" + t.trial_id}) for t in made.trials)
    text = shown(changed(made, trials=trials))
    assert "[red]x[/red]" in text and "[bold]" in text


def test_a_narrow_terminal_leaves_out_hyperparameters_and_counts_them():
    text = shown(made_experiment(5), width=80)
    assert "abcd1_00000" in text and re.search(r"not shown: [1-5] more hyperparameters", text)
    assert max(map(len, text.splitlines())) <= 80


def test_an_invalid_number_of_rows_is_named(home, capsys):
    with pytest.raises(SystemExit):
        run("show", home, "-n", "abc")
    assert "must be a whole number and at least 1, got 'abc'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "report", "export"])
def test_a_wrong_path_is_one_line_and_status_1(command, tmp_path, capsys):
    more = ["--csv", "-"] if command == "export" else []
    assert run(command, tmp_path / "nowhere", *more) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("horovod-tune: there is no folder at") and errors.count("\n") == 1


def test_without_a_metric_there_are_numbers_and_a_page(tmp_path, monkeypatch, capsys):
    made = made_experiment(3)
    home = written(made, tmp_path)
    (state,) = home.glob("experiment_state-*.json")
    state.write_text(state.read_text().replace('"_metric": "loss"', '"_metric": null'))
    monkeypatch.chdir(tmp_path)
    assert run("show", home) == 0
    shown = capsys.readouterr().out
    assert "No best trial" in shown and "accuracy" in shown
    assert f"{made.trials[0].rows[-1]['accuracy']:.4g}" in shown
    assert run("report", home, "-o", "page.html") == 0
    told = capsys.readouterr()
    assert told.out.startswith("page.html: 3 trials") and "the report has no curves" in told.err
    page = Path("page.html").read_text()
    assert f"{made.trials[0].rows[-1]['accuracy']:.5g}" in page


@pytest.mark.parametrize("given", [("--metric", "los"), ("--limit", "latncy <= 1")])
@pytest.mark.parametrize("command", ["show", "report", "export"])
def test_a_name_that_no_trial_reported_is_named_with_status_2(command, given, home, capsys):
    more = ["--csv", "-"] if command == "export" else []
    assert run(command, home, "--mode", "min", *given, *more) == 2
    assert f"no trial reported a number named '{given[1][:6].split()[0]}'" in capsys.readouterr().err


@pytest.mark.long
def test_report_writes_the_page_and_names_what_was_not_read(home, tmp_path, capsys):
    (home / "train_abcd1_00003" / "result.json").write_text("{")
    assert run("report", home, "--mode", "min", "-o", tmp_path / "page.html") == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    said = capsys.readouterr()
    assert "30 trials" in said.out
    assert "abcd1_00003" in said.err
    assert run("report", home, "--mode", "min", "-o", tmp_path / "no" / "where.html") == 1
    assert "could not be completed: [Errno 2]" in capsys.readouterr().err


@pytest.mark.long
def test_export_writes_both_tables_in_both_formats(home, tmp_path, capsys):
    analysis = analyze(home, mode="min")
    for what, table in (("trials", analysis.dataframe()), ("history", analysis.history())):
        csv, parquet = tmp_path / f"{what}.csv", tmp_path / f"{what}.parquet"
        assert run("export", home, "--mode", "min", "--what", what, "--csv", csv, "--parquet", parquet) == 0
        for read in (pd.read_csv(csv), pd.read_parquet(parquet)):
            assert len(read) == len(table)
            assert list(read.columns) == list(table.columns)
        kept = pd.read_parquet(parquet)
        assert kept["loss"].dtype == "float64"
        hosts = kept["hosts"] if what == "history" else map(json.loads, kept["hosts"])
        assert list(hosts) == table["hosts"].tolist()
    assert pd.read_parquet(tmp_path / "trials.parquet")["config/net/width"].dtype == "int64"
    assert run("export", home, "--mode", "min", "--csv", "-") == 0
    assert len(pd.read_csv(io.StringIO(capsys.readouterr().out))) == 30
    assert run("export", home) == 2
    assert "--csv FILE" in capsys.readouterr().err


def test_a_closed_pipe_is_left_to_the_command_line(home, monkeypatch):
    def refuse(text: str) -> int:
        raise BrokenPipeError

    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", refuse)
    monkeypatch.setattr("sys.stdout", stream)
    with pytest.raises(BrokenPipeError):
        run("export", home, "--csv", "-")


def running(home: Path, monkeypatch: pytest.MonkeyPatch, looks: int) -> tuple[Analysis, list[float]]:
    """An experiment that runs for so many looks, and the seconds that were slept between them."""
    slept: list[float] = []
    monkeypatch.setattr(
        Analysis, "state", property(lambda self: "running" if len(slept) < looks else "finished")
    )
    return analyze(home, mode="min"), slept


@pytest.mark.long
def test_watching_in_a_terminal_redraws_until_the_end(home, monkeypatch):
    analysis, slept = running(home, monkeypatch, 2)
    stream = io.StringIO()
    screen = terminal.Console(file=stream, width=120, height=40, force_terminal=True)
    terminal.watch(analysis, screen, interval_s=1.0, sleep=slept.append)
    assert slept == [1.0, 1.0]
    assert "best loss" in stream.getvalue()
    assert "\x1b[?25h" in stream.getvalue(), "the cursor is shown again"


def test_after_watching_the_metric_is_looked_for_in_what_was_read_last(home, monkeypatch, capsys):
    last, _ = running(home, monkeypatch, 1)
    monkeypatch.setattr(terminal, "watch", lambda *args, **settings: last)
    assert run("show", home, "--watch") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_ctrl_c_ends_watching_cleanly(home, monkeypatch, is_terminal):
    analysis, _ = running(home, monkeypatch, 9)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    screen = terminal.Console(file=io.StringIO(), width=120, force_terminal=is_terminal)
    assert terminal.watch(analysis, screen, sleep=interrupt) is analysis


def test_a_file_that_is_being_replaced_is_read_the_next_time(home, monkeypatch):
    analysis, slept = running(home, monkeypatch, 1)

    def vanish(seconds: float) -> None:
        slept.append(seconds)
        for state in home.glob("*"):
            state.rename(home.parent / state.name)

    terminal.watch(analysis, terminal.Console(file=io.StringIO()), sleep=vanish)


LONG = "validation/multiclass_accuracy_top_5_average"


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("metric", ["loss", LONG])
def test_ids_and_numbers_are_never_cut_but_names_are(width, metric):
    made = made_experiment(6)
    rows = [tuple(row | {LONG: row["loss"]} for row in trial.rows) for trial in made.trials]
    trials = [replace(trial, rows=each) for trial, each in zip(made.trials, rows, strict=True)]
    analysis = changed(made, trials=tuple(trials), metric=metric)
    lines = shown(analysis, width=width).splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("trial "))
    table = [line.split() for line in lines[head + 2 : head + 8]]
    lasts = analysis.scores["last"]
    for number, words in zip(analysis.ranked, table, strict=True):
        assert words[0] == analysis.trials[number].trial_id
        assert f"{lasts[number]:.5g}" in words
        assert not any("…" in word for word in words)
    if width > 30:
        assert all(len(line) <= width for line in lines[head : head + 8])
    title = " ".join(lines[head].split())
    if metric == LONG:
        assert (LONG in title) == (width == 200) and "top_5_average"[-10:] in title
    else:
        assert "…" not in title


def test_what_is_copied_is_not_broken_into_lines():
    made = made_experiment(1)
    (trial,) = made.trials
    analysis = changed(made, trials=(replace(trial, config={"data": "/data/" + "x" * 100}),))
    assert f"config = {{'data': '/data/{'x' * 100}'}}" in shown(analysis, width=60)


def test_a_text_with_a_lone_carriage_return_stays_in_its_row(tmp_path):
    made = made_experiment(3)
    trials = [replace(trial, config={"a\rb": "one\rtwo", "c": "x\r\ny"}) for trial in made.trials]
    for what in ("dataframe", "history"):
        table = getattr(changed(made, trials=tuple(trials)), what)()
        export.write_csv(table, tmp_path / "a.csv")
        with open(tmp_path / "a.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(pd.read_csv(tmp_path / "a.csv")) == len(table)
        if what == "dataframe":
            assert {(row["config/a\rb"], row["config/c"]) for row in rows} == {("one\rtwo", "x\r\ny")}


@pytest.mark.long
def test_a_dash_is_standard_output_for_each_kind_of_file(home, tmp_path, capsysbinary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert run("report", home, "--mode", "min", "-o", "-") == 0
    assert capsysbinary.readouterr().out.startswith(b"<!doctype html>")
    assert run("export", home, "--mode", "min", "--parquet", "-") == 0
    assert len(pd.read_parquet(io.BytesIO(capsysbinary.readouterr().out))) == 30
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.processes
@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "ascii", "NO_COLOR": "1", "TERM": "dumb"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
)
def test_a_terminal_that_is_not_utf_8_shows_other_signs(environment, tmp_path):
    made = made_experiment(2)
    trials = [replace(trial, config={"name": f"模型{n} é"}) for n, trial in enumerate(made.trials)]
    home = written(changed(made, trials=tuple(trials)), tmp_path)
    results = {}
    for words in (["show"], ["export", "--csv", "-"]):
        command = [sys.executable, "-m", "horovod_tune.cli", words[0], str(home), *words[1:]]
        arguments = ["--metric", "loss", "--mode", "min"]
        ran = subprocess.run([*command, *arguments], capture_output=True, env=os.environ | environment)
        assert ran.returncode == 0, ran.stderr
        results[words[0]] = ran.stdout
    assert b"\\u6a21\\u578b0" in results["show"] and b"_" in results["show"]
    assert "模型1 é" in results["export"].decode("utf-8"), "a pipe gets UTF-8, as a file does"
