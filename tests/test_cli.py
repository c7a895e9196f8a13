"""The command `horovod-tune`: subcommands register themselves, and failures say what to type."""

from __future__ import annotations

import argparse
import subprocess
import sys
import types
from collections.abc import Callable

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


@pytest.fixture
def run_failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    """Run the command line with a command that raises."""

    def run(raises: BaseException) -> int:
        def fail(_: argparse.Namespace) -> int:
            raise raises

        failing = types.ModuleType("command_that_fails")
        failing.add_parsers = lambda parsers: parsers.add_parser("fail").set_defaults(run=fail)  # type: ignore
        monkeypatch.setitem(sys.modules, "command_that_fails", failing)
        monkeypatch.setattr(cli, "COMMAND_MODULES", ("command_that_fails",))
        return cli.main(["fail"])

    return run


def test_a_missing_library_names_its_extra_and_an_interrupt_ends_quietly(
    run_failing: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ModuleNotFoundError("No module named 'plotly.graph_objects'", name="plotly.graph_objects")
    assert run_failing(missing) == 1
    assert "pip install 'horovod_tune[analysis]'" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        run_failing(ModuleNotFoundError("No module named 'nowhere'", name="nowhere"))
    assert run_failing(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "\nhorovod-tune: interrupted\n"
