"""Trials whose ranks compute on GPUs: which device, which collectives, and what each trial makes again."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from processes import last_results

from horovod_tune import DistributedTrainableCreator, get_checkpoint, report

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600
TuneRun = Callable[..., Any]


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def reduce_on_gpu(config: dict[str, Any]) -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    ones = torch.ones(1000, device="cuda") * (hvd.rank() + 1)
    total = hvd.allreduce(ones, op=hvd.Sum, name="on_gpu")
    devices = hvd.allgather_object(str(torch.cuda.get_device_properties(hvd.local_rank()).uuid))
    report(
        {
            "device_type": total.device.type,
            "total": total.mean().item(),
            "visible": torch.cuda.device_count(),
            "devices": len(set(devices)),
            "nccl": bool(hvd.nccl_built()),
        }
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_reduce_tensors_on_gpus_of_their_own(ranks: int, tune_run: TuneRun) -> None:
    if gpus() < ranks:
        pytest.skip(f"{ranks} ranks with NCCL need as many GPUs; here is {gpus()}")
    trainable = DistributedTrainableCreator(reduce_on_gpu, num_slots=ranks, use_gpu=True)
    (told,) = last_results(tune_run(trainable))
    assert told["nccl"] and told["device_type"] == "cuda"
    assert told["total"] == sum(range(1, ranks + 1))
    assert told["devices"] == told["visible"] == ranks


def share_one_gpu(config: dict[str, Any]) -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.cuda.set_device(0)
    weights = torch.full((1000,), float(hvd.rank()), device="cuda", requires_grad=True)
    (weights * 2).sum().backward()
    assert weights.grad is not None
    # NCCL takes only one rank per GPU. Gloo reduces what is in host memory.
    total = hvd.allreduce((weights.grad + hvd.rank()).cpu(), op=hvd.Sum, name="through_gloo").cuda()
    report({"device_type": total.device.type, "total": total.mean().item(), "size": hvd.size()})


def test_two_ranks_share_one_gpu_through_gloo(tune_run: TuneRun) -> None:
    trainable = DistributedTrainableCreator(share_one_gpu, num_slots=2)
    (told,) = last_results(tune_run(trainable))
    assert (told["device_type"], told["total"], told["size"]) == ("cuda", 5.0, 2)


def take_and_leave_memory(config: dict[str, Any]) -> None:
    import horovod.torch as hvd
    import torch

    had_context = torch.cuda.is_initialized()
    began = time.monotonic()
    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    held = torch.cuda.memory_allocated() + torch.cuda.memory_reserved()
    block = torch.ones(1 << 28, device="cuda")  # 1 GB
    total = block[::1000].mean().item()
    report(
        {
            "rank_pid": os.getpid(),
            "had_context": had_context,
            "held": held,
            "total": total,
            "first_operation_s": time.monotonic() - began,
        }
    )


def test_each_trial_makes_its_context_and_finds_no_memory_in_use(tune_run: TuneRun) -> None:
    trainable = DistributedTrainableCreator(take_and_leave_memory, num_slots=1, use_gpu=True)
    analysis = tune_run(trainable, num_samples=3, max_concurrent_trials=1)
    results = last_results(analysis)
    assert len({each["rank_pid"] for each in results}) == 3
    for each in results:
        assert (each["had_context"], each["held"], each["total"]) == (False, 0, 1.0)
    print({"first_operation_s": [each["first_operation_s"] for each in results]})


def fail_once_after_a_checkpoint(config: dict[str, Any]) -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    state: dict[str, Any] = {"weights": torch.zeros(1000, device="cuda"), "step": 0}
    restored_type = ""
    checkpoint = get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"))
        restored_type = state["weights"].device.type
    while state["step"] < 4:
        state = {"weights": state["weights"] + 1, "step": state["step"] + 1}
        with tempfile.TemporaryDirectory() as directory:
            if hvd.rank() == 0:
                torch.save(state, Path(directory, "state.pt"))
            report(
                {
                    "step": state["step"],
                    "weight": state["weights"].mean().item(),
                    "restored_type": restored_type,
                },
                checkpoint=directory,
            )
        if state["step"] == 2 and not restored_type:
            raise RuntimeError("fails once")


def test_tensors_on_the_gpu_come_back_from_a_checkpoint(tune_run: TuneRun) -> None:
    trainable = DistributedTrainableCreator(fail_once_after_a_checkpoint, num_slots=1, use_gpu=True)
    (told,) = last_results(tune_run(trainable, max_failures=1))
    assert (told["step"], told["weight"], told["restored_type"]) == (4, 4.0, "cuda")


def test_the_demo_runs_on_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/bayesopt_digits.py"), "--use-gpu", "--num-slots", "1"]
    options = ["--num-samples", "3", "--storage-path", str(tmp_path), "--at-least", "0.5"]
    ran = subprocess.run([*command, *options], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]


def test_doctor_finds_nothing_wrong_on_a_machine_with_a_gpu() -> None:
    doctor = [str(Path(sys.executable).with_name("horovod-tune")), "doctor"]
    ran = subprocess.run(doctor, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "nccl" in ran.stdout.lower()
