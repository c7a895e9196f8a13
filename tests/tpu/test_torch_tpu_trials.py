"""Trials of backend="torch" with use_tpu=True, on simulated TPU hosts and the stand-in for torch_tpu.

Real are Ray's placement and chips, the ranks, their environment, DDP and what carries its collectives (Gloo).
The stand-in's device has the CPU's memory, and gives a chip to one process at a time, as libtpu does.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from processes import error_of, last_results
from ray import tune
from sessions import simulated_nodes

from horovod_tune import (
    DistributedTrainableCreator,
    commit,
    get_checkpoint,
    get_state,
    get_world,
    large_batch,
    report,
)

pytestmark = [pytest.mark.slow, pytest.mark.processes]

cloudpickle.register_pickle_by_value(sys.modules[__name__])
TuneRun = Callable[..., Any]
STAND_IN = Path(__file__).parent / "stand_in"


def host(name: str, chips: int, pod_type: str, slice_name: str, worker: int, topology: str) -> dict[str, Any]:
    """Return a node as Ray describes a TPU host."""
    labels = {"slice-name": slice_name, "worker-id": str(worker), "pod-type": pod_type, "topology": topology}
    head = {f"TPU-{pod_type}-head": 1} if worker == 0 else {}
    return {
        "num_cpus": 4,
        "resources": {"TPU": chips, slice_name: 1, **head},
        "labels": {f"ray.io/tpu-{key}": label for key, label in labels.items()},
        "env_vars": {"STAND_IN_HOST": name},
    }


@pytest.fixture(scope="module")
def chips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the stand-in locks chips."""
    return tmp_path_factory.mktemp("chips")


@pytest.fixture(scope="module")
def ray_session(chips: Path) -> Iterator[Any]:
    """A host with four chips, a slice of two hosts with two each, and a head without CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))
        patch.syspath_prepend(STAND_IN)
        patch.setenv("STAND_IN_CHIPS", "4")
        patch.setenv("STAND_IN_FOLDER", str(chips))
        pair = [host(f"pair-{i}", 2, "v5litepod-4", "pair", i, "2x2") for i in range(2)]
        with simulated_nodes(host("solo", 4, "v6e-4", "solo", 0, "2x2"), *pair) as nodes:
            yield nodes


ONE_HOST = {"use_tpu": True, "num_slots": 4}
TWO_HOSTS = {"use_tpu": True, "num_hosts": 2, "num_cpus_per_slot": 0.5}


def trainable(function: Callable[[dict[str, Any]], Any], **options: Any) -> Any:
    return DistributedTrainableCreator(function, backend="torch", **options)


def train(config: dict[str, Any]) -> None:
    """Train with DDP on the rank's device, whichever it is, on other data per rank."""
    import tempfile

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if config.get("initializes"):
        dist.init_process_group(config["initializes"])
    device = torch.device(get_world().device)
    torch.manual_seed(dist.get_rank())  # DDP sends rank 0's
    model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = 0
    if (checkpoint := get_checkpoint()) is not None:
        first, weights = torch.load(Path(checkpoint.path, "state.pt"))
        model.module.load_state_dict(weights)
    names = ("GROUP_RANK", "LOCAL_RANK", "RANK", "CLOUD_TPU_TASK_ID", "TPU_VISIBLE_CHIPS", "STAND_IN_HOST")
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, [os.environ.get(name) for name in names])
    for step in range(first, config.get("steps", 3)):
        samples = torch.full((2, 4), dist.get_rank() + step + 1.0, device=device)
        optimizer.zero_grad()
        loss = model(samples).square().mean()
        loss.backward()
        optimizer.step()
        if step == 2 and dist.get_rank() == config.get("dies") and not Path(config["marker"]).exists():
            Path(config["marker"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        weights = {name: each.cpu() for name, each in model.module.state_dict().items()}
        with tempfile.TemporaryDirectory() as folder:
            if config.get("saves"):
                torch.save((step + 1, weights), Path(folder, "state.pt"))
            report(
                step=step + 1,
                first=first,
                loss=loss.item(),
                weights=[float(each) for each in torch.cat([w.flatten() for w in weights.values()])],
                device=str(next(model.parameters()).device),
                backend=str(dist.get_backend()),
                ranks=ranks,
                checkpoint=folder if config.get("saves") else None,
            )
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def on_cpu(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of four ranks without a TPU."""
    settings = {"storage_path": str(tmp_path_factory.mktemp("cpu")), "verbose": 0}
    (result,) = last_results(tune.run(trainable(train, num_slots=4), **settings))
    assert result["device"] == "cpu"
    return result


@pytest.mark.parametrize("initializes", [None, "tpu_dist"])
def test_an_unchanged_function_trains_on_the_chips_of_one_host(
    tune_run: TuneRun, on_cpu: dict[str, Any], initializes: str | None
) -> None:
    (result,) = last_results(tune_run(trainable(train, **ONE_HOST), config={"initializes": initializes}))
    assert result["device"] == "tpu:0"
    assert result["backend"] == (initializes or "cpu:gloo,tpu:tpu_dist")
    assert result["weights"] == on_cpu["weights"]
    assert result["ranks"] == [["0", f"{i}", f"{i}", f"{i}", f"{i}", "solo"] for i in range(4)]


def test_the_hosts_of_a_slice_are_one_world_in_the_order_of_their_chips(
    tune_run: TuneRun, on_cpu: dict[str, Any]
) -> None:
    # Two trials, one after the other on the same actors.
    for result in last_results(tune_run(trainable(train, **TWO_HOSTS), num_samples=2)):
        assert result["weights"] == on_cpu["weights"]
        found = [(at, int(chip)) for *_, chip, at in result["ranks"]]
        assert found == [("pair-0", 0), ("pair-0", 1), ("pair-1", 0), ("pair-1", 1)]
        assert [each[:4] for each in result["ranks"]] == [
            [f"{rank // 2}", f"{rank % 2}", f"{rank}", f"{rank}"] for rank in range(4)
        ]


def test_trials_that_share_a_host_have_chips_of_their_own(tune_run: TuneRun, tmp_path: Path) -> None:
    def meet(config: dict[str, Any]) -> None:
        """Report the chips once both trials are there."""
        import time

        import torch
        import torch.distributed as dist

        total = torch.ones(1, device="tpu")
        dist.all_reduce(total)
        names = ("TPU_VISIBLE_CHIPS", "TPU_PROCESS_ADDRESSES", "TORCH_TPU_TOPOLOGY")
        found: list[Any] = [None] * 2
        dist.all_gather_object(found, [os.environ[name] for name in names])
        Path(config["folder"], str(config["trial"])).touch()
        end = time.monotonic() + 120
        while len(list(Path(config["folder"]).iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        report(total=total.item(), found=found, there=len(list(Path(config["folder"]).iterdir())))

    folder = tmp_path / "there"
    folder.mkdir()
    space = {"trial": tune.grid_search([0, 1]), "folder": str(folder)}
    analysis = tune_run(trainable(meet, use_tpu=True, tpu_type="v6e-4", num_slots=2), config=space)
    results = last_results(analysis)
    assert [(each["total"], each["there"]) for each in results] == [(2.0, 2)] * 2
    taken = [[int(chip) for chip, *_ in each["found"]] for each in results]
    assert sorted([*taken[0], *taken[1]]) == [0, 1, 2, 3]
    for mine, each in zip(taken, results, strict=True):
        addresses = ",".join(f"localhost:{8476 + chip}" for chip in mine)
        assert [rest for _, *rest in each["found"]] == [[addresses, "1,2,1"]] * 2


def test_a_rank_that_cannot_get_its_chip_says_so(tune_run: TuneRun, chips: Path) -> None:
    with (chips / "solo-2").open("w") as taken:
        fcntl.flock(taken, fcntl.LOCK_EX)
        analysis = tune_run(trainable(train, **ONE_HOST), raise_on_failed_trial=False)
    (trial,) = analysis.trials
    said = error_of(trial)
    assert "rank 2 of 4 on" in said
    reason = "failed to retrieve the PjRt client: chip 2 is in use"
    assert f"StartFailed: this rank cannot use TPU chip 2 of its host: {reason}" in said


def test_a_trial_continues_from_its_checkpoint_after_a_rank_was_killed(
    tune_run: TuneRun, tmp_path: Path
) -> None:
    config = {"steps": 4, "saves": True, "dies": 3, "marker": str(tmp_path / "died")}
    (trial,) = tune_run(trainable(train, **TWO_HOSTS), config=config, max_failures=1).trials
    assert trial.last_result["step"] == 4
    assert trial.last_result["first"] in (2, 3), "rank 0 may or may not have reported step 3 by then"
    said = Path(trial.error_file).read_text()
    assert "rank 3 of 4 on" in said and "died" in said and "SIGKILL" in said


def test_a_rank_that_raises_is_the_cause_and_not_those_that_wait_for_it(tune_run: TuneRun) -> None:
    def fail(config: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        if get_world().rank == 1:
            raise ValueError("rank 1's own")
        dist.all_reduce(torch.ones(1, device="tpu"))

    two = {"use_tpu": True, "tpu_type": "v6e-4", "num_slots": 2}
    (trial,) = tune_run(trainable(fail, **two), raise_on_failed_trial=False).trials
    said = error_of(trial)
    assert "rank 1 of 2 on" in said and "ValueError: rank 1's own" in said


@pytest.mark.parametrize("initializes", [None, "tpu_dist"])
def test_large_batch_and_commit_work_with_either_group(tune_run: TuneRun, initializes: str | None) -> None:
    def tune_batch(config: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        if config["initializes"]:
            dist.init_process_group(config["initializes"])
        device = get_world().device
        torch.manual_seed(3)
        model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
        setup = large_batch.from_config(model, config["recipe"], num_samples=16)
        rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).to(device)
        for epoch in range(2):
            for passes in setup.batches(torch.randperm(16, generator=torch.Generator().manual_seed(epoch))):
                for part in passes:
                    part = part.to(device)
                    loss = (model(rows[part]) - rows[part].sum(1, keepdim=True)).square().mean()
                    setup.backward(loss, samples=len(part))
                setup.step()
            commit({"epoch": epoch})
        weights = [float(each) for each in model.module.weight.cpu().flatten()]
        dist.barrier()
        report(weights=weights, state=get_state(), device=device, **setup.metrics())

    recipe = {"lr": 0.05, "epochs": 2, "base_batch_size": 8, "global_batch_size": 8, "noise_scale": True}
    recipe["max_micro_batch_size"] = 2
    config = {"recipe": recipe, "initializes": initializes}
    two = {"use_tpu": True, "tpu_type": "v6e-4", "num_slots": 2}
    (on_tpu,) = last_results(tune_run(trainable(tune_batch, **two), config=config))
    config = {"recipe": recipe, "initializes": None}
    (on_cpu,) = last_results(tune_run(trainable(tune_batch, num_slots=2), config=config, name="cpu"))
    assert (on_tpu["device"], on_cpu["device"]) == ("tpu", "cpu")
    assert on_tpu["state"] == {"epoch": 1}
    assert on_tpu["weights"] == pytest.approx(on_cpu["weights"], rel=1e-5)
    measured = ["lr", "global_batch_size", *(name for name in on_cpu if name.startswith("noise_scale"))]
    for name in measured:
        assert on_tpu[name] == pytest.approx(on_cpu[name], rel=1e-3)
