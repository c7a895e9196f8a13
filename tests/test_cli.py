"""The command `horovod-tune`: subcommands register themselves, and failures say what to type."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import horovod_tune
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
    assert run_failing(ModuleNotFoundError("No module named 'nowhere'", name="nowhere")) == 1
    assert "No module named 'nowhere'. Run `horovod-tune doctor`" in capsys.readouterr().err
    assert run_failing(ImportError("GLIBC_2.99 not found")) == 1
    assert "GLIBC_2.99 not found. Run `horovod-tune doctor`" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError, match=r"horovod_tune\.nowhere"):  # a fault of ours
        run_failing(
            ModuleNotFoundError("No module named 'horovod_tune.nowhere'", name="horovod_tune.nowhere")
        )
    assert run_failing(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "\nhorovod-tune: interrupted\n"


def test_the_command_line_needs_only_the_standard_library(tmp_path: Path) -> None:
    """As after `pip install --no-deps`, or on a site whose packages come from elsewhere."""
    wanted = ["psutil", "packaging", "ray[tune]<3,>=2.51", "pandas>=2", 'rich>=13; extra == "analysis"']
    metadata = tmp_path / "horovod_tune-0.1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    requires = "".join(f"Requires-Dist: {line}\n" for line in wanted)
    metadata.write_text(f"Metadata-Version: 2.1\nName: horovod_tune\nVersion: 0.1.0\n{requires}")
    root = Path(horovod_tune.__file__).parent.parent

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-S", "-m", "horovod_tune.cli", *arguments],  # -S: without site-packages
            capture_output=True,
            text=True,
            timeout=60,
            env={"PYTHONPATH": f"{root}{os.pathsep}{tmp_path}", "PATH": os.defpath},
            cwd=tmp_path,
        )

    assert run("--version").stdout == f"{horovod_tune.__version__}\n"
    assert run("export", "--help").returncode == 0
    ran = run("doctor")
    assert ran.returncode == 1 and ran.stderr == ""
    for line in wanted[:-1]:
        assert f"Cure: pip install '{line}'" in ran.stdout
    assert "rich" not in ran.stdout and "A trial cannot run here." in ran.stdout
    for command in (["show", "x"], ["report", "x"], ["export", "x", "--csv", "-"]):
        ran = run(*command)
        assert ran.returncode == 1 and ran.stderr.count("\n") == 1
        assert "horovod-tune doctor" in ran.stderr
    assert "install torch first" in run("install-horovod").stderr
