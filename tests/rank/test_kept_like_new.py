"""Many kinds of programs have the same results in reused processes as in new ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import kept_programs
import pytest
from kept_programs import KEPT
from trial_runner import TrialRunner

cloudpickle.register_pickle_by_value(kept_programs)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ray_session")]

# Those that `make test` runs; the others take some minutes.
SHORT = {
    "wraps_a_function_of_torch",
    "uses_an_installed_package_with_state",
    "sets_the_fusion_threshold",
    "registers_an_operator",
    "trains_and_is_kept",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    kept_programs.write_modules(folder)
    return folder


@pytest.fixture(scope="module")
def kept(ray_session: Any, folder: Path) -> Iterator[TrialRunner]:
    runner = TrialRunner(folder, num_slots=1)
    yield runner
    runner.close()


# Forks for each name that it reads, so that Horovod is imported only once.
NEW = """
import os, sys, traceback
import horovod.torch
import kept_programs
for name in sys.stdin:
    if not os.fork():
        try:
            seen = repr(kept_programs.PROGRAMS[name.strip()]({"number": 1}))
        except Exception:
            seen = repr(traceback.format_exc())
        print(seen, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def new(folder: Path) -> Iterator[Callable[[str], str]]:
    """Return a function that runs a program in a new process and returns its result."""
    paths = [str(Path(__file__).parent), *(str(folder / name) for name in kept_programs.FOLDERS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", NEW],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def ask(program: str) -> str:
            print(program, file=questions, flush=True)
            return answers.readline().rstrip("\n")

        yield ask


def run(runner: TrialRunner, folder: Path, program: str, number: int) -> dict[str, Any]:
    (told,) = runner.run(kept_programs.run, program=program, number=number, modules=str(folder))
    return told


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=pytest.mark.contract if name in SHORT else pytest.mark.slow)
        for name in kept_programs.PROGRAMS
    ],
)
def test_later_trials_see_what_the_first_one_saw(kept, new, folder, program):
    seen, pids, reasons = [], [], []
    for number in range(2):
        told = run(kept, folder, program, number)
        seen.append(told["seen"])
        pids.append(told["pid"])
        reasons.append(kept.replaced_because)
    print(program, pids, reasons)
    assert seen == [new(program)] * 2
    if program in KEPT:
        assert reasons == ["", ""]
        assert len(set(pids)) == 1
