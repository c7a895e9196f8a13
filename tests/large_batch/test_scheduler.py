"""`LargeBatchLR` as a torch scheduler: rates, groups, state, and a batch that changes in mid-training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from horovod_tune.large_batch import Constant, Cosine, HyperparameterError, LargeBatchLR, MultiStep, Warmup


def sgd(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in rates])


def walk(optimizer: torch.optim.Optimizer, scheduler: LargeBatchLR, steps: int) -> Iterator[list[float]]:
    for _ in range(steps):
        yield [group["lr"] for group in optimizer.param_groups]
        optimizer.step()
        scheduler.step()


SCHEDULE = Warmup(2.5, Cosine(7), start=0.125)


def test_every_group_keeps_its_own_base_rate() -> None:
    optimizer = sgd(0.1, 0.7)
    scheduler = LargeBatchLR(
        optimizer, SCHEDULE, steps_per_epoch=10, global_batch_size=1024, base_batch_size=64, rule="sqrt"
    )
    for step, rates in enumerate(walk(optimizer, scheduler, 100)):
        assert rates == [base * (4.0 * SCHEDULE(step / 10)) for base in (0.1, 0.7)]
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]


def test_a_changed_batch_continues_at_the_same_epoch_and_the_rate_follows() -> None:
    optimizer = sgd(0.5)
    scheduler = LargeBatchLR(
        optimizer, Cosine(10), steps_per_epoch=12, global_batch_size=64, base_batch_size=64
    )
    list(walk(optimizer, scheduler, 30))
    assert scheduler.epoch == Fraction(5, 2)
    scheduler.change_batch(256, steps_per_epoch=3)
    assert scheduler.epoch == Fraction(5, 2)
    rates = [rate for (rate,) in walk(optimizer, scheduler, 6)]
    assert rates == [0.5 * (4.0 * Cosine(10)(float(Fraction(5, 2) + Fraction(step, 3)))) for step in range(6)]
    assert scheduler.epoch == Fraction(9, 2)


def test_many_changes_of_the_batch_lose_no_time() -> None:
    draw = random.Random(3)
    optimizer = sgd(1.0)
    scheduler = LargeBatchLR(
        optimizer, MultiStep([30]), steps_per_epoch=7, global_batch_size=1, base_batch_size=1, rule="none"
    )
    time = Fraction(0)
    for _ in range(40):
        steps, length = draw.randint(1, 9), draw.choice([3, 7, 11, 13, 49])
        time += Fraction(steps, scheduler.steps_per_epoch)
        list(walk(optimizer, scheduler, steps))
        scheduler.change_batch(draw.randint(1, 512), steps_per_epoch=length)
        assert scheduler.epoch == time
        restored = LargeBatchLR(sgd(1.0), MultiStep([30]), steps_per_epoch=1, rule="none")
        restored.load_state_dict(scheduler.state_dict())
        assert restored.epoch == time


def test_a_reduction_holds_for_the_rest_of_the_schedule() -> None:
    optimizer = sgd(1.0)
    scheduler = LargeBatchLR(optimizer, Constant(), steps_per_epoch=1)
    scheduler.reduce(0.25)
    assert optimizer.param_groups[0]["lr"] == 0.25
    list(walk(optimizer, scheduler, 3))
    assert optimizer.param_groups[0]["lr"] == 0.25
    scheduler.reduce(0.5)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_group_that_is_added_later_follows_the_schedule() -> None:
    """Layers that are unfrozen in mid-training."""
    optimizer = sgd(0.1)
    scheduler = LargeBatchLR(
        optimizer, Cosine(4), steps_per_epoch=1, global_batch_size=64, base_batch_size=32
    )
    list(walk(optimizer, scheduler, 1))
    optimizer.add_param_group({"params": [torch.zeros(1)], "lr": 0.3})
    for step, rates in enumerate(list(walk(optimizer, scheduler, 4))[1:], start=2):
        assert rates == pytest.approx([0.2 * Cosine(4)(step), 0.6 * Cosine(4)(step)])


def test_a_tensor_rate_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
    scheduler = LargeBatchLR(optimizer, Cosine(10), steps_per_epoch=1)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    scheduler.change_batch(steps_per_epoch=2)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.5 * Cosine(10)(4))
    added = torch.tensor(0.25)
    optimizer.add_param_group({"params": [torch.zeros(1)], "lr": added})
    for factor in (0.5, 0.25):
        scheduler.reduce(0.5)
        assert added.item() == pytest.approx(0.25 * factor * Cosine(10)(4))


def test_a_refused_change_changes_nothing() -> None:
    optimizer = sgd(0.5)
    scheduler = LargeBatchLR(optimizer, Cosine(10), steps_per_epoch=4)
    list(walk(optimizer, scheduler, 3))
    before = scheduler.state_dict()
    with pytest.raises(HyperparameterError, match="base_batch_size must be given"):
        scheduler.change_batch(64, steps_per_epoch=2)
    with pytest.raises(HyperparameterError, match=r"factor must be more than 0 and at most 1, got 2"):
        scheduler.reduce(2)
    with pytest.raises(HyperparameterError, match="state_dict must have 1 parameter groups, got 2"):
        scheduler.load_state_dict(LargeBatchLR(sgd(0.5, 0.5), Cosine(10), steps_per_epoch=2).state_dict())
    assert scheduler.state_dict() == before
