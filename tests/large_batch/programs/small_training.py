"""What the checks in a world of real ranks share: a model, its samples and the optimisers; starts it."""

from __future__ import annotations

import os

import horovod.torch as hvd
import torch
import torch.distributed as dist

from horovod_tune.large_batch import Lamb, Lars, parameter_groups

torch.set_num_threads(1)
IS_TORCH = os.environ["BACKEND"] == "torch"
if IS_TORCH:
    dist.init_process_group("gloo")
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
else:
    hvd.init()
    RANK, SIZE = hvd.rank(), hvd.size()
INPUTS = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
ANSWERS = torch.randn(24, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "lars": lambda groups: Lars(groups, lr=0.5, trust=0.1, nesterov=True),
    "lamb": lambda groups: Lamb(groups, lr=0.05),
}


def new_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Tanh(), torch.nn.Linear(8, 2)]
    return torch.nn.Sequential(*layers).double()


def in_world(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model as this world's training functions have it."""
    return torch.nn.parallel.DistributedDataParallel(model) if IS_TORCH else model


def loss_of(model: torch.nn.Module, rows: list[int]) -> torch.Tensor:
    return (model(INPUTS[rows]) - ANSWERS[rows]).square().mean()


def distance(model: torch.nn.Module, other: torch.nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((one - two).abs().max().item() for one, two in pairs)


def distributed(model: torch.nn.Module, kind: str, **options):
    optimizer = OPTIMIZERS[kind](parameter_groups(model, weight_decay=0.01))
    if IS_TORCH:
        return optimizer
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
