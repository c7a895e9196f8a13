"""Growth policies, power iteration against dense Hessians, and growth applied to a training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from horovod_tune.large_batch import (
    BatchGrowth,
    Constant,
    CurvatureGrowth,
    FixedGrowth,
    GlobalBatch,
    GradientAccumulator,
    LargeBatchLR,
    MultiStep,
    NoiseEstimate,
    NoiseScaleGrowth,
    largest_eigenvalue,
    split_batch,
)


def estimate(low: float) -> NoiseEstimate:
    return NoiseEstimate(2 * low, low, 4 * low, 1.0, 2 * low)


def test_fixed_growth_makes_up_for_milestones_passed_in_between() -> None:
    policy = FixedGrowth([1, 2, 3, 10], factor=3)
    assert [policy.growth(epoch, 1) for epoch in (0, 0.99, 3.5, 3.6, 2.0, 11)] == [1, 1, 27, 1, 1, 3]


def test_the_noise_scale_grows_the_batch_up_to_its_sure_end_and_never_back() -> None:
    policy = NoiseScaleGrowth(factor=2, fraction=0.5)
    batch = 32
    for low, expected in [(10, 32), (127, 32), (128, 64), (100, 64), (5000, 2048), (0, 2048)]:
        batch *= policy.growth(0.0, batch, estimate(low))
        assert batch == expected
    assert policy.growth(0.0, batch, None) == 1


def test_curvature_grows_where_it_falls_and_after_the_duration() -> None:
    policy = CurvatureGrowth(decay=2, duration=5)
    values = [(0, 10.0), (1, 6.0), (2, -4.9), (3, 4.0), (6.9, 4.0), (7, 4.0), (8, 100.0), (11, 1.9)]
    assert [policy.growth(epoch, 1, value) for epoch, value in values] == [1, 1, 2, 1, 1, 2, 1, 2]


@pytest.mark.parametrize("seed", range(2))
def test_power_iteration_finds_the_eigenvalue_of_a_dense_hessian(seed: int) -> None:
    """Of a network with one hidden layer."""
    torch.manual_seed(seed)
    rows, answers = torch.randn(30, 4).double(), torch.randn(30).double()

    def loss(weights: torch.Tensor) -> torch.Tensor:
        return ((rows @ weights[:20].view(4, 5)).tanh() @ weights[20:] - answers).square().mean()

    flat = 0.5 * torch.randn(25).double()
    eigenvalues = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat))
    largest = eigenvalues[eigenvalues.abs().argmax()].item()
    params = [part.clone().requires_grad_() for part in flat.split([20, 5])]
    found = largest_eigenvalue(lambda: loss(torch.cat(params)), params, max_products=500, tolerance=1e-9)
    assert found == pytest.approx(largest, rel=1e-4)
    assert all(each.grad is None for each in params)


def test_power_iteration_sees_saddles_linear_losses_and_unused_parameters() -> None:
    weights = torch.tensor([1.0, 1.0], requires_grad=True)
    unused, frozen = torch.zeros(3, requires_grad=True), torch.zeros(3)
    params = [weights, unused, frozen]
    signs = torch.tensor([1.0, -6.0])
    found = largest_eigenvalue(lambda: (signs * weights**2).sum() / 2, params, tolerance=1e-6)
    assert found == pytest.approx(-6, rel=1e-4)
    assert largest_eigenvalue(lambda: weights.sum(), params) == 0


class Training:
    """A training of 640 samples with batches of 32, whose batch grows; nothing but steps is trained."""

    def __init__(
        self, policy: Any, *, world_size: int = 1, rule: str = "linear", keep: str = "global", **options: Any
    ) -> None:
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        split = split_batch(32, world_size, 16)
        self.accumulator = GradientAccumulator(
            self.optimizer, passes=split.passes, local_batch_size=split.local_batch_size
        )
        self.scheduler = LargeBatchLR(
            self.optimizer,
            options.pop("schedule", Constant()),
            steps_per_epoch=20,
            global_batch_size=32,
            base_batch_size=32,
            rule=rule,
        )
        batch = GlobalBatch(
            split, accumulator=self.accumulator, scheduler=self.scheduler, num_samples=640, keep=keep
        )
        self.growth = BatchGrowth(policy, batch, **{"max_global_batch_size": 10_000, **options})

    def epoch(self) -> None:
        for _ in range(self.scheduler.steps_per_epoch):
            self.optimizer.step()
            self.scheduler.step()

    @property
    def rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]


def test_growth_changes_passes_rate_and_steps_together() -> None:
    training = Training(FixedGrowth([1, 3], factor=4))
    seen = []
    for _ in range(5):
        training.epoch()
        training.growth.update()
        split = training.growth.batch.split
        seen.append((float(training.scheduler.epoch), split.global_batch_size, split.passes, training.rate))
    assert seen == [
        (1, 128, 8, pytest.approx(0.4)),
        (2, 128, 8, pytest.approx(0.4)),
        (3, 512, 32, pytest.approx(1.6)),
        (4, 512, 32, pytest.approx(1.6)),
        (5, 512, 32, pytest.approx(1.6)),
    ]
    assert training.accumulator.passes == 32 and training.scheduler.steps_per_epoch == 2


def test_first_the_batch_grows_then_the_rate_decays() -> None:
    policy = FixedGrowth([1, 2, 3], factor=5)
    training = Training(policy, rule="none", max_global_batch_size=320, decay_at_limit=True)
    rates, batches = [], []
    for _ in range(3):
        training.epoch()
        training.growth.update()
        rates.append(training.rate)
        batches.append(training.growth.batch.split.global_batch_size)
    assert batches == [160, 320, 320]
    # 5 = 2 x 2.5 at the limit, then 5 in full.
    assert rates == pytest.approx([0.1, 0.04, 0.008])


def test_a_noise_scale_beyond_the_limit_decays_the_rate_once() -> None:
    def training() -> Training:
        return Training(NoiseScaleGrowth(), rule="none", max_global_batch_size=64, decay_at_limit=True)

    first, second = training(), training()
    for _ in range(3):
        first.growth.update(estimate(300))  # 8 times the batch: 2 times in the batch, 4 in the rate
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    second.growth.load_state_dict(first.growth.state_dict())
    for low, rate in [(300, 0.025), (600, 0.0125), (600, 0.0125)]:
        second.growth.update(estimate(low))
        assert second.growth.batch.split.global_batch_size == 64
        assert second.rate == pytest.approx(rate)


def test_a_batch_that_more_ranks_have_brought_beyond_the_limit_is_kept() -> None:
    training = Training(FixedGrowth([1]), world_size=4, keep="local", max_global_batch_size=16)
    training.epoch()
    assert not training.growth.update()
    assert training.growth.batch.split.global_batch_size == 32


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_state_goes_through_a_checkpoint_to_a_world_of_any_size(world_size: int) -> None:
    schedule = MultiStep([3])
    training = Training(FixedGrowth([1, 4]), schedule=schedule)
    training.epoch()
    training.growth.update()
    training.optimizer.step()
    training.scheduler.step()
    other = Training(FixedGrowth([1, 4]), world_size=world_size, schedule=schedule)
    other.scheduler.load_state_dict(training.scheduler.state_dict())
    other.growth.load_state_dict(training.growth.state_dict())
    assert other.growth.batch.split == split_batch(64, world_size, 16 if world_size == 1 else 8)
    assert other.scheduler.state_dict() == training.scheduler.state_dict()
    for _ in range(45):
        for each in (training, other):
            each.optimizer.step()
            each.scheduler.step()
            each.growth.update()
        assert other.rate == training.rate
        assert other.growth.batch.split.global_batch_size == training.growth.batch.split.global_batch_size
    assert training.growth.batch.split.global_batch_size == 128


def test_a_policy_of_ones_own_is_enough() -> None:
    class Thrice:
        def growth(self, epoch: float, global_batch_size: int, measure: Any) -> int:
            return 3 if epoch >= 1 and global_batch_size == 32 else 1

    training = Training(Thrice())
    assert not training.growth.update()
    training.epoch()
    assert training.growth.update() and training.growth.batch.split.global_batch_size == 96
    assert np.isclose(training.rate, 0.3)
