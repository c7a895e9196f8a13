"""Many kinds of programs have the same results in reused processes as in new ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def new(ray_session: Any, folder: Path) -> Iterator[TrialRunner]:
    runner = TrialRunner(folder / "new", num_slots=1, reuse_workers=False)
    yield runner
    runner.close()


def run(runner: TrialRunner, folder: Path, program: str, number: int) -> dict[str, Any]:
    config = {"program": program, "number": number, "modules": str(folder), "opt": {"opt/lr": 0.1, 1: 2}}
    return runner.run(kept_programs.run, **config)[-1]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=pytest.mark.contract if name in SHORT else pytest.mark.slow)
        for name in kept_programs.PROGRAMS
    ],
)
def test_later_trials_see_what_the_first_one_saw(kept, new, folder, program):
    told, reasons = [], []
    for number in range(2):
        told.append(run(kept, folder, program, number))
        reasons.append(kept.replaced_because)
    print(program, told, reasons)
    assert [each["seen"] for each in told] == [run(new, folder, program, 1)["seen"]] * 2
    if program in KEPT:
        assert reasons == ["", ""]
        assert told[0]["pid"] == told[1]["pid"]
