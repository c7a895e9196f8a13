"""What cannot be is refused with the argument's name, its bound and the value that was given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from horovod_tune.large_batch import (
    BatchGrowth,
    Constant,
    Cosine,
    CurvatureGrowth,
    FixedGrowth,
    GlobalBatch,
    GradientAccumulator,
    HyperparameterError,
    InverseSqrt,
    Lamb,
    LargeBatchLR,
    Lars,
    MultiStep,
    NoiseScale,
    NoiseScaleGrowth,
    OneCycle,
    Polynomial,
    Warmup,
    largest_eigenvalue,
    parameter_groups,
    scaled_adam,
    scaling_factor,
    split_batch,
    steps_per_epoch,
)

CONSTANT = Constant()
WEIGHTS = [torch.nn.Parameter(torch.ones(2, 2))]


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(WEIGHTS, lr=0.1)


def accumulator(**options: Any) -> GradientAccumulator:
    return GradientAccumulator(sgd(), **{"passes": 2, "local_batch_size": 8, **options})


def scheduler(schedule: Any = CONSTANT, **options: Any) -> LargeBatchLR:
    return LargeBatchLR(sgd(), schedule, **{"steps_per_epoch": 2, **options})


def global_batch(**options: Any) -> GlobalBatch:
    parts: dict[str, Any] = {"accumulator": accumulator(), "scheduler": scheduler(), "num_samples": 640}
    return GlobalBatch(split_batch(32, 1), **parts, **options)


def growth(largest: int) -> BatchGrowth:
    return BatchGrowth(FixedGrowth([1]), global_batch(), max_global_batch_size=largest)


def adam(betas: tuple[float, float], batch: int) -> Any:
    return scaled_adam(1e-3, betas, 1e-8, global_batch_size=batch, base_batch_size=1)


COUNTS: dict[str, Callable[[Any], Any]] = {
    "global_batch_size": lambda value: split_batch(value, 1),
    "world_size": lambda value: split_batch(64, value),
    "max_micro_batch_size": lambda value: split_batch(64, 1, value),
    "base_batch_size": lambda value: scaling_factor(64, value),
    "num_samples": lambda value: steps_per_epoch(value, 64),
    "passes": lambda value: accumulator(passes=value),
    "local_batch_size": lambda value: accumulator(local_batch_size=value),
    "steps_per_epoch": lambda value: scheduler(steps_per_epoch=value),
    "every": lambda value: NoiseScale(every=value),
    "factor": lambda value: FixedGrowth([1], factor=value),
}


@pytest.mark.parametrize("value", [0, -4, True, 2.0, math.nan, math.inf, "8", None, np.float64(8), [8]])
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_an_integer_or_named(name: str, value: Any) -> None:
    if name == "max_micro_batch_size" and value is None:
        return
    with pytest.raises(HyperparameterError, match=f"{name} must be an integer of at least"):
        COUNTS[name](value)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("name", COUNTS)
def test_integers_of_numpy_are_counts(name: str, kind: Any) -> None:
    COUNTS[name](kind(8))


BAD: list[tuple[Callable[[], Any], str]] = [
    # Optimizers
    (lambda: Lars(WEIGHTS, lr=-1), "lr must be at least 0, got -1"),
    (lambda: Lars(WEIGHTS, lr=None), "lr must be a finite number, got None"),
    (lambda: Lars(WEIGHTS, lr=10**400), "lr must be a finite number, got 1000"),
    (lambda: Lamb(WEIGHTS, lr="0.1"), "lr must be a finite number, got '0.1'"),
    (lambda: Lars(WEIGHTS, momentum=1.0), "momentum must be at least 0 and less than 1, got 1.0"),
    (lambda: Lars(WEIGHTS, momentum=0, nesterov=True), "momentum must be more than 0 with nesterov, got 0"),
    (lambda: Lamb(WEIGHTS, layer_wise=2), "layer_wise must be True or False, got 2"),
    (lambda: Lars(WEIGHTS, trust=0), "trust must be more than 0, got 0"),
    (lambda: Lars(WEIGHTS, weight_decay=math.nan), "weight_decay must be a finite number, got nan"),
    (lambda: Lamb(WEIGHTS, betas=(0.9, 1.0)), r"betas\[1\] must be at least 0 and less than 1, got 1.0"),
    (lambda: Lamb(WEIGHTS, betas=0.9), "betas must be two numbers, got 0.9"),
    (lambda: Lamb(WEIGHTS, betas=(0.9, 0.99, 0.9)), r"betas must be two numbers, got \(0.9, 0.99, 0.9\)"),
    (lambda: Lamb(WEIGHTS, eps=-1e-6), "eps must be at least 0, got -1e-06"),
    (lambda: Lars([torch.zeros(2, dtype=torch.complex64)]), "parameter 0 of group 0 must be real, got torch"),
    (lambda: parameter_groups(torch.nn.LazyLinear(3)), "'weight' has no shape yet"),
    (lambda: parameter_groups(torch.nn.ReLU()), "must have a parameter that requires a gradient, got none"),
    (
        lambda: parameter_groups(torch.nn.Linear(2, 2), weight_decay=-1),
        "weight_decay must be at least 0, got -1",
    ),
    # Schedules
    (lambda: Cosine(0), "length must be more than 0, got 0"),
    (lambda: Cosine(math.inf), "length must be a finite number, got inf"),
    (lambda: Cosine("90"), "length must be a finite number, got '90'"),
    (lambda: Polynomial(10, power=0), "power must be more than 0, got 0"),
    (lambda: Polynomial(10, end=-0.1), "end must be at least 0, got -0.1"),
    (lambda: MultiStep([30, 20]), r"milestones must increase, got \[30, 20\]"),
    (lambda: MultiStep([-1]), r"milestones\[0\] must be at least 0, got -1"),
    (lambda: MultiStep(30), "milestones must be a list of numbers, got 30"),
    (lambda: OneCycle(10, rise=1), "rise must be at least 0 and less than 1, got 1"),
    (lambda: InverseSqrt(0), "timescale must be more than 0, got 0"),
    (lambda: Warmup(-1), "length must be at least 0, got -1"),
    (lambda: Warmup(2, 3), r"then must be a schedule, such as Cosine\(10\), got 3"),
    (lambda: Warmup(math.nan), "length must be a finite number, got nan"),
    (lambda: scheduler(global_batch_size=8), "base_batch_size must be given together, got 8 and None"),
    (lambda: scheduler(rule="quadratic"), "rule must be one of linear, none, sqrt"),
    (lambda: scheduler(lambda time: math.nan), "schedule must be finite and at least 0, got nan at epoch 0"),
    (lambda: scheduler(lambda time: -1), "schedule must be finite and at least 0, got -1 at epoch 0"),
    (lambda: scheduler(0.5), "schedule must be a function of the time, got 0.5"),
    # Batches
    (lambda: scaling_factor(64, 32, "cubic"), "rule must be one of linear, none, sqrt, got 'cubic'"),
    (lambda: adam((0.9, 0.99), 16), r"must be at most 10 times base_batch_size for betas\[0\]=0.9, got 16"),
    (lambda: adam((1.0, 0.99), 2), r"betas\[0\] must be at least 0 and less than 1, got 1.0"),
    (lambda: split_batch(5, 8), "must be a multiple of the world size 8, such as 8, got 5"),
    (lambda: global_batch(max_micro_batch_size=0), "max_micro_batch_size must be an integer .* 1, got 0"),
    (lambda: accumulator(local_batch_size=1), "local_batch_size must be an integer of at least 2, got 1"),
    (lambda: accumulator(max_norm=0), "max_norm must be more than 0, got 0"),
    (lambda: accumulator(passes=1, noise_scale=NoiseScale()), "passes must be at least 2 on one rank"),
    (lambda: accumulator().step(), "samples over all ranks must be an integer of at least 1, got 0"),
    (
        lambda: accumulator().backward(WEIGHTS[0].sum(), samples=0),
        "samples must be an integer of at least 1, got 0",
    ),
    # The noise scale, and growth
    (lambda: NoiseScale(decay=1.0), "decay must be more than 0 and less than 1, got 1.0"),
    (lambda: NoiseScale(confidence=1.0), "confidence must be at least 0 and less than 1, got 1.0"),
    (lambda: NoiseScale().update(1, 1 / 8, 1, 8), "inverse_small must be more than 0.125, got 0.125"),
    (lambda: NoiseScale().update(1, 1, math.nan, 8), "big_square must be a finite number, got nan"),
    (lambda: FixedGrowth([2, 1]), r"milestones must increase, got \[2, 1\]"),
    (lambda: FixedGrowth(30), "milestones must be a list of numbers, got 30"),
    (lambda: NoiseScaleGrowth(fraction=0), "fraction must be more than 0, got 0"),
    (lambda: CurvatureGrowth(decay=1), "decay must be more than 1, got 1"),
    (lambda: CurvatureGrowth()(0, 1, math.nan, None), "eigenvalue must be a finite number, got nan"),
    (
        lambda: largest_eigenvalue(lambda: torch.zeros(()), [torch.zeros(1)]),
        "one that requires a gradient, got none",
    ),
    (lambda: growth(16), "max_global_batch_size must be an integer of at least 32, got 16"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments_are_named_with_their_bound(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(HyperparameterError, match=message):
        call()
