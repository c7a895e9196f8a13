"""num_hosts=2 on several simulated nodes of one machine: ranks, hosts, and files that must cross nodes."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from sessions import simulated_nodes

from horovod_tune import DistributedTrainableCreator
from horovod_tune.errors import ResourcesUnavailable


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs, and two nodes of 2."""
    host = {"num_cpus": 2, "num_gpus": 2}
    with simulated_nodes(host, host) as nodes:
        yield nodes


def run(trainable, tmp_path, **settings):
    from ray import tune

    return tune.run(trainable, storage_path=str(tmp_path), name="hosts", verbose=0, **settings)


def results_of(trial):
    return [json.loads(line) for line in Path(trial.path, "result.json").read_text().splitlines()]


def where(config):
    import horovod.torch as hvd
    import ray
    import torch

    from horovod_tune import report

    hvd.init()
    mine = [hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    everyone = hvd.allgather(torch.tensor([mine]), name="where").tolist()
    nodes = hvd.allgather_object(ray.get_runtime_context().get_node_id())
    report(everyone=everyone, nodes=nodes, size=hvd.size())


@pytest.fixture(autouse=True)
def by_value():
    """The ranks cannot import this file, so its functions travel as code."""
    import sys

    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_each_host_gets_its_slots_and_ranks_are_consecutive_on_it(cluster, tmp_path):
    analysis = run(DistributedTrainableCreator(where, num_hosts=2, num_slots=2), tmp_path)
    (result,) = results_of(analysis.trials[0])
    assert result["size"] == result["world_size"] == 4
    assert result["hosts"] == f"{socket.gethostname()}:4", "both nodes are simulated on this host"
    assert sorted(result["everyone"]) == [[0, 0, 2, 0, 2], [1, 1, 2, 0, 2], [2, 0, 2, 1, 2], [3, 1, 2, 1, 2]]
    first, second = set(result["nodes"][:2]), set(result["nodes"][2:])
    assert len(first) == len(second) == 1 and first != second


def test_a_total_larger_than_one_node_spills_to_the_next(cluster, tmp_path):
    analysis = run(DistributedTrainableCreator(where, num_workers=3), tmp_path)
    (result,) = results_of(analysis.trials[0])
    assert sorted(each[2] for each in result["everyone"]) == [1, 2, 2]
    assert sorted(each[0] for each in result["everyone"]) == [0, 1, 2]


def test_every_rank_finds_its_own_gpu_at_its_local_rank(cluster, tmp_path):
    """Ray hands out device numbers whether there are such devices or not; nothing here touches one."""

    def train(config):
        import os

        import horovod.torch as hvd
        import ray

        from horovod_tune import report

        hvd.init()
        devices = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        mine = (len(devices), devices[hvd.local_rank()], [str(gpu) for gpu in ray.get_gpu_ids()])
        report(seen=hvd.allgather_object(mine))

    trainable = DistributedTrainableCreator(train, num_hosts=2, num_slots=2, use_gpu=True)
    (result,) = results_of(run(trainable, tmp_path, num_samples=2).trials[1])
    for count, at_local_rank, reserved in result["seen"]:
        assert count == 2
        assert [at_local_rank] == reserved


def test_more_hosts_than_there_are_is_an_error(cluster, tmp_path):
    trainable = DistributedTrainableCreator(where, num_hosts=3, num_slots=1)
    with pytest.raises(ResourcesUnavailable, match="3 x 1 CPU on different machines"):
        run(trainable, tmp_path)


def test_a_directory_crosses_nodes_whole(cluster, tmp_path):
    import ray

    from horovod_tune import transfer

    source, target = tmp_path / "source", tmp_path / "target"
    (source / "inner" / "empty").mkdir(parents=True)
    large = bytes(range(256)) * (transfer.CHUNK_BYTES // 256) * 2 + b"tail"
    (source / "inner" / "large").write_bytes(large)
    (source / "none").touch()
    first, second = [node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU")]
    transfer.copy_directory(first, str(source), second, str(target), timeout_s=120)
    assert (target / "inner" / "large").read_bytes() == large
    assert (target / "none").read_bytes() == b""
    assert (target / "inner" / "empty").is_dir()
    assert [path.name for path in tmp_path.glob("*.part")] == []
    assert transfer.stat_directory(second, str(target), timeout_s=60) == transfer.fingerprint(str(target))

    with pytest.raises(FileNotFoundError, match="absent"):
        transfer.copy_directory(first, str(tmp_path / "absent"), second, str(tmp_path / "t2"), timeout_s=120)
    assert not (tmp_path / "t2").exists()
