"""Training functions of torch.distributed on real ranks: what they find, and what they leave behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from worker_kinds import Workers, skip_unless_installed

from horovod_tune import get_world, report
from horovod_tune.coordinator.worker_group import UNWIND_TIMEOUT_S
from horovod_tune.errors import TrainingFailed

pytestmark = pytest.mark.processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def workers(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    made = Workers("torch", tmp_path_factory.mktemp("torch"))
    yield made
    made.close()


@pytest.fixture
def impatient_workers(ray_session: Any, tmp_path: Path) -> Iterator[Workers]:
    made = Workers("torch", tmp_path, stall_timeout_s=4.0)
    yield made
    made.close()


def train_ddp(steps: int = 3) -> list[float]:
    """Train on other data per rank; return the parameters, which DDP keeps equal."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 3), dist.get_rank() + step + 1.0)).sum().backward()
        optimizer.step()
    return [value for each in model.parameters() for value in each.flatten().tolist()]


def report_state(config: dict[str, Any]) -> None:
    """Report this rank's place, torch's groups, and a gradient step."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    groups = len(c10d._world.pg_map), c10d._world.group_count
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, (dist.get_rank(), get_world().rank, train_ddp()))
    report(ranks=[list(each[:2]) for each in ranks], weights=[each[2] for each in ranks], groups=groups)


def state_of(workers: Workers) -> dict[str, Any]:
    _, events = workers.run(report_state)
    found: dict[str, Any] = events[0].metrics
    assert found["ranks"] == [[0, 0], [1, 1]]
    assert found["weights"][0] == found["weights"][1]
    assert found["groups"] == (1, 1)
    return found


def test_torch_distributed_is_initialised_and_ddp_averages(workers: Workers) -> None:
    state_of(workers)


def train_with_horovod(config: dict[str, Any]) -> None:
    """Train as `train_ddp`; report the parameters."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 3), hvd.rank() + step + 1.0)).sum().backward()
        optimizer.step()
    report(weights=[value for each in model.parameters() for value in each.flatten().tolist()])


@pytest.mark.slow
def test_ddp_trains_as_horovod_does(workers: Workers, tmp_path: Path) -> None:
    skip_unless_installed("gloo")
    horovod = Workers("gloo", tmp_path)
    try:
        _, events = horovod.run(train_with_horovod)
    finally:
        horovod.close()
    assert state_of(workers)["weights"][0] == pytest.approx(events[0].metrics["weights"])


def init_twice(config: dict[str, Any]) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.destroy_process_group()
    if get_world().rank == 0:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 2}
        with pytest.raises(RuntimeError):
            dist.init_process_group("gloo", timeout=timedelta(seconds=1), **alone)
    dist.init_process_group()
    total = torch.ones(1)
    dist.all_reduce(total)
    report(total=total.item())


def test_a_rank_that_failed_to_make_a_group_makes_the_next_one(workers: Workers) -> None:
    _, events = workers.run(init_twice)
    assert events[0].metrics["total"] == 2


def looks_for_what_optimizers_import(config: dict[str, Any]) -> None:
    found = "torch._dynamo" in sys.modules
    import torch

    torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    report(found=found, needed="torch._dynamo" in sys.modules)


def test_no_trial_imports_what_torchs_optimizers_need(workers: Workers) -> None:
    _, events = workers.run(looks_for_what_optimizers_import)
    assert events[0].metrics["found"] >= events[0].metrics["needed"]


def torchrun_script(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    if config["destroys"]:
        dist.destroy_process_group()
    for _ in range(2):
        dist.init_process_group("gloo")
        weights = train_ddp()
        assert dist.get_rank() == int(os.environ["RANK"]) and dist.get_backend() == "gloo"
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        assert not dist.is_initialized()
    place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "WORLD_SIZE": "2"}
    if os.environ["RANK"] == "0":
        assert {name: os.environ[name] for name in place} == place
        assert os.environ["MASTER_ADDR"] == "127.0.0.1" and int(os.environ["MASTER_PORT"])
        report(total=total.item(), weights=weights)


@pytest.mark.parametrize("destroys", [False, True])
def test_a_script_made_for_torchrun_needs_only_its_report(workers: Workers, destroys: bool) -> None:
    _, events = workers.run(torchrun_script, destroys=destroys)
    assert events[0].metrics["total"] == 2.0
    assert events[0].metrics["weights"] == state_of(workers)["weights"][0]


def test_accelerate_joins_the_ranks_without_being_told_that_they_have_no_gpu(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        from accelerate import Accelerator

        report(processes=Accelerator().num_processes)

    _, events = workers.run(train)
    assert events[0].metrics == {"processes": 2}


def test_init_process_group_may_ask_for_a_timeout_and_its_own_store(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        dist.init_process_group(timeout=timedelta(seconds=7))
        cpu = dist.distributed_c10d.torch.device("cpu")
        backends = [each._get_backend(cpu) for each in (dist.group.WORLD, dist.new_group())]
        report(timeouts=[each.options._timeout.total_seconds() for each in backends])
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo")
        dist.destroy_process_group()
        rank, size = get_world().rank, get_world().size
        own = dist.FileStore(config["file"], size)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
        train_ddp()

    _, events = workers.run(train, file=str(workers.folder / "store"))
    assert events[0].metrics == {"timeouts": [7.0, 7.0]}


def test_an_address_of_the_scripts_own_is_not_shared_with_other_trials(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        place = {"rank": get_world().rank, "world_size": get_world().size}
        for _ in range(2):  # the file is that of a group which has ended
            for method in config["methods"]:
                dist.init_process_group("gloo", init_method=method, **place)
                total = torch.ones(1)
                dist.all_reduce(total)
                dist.destroy_process_group()
        report(total=total.item())

    with socket.create_server(("127.0.0.1", 0)) as of_another_trial:
        port = of_another_trial.getsockname()[1]
        methods = [f"tcp://127.0.0.1:{port}", f"file://{workers.folder / 'store'}"]
        _, events = workers.run(train, methods=methods)
    assert events[0].metrics["total"] == 2.0


def test_a_ddp_model_of_the_script_joins_the_ranks(workers: Workers) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def train(config: dict[str, Any]) -> None:
        rank = torch.distributed.get_rank()
        model(torch.full((4, 3), float(rank))).sum().backward()
        report(gradient=model.module.weight.grad.tolist())

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(3, 1))
        _, events = workers.run(train)
    finally:
        dist.destroy_process_group()
    assert events[0].metrics["gradient"] == [[2.0] * 3], "the mean of 0 and 4"


def test_arguments_of_transformers_made_in_the_driver_know_the_ranks(workers: Workers) -> None:
    arguments = pytest.importorskip("transformers").TrainingArguments(output_dir="trainer", use_cpu=True)
    assert arguments.world_size == 1

    def train(config: dict[str, Any]) -> None:
        import torch

        places: list[Any] = [None, None]
        torch.distributed.all_gather_object(places, (arguments.process_index, arguments.world_size))
        report(places=places)

    _, events = workers.run(train)
    assert events[0].metrics["places"] == [(0, 2), (1, 2)]


def test_processes_that_a_rank_starts_make_their_own_group(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        child = "from torch import distributed as d; d.init_process_group('gloo', rank=0, world_size=1)"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        if get_world().rank == 0:
            variables = {**os.environ, "MASTER_PORT": port}
            subprocess.run([sys.executable, "-c", child], env=variables, check=True, timeout=30)
        report(done=True)

    workers.run(train)


def test_a_group_that_the_function_destroys_is_freed_at_once(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        def count() -> list[int]:
            return [len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task")]

        def use_groups() -> None:
            whole, alone = dist.new_group(), dist.new_group([1])
            dist.all_reduce(torch.ones(1), group=whole)
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
            assert mesh["a"].get_group() is dist.group.WORLD
            groups = [whole, mesh["b"].get_group()]
            for group in [*groups, alone] if dist.get_rank() == 1 else groups:
                dist.destroy_process_group(group)

        use_groups()
        before = count()
        for _ in range(5):
            use_groups()
        report(more=[now - then for now, then in zip(count(), before, strict=True)])

    _, events = workers.run(train)
    assert events[0].metrics["more"] == [0, 0]


def test_a_fully_sharded_model_trains_on_a_mesh_that_makes_the_default_group(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        if config["is_alone"]:
            loss = model(torch.ones(2, 4)).pow(2).sum()
            report(loss=loss.item())
            return
        torch.distributed.destroy_process_group()  # the mesh then makes another one
        mesh = init_device_mesh("cpu", (2,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        report(loss=model(torch.ones(2, 4)).pow(2).sum().item())

    sharded, alone = (workers.run(train, is_alone=each)[1][0].metrics for each in (False, True))
    assert sharded["loss"] == pytest.approx(alone["loss"])


def test_a_stopped_rank_gets_the_others_out_of_their_collective(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        while True:
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 0:
                report(step=1)

    workers.begin(train)
    workers.group.next_event()
    began = time.monotonic()
    assert workers.group.end_trial()
    assert time.monotonic() - began < UNWIND_TIMEOUT_S


def fail(config: dict[str, Any]) -> None:
    """Rank 1 does what the test says, after a collective, while rank 0 waits for it."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    # No DDP: on a busy machine one rank may import what it needs for longer than the stall timeout.
    dist.all_reduce(torch.ones(1))
    report(step=1)
    if dist.get_rank() == 1:
        if config["how"] == "no data":
            raise RuntimeError("DataLoader timed out after 5 seconds (pid(s) 1)")
        if config["how"] in ("hang", "barrier"):
            time.sleep(100)
        if config["how"] == "return":
            return
    if config["how"] == "barrier":
        dist.monitored_barrier(timeout=timedelta(seconds=2))
    dist.all_reduce(torch.ones(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("no data", "rank 1 of 2 on {host} failed:"),
        ("return", "rank 1 of 2 on {host} returned from the training function, while others"),
        ("hang", "rank 1 of 2 on {host} hung:"),
        ("barrier", "rank 1 of 2 on {host} hung:"),
    ],
)
def test_the_rank_that_others_wait_for_is_named(impatient_workers: Workers, how: str, named: str) -> None:
    workers = impatient_workers
    workers.begin(fail, how=how)
    workers.group.next_event()
    began = time.monotonic()
    with pytest.raises(TrainingFailed) as caught:
        workers.group.next_event()
    assert named.format(host=os.uname().nodename) in str(caught.value)
    assert time.monotonic() - began < 20
    if how == "no data":
        assert "RuntimeError: DataLoader timed out after 5 seconds" in str(caught.value)


def test_large_batch_works_on_ddp(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from horovod_tune.errors import HorovodTuneError
        from horovod_tune.large_batch import from_config

        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(3, 1))
        with pytest.raises(HorovodTuneError, match="check_synchronised\\(\\) is for Horovod; models in"):
            get_world().check_synchronised(model)
        inputs = torch.arange(24.0).reshape(8, 3) / 24
        sizes = {"base_batch_size": 4, "global_batch_size": 8, "max_micro_batch_size": 2}
        setup = from_config(model, {"lr": 0.1, "epochs": 3, **sizes}, num_samples=8)
        for _ in range(3):
            for passes in setup.batches(torch.arange(8)):
                for rows in passes:
                    setup.backward(model(inputs[rows]).square().mean(), samples=len(rows))
                setup.step()
        report(passes=setup.split.passes)

    _, events = workers.run(train)
    assert events[0].metrics["passes"] == 2


def test_a_collective_that_never_ends_keeps_no_process_waiting(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        train_ddp()
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1), async_op=True)

    workers.begin(train)
    workers.events()
    began = time.monotonic()
    assert workers.group.end_trial()
    assert time.monotonic() - began < UNWIND_TIMEOUT_S


def test_ranks_make_groups_after_rank_0_has_returned(workers: Workers) -> None:
    """Rank 0's process has the store that they need for it, as under torchrun its agent has."""

    def train(config: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            time.sleep(1.0)
            group = dist.new_group([1], use_local_synchronization=True)
            dist.all_reduce(torch.ones(1), group=group)
            Path("done").touch()

    folder, _ = workers.run(train)
    assert (folder / "done").exists()
