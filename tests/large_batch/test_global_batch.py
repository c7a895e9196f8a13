"""A global batch: its split, its growth, and worlds that change their size, without Horovod."""

from __future__ import annotations

import random
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
    HyperparameterError,
    LargeBatchLR,
    MultiStep,
    NoiseEstimate,
    NoiseScaleGrowth,
    Schedule,
    from_config,
    largest_eigenvalue,
    rank_passes,
    scaled_adam,
    split_batch,
    steps_per_epoch,
)

CONSTANT = Constant()


class World:
    """As many ranks as a test says, and a training whose steps change nothing but the rate."""

    size = 4

    def make(
        self,
        batch: int = 96,
        *,
        base: int = 24,
        rule: str = "linear",
        schedule: Schedule = CONSTANT,
        even: bool = True,
        **options: Any,
    ) -> GlobalBatch:
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        self.optimizer.synchronize = lambda: None  # type: ignore[attr-defined]
        split = split_batch(batch, self.size, 12, even=even)
        self.accumulator = GradientAccumulator(
            self.optimizer, passes=split.passes, local_batch_size=split.local_batch_size
        )
        sizes: dict[str, int] = {"steps_per_epoch": 10, "global_batch_size": batch, "base_batch_size": base}
        self.scheduler = LargeBatchLR(self.optimizer, schedule, rule=rule, **sizes)
        parts: dict[str, Any] = {"accumulator": self.accumulator, "scheduler": self.scheduler}
        self.batch = GlobalBatch(split, num_samples=10 * batch, even=even, **parts, **options)
        return self.batch

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.step()
            self.scheduler.step()

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr("horovod_tune.large_batch.accumulation.world_size", lambda _: made.size)
    return made


def test_a_kept_global_batch_takes_more_passes_in_a_smaller_world_at_the_same_rate(world: World) -> None:
    batch = world.make()
    seen = []
    for world.size in (4, 2, 8):
        batch.follow_world()
        seen.append((batch.split.global_batch_size, batch.split.world_size, world.accumulator.passes))
        assert world.rate == 0.4 and world.scheduler.steps_per_epoch == 10
    assert seen == [(96, 4, 2), (96, 2, 4), (96, 8, 1)]


def test_a_kept_local_batch_takes_rate_and_steps_with_it(world: World) -> None:
    batch = world.make(keep="local")
    world.step(5)
    seen = []
    for world.size in (4, 2, 8):
        batch.follow_world()
        assert world.accumulator.passes == 2
        assert float(world.scheduler.epoch) == 0.5
        seen.append((batch.split.global_batch_size, world.rate, world.scheduler.steps_per_epoch))
    assert seen == [(96, 0.4, 10), (48, 0.2, 20), (192, 0.8, 5)]


@pytest.mark.parametrize(("keep", "expected"), [("global", 96), ("local", 144)])
def test_its_state_goes_to_a_world_of_another_size(world: World, keep: str, expected: int) -> None:
    state = world.make(keep=keep).state_dict()
    world.size = 6
    batch = world.make(keep=keep)
    batch.load_state_dict(state)
    assert batch.split.global_batch_size == expected
    assert world.scheduler.global_batch_size == expected


def test_a_batch_that_the_world_does_not_divide_is_refused_or_shared(world: World) -> None:
    batch = world.make()
    world.size = 5
    with pytest.raises(HyperparameterError, match="multiple of the world size 5, such as 95 or 100, got 96"):
        batch.follow_world()
    world.size = 4
    batch = world.make(even=False)
    world.size = 5
    batch.follow_world()
    assert (batch.split.local_batch_size, batch.split.passes) == (20, 2)


@pytest.mark.parametrize("world_size", [1, 3, 5, 7, 40])
@pytest.mark.parametrize("batch", [1, 32, 33])
def test_uneven_ranks_take_each_sample_once_in_no_more_than_the_passes(world_size: int, batch: int) -> None:
    split = split_batch(batch, world_size, 4, even=False)
    order = torch.randperm(100)
    ranks = [list(rank_passes(order, split, rank)) for rank in range(world_size)]
    for step, rows_of_step in enumerate(order.split(batch)):
        groups = [rank[step] for rank in ranks]
        taken = torch.cat([rows for group in groups for rows in group])
        assert sorted(taken.tolist()) == sorted(rows_of_step.tolist())
        assert max(len(group) for group in groups) <= split.passes
        assert all(len(rows) <= min(4, split.micro_batch_size) for group in groups for rows in group)
        mine = [sum(len(rows) for rows in group) for group in groups]
        assert max(mine) <= split.local_batch_size and max(mine) - min(mine) <= 1


def test_passes_of_a_broken_world_are_dropped(world: World) -> None:
    batch = world.make()
    weight = world.optimizer.param_groups[0]["params"][0]
    world.accumulator.backward(weight.sum(), samples=12)
    world.size = 2
    batch.follow_world()
    assert weight.grad is None and not world.accumulator.full
    batch.resize(192)


def test_an_optimiser_that_was_made_alone_is_refused_in_a_larger_world(world: World) -> None:
    world.size = 1
    batch = world.make()
    world.size = 2
    with pytest.raises(HyperparameterError, match="made again with 2 ranks"):
        batch.follow_world()


def test_a_configuration_names_what_a_new_world_keeps() -> None:
    config = {"lr": 0.1, "epochs": 4, "base_batch_size": 32}
    model = torch.nn.Linear(2, 1)
    setup = from_config(model, {**config, "local_batch_size": 64}, num_samples=640)
    assert (setup.batch.keep, setup.split.global_batch_size, setup.scheduler.scale) == ("local", 64, 2.0)
    setup = from_config(model, {**config, "global_batch_size": 64}, num_samples=640)
    assert setup.batch.keep == "global"
    both = {**config, "global_batch_size": 64, "local_batch_size": 64}
    for bad in (config, both):
        with pytest.raises(HyperparameterError, match="one of global_batch_size and local_batch_size"):
            from_config(model, bad, num_samples=640)
    with pytest.raises(HyperparameterError, match="local_batch_size must be an integer of at least 1, got 0"):
        from_config(model, {**config, "local_batch_size": 0}, num_samples=640)
    with pytest.raises(HyperparameterError, match="keep must be one of global, local, got 'rate'"):
        World().make(keep="rate")


def test_scaled_adam_keeps_its_memory_in_samples() -> None:
    scaled = scaled_adam(1e-3, (0.9, 0.999), 1e-8, global_batch_size=1024, base_batch_size=256)
    # A beta forgets over 1 / (1 - beta) steps.
    for before, after in zip((0.9, 0.999), scaled.betas, strict=True):
        assert 1024 / (1 - after) == pytest.approx(256 / (1 - before))
    assert (scaled.lr, scaled.eps) == (2e-3, 0.5e-8)
    scaled = scaled_adam(1e-3, (0.95, 0.999), 1e-8, global_batch_size=20, base_batch_size=1)
    assert scaled.betas == (0.0, pytest.approx(0.98))


def test_a_split_is_the_whole_batch_in_the_fewest_passes() -> None:
    draw = random.Random(0)
    for _ in range(500):
        world, local, limit = draw.randint(1, 64), draw.randint(1, 5000), draw.randint(1, 512)
        split = split_batch(world * local, world, limit)
        assert split.local_batch_size * world == split.global_batch_size
        assert split.micro_batch_size <= limit
        assert split.passes == -(-local // limit)
        # Full passes and one shorter last pass that is not empty.
        assert (split.passes - 1) * split.micro_batch_size < local <= split.passes * split.micro_batch_size


@pytest.mark.parametrize("batch", [200, 250, 255])
def test_small_integers_of_numpy_do_not_overflow(batch: int) -> None:
    assert split_batch(np.uint8(batch), np.uint8(1), np.uint8(100)) == split_batch(batch, 1, 100)
    assert steps_per_epoch(np.uint8(batch), np.uint8(90)) == 3


def estimate(low: float) -> NoiseEstimate:
    return NoiseEstimate(2 * low, low, 4 * low, 1.0, 2 * low)


def factors(policy: Any, calls: list[tuple[float, float | None]]) -> list[int]:
    """Return what `BatchGrowth` gets from a policy, whose last growth it passes on."""
    found, last = [], None
    for epoch, measure in calls:
        found.append(policy(epoch, 1, measure, last))
        if found[-1] > 1 or last is None:
            last = (epoch, measure)
    return found


def test_fixed_growth_makes_up_for_milestones_passed_in_between() -> None:
    policy = FixedGrowth([1, 2, 3, 10], factor=3)
    epochs = (0, 0.99, 3.5, 3.6, 2.0, 11)
    assert factors(policy, [(epoch, None) for epoch in epochs]) == [1, 1, 27, 1, 1, 3]


def test_the_noise_scale_grows_the_batch_up_to_its_sure_end_and_never_back() -> None:
    policy = NoiseScaleGrowth(factor=2, fraction=0.5)
    batch = 32
    for low, expected in [(10, 32), (127, 32), (128, 64), (100, 64), (5000, 2048), (0, 2048)]:
        batch *= policy(0.0, batch, estimate(low), None)
        assert batch == expected
    assert policy(0.0, batch, None, None) == 1


def test_curvature_grows_where_it_falls_and_after_the_duration() -> None:
    policy = CurvatureGrowth(decay=2, duration=5)
    values = [(0, 10.0), (1, 6.0), (2, -4.9), (3, 4.0), (6.9, 4.0), (7, 4.0), (8, 100.0), (11, 1.9)]
    assert factors(policy, values) == [1, 1, 2, 1, 1, 2, 1, 2]


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


def test_growth_changes_passes_rate_and_steps_together(world: World) -> None:
    world.size = 1
    growth = BatchGrowth(FixedGrowth([1, 3], factor=4), world.make(24), max_global_batch_size=10_000)
    seen = []
    for _ in range(5):
        world.step(world.scheduler.steps_per_epoch)
        growth.update()
        split = world.batch.split
        seen.append((float(world.scheduler.epoch), split.global_batch_size, split.passes, world.rate))
    first, last = (96, 8, pytest.approx(0.4)), (384, 32, pytest.approx(1.6))
    assert seen == [(1, *first), (2, *first), (3, *last), (4, *last), (5, *last)]
    assert world.accumulator.passes == 32 and world.scheduler.steps_per_epoch == 1


def test_first_the_batch_grows_then_the_rate_decays(world: World) -> None:
    world.size = 1
    policy, batch = FixedGrowth([1, 2, 3], factor=5), world.make(24, rule="none")
    growth = BatchGrowth(policy, batch, max_global_batch_size=240, decay_at_limit=True)
    rates, batches = [], []
    for _ in range(3):
        world.step(world.scheduler.steps_per_epoch)
        growth.update()
        rates.append(world.rate)
        batches.append(batch.split.global_batch_size)
    assert batches == [120, 240, 240]
    # 5 = 2 x 2.5 at the limit, then 5 in full.
    assert rates == pytest.approx([0.1, 0.04, 0.008])


def test_a_noise_scale_beyond_the_limit_decays_the_rate_once() -> None:
    def made() -> tuple[World, BatchGrowth]:
        world = World()
        batch = world.make(24, rule="none")
        return world, BatchGrowth(NoiseScaleGrowth(), batch, max_global_batch_size=48, decay_at_limit=True)

    (first, growth), (second, restored) = made(), made()
    for _ in range(3):
        growth.update(estimate(300))  # 8 times the batch: 2 times in the batch, 4 in the rate
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    restored.load_state_dict(growth.state_dict())
    for low, rate in [(300, 0.025), (600, 0.0125), (600, 0.0125)]:
        restored.update(estimate(low))
        assert second.batch.split.global_batch_size == 48
        assert second.rate == pytest.approx(rate)


def test_a_batch_that_more_ranks_have_brought_beyond_the_limit_is_kept(world: World) -> None:
    growth = BatchGrowth(FixedGrowth([1]), world.make(24, keep="local"), max_global_batch_size=16)
    world.step(10)
    assert not growth.update() and world.batch.split.global_batch_size == 24


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_state_goes_through_a_checkpoint_to_a_world_of_any_size(world_size: int) -> None:
    worlds, growths = [], []
    for size in (1, world_size):
        world = World()
        world.size = size
        batch = world.make(24, schedule=MultiStep([3]))
        worlds.append(world)
        growths.append(BatchGrowth(FixedGrowth([1, 4]), batch, max_global_batch_size=10_000))
    (one, other), (growth, restored) = worlds, growths
    one.step(10)
    growth.update()
    one.step()
    other.scheduler.load_state_dict(one.scheduler.state_dict())
    restored.load_state_dict(growth.state_dict())
    assert other.batch.split == split_batch(48, world_size, 12 if world_size == 1 else 6)
    assert other.scheduler.state_dict() == one.scheduler.state_dict()
    for _ in range(20):
        for each, its_growth in zip(worlds, growths, strict=True):
            each.step()
            its_growth.update()
        assert other.rate == one.rate
        assert other.batch.split.global_batch_size == one.batch.split.global_batch_size
    assert one.batch.split.global_batch_size == 96


def test_a_policy_of_ones_own_is_enough(world: World) -> None:
    def thrice(epoch: float, global_batch_size: int, measure: Any, last: Any) -> int:
        return 3 if epoch >= 1 and global_batch_size == 24 else 1

    growth = BatchGrowth(thrice, world.make(24), max_global_batch_size=10_000)
    assert not growth.update()
    world.step(10)
    assert growth.update() and world.batch.split.global_batch_size == 72
    assert world.rate == pytest.approx(0.3)
