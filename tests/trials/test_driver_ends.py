"""The driver is interrupted, or killed: nothing stays, and the experiment continues where it was."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from processes import command_of, eventually, processes_of

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("drivers") / "search.py"


@pytest.fixture
def ray_folder():
    # Short, because Ray keeps sockets in it, whose paths are limited to 107 bytes.
    folder = tempfile.mkdtemp(prefix="ht", dir="/tmp")
    yield folder
    for process in processes_of(folder):  # only what a failed test left
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def left_after(end, ray_folder):
    """Return the processes that are still there; Ray's own two agents outlive a driver that was killed."""
    rays_own = ("ray::DashboardAgent", "ray::RuntimeEnvAgent") if end == signal.SIGKILL else ()
    return [process for process in processes_of(ray_folder) if command_of(process) not in (*rays_own, "")]


def start(ray_folder, storage, *more):
    storage.mkdir(exist_ok=True)
    # Tune writes down what it knows every 10 s; the trials of this test are shorter than that.
    environment = {**os.environ, "TUNE_GLOBAL_CHECKPOINT_S": "0.2"}
    with open(storage / "stderr.txt", "w") as stderr:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), ray_folder, str(storage), *more],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=storage,
            env=environment,
        )


def marks(storage):
    return sorted(path.name for path in storage.glob("[ab]-*"))


@pytest.mark.parametrize(
    "end",
    [
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGTERM)),
        pytest.param(signal.SIGKILL, marks=pytest.mark.contract),
    ],
    ids=lambda each: each.name,
)
def test_nothing_outlives_the_driver_and_the_experiment_continues(end, ray_folder, tmp_path):
    storage = tmp_path / "results"
    driver = start(ray_folder, storage)
    eventually(lambda: any(mark.startswith("a-4") for mark in marks(storage)), within_s=200)
    assert len(processes_of(ray_folder)) >= 3
    driver.send_signal(end)
    driver.wait(timeout=60)
    left = partial(left_after, end, ray_folder)
    eventually(lambda: not left(), within_s=60, why=left)
    before = marks(storage)
    assert not any(mark.startswith("a-6") for mark in before)

    driver = start(ray_folder, storage, "--restore")
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 0, (storage / "stderr.txt").read_text()[-3000:]
    results = json.loads(output.strip().splitlines()[-1])
    assert {name: result["count"] for name, result in results.items()} == {"a": 6, "b": 6}
    assert {result["training_iteration"] for result in results.values()} == {6}
    assert results["a"]["start"] >= 1, "started from the beginning instead of its checkpoint"
    eventually(lambda: not processes_of(ray_folder), within_s=60)
