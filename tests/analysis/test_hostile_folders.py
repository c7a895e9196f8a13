"""Untrusted folders: each bad part is named, the rest is shown, and nothing else is affected."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import stat
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_experiments import edit_state, read
from mutations import damage

from horovod_tune.analysis import Analysis, analyze
from horovod_tune.analysis.export import escape_formula, write_csv, write_parquet
from horovod_tune.analysis.printable import one_line, printable
from horovod_tune.analysis.progress import ProgressCallback
from horovod_tune.analysis.reader.folders import UnusableFile, open_folder
from horovod_tune.analysis.reader.plain_values import plain, read_object
from horovod_tune.analysis.reader.state_files import parse_state
from horovod_tune.analysis.reader.trial_files import with_files
from horovod_tune.analysis.report import render

EVIL = "\x1b]0;title\x07\x1b[2J[red]=1+1"


def every_way_out(analysis: Analysis, folder: Path) -> str:
    """Show, export and report it; returns what a terminal would get."""
    for table in (analysis.dataframe(), analysis.history()):
        write_csv(table, folder / "table.csv")
        write_parquet(table, folder / "table.parquet")
    (folder / "page.html").write_text(render(analysis), encoding="utf-8")
    terminal = pytest.importorskip("horovod_tune.analysis.terminal")
    stream = io.StringIO()
    terminal.Console(file=stream, width=120).print(terminal.view(analysis))
    if analysis.best_number is not None:
        assert analysis.best_result_df is not None
        assert analysis.best_checkpoint_path is None or "part" not in analysis.best_checkpoint_path
    stream.getvalue().encode("utf-8")
    return stream.getvalue()


@pytest.mark.parametrize("seed", range(20))
def test_damage_of_any_kind_costs_what_it_hit_only(experiments, tmp_path, seed):
    rng = random.Random(seed)
    names = sorted(path.name for path in experiments.iterdir() if path.is_dir())
    home = tmp_path / rng.choice(names)
    shutil.copytree(experiments / home.name, home)
    done = [damage(home, rng) for _ in range(rng.randrange(1, 6))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            analysis = read(home)
    except ValueError as error:
        assert "no Tune experiment at" in str(error), done
        return
    assert "\x1b" not in every_way_out(analysis, tmp_path), done


def test_what_is_deep_is_cut_off():
    within: list[object] = []
    within.append({"deep": within})
    cut: list[str] = []
    assert len(str(plain(within, cut.append))) < 500
    assert cut == ["data nested more than 32 deep"]


@pytest.mark.long
def test_what_is_cut_off_a_thousand_times_is_named_once(home):
    deep: object = []
    for _ in range(40):
        deep = [deep]
    (trial, *_), many = read(home).trials, [deep] * 1000
    edit_state(home, 0, {"config": {"many": many}})
    (state,) = home.glob("experiment_state-*.json")
    assert len(parse_state(state.read_bytes(), state.name, open_folder(home)).problems) == 1
    for name in ("result.json", "params.json"):
        (home / trial.folder_name / name).write_text(json.dumps({"many": many}))
    _, problems = with_files(open_folder(home), replace(trial, status="UNKNOWN"))
    what = "data nested more than 32 deep is left out"
    assert [each.what for each in problems] == [f"result.json: line 1: {what}", f"params.json: {what}"]


@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"a":' * 100_000, b"1" * 5000, b"{", b"\xff"])
def test_json_that_cannot_be_read_is_a_value_error(data):
    with pytest.raises(ValueError):
        read_object(data)


def test_texts_and_numbers_of_json_can_always_be_written_out():
    cut: list[str] = []
    value = read_object(b'{"\\ud800": "\\udfff", "n": 1' + b"0" * 400 + b', "x": "\xff"}', cut.append)
    json.dumps(value, ensure_ascii=False).encode("utf-8")
    assert value["\\ud800"] == "\\udfff"
    assert set(cut) == {
        "text that is not UTF-8",
        "text that is not Unicode",
        "a number of more than 300 digits",
    }


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "outside", "loop"])
def test_what_is_no_file_of_the_experiment_is_not_opened(home, tmp_path, kind, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("TOP SECRET")
    edit_state(home, 2, error_filename="error.txt")
    for number, name in enumerate(("result.json", "error.txt", "params.json"), start=1):
        place = home / f"train_abcd1_0000{number}" / name
        place.unlink(missing_ok=True)
        if kind in ("fifo", "socket"):
            os.mknod(place, 0o600 | (stat.S_IFIFO if kind == "fifo" else stat.S_IFSOCK))
        else:
            place.symlink_to({"device": "/dev/zero", "outside": secret, "loop": place}[kind])
        with monkeypatch.context() as opening, pytest.raises(UnusableFile):
            opening.setattr(os, "open", None)
            open_folder(home).below(place.parent.name).read(name)
    analysis = read(home)
    assert len(analysis.trials) == 6
    every_way_out(analysis, tmp_path)
    assert "TOP SECRET" not in (tmp_path / "page.html").read_text()
    problems = list(map(str, analysis.problems))
    assert any(each.startswith("abcd1_00001: result.json cannot be read") for each in problems)
    assert any(each.startswith("abcd1_00002: error.txt cannot be read") for each in problems)
    next(home.glob("experiment_state-*.json")).unlink()  # now params.json is all that has a configuration
    assert any("params.json cannot be read" in str(each) for each in read(home).problems)


def test_a_link_within_the_experiment_is_followed(home):
    trial = home / "train_abcd1_00001"
    (trial / "result.json").rename(home / "moved.json")
    (trial / "result.json").symlink_to(home / "moved.json")
    assert read(home).problems == ()


def test_a_file_beyond_any_size_is_named_and_not_read(home):
    with (home / "train_abcd1_00002" / "result.json").open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(UnusableFile, match=r"larger than 268,435,456 bytes: 1,099,511,627,776"):
        open_folder(home).below("train_abcd1_00002").read("result.json")
    assert "larger than" in str(read(home).problems[0])


def test_of_an_error_without_end_both_ends_are_kept(home):
    edit_state(home, 0, {"status": "ERROR"}, error_filename="error.txt")
    (home / "train_abcd1_00000" / "error.txt").write_text("begins\n" + "x" * 10**7 + "\nValueError: ends")
    text = read(home).errors()["abcd1_00000"]
    assert text.startswith("begins") and text.endswith("ValueError: ends") and len(text) < 210_000


def report_checkpoints(home: Path, *rows: dict[str, Any]) -> Path:
    """Let the best trial have these reports, each with a checkpoint; returns its folder."""
    trial = home / Path(read(home).best_trial.directory).name
    lines = [json.dumps({"training_iteration": number, **row}) for number, row in enumerate(rows, 1)]
    (trial / "result.json").write_text("\n".join(lines) + "\n")
    for row in rows:
        (trial / row["checkpoint_dir_name"]).mkdir(exist_ok=True)
    return trial


def best_checkpoint(home: Path, limit: str) -> str | None:
    return analyze(home, metric="loss", mode="min", limits=[limit]).best_checkpoint_path


def test_the_best_checkpoint_is_within_the_limits(home):
    first = {"loss": 0.1, "latency": 25, "checkpoint_dir_name": "checkpoint_000000"}
    # The loss is as before.
    trial = report_checkpoints(home, first, {"latency": 18, "checkpoint_dir_name": "checkpoint_000001"})
    assert best_checkpoint(home, "latency <= 30") == str(trial / "checkpoint_000000")
    assert best_checkpoint(home, "latency <= 20") == str(trial / "checkpoint_000001")
    (trial / "checkpoint_000001").rmdir()
    assert best_checkpoint(home, "latency <= 20") is None


def test_a_checkpoint_that_a_resumed_driver_wrote_again_counts_as_it_is_now(home):
    reported = ((-9.0, 10, 1), (-9.0, 30, 1), (-8.0, 10, 2))
    rows = [
        {"loss": loss, "latency": latency, "checkpoint_dir_name": f"checkpoint_00000{number}"}
        for loss, latency, number in reported
    ]
    trial = report_checkpoints(home, *rows)
    assert best_checkpoint(home, "latency <= 20") == str(trial / "checkpoint_000002")


def test_a_checkpoint_that_was_never_finished_is_none(home):
    trial = home / Path(read(home).best_trial.directory).name
    for name in ("checkpoint_000000", "checkpoint_000001.part", "checkpoint_000002.part-3f"):
        (trial / name).mkdir()
    assert read(home).best_checkpoint_path == str(trial / "checkpoint_000000")
    (trial / "checkpoint_000000").rmdir()
    assert read(home).best_checkpoint_path is None


def test_no_text_of_an_experiment_steers_the_terminal(home, tmp_path):
    edit_state(home, 0, {"trial_id": EVIL, "status": EVIL, "config": {EVIL: EVIL}}, error_filename=EVIL)
    (home / "train_abcd1_00000" / "error.txt").write_text(f"ValueError: {EVIL}")
    shown = every_way_out(read(home), tmp_path)
    assert "\x1b" not in shown and "\x07" not in shown
    assert r"\x1b]0;title" in shown


@pytest.mark.parametrize("live", [False, True])
def test_no_text_of_a_search_steers_the_terminal_while_it_runs(live):
    stream, evil = io.StringIO(), {EVIL: EVIL}
    shown = ProgressCallback(EVIL, "min", stream=stream, live=live)
    shown._metadata_written = True
    shown.setup()
    trial = SimpleNamespace(
        trial_id=EVIL, stopping_criterion={}, config=evil, evaluated_params=evil, status="RUNNING"
    )
    shown.on_trial_start(0, [], trial)
    shown.on_trial_result(0, [], trial, {EVIL: 1.0})
    shown.on_step_end(0, [])
    shown.on_trial_error(0, [], trial)
    shown.on_experiment_end([])
    assert "\x1b]0;" not in stream.getvalue() and "\x07" not in stream.getvalue()
    assert r"\x1b]0;title" in stream.getvalue()


def test_control_characters_are_escaped_and_text_is_unchanged():
    assert printable("größe\n\tµ 日本 🙂") == "größe\n\tµ 日本 🙂"
    assert one_line("a\nb\r\x9b\u202e") == r"a\nb\r\x9b\u202e"


@pytest.mark.parametrize("text", ["=1+1", "+x", "-cmd", "@SUM(A1)", "\t=1", "\r=1", " =1", "\uff1d1"])
def test_no_cell_of_a_csv_is_a_formula(home, text):
    assert escape_formula(text) == f"'{text}"
    table = read(home).dataframe()
    table["config/x"], table[text] = text, 1
    stream = io.StringIO()
    write_csv(table, stream)
    assert f"'{text.strip()}" in stream.getvalue().replace("\t", "").replace("\r", "").replace("' ", "'")
    assert escape_formula("-1.5e3") == "-1.5e3"
