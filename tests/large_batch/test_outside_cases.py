"""Faults that other implementations were reported to have, curves of other libraries, and hostile numbers."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from horovod_tune.large_batch import (
    AdamHyperparameters,
    Cosine,
    GradientAccumulator,
    HyperparameterError,
    Lamb,
    LargeBatchLR,
    Lars,
    NoiseScale,
    from_config,
    scaled_adam,
    split_batch,
    steps_per_epoch,
)


def test_the_minute_long_imagenet_recipe() -> None:
    """Goyal et al. 2017: 8192 images a step, 0.1 for 256; five epochs from 0.1 to 3.2, then steps of 0.1."""
    weight = torch.nn.Parameter(torch.zeros(1))
    config = {"lr": 0.1, "base_batch_size": 256, "global_batch_size": 8192, "epochs": 90, "warmup_epochs": 5}
    config |= {"schedule": "multi_step", "milestones": [30, 60, 80], "max_micro_batch_size": 32}
    model = torch.nn.Module()
    model.weight = weight
    setup = from_config(model, config, num_samples=1_281_167)
    assert (setup.scheduler.steps_per_epoch, setup.split.passes) == (157, 256)
    rates = []
    for step in range(90 * 157):
        if step % 157 == 0:
            rates.append(setup.optimizer.param_groups[0]["lr"])
        setup.optimizer.step()
        setup.scheduler.step()
    assert rates[:7] == pytest.approx([0.1, 0.72, 1.34, 1.96, 2.58, 3.2, 3.2])
    assert [rates[each] for each in (29, 30, 60, 80)] == pytest.approx([3.2, 0.32, 0.032, 0.0032])


def test_numbers_of_numpy_train_like_pythons() -> None:
    found = scaled_adam(
        np.float32(0.5), (0.75, 0.9375), 2e-8, global_batch_size=np.int64(4), base_batch_size=1
    )
    assert found == AdamHyperparameters(1.0, (0.0, 0.75), 1e-8)
    config = {"lr": np.float64(0.1), "epochs": np.int64(4), "base_batch_size": np.int32(32)}
    config |= {"global_batch_size": np.int64(64), "schedule": "polynomial", "power": np.float64(2)}
    setup = from_config(torch.nn.Linear(2, 1), config, num_samples=640)
    assert setup.optimizer.param_groups[0]["lr"] == 0.2 and setup.scheduler.scale == 2.0
    setup.scheduler.reduce(np.float64(0.5))
    saved = io.BytesIO()
    torch.save(setup.state_dict(), saved)
    saved.seek(0)
    setup.load_state_dict(torch.load(saved, weights_only=True))


@pytest.mark.parametrize("batch", [200, 250, 255])
def test_small_integers_of_numpy_do_not_overflow(batch: int) -> None:
    assert split_batch(np.uint8(batch), np.uint8(1), np.uint8(100)) == split_batch(batch, 1, 100)
    assert steps_per_epoch(np.uint8(batch), np.uint8(90)) == 3


@pytest.mark.parametrize("kind", [Lars, Lamb])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_an_optimiser_steps_and_names_as_it_did(kind: Any, copied: Any) -> None:
    """torch's pickle of an optimiser has groups and state only: what else it needs has to come from those."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    original = kind([{"params": [weight], "names": ["weight"]}], lr=0.1)
    twin = copied(original)
    (other,) = twin.param_groups[0]["params"]
    weight.grad, other.grad = torch.ones(2, 2), torch.ones(2, 2)
    original.step()
    twin.step()
    assert torch.equal(weight, other) and weight[0, 0] < 1
    other.grad[1, 1] = math.nan
    with pytest.raises(HyperparameterError, match="the trust ratio of parameter 'weight' must be finite"):
        twin.step()


def test_a_group_that_is_added_later_follows_the_schedule() -> None:
    """Layers that are unfrozen in mid-training."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    options = {"steps_per_epoch": 1, "global_batch_size": 64, "base_batch_size": 32}
    schedule = LargeBatchLR(optimizer, Cosine(4), **options)
    rates = []
    for step in range(4):
        if step == 1:
            late = [torch.nn.Parameter(torch.ones(1))]
            optimizer.add_param_group({"params": late, "lr": 0.3})
        optimizer.step()
        schedule.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    for step, (first, *others) in enumerate(rates, start=1):
        assert first == pytest.approx(0.2 * Cosine(4)(step))
        assert others == [pytest.approx(3 * first)][: step - 1]


@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": 1.0},
        {"noise_scale": NoiseScale(every=1)},
        {"max_norm": 1.0, "scaler": torch.amp.GradScaler("cpu", enabled=False)},
    ],
)
def test_a_gradient_that_is_not_finite_is_refused_before_the_step(options: dict[str, Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    each = GradientAccumulator(torch.optim.SGD([weight], lr=0.1), passes=2, local_batch_size=2, **options)
    for factor in (1.0, math.inf):
        each.backward((factor * weight).sum(), samples=1)
    with pytest.raises(HyperparameterError, match="the gradient's norm must be finite, got inf"):
        each.step()
    assert weight.tolist() == [1.0, 1.0]
