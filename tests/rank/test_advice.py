"""The advice below the traceback of an error that has to do with how a rank runs."""

from __future__ import annotations

import argparse
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import click
import numpy
import pytest

from horovod_tune.rank.advice import advice_on


@pytest.fixture
def started_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the script, with data.csv; the working directory is the trial's."""
    start, trial = tmp_path / "start", tmp_path / "trial"
    start.mkdir()
    trial.mkdir()
    (start / "data.csv").write_text("1,2\n")
    monkeypatch.setenv("TUNE_ORIG_WORKING_DIR", str(start))
    monkeypatch.chdir(trial)
    return start


def advice_of(act: Callable[[], object]) -> str:
    with pytest.raises(BaseException) as raised:
        act()
    return advice_on(raised.value)


def test_a_relative_path_is_explained_with_where_the_file_is(started_in: Path) -> None:
    text = advice_of(lambda: Path("data.csv").read_text())
    assert (
        f"'data.csv' is a relative path, and a rank starts in its trial's own directory ({Path.cwd()})"
        in text
    )
    assert "os.path.join(os.environ['TUNE_ORIG_WORKING_DIR'], 'data.csv')" in text


def test_a_relative_path_is_explained_without_such_a_file(started_in: Path) -> None:
    text = advice_of(lambda: Path("other.csv").read_text())
    assert "'other.csv' is a relative path" in text and "the file is in" not in text


def test_a_path_is_found_in_the_text_of_the_error(started_in: Path) -> None:
    assert "'data.csv' is a relative path" in advice_of(lambda: numpy.loadtxt("data.csv"))


def test_the_missing_file_may_be_the_cause_of_another_error(started_in: Path) -> None:
    def act() -> None:
        try:
            Path("data.csv").read_text()
        except FileNotFoundError as error:
            raise RuntimeError("no data") from error

    assert "'data.csv' is a relative path" in advice_of(act)


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(2, "x", "/nowhere/data.csv"), FileNotFoundError("gone"), ValueError("data.csv")],
)
def test_there_is_no_advice_on_other_errors(started_in: Path, error: Exception) -> None:
    assert advice_on(error) == ""


def test_a_cycle_of_causes_ends() -> None:
    first, second = ValueError(1), ValueError(2)
    first.__cause__, second.__cause__ = second, first
    assert advice_on(first) == ""


@pytest.mark.parametrize("code", [0, 3, None, "text"])
def test_sys_exit_is_explained(code: object) -> None:
    text = advice_on(SystemExit(code))
    assert f"sys.exit({code!r})" in text and "return from the function" in text


@pytest.mark.parametrize("parse", [argparse.ArgumentParser().parse_args, click.command(lambda: None)])
def test_an_error_of_a_parser_of_arguments_is_explained(
    monkeypatch: pytest.MonkeyPatch, parse: Callable[[], object]
) -> None:
    monkeypatch.setattr(sys, "argv", ["horovod_tune_template", "--unknown"])
    assert "in a rank, it is empty, not your command line" in advice_of(parse)


def test_a_command_that_exits_when_it_has_ended_is_explained() -> None:
    text = advice_of(lambda: click.command(lambda: None)([]))
    assert "click called sys.exit(0)" in text and "standalone_mode=False" in text


def test_an_error_about_main_is_explained() -> None:
    kind = type("Data", (), {"__module__": "__main__"})
    text = advice_of(lambda: pickle.dumps(kind()))
    assert "into a module that the script imports" in text and "state_dict" in text


def test_functions_of_ray_train_have_a_line_with_what_to_use() -> None:
    import ray.train
    import ray.train.torch
    import ray.tune

    def own_error() -> None:
        raise RuntimeError("of the function itself")

    for call, is_of_train in [
        (ray.train.torch.get_device, True),
        (lambda: ray.train.get_dataset_shard("train"), True),
        (lambda: ray.tune.get_dataset_shard("train"), True),
        (lambda: ray.tune.no_such_function(), False),
        (own_error, False),
    ]:
        with pytest.raises((RuntimeError, AttributeError)) as caught:
            call()
        assert ("get_world().device) for get_device" in advice_on(caught.value)) == is_of_train


def test_a_breakpoint_is_explained_with_how_to_attach_a_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray sets this in its workers, and ranks have their environment.
    for hook in ("ray.util.rpdb.set_trace", ""):
        monkeypatch.setenv("PYTHONBREAKPOINT", hook)
        monkeypatch.setattr("sys.stdin", io.StringIO())

        def debug() -> None:
            breakpoint()
            raise ValueError("not reached")

        assert "debugpy.listen(5678 + get_world().rank)" in advice_of(debug)
