"""Runs in each rank of test_worlds.py: what N ranks do, compared with one rank with the whole batch.

Each check returns plain data; the last line printed is the JSON of all.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from horovod_tune.large_batch import (
    Cosine,
    GradientAccumulator,
    HyperparameterError,
    Lamb,
    LargeBatchLR,
    Lars,
    NoiseScale,
    Warmup,
    from_config,
    largest_eigenvalue,
    parameter_groups,
)

torch.set_num_threads(1)
IS_TORCH = os.environ["BACKEND"] == "torch"
ALONE = torch.nn.Linear(1, 1, bias=False)
# Made before there is a world.
ACCUMULATOR = GradientAccumulator(
    torch.optim.SGD(ALONE.parameters(), lr=1.0), passes=1, local_batch_size=1, model=ALONE
)
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


def accumulated(kind: str, *, clip: float | None = None, op=hvd.Average) -> dict[str, object]:
    """Passes of random sizes, as many and as large as it comes on each rank, against one batch of all."""
    model, whole = in_world(new_model()), new_model()
    optimizer = distributed(model, kind, op=op)
    reference = OPTIMIZERS[kind](parameter_groups(whole, weight_decay=0.01))
    schedule = {"steps_per_epoch": 3, "global_batch_size": 24, "base_batch_size": 8}
    scheduler = LargeBatchLR(optimizer, Warmup(1, Cosine(3)), **schedule)
    other = LargeBatchLR(reference, Warmup(1, Cosine(3)), **schedule)
    sent = []
    if not IS_TORCH:
        send = optimizer._allreduce_grad_async
        optimizer._allreduce_grad_async = lambda parameter: sent.append(1) or send(parameter)
    accumulator = GradientAccumulator(
        optimizer, passes=3, local_batch_size=12, max_norm=clip, scheduler=scheduler, model=model
    )
    draw = random.Random(9)
    early, rates, samples = 0, [], []
    for step in range(7):
        rows = draw.sample(range(24), draw.randint(6, 24))
        # The last group has one pass on rank 0 and none on rank 1.
        counts = [3, 3] if step < 5 else [2, 3] if step == 5 else [1, 0]
        cuts = sorted(draw.sample(range(1, len(rows)), sum(counts) - 1)) if sum(counts) > 1 else []
        pieces = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        mine = pieces[: counts[0]] if RANK == 0 else pieces[counts[0] :]
        for number, piece in enumerate(mine):
            accumulator.backward(loss_of(model, piece), samples=len(piece))
            if number < 2:
                early += len(sent)
        rates.append(optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"])
        result = accumulator.step()
        samples.append(result.samples == len(rows))
        reference.zero_grad()
        loss_of(whole, rows).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(whole.parameters(), clip)
        reference.step()
        other.step()
        sent.clear()
    return {"distance": distance(model, whole), "early": early, "rates": all(rates), "samples": all(samples)}


def mixed_precision() -> dict[str, object]:
    """An overflow on one rank only, in the second of four steps."""
    model = in_world(new_model())
    optimizer = distributed(model, "lars", compression=hvd.Compression.fp16)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scheduler = LargeBatchLR(optimizer, Cosine(10), steps_per_epoch=1)
    accumulator = GradientAccumulator(
        optimizer, passes=2, local_batch_size=6, max_norm=1.0, scaler=scaler, scheduler=scheduler, model=model
    )
    stepped = []
    for step in range(4):
        for number in range(2):
            rows = [(step * 7 + 6 * RANK + 3 * number + row) % 24 for row in range(3)]
            loss = loss_of(model, rows)
            if step == 1 and number == 1 and RANK == 1:
                loss = loss * float("inf")
            accumulator.backward(loss, samples=3)
        stepped.append(accumulator.step().stepped)
    return {
        "stepped": stepped,
        "epoch": float(scheduler.epoch),
        "scale": scaler.get_scale(),
        "weights": float(sum(parameter.detach().sum() for parameter in model.parameters())),
    }


def noise() -> dict[str, object]:
    """Noise of a known size at a point that stays: the ranks agree, and the truth is in the interval."""
    parameter = torch.nn.Parameter(torch.full((20,), 0.5, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    if not IS_TORCH:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=[("parameter", parameter)])
    meter = NoiseScale(every=1, decay=0.999, confidence=0.999)
    accumulator = GradientAccumulator(
        optimizer, passes=2, local_batch_size=8, noise_scale=meter, model=torch.nn.ParameterList([parameter])
    )
    draw = torch.Generator().manual_seed(RANK)
    for _ in range(300):
        for samples in (3, 5):
            points = torch.randn(samples, 20, dtype=torch.float64, generator=draw)
            accumulator.backward((parameter * (1 + points)).sum(1).mean(), samples=samples)
        accumulator.step()
    return meter.estimate()._asdict()


def curvature() -> dict[str, float]:
    """Every rank with half of the samples, against all of them in the formula of the mean loss."""
    weights = torch.ones(3, dtype=torch.float64, requires_grad=True)
    rows = INPUTS[RANK::SIZE, :3]
    found = largest_eigenvalue(
        lambda: (rows @ weights).square().mean(), [weights], max_products=200, tolerance=1e-12
    )
    dense = 2 * INPUTS[:, :3].T @ INPUTS[:, :3] / len(INPUTS)
    return {"found": found, "dense": torch.linalg.eigvalsh(dense).max().item()}


def configured() -> dict[str, object]:
    """A configuration in this world against the same by hand on one rank."""
    model, whole = in_world(new_model()), new_model()
    config = {"lr": 0.05, "epochs": 4, "base_batch_size": 4, "global_batch_size": 10, "warmup_epochs": 1.5}
    config |= {"optimizer": "lars", "max_micro_batch_size": 2, "max_norm": 0.5, "weight_decay": 0.01}
    setup = from_config(model, config, num_samples=24)
    reference = Lars(parameter_groups(whole, weight_decay=0.01), lr=0.05, trust=0.05)
    start = 1 / math.sqrt(2.5)
    schedule = LargeBatchLR(
        reference,
        Warmup(1.5, Cosine(2.5), start),
        steps_per_epoch=3,
        global_batch_size=10,
        base_batch_size=4,
        rule="sqrt",
    )
    equal = []
    for epoch in range(4):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(epoch))
        for passes in setup.batches(order):
            for rows in passes:
                setup.backward(loss_of(model, rows.tolist()), samples=len(rows))
            setup.step()
        for rows in order.split(10):
            reference.zero_grad()
            loss_of(whole, rows.tolist()).backward()
            torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            reference.step()
            schedule.step()
        equal.append(setup.optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"])
    split = setup.split
    return {"distance": distance(model, whole), "rates": all(equal), "passes": split.passes}


def unused() -> list[float]:
    """How far a step moves three layers: one that is trained, one unused, and one frozen after the set-up."""
    model = torch.nn.ModuleList(torch.nn.Linear(6, 1).double() for _ in range(3))
    config = {"lr": 0.1, "epochs": 1, "base_batch_size": 4, "global_batch_size": 4, "weight_decay": 0.5}
    setup = from_config(model, {**config, "optimizer": "lamb", "schedule": "constant"}, num_samples=4)
    model[2].requires_grad_(False)
    before = copy.deepcopy(model)
    if RANK == 0:
        setup.backward((model[0](INPUTS[:2]) + model[2](INPUTS[:2])).mean(), samples=2)
    setup.step()
    return [distance(one, other) for one, other in zip(model, before, strict=True)]


def grown() -> float:
    """The weight's step for a gradient of 1, by what was made before there was a world."""
    before = ALONE.weight.item()
    ACCUMULATOR.restart()
    ACCUMULATOR.backward(ALONE.weight.sum(), samples=1)
    ACCUMULATOR.step()
    return ALONE.weight.item() - before


def refusals() -> dict[str, str]:
    """What is no distributed optimiser, what is no whole model, and what has no weighted mean."""
    plain = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    parts: dict[str, tuple] = {"plain": (plain, None)}
    if IS_TORCH:
        sharded = FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))
        parts["sharded"] = (plain, sharded)
    else:
        parts["adasum"] = (distributed(new_model(), "lamb", op=hvd.Adasum), None)
    found = {}
    for name, (optimizer, model) in parts.items():
        try:
            GradientAccumulator(optimizer, passes=1, local_batch_size=1, model=model)
        except HyperparameterError as error:
            found[name] = str(error)
    return found


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


results = {
    "accumulated": {kind: accumulated(kind) for kind in OPTIMIZERS},
    "clipped": accumulated("lars", clip=0.05),
    "mixed_precision": mixed_precision(),
    "noise": noise(),
    "curvature": curvature(),
    "configured": configured(),
    "refusals": refusals(),
    "unused": unused(),
}
if IS_TORCH:
    results["grown"] = grown()
    dist.destroy_process_group()  # at exit, its threads abort the process now and then
else:
    results |= {
        "summed": accumulated("sgd", op=hvd.Sum),
        "own_passes": {kind: own_passes(kind) for kind in ("lars", "lamb")},
        "broadcast": {kind: broadcast(kind) for kind in ("lars", "lamb")},
    }
    hvd.shutdown()
print(json.dumps(results), flush=True)
