"""`ReduceLROnPlateau` on one rank; tests of the average over ranks are in test_worlds.py."""

from __future__ import annotations

import pytest
import torch

from horovod_tune.large_batch import HyperparameterError, LargeBatchLR, ReduceLROnPlateau, Warmup

LOSSES = [3.0, 2.0, 2.1, 2.2, 2.3, 1.9, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.5, 1.5, 1.5]


def test_on_one_rank_it_is_torchs() -> None:
    rates = []
    for kind in (ReduceLROnPlateau, torch.optim.lr_scheduler.ReduceLROnPlateau):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        scheduler = kind(optimizer, factor=0.3, patience=1, cooldown=1, min_lr=0.05)
        for loss in LOSSES:
            scheduler.step(loss)
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates[: len(LOSSES)] == rates[len(LOSSES) :]
    assert min(rates) == 0.05


def test_with_a_schedule_its_rates_are_reduced_also_those_to_come() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = LargeBatchLR(optimizer, Warmup(4, start=0.0), steps_per_epoch=1)
    plateau = ReduceLROnPlateau(optimizer, schedule=schedule, factor=0.5, patience=0, min_lr=0.2)
    rates = []
    for loss in (3.0, 4.0, 2.0, 2.5, 2.5, 2.5, 2.5):
        optimizer.step()
        schedule.step()
        plateau.step(loss)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.25, 0.25, 0.375, 0.25, 0.2, 0.2, 0.2]


def test_its_state_goes_through_a_checkpoint_of_plain_data() -> None:
    import io

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = LargeBatchLR(optimizer, Warmup(4), steps_per_epoch=1)
    plateau = ReduceLROnPlateau(optimizer, schedule=schedule, patience=2)
    plateau.step(1.0)
    plateau.step(2.0)
    saved = io.BytesIO()
    torch.save(plateau.state_dict(), saved)
    saved.seek(0)
    other = ReduceLROnPlateau(optimizer, schedule=schedule, patience=2)
    other.load_state_dict(torch.load(saved, weights_only=True))
    assert (other.num_bad_epochs, other.best) == (1, 1.0)


@pytest.mark.parametrize(
    ("metric", "samples", "message"),
    [
        (float("nan"), 1, "metrics must be finite and samples at least 0, got nan of 1 samples on rank 0"),
        (1.0, -2, "metrics must be finite and samples at least 0, got 1.0 of -2 samples on rank 0"),
        (1.0, 0, "samples over all ranks must be more than 0, got 0.0"),
    ],
)
def test_bad_metrics_are_named(metric: float, samples: float, message: str) -> None:
    plateau = ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    with pytest.raises(HyperparameterError, match=message):
        plateau.step(metric, samples=samples)
