"""A draining node: an elastic trial leaves it at a commit, or moves, and no retry is used up.

Ray runs on simulated nodes here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import sessions
from processes import records_of
from sessions import drain_node, simulated_nodes

from horovod_tune import DistributedTrainableCreator, commit, get_state, report
from horovod_tune.session.session import COMMIT_FILE

pytestmark = [pytest.mark.slow, pytest.mark.processes]

pytest.importorskip("horovod")
for module in (sys.modules[__name__], sessions):
    cloudpickle.register_pickle_by_value(module)


@pytest.fixture(scope="module")
def ray_session() -> Iterator[Any]:
    """A head without CPUs, and three nodes of 1."""
    host = {"num_cpus": 1}
    with simulated_nodes(host, host, host) as nodes:
        yield nodes


def train(config: dict[str, Any]) -> None:
    """Sum the epochs' numbers until no rank is on the node that the last rank drains at epoch 3, once."""
    import horovod.torch as hvd
    import ray
    import torch

    hvd.init()
    node = os.environ[
        "HOROVOD_HOSTNAME"
    ]  # on simulated nodes, Ray may say another one: see test_several_hosts
    marker = Path(config["folder"], "drained")
    state = get_state() or {"epoch": 0, "sum": 0.0}
    while state["epoch"] < 2000:
        epoch = state["epoch"] + 1
        mean = hvd.allreduce(torch.tensor([float(epoch)], dtype=torch.float64)).item()
        nodes = hvd.allgather_object(node)
        if epoch == 3 and hvd.rank() == hvd.size() - 1 and not marker.exists():  # it may be done again
            marker.write_text(node)
            drain_node(ray.get_runtime_context().gcs_address, node)
        mine = marker.read_text() if marker.exists() else None
        # Named: Horovod names it by the object's type, and None is another one.
        drained = hvd.broadcast_object(mine, hvd.size() - 1, name="drained")
        state = {"epoch": epoch, "sum": state["sum"] + mean}
        is_away = drained is not None and drained not in nodes
        report(epoch=epoch, sum=state["sum"], size=hvd.size(), pid=os.getpid(), is_away=is_away)
        commit(state)
        if is_away and hvd.size() == config["ranks"]:
            return
        if epoch > 3:
            time.sleep(0.05)  # Ray is asked now and then, and others start


@pytest.mark.parametrize("ranks", [2, 1], ids=["others continue", "its only node drains"])
def test_ranks_leave_a_draining_node_with_their_last_commit(
    tune_run: Any, tmp_path: Path, ranks: int
) -> None:
    trainable = DistributedTrainableCreator(train, num_workers=ranks, min_workers=1)
    config = {"ranks": ranks, "folder": str(tmp_path)}
    records = records_of(tune_run(trainable, config=config, raise_on_failed_trial=False))
    epochs = [each["epoch"] for each in records]
    assert sorted(set(epochs)) == list(range(1, epochs[-1] + 1))
    assert all(each["sum"] == sum(range(each["epoch"] + 1)) for each in records)
    assert records[-1]["is_away"] and records[-1]["size"] == ranks
    if ranks == 2:
        changes = str([each["world_change"] for each in records])
        assert "rank 1 on" in changes and "draining" in changes
        assert len({each["pid"] for each in records}) == 1, "rank 0 keeps its process"
    else:
        assert len({each["pid"] for each in records}) == 2
        assert len(epochs) - len(set(epochs)) <= 1, "at most the epoch that was reported last is done again"


def train_on_nodes_that_all_go(config: dict[str, Any]) -> None:
    """Do what a Slurm job does near its time limit, and train on until a commit has become a checkpoint."""
    import horovod.torch as hvd
    import ray

    from horovod_tune.ray_compat import queries

    hvd.init()
    state = get_state() or {"epoch": 0}
    storage = Path(config["storage"])
    while state["epoch"] < 2000:
        state = {"epoch": state["epoch"] + 1}
        if state["epoch"] == 3 and hvd.rank() == 0:
            queries.announce_end(ray.get_runtime_context().gcs_address)
        is_saved = any(storage.rglob(COMMIT_FILE))
        report(**state, is_saved=is_saved)
        commit(state)
        if hvd.broadcast_object(is_saved, 0):
            return
        time.sleep(0.05)


def test_commits_become_checkpoints_when_the_end_of_all_nodes_is_announced(
    tune_run: Any, tmp_path: Path
) -> None:
    """Last in this module: the announcement also applies to later trials."""
    trainable = DistributedTrainableCreator(train_on_nodes_that_all_go, num_workers=1, min_workers=1)
    assert records_of(tune_run(trainable, config={"storage": str(tmp_path)}))[-1]["is_saved"]
