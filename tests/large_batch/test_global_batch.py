"""A global batch: its split, its scaling, and worlds that change their size, without Horovod."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from horovod_tune.large_batch import (
    Constant,
    GlobalBatch,
    GradientAccumulator,
    HyperparameterError,
    LargeBatchLR,
    from_config,
    rank_passes,
    scaled_adam,
    split_batch,
)


class World:
    """As many ranks as a test says."""

    size = 4

    def make(self, *, keep: str = "global", even: bool = True, batch: int = 96) -> GlobalBatch:
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        self.optimizer.synchronize = lambda: None  # type: ignore[attr-defined]
        split = split_batch(batch, self.size, 12, even=even)
        self.accumulator = GradientAccumulator(
            self.optimizer, passes=split.passes, local_batch_size=split.local_batch_size
        )
        options: dict[str, Any] = {"steps_per_epoch": 10, "global_batch_size": batch, "base_batch_size": 24}
        self.scheduler = LargeBatchLR(self.optimizer, Constant(), rule="linear", **options)
        return GlobalBatch(
            split,
            accumulator=self.accumulator,
            scheduler=self.scheduler,
            num_samples=10 * batch,
            keep=keep,
            even=even,
        )

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
    for _ in range(5):
        world.optimizer.step()
        world.scheduler.step()
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
