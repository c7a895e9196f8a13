"""Scaling rules and the split of a global batch, by hand and over many sizes."""

from __future__ import annotations

import random

import pytest

from horovod_tune.large_batch import (
    HyperparameterError,
    scaled_adam,
    scaling_factor,
    split_batch,
    steps_per_epoch,
)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 32.0), ("sqrt", 32**0.5), ("none", 1.0)])
def test_a_rule_scales_from_the_base_batch_to_the_global_one(rule: str, factor: float) -> None:
    assert scaling_factor(8192, 256, rule) == factor
    assert scaling_factor(256, 8192, rule) == pytest.approx(1 / factor)


def test_scaled_adam_keeps_its_memory_in_samples() -> None:
    scaled = scaled_adam(1e-3, (0.9, 0.999), 1e-8, global_batch_size=1024, base_batch_size=256)
    # A beta forgets over 1 / (1 - beta) steps.
    for before, after in zip((0.9, 0.999), scaled.betas, strict=True):
        assert 1024 / (1 - after) == pytest.approx(256 / (1 - before))
    assert (scaled.lr, scaled.eps) == (2e-3, 0.5e-8)


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


def test_the_steps_of_an_epoch_are_those_of_a_data_loader() -> None:
    from torch.utils.data import DataLoader

    for samples, batch in [(1000, 128), (1024, 128), (1, 1), (5, 9)]:
        loader = DataLoader(list(range(samples)), batch_size=batch)
        assert steps_per_epoch(samples, batch) == len(loader)
        if samples >= batch:
            loader = DataLoader(list(range(samples)), batch_size=batch, drop_last=True)
            assert steps_per_epoch(samples, batch, drop_last=True) == len(loader)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scaling_factor(64, 32, "cubic"), "rule must be one of linear, none, sqrt, got 'cubic'"),
        (
            lambda: scaled_adam(1e-3, (0.9, 0.99), 1e-8, global_batch_size=4096, base_batch_size=256),
            r"global_batch_size must be at most 10 times base_batch_size for betas\[0\]=0.9, got 16 times",
        ),
        (
            lambda: scaled_adam(1e-3, (1.0, 0.99), 1e-8, global_batch_size=2, base_batch_size=1),
            r"betas\[0\] must be at least 0 and less than 1, got 1.0",
        ),
        (
            lambda: split_batch(5, 8),
            "must be a multiple of the world size 8, such as 8, got 5",
        ),
        (
            lambda: steps_per_epoch(10, 11, drop_last=True),
            r"global_batch_size must be at most num_samples \(10\) with drop_last, got 11",
        ),
    ],
)
def test_bad_numbers_are_named_with_their_bound(call, message: str) -> None:
    with pytest.raises(HyperparameterError, match=message):
        call()
