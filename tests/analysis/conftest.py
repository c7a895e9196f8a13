"""Experiments for the tests of the analysis: real ones that Tune wrote here, made once for all tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_experiments import made_experiment, written

HERE = Path(__file__).parent

_RUN_LIMIT_S = 560  # on a machine of two cores with other work


def _run(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "RAY_AIR_NEW_OUTPUT": "0",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return subprocess.run(
        [sys.executable, str(HERE / "tune_experiments.py"), str(folder), *names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_RUN_LIMIT_S,
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of an experiment of six trials with 27 reports each."""
    return written(made_experiment(6, asha=False), tmp_path)


@pytest.fixture(scope="session")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the finished experiments of `tune_experiments.py`, by name."""
    folder = tmp_path_factory.mktemp("experiments")
    names = ("random", "asha", "failing", "diverging", "distributed", "pbt", "plain_run")
    done = _run(folder, *names, "no_metric", "twice")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    yield folder


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment whose driver was killed (SIGKILL) while its third trial trained."""
    folder = tmp_path_factory.mktemp("killed")
    done = _run(folder, "killed")
    assert done.returncode == -9, (done.returncode, done.stderr[-3000:])
    return folder / "killed"


@pytest.fixture(scope="session")
def seen_by_driver(experiments: Path) -> dict[str, dict[str, object]]:
    """Tune's own analysis of each experiment, from the process that ran it."""
    return json.loads((experiments / "seen_by_driver.json").read_text())
