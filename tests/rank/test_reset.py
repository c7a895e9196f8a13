"""A trial cannot tell whether its workers are new: each leak is planted in trial 1, looked for in trial 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import leaks
import pytest
from trial_runner import TrialRunner

cloudpickle.register_pickle_by_value(leaks)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ray_session")]

MODULE = "STATE = 1\n"


def look_and_plant(config: dict[str, Any]) -> None:
    """What both trials run, on both ranks; only the first one plants."""
    sys.path.insert(0, config["modules"])  # as a script's own folder would be
    facts = {"pid": os.getpid(), "generators": leaks.generators(), "before": leaks.look()}
    if config["plant"]:
        leaks.plant()
        facts |= {"after": leaks.look(), "generators after": leaks.generators()}
    rank = os.environ["HOROVOD_RANK"]
    Path(config["facts"], f"{config['number']}-{rank}.json").write_text(config["dump"](facts))


@pytest.fixture(scope="module")
def observed(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Any]:
    """What (trial, rank) saw, and why the workers were replaced after the first trial."""
    folder = tmp_path_factory.mktemp("leaks")
    (folder / "users_own_module.py").write_text(MODULE)
    runner = TrialRunner(folder)
    reasons = []
    for number, plant in ((1, True), (2, False), (3, False)):
        runner.run(
            look_and_plant,
            number=number,
            plant=plant,
            facts=str(folder),
            modules=str(folder),
            dump=json.JSONEncoder().encode,
        )
        reasons.append(runner.replaced_because)
    runner.close()
    seen: dict[Any, Any] = {
        (number, rank): json.loads((folder / f"{number}-{rank}.json").read_text())
        for number in (1, 2, 3)
        for rank in (0, 1)
    }
    seen["reasons"] = reasons
    return seen


def test_the_workers_of_all_these_trials_are_the_same(observed):
    assert observed["reasons"] == ["", "", ""]
    for rank in (0, 1):
        assert len({observed[number, rank]["pid"] for number in (1, 2, 3)}) == 1


@pytest.mark.parametrize("leak", leaks.LEAKS)
def test_a_trial_does_not_see_what_the_one_before_left(observed, leak):
    for rank in (0, 1):
        first, second, third = (observed[number, rank] for number in (1, 2, 3))
        assert first["after"][leak] != first["before"][leak], "the leak was not planted"
        assert second["before"][leak] == first["before"][leak]
        assert third["before"][leak] == first["before"][leak]


@pytest.mark.parametrize("generator", ["random", "numpy"])
def test_random_generators_draw_anew_in_every_trial_and_rank(observed, generator):
    drawn = [observed[number, rank]["generators"][generator] for number in (1, 2, 3) for rank in (0, 1)]
    drawn += [observed[1, rank]["generators after"][generator] for rank in (0, 1)]
    assert len(set(drawn)) == len(drawn)


def test_memory_that_a_trial_leaves_in_a_library_replaces_the_process():
    # In a process of its own, whose memory nobody else uses.
    program = """
import json, sys
from horovod_tune.rank.reset.baseline import MEMORY_LEFT_MB, Baseline
baseline = Baseline()
kept = bytearray(b"x" * (150 << 20))  # as libraries keep it
few = baseline.restore()
json.kept = bytearray(b"x" * (MEMORY_LEFT_MB << 20))
print(json.dumps([few, baseline.restore()]))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    few, many = json.loads(ran.stdout)
    assert few == []
    assert len(many) == 1 and "MB more memory" in many[0]
