"""Arguments and packages that TPU trials refuse, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from processes import run_python

from horovod_tune import DistributedTrainableCreator
from horovod_tune.errors import BackendMissing, SpecError

STAND_IN = Path(__file__).parent / "stand_in"


def train(config: dict[str, Any]) -> None:
    """Never runs."""


def test_a_host_without_a_tpu_is_named() -> None:
    program = """
from horovod_tune.messages import RankInfo
from horovod_tune.backends.torch_distributed.torch_world import TorchWorld
world = TorchWorld(9, 9, "tpu")
world.load()
try:
    world.enter(RankInfo(0, 1, 0, 1, 0, 1), "first")
except Exception as error:
    print(type(error).__name__, error)
"""
    paths = os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")])
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    without["PYTHONPATH"] = str(STAND_IN.parents[2])
    said = run_python("-c", program, env={**os.environ, "PYTHONPATH": paths, "STAND_IN_CHIPS": ""}).stdout
    assert said == "BackendMissing torch_tpu finds no TPU on this host, so it has no backend tpu_dist\n"
    said = run_python(
        "-c", program.replace("world.load()\ntry:", "try:\n    world.load()"), env=without
    ).stdout
    assert said.startswith("BackendMissing torch_tpu cannot be imported on this host (No module named")
    assert "pip install torch_tpu" in said


def test_a_driver_without_torch_tpu_is_told_what_to_install() -> None:
    with pytest.raises(BackendMissing, match=r"torch_tpu is not installed. Run `pip install torch_tpu`"):
        DistributedTrainableCreator(train, backend="torch", use_tpu=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "horovod"}, "with use_tpu, backend must be 'torch' .* or left out .*, got 'horovod'"),
        ({"backend": "gloo"}, "backend must be one of 'horovod', 'torch', got 'gloo'"),
        ({"backend": "torch", "tpu_type": "v9-8"}, "tpu_type must be .* got 'v9-8'"),
        ({"backend": "torch", "min_workers": 1}, "min_workers cannot be given with use_tpu"),
        ({"backend": "torch", "num_workers": 4}, "num_workers cannot be given with use_tpu"),
        ({"backend": "torch", "use_gpu": True}, "use_gpu and use_tpu cannot both be True"),
    ],
)
def test_arguments_that_do_not_fit_tpus_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        DistributedTrainableCreator(train, use_tpu=True, **options)


def test_a_number_of_chips_that_no_host_offers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STAND_IN)
    with pytest.raises(SpecError, match=r"num_slots must be one of \(1, 2, 4, 8\) with use_tpu, got 3"):
        DistributedTrainableCreator(
            train, backend="torch", use_tpu=True, num_slots=3
        ).default_resource_request({})


@pytest.mark.parametrize("has_torch_tpu", [True, False])
def test_torch_xla_stays_without_a_backend_and_its_successor_is_named_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_torch_tpu: bool
) -> None:
    (tmp_path / "torch_xla.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    if has_torch_tpu:
        monkeypatch.syspath_prepend(STAND_IN)
    made = DistributedTrainableCreator(train, use_tpu=True)
    assert made._spec.backend_name == "xla"
    named = 'use_tpu=True runs on torch_xla; with backend="torch", it runs on TorchTPU, its successor.\n'
    assert capsys.readouterr().out == (named if has_torch_tpu else "")
