"""Schedules as functions of time: whole curves against NumPy formulas and against torch's own schedulers."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from horovod_tune.large_batch import Cosine, InverseSqrt, MultiStep, OneCycle, Polynomial, Schedule, Warmup

TIMES = np.linspace(0, 120, 2401)


# Those that torch has as well are compared with torch's below.
CURVES = {
    "inverse square root": (InverseSqrt(7.5), 1 / np.sqrt(1 + TIMES / 7.5)),
    "warm-up of Vaswani et al.": (
        Warmup(12, InverseSqrt(12)),
        np.sqrt(12) * np.minimum(np.maximum(TIMES, 1e-9) ** -0.5, TIMES * 12**-1.5),
    ),
    "warm-up of half an epoch": (
        Warmup(0.5, Polynomial(100), start=0.2),
        np.where(TIMES < 0.5, 0.2 + 0.8 * TIMES / 0.5, np.clip(1 - (TIMES - 0.5) / 100, 0, 1)),
    ),
}


@pytest.mark.parametrize("name", CURVES)
def test_a_whole_curve_is_its_formula(name: str) -> None:
    schedule, expected = CURVES[name]
    assert np.allclose([schedule(float(time)) for time in TIMES], expected, rtol=0, atol=1e-12)


def torch_rates(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def one_cycle_of_torch(steps: int) -> Schedule:
    # torch's phases end at step 0.3 * steps - 1 and at the last step.
    return OneCycle(steps - 1, rise=(0.3 * steps - 1) / (steps - 1))


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (Cosine(40, end=0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, 40, eta_min=0.1)),
        (MultiStep([5, 11, 30], gamma=0.3), lambda o: lr_scheduler.MultiStepLR(o, [5, 11, 30], gamma=0.3)),
        (Polynomial(40, power=2), lambda o: lr_scheduler.PolynomialLR(o, 40, power=2)),
        (Warmup(8, start=0.25), lambda o: lr_scheduler.LinearLR(o, 0.25, 1.0, total_iters=8)),
        (
            Warmup(8, Cosine(32), start=0.1),
            lambda o: lr_scheduler.SequentialLR(
                o,
                [lr_scheduler.LinearLR(o, 0.1, 1.0, 8), lr_scheduler.CosineAnnealingLR(o, 32)],
                milestones=[8],
            ),
        ),
        (
            Warmup(8, MultiStep([6, 20], gamma=0.5), start=0.1, overlap=True),
            lambda o: lr_scheduler.ChainedScheduler(
                [lr_scheduler.LinearLR(o, 0.1, 1.0, 8), lr_scheduler.MultiStepLR(o, [6, 20], gamma=0.5)]
            ),
        ),
        (one_cycle_of_torch(41), lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=41)),
    ],
)
def test_a_schedule_agrees_with_torchs_scheduler(schedule: Schedule, make) -> None:
    assert np.allclose([schedule(step) for step in range(40)], torch_rates(make, 40), rtol=0, atol=1e-9)


def test_schedules_can_be_compared_and_pickled() -> None:
    schedule = Warmup(5, MultiStep([30, 60]), start=0.1)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert schedule != Warmup(5, MultiStep([30, 61]), start=0.1)
