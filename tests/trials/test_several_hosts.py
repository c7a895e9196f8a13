"""num_hosts=2 on several simulated nodes of one machine: ranks, hosts, and files that must cross nodes."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import cloudpickle
import pytest
from processes import error_of, eventually, results_of
from sessions import simulated_nodes

from horovod_tune import DistributedTrainableCreator, report
from horovod_tune.coordinator.policy import HEARTBEAT_S

pytestmark = [pytest.mark.slow, pytest.mark.processes]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def ray_session():
    """Two nodes of 2, and a head without CPUs: the cluster that `tune_run` and the other fixtures use."""
    host = {"num_cpus": 2, "num_gpus": 2}
    with simulated_nodes(host, host) as nodes:
        yield nodes


def where(config):
    import os

    import horovod.torch as hvd
    import torch

    hvd.init()
    mine = [hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    everyone = hvd.allgather(torch.tensor([mine]), name="where").tolist()
    # Not Ray's: on simulated nodes, which have one address, a rank connects to any of them.
    nodes = hvd.allgather_object(os.environ["HOROVOD_HOSTNAME"])
    report(everyone=everyone, nodes=nodes)


def where_with_torch(config):
    import os

    import torch.distributed as dist

    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    mine = [int(os.environ[name]) for name in names], os.environ["GROUP_RANK"]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    everyone, nodes = map(list, zip(*found, strict=True))
    report(everyone=everyone, nodes=nodes)


@pytest.mark.parametrize(
    ("backend", "function"),
    [pytest.param("horovod", where, marks=pytest.mark.contract), ("torch", where_with_torch)],
    ids=["horovod", "torch"],
)
def test_each_host_gets_its_slots_and_ranks_are_consecutive_on_it(tune_run, backend, function):
    trainable = DistributedTrainableCreator(function, backend=backend, num_hosts=2, num_slots=2)
    (result,) = results_of(tune_run(trainable).trials[0])
    assert result["world_size"] == 4
    assert result["hosts"] == f"{socket.gethostname()}:4", "both nodes are simulated on this host"
    assert sorted(result["everyone"]) == [[0, 0, 2, 0, 2], [1, 1, 2, 0, 2], [2, 0, 2, 1, 2], [3, 1, 2, 1, 2]]
    first, second = set(result["nodes"][:2]), set(result["nodes"][2:])
    assert len(first) == len(second) == 1 and first != second


def test_a_total_larger_than_one_node_spills_to_the_next(tune_run):
    (result,) = results_of(tune_run(DistributedTrainableCreator(where, num_workers=3)).trials[0])
    assert sorted(each[2] for each in result["everyone"]) == [1, 2, 2]
    assert sorted(each[0] for each in result["everyone"]) == [0, 1, 2]


def test_every_rank_finds_its_own_gpu_at_its_local_rank(tune_run):
    """Ray hands out device numbers whether there are such devices or not; nothing here touches one."""

    def train(config):
        import os

        import horovod.torch as hvd
        import ray

        hvd.init()
        devices = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        mine = (len(devices), devices[hvd.local_rank()], [str(gpu) for gpu in ray.get_gpu_ids()])
        interfaces = [os.environ.get("NCCL_SOCKET_IFNAME"), os.environ["HOROVOD_GLOO_IFACE"]]
        report(seen=hvd.allgather_object(mine), interfaces=hvd.allgather_object(interfaces))

    trainable = DistributedTrainableCreator(train, num_hosts=2, num_slots=2, use_gpu=True)
    (result,) = results_of(tune_run(trainable, num_samples=2).trials[1])
    for count, at_local_rank, reserved in result["seen"]:
        assert count == 2
        assert [at_local_rank] == reserved
    for of_nccl, of_gloo in result["interfaces"]:
        assert of_nccl == f"={of_gloo}", "the automatic choice holds for NCCL as well"


def node_with(resource):
    """Return the id of a node that has ``resource``: CPUs are on those that are not the driver's."""
    import ray

    return next(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource))


@pytest.fixture
def worker_node(ray_session):
    return node_with("CPU")


def test_a_directory_crosses_nodes_whole(worker_node, tmp_path):
    from horovod_tune.files import directories
    from horovod_tune.transfer import node_transfer

    source, there, back = tmp_path / "source", tmp_path / "new" / "there", tmp_path / "back"
    (source / "inner" / "empty").mkdir(parents=True)
    large = bytes(range(256)) * (node_transfer.CHUNK_BYTES // 256) * 2 + b"tail"
    (source / "inner" / "large").write_bytes(large)
    (source / "none").touch()
    (source / "link").symlink_to("inner", target_is_directory=True)
    for number in range(1500):
        (source / f"small {number}").write_text(str(number))
    node_transfer.send_directory(str(source), worker_node, str(there), timeout_s=120)
    node_transfer.fetch_directory(worker_node, str(there), str(back), timeout_s=120)
    for target in (there, back):
        assert (target / "inner" / "large").read_bytes() == large
        assert (target / "link" / "large").read_bytes() == large and not (target / "link").is_symlink()
        assert (target / "none").read_bytes() == b""
        assert (target / "inner" / "empty").is_dir()
        assert {(target / f"small {n}").read_text() for n in range(1500)} == {str(n) for n in range(1500)}
    assert list(tmp_path.rglob("*.part")) == []
    stamp = node_transfer.call_on(worker_node, directories.fingerprint, str(there), timeout_s=60)
    assert stamp == directories.fingerprint(str(there))


def test_copying_continues_when_the_process_that_owned_the_actor_has_ended(worker_node, tmp_path):
    import ray

    from horovod_tune.transfer import node_transfer

    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("1")
    node_transfer.send_directory(str(tmp_path / "source"), worker_node, str(tmp_path / "a"), timeout_s=120)
    first = node_transfer.begin(worker_node)
    assert node_transfer.begin(worker_node) is first, "one actor per node"
    ray.kill(first)
    node_transfer.send_directory(str(tmp_path / "source"), worker_node, str(tmp_path / "b"), timeout_s=120)
    assert (tmp_path / "b" / "file").read_text() == "1"
    assert node_transfer.begin(worker_node) is not first


def test_a_node_that_is_lost_is_an_error_in_time(ray_session, tmp_path):
    import ray

    from horovod_tune.files import directories
    from horovod_tune.transfer import node_transfer

    extra = ray_session.add_node(num_cpus=0, resources={"extra": 1})
    node = node_with("extra")
    assert node_transfer.call_on(node, directories.fingerprint, str(tmp_path), timeout_s=120)
    ray_session.remove_node(extra, allow_graceful=False)

    def is_an_error():
        try:
            node_transfer.call_on(node, directories.fingerprint, str(tmp_path), timeout_s=60)
        except ray.exceptions.RayError:
            return True
        return False  # its processes take a moment to follow the node

    eventually(is_an_error, within_s=120)


def report_often(config):
    import horovod.torch as hvd

    hvd.init()
    for step in range(config["reports"]):
        report(step=step)


def test_ranks_on_other_hosts_report_through_ray_without_waiting_for_a_poll(tune_run):
    trainable = DistributedTrainableCreator(report_often, num_hosts=2, num_slots=2)
    results = results_of(tune_run(trainable, config={"reports": 100}).trials[0])
    assert [result["step"] for result in results] == list(range(100))
    assert results[-1]["time_total_s"] - results[0]["time_total_s"] < 10 * HEARTBEAT_S


def die_on_the_other_host(config):
    import horovod.torch as hvd

    hvd.init()
    report(step=0)
    if hvd.rank() == 3:
        print("its last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()


def test_the_last_output_of_a_rank_that_died_is_fetched_from_its_host(tune_run):
    trainable = DistributedTrainableCreator(die_on_the_other_host, num_hosts=2, num_slots=2)
    (trial,) = tune_run(trainable, raise_on_failed_trial=False).trials
    assert "rank 3 of 4" in error_of(trial) and "  its last words\n" in error_of(trial)
    assert "its last words\n" in Path(trial.path, "rank_3.log").read_text()
