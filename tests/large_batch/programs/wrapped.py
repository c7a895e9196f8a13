"""Checks of `Lars` and `Lamb` inside ``hvd.DistributedOptimizer`` alone; run by two_ranks.py."""

from __future__ import annotations

import copy

import horovod.torch as hvd
from small_training import OPTIMIZERS, RANK, SIZE, distance, distributed, loss_of, new_model

from horovod_tune.large_batch import GradientAccumulator, HyperparameterError, parameter_groups


def own_passes(kind: str) -> float:
    """Horovod's own ``backward_passes_per_step``, whose sum the losses make a mean."""
    model, whole = new_model(), new_model()
    optimizer = distributed(model, kind, backward_passes_per_step=2)
    reference = OPTIMIZERS[kind](parameter_groups(whole, weight_decay=0.01))
    for step in range(6):
        rows = [(step * 5 + row) % 24 for row in range(12)]
        mine = rows[RANK::SIZE]
        optimizer.zero_grad()
        for part in (mine[:3], mine[3:]):
            (loss_of(model, part) / 2).backward()
        optimizer.step()
        reference.zero_grad()
        loss_of(whole, rows).backward()
        reference.step()
    return distance(model, whole)


def adasum() -> str:
    """What the accumulator says to Adasum's wrapper."""
    try:
        GradientAccumulator(distributed(new_model(), "lamb", op=hvd.Adasum), passes=2, local_batch_size=4)
    except HyperparameterError as error:
        return str(error)
    return ""


def broadcast(kind: str) -> dict[str, object]:
    """Rank 0 has a state, rank 1 is new: the usual resumption from a checkpoint of rank 0."""
    model = new_model(seed=RANK)
    optimizer = OPTIMIZERS[kind](parameter_groups(model, weight_decay=0.5))
    if RANK == 0:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, list(range(12))).backward()
            optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    # Horovod's wrapper starts with an empty state.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    if RANK == 0:
        optimizer.load_state_dict(state)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, list(range(12))).backward()
        optimizer.step()
    numbers = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
    state = [
        value if isinstance(value, int) else float(value.double().sum())
        for _, each in sorted(optimizer.state_dict()["state"].items())
        for value in each.values()
    ]
    return {"weights": numbers, "state": state}
