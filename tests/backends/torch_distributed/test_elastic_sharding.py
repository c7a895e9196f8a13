"""Sharded models in an elastic trial: each world has meshes and shards of its own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from processes import records_of

from horovod_tune import DistributedTrainableCreator, commit, get_state, report

pytestmark = [pytest.mark.slow, pytest.mark.processes]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LOSSES = (3, 5)


def train(config: dict[str, Any]) -> None:
    """Train a sharded model of 8 rows, and lose rank 1 of 3 twice: rank 2 becomes rank 1."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import state_dict as states
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.nn import functional

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    whole = states.StateDictOptions(full_state_dict=True)
    state = get_state() or {"epoch": 0}
    if "model" in state:
        states.set_model_state_dict(model, state["model"], options=whole)
    for epoch in range(state["epoch"] + 1, 9):
        died = Path(config["folder"], f"died_in_{epoch}")
        if config["loses"] and epoch in LOSSES and dist.get_rank() == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).pow(2).sum()
        loss.backward()
        optimizer.step()
        weights = [states.get_model_state_dict(model, options=whole)]
        dist.broadcast_object_list(weights, 0)
        ranks = functional.all_reduce(torch.ones(1)).item()
        report(epoch=epoch, loss=loss.item(), ranks=ranks, files=len(os.listdir("/proc/self/fd")))
        commit({"epoch": epoch, "model": weights[0]})


def test_a_sharded_model_trains_on_when_its_ranks_have_other_numbers(tune_run: Any, tmp_path: Path) -> None:
    trainable = DistributedTrainableCreator(train, num_slots=3, min_workers=2, backend="torch")
    runs = []
    for loses in (False, True):
        (tmp_path / str(loses)).mkdir()
        config = {"folder": str(tmp_path / str(loses)), "loses": loses}
        runs.append(records_of(tune_run(trainable, config=config)))
    alone, lost = runs
    assert [each["epoch"] for each in lost] == list(range(1, 9))
    assert lost[-1]["world_changes"] == len(LOSSES) and lost[-1]["ranks"] == 3
    assert [each["loss"] for each in lost] == pytest.approx([each["loss"] for each in alone], rel=1e-4)
    assert lost[-1]["files"] <= lost[0]["files"] + 2, "the groups of a world that has ended are freed"
