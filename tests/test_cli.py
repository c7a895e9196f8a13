"""The command `horovod-tune`: subcommands register themselves, and failures say what to type."""

from __future__ import annotations

import argparse
import subprocess
import sys
import types

import pytest

from horovod_tune import cli


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "horovod_tune.cli", *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "command", [(), ("doctor",), ("install-horovod",), ("report",), ("show",), ("export",)]
)
def test_help_is_there_for_every_command(command: tuple[str, ...]) -> None:
    ran = run_cli(*command, "--help")
    assert ran.returncode == 0 and ran.stdout.startswith("usage: horovod-tune")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "COMMAND"),
        (("nothing",), "invalid choice: 'nothing'"),
        (
            ("install-horovod", "--jobs", "0"),
            "--jobs/-j: the number of compilers must be an integer of at least 1, got 0",
        ),
        (("install-horovod", "--gpu", "rocm"), "invalid choice: 'rocm'"),
    ],
)
def test_a_wrong_command_line_is_named_and_exits_with_2(arguments: tuple[str, ...], said: str) -> None:
    ran = run_cli(*arguments)
    assert ran.returncode == 2 and said in ran.stderr


def command_that(raises: BaseException) -> types.ModuleType:
    """Make a module with a command that raises."""

    def run(_: argparse.Namespace) -> int:
        raise raises

    def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        subparsers.add_parser("fail").set_defaults(run=run)

    module = types.ModuleType("command_that_fails")
    module.add_parsers = add_parsers  # type: ignore[attr-defined]
    return module


def run_failing(monkeypatch: pytest.MonkeyPatch, raises: BaseException) -> int:
    monkeypatch.setitem(sys.modules, "command_that_fails", command_that(raises))
    monkeypatch.setattr(cli, "COMMAND_MODULES", ("command_that_fails",))
    return cli.main(["fail"])


def test_a_missing_optional_library_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ModuleNotFoundError("No module named 'plotly.graph_objects'", name="plotly.graph_objects")
    assert run_failing(monkeypatch, missing) == 1
    assert "pip install 'horovod_tune[analysis]'" in capsys.readouterr().err


def test_another_missing_module_is_not_explained_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        run_failing(monkeypatch, ModuleNotFoundError("No module named 'nowhere'", name="nowhere"))


def test_an_interrupt_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_failing(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "\nhorovod-tune: interrupted\n"
