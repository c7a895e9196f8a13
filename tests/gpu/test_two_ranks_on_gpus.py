"""Two ranks with NCCL, which share a GPU where there is only one.

NCCL refuses two ranks of a host on one GPU. So each rank here is on a "host" of its own, as NCCL_HOSTID
names it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from horovod_tune import DistributedTrainableCreator, commit, get_state, get_world, report

cloudpickle.register_pickle_by_value(sys.modules[__name__])
TuneRun = Callable[..., Any]
STALL_S = 10
TWO_RANKS_ON_ONE_GPU = True


def creator(function: Callable[[dict[str, Any]], Any], **options: Any) -> Any:
    settings = {"num_slots": 2, "stall_timeout_s": STALL_S, "use_gpu": True, **options}
    return DistributedTrainableCreator(function, **settings)


def initialize(backend: str) -> None:
    import torch

    os.environ["NCCL_HOSTID"] = f"host of rank {get_world().rank}"
    torch.cuda.set_device((get_world().gpu or 0) % torch.cuda.device_count())
    if backend == "horovod":
        import horovod.torch as hvd

        hvd.init()


def all_reduce(tensor: Any, backend: str) -> Any:
    """Return the sum over the ranks."""
    if backend == "torch":
        import torch.distributed as dist

        dist.all_reduce(tensor)
        return tensor
    import horovod.torch as hvd

    return hvd.allreduce(tensor, op=hvd.Sum, name="total")


def train(config: dict[str, Any]) -> None:
    """Train with DDP and with FSDP2, on other data per rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    had_context = torch.cuda.is_initialized()
    initialize("torch")
    held = torch.cuda.memory_allocated()

    def new_model() -> Any:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)]
        return torch.nn.Sequential(*layers).cuda()

    def train_model(model: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            samples = torch.full((4, 8), dist.get_rank() + step + 1.0, device="cuda")
            optimizer.zero_grad()
            model(samples).square().mean().backward()
            optimizer.step()

    replicated = DistributedDataParallel(new_model())
    train_model(replicated)
    sharded = new_model()
    fully_shard(sharded, mesh=init_device_mesh("cuda", (2,)))
    train_model(sharded)
    weights = [each.detach().sum().item() for each in replicated.parameters()]
    whole = [each.full_tensor().detach().sum().item() for each in sharded.parameters()]
    on_cpu = torch.ones(1)
    dist.all_reduce(on_cpu)
    report(
        rank_pid=os.getpid(),
        had_context=had_context,
        held=held,
        weights=weights,
        whole=whole,
        sum=on_cpu.item(),
    )


def test_trials_train_alike_with_torch_in_new_processes(tune_run: TuneRun) -> None:
    analysis = tune_run(creator(train, backend="torch"), num_samples=3, max_concurrent_trials=1)
    results = [trial.last_result for trial in analysis.trials]
    assert len({each["rank_pid"] for each in results}) == 3
    for each in results:
        assert each["sum"] == 2 and each["weights"] == pytest.approx(each["whole"], rel=1e-5)
        assert (each["had_context"], each["held"]) == (False, 0)
        assert each["weights"] == results[0]["weights"]


def fail(config: dict[str, Any]) -> None:
    """Reduce on the GPU; rank 1 ends in the way of the trial before the third step."""
    import torch

    initialize(config["backend"])
    for step in range(4):
        if step == 2 and get_world().rank == 1:
            match config["way"]:
                case "raise":
                    raise ValueError("rank 1's own")
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    time.sleep(600)
                case "return":
                    return
        total = all_reduce(torch.ones(1000, device="cuda"), config["backend"])
        report(step=step, total=total.mean().item())


@pytest.mark.parametrize("backend", ["torch", "horovod"])
@pytest.mark.parametrize("way", ["raise", "kill", "hang", "return"])
def test_the_rank_that_does_not_enter_a_collective_is_named(
    way: str, backend: str, tune_run: TuneRun
) -> None:
    config = {"way": way, "backend": backend}
    analysis = tune_run(creator(fail, backend=backend), config=config, raise_on_failed_trial=False)
    (trial,) = analysis.trials
    assert trial.status == "ERROR"
    text = Path(trial.error_file).read_text()
    first = next(line for line in text.splitlines() if "TrainingFailed" in line)
    assert "rank 1 of 2" in first, text
    assert (trial.last_result["step"], trial.last_result["total"]) == (1, 2.0)


def sum_steps(config: dict[str, Any]) -> None:
    """Add the mean over the ranks of 1 per step; rank 1 is lost once, and another one joins."""
    import torch

    initialize(config["backend"])
    died = Path(config["folder"], "died")
    state = get_state() or {"step": 0, "sum": torch.zeros(1, device="cuda")}
    while state["step"] < 2000 and not (state["step"] > 30 and get_world().size == 2 and died.exists()):
        if state["step"] == 5 and get_world().rank == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), getattr(signal, config["signal"]))
        one = all_reduce(torch.ones(1, device="cuda"), config["backend"]) / get_world().size
        state = {"step": state["step"] + 1, "sum": state["sum"] + one}
        commit(state)
        if state["step"] > 30:
            time.sleep(0.1)
    report(step=state["step"], total=state["sum"].item(), size=get_world().size)


@pytest.mark.parametrize("backend", ["torch", "horovod"])
@pytest.mark.parametrize("by", ["SIGKILL", "SIGSTOP"])
def test_an_elastic_trial_loses_a_rank_and_takes_another(
    by: str, backend: str, tune_run: TuneRun, tmp_path: Path
) -> None:
    trainable = creator(sum_steps, backend=backend, min_workers=1)
    analysis = tune_run(trainable, config={"folder": str(tmp_path), "signal": by, "backend": backend})
    told = analysis.trials[0].last_result
    assert told["total"] == told["step"] and told["size"] == 2
