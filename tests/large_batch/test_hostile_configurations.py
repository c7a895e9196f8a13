"""`from_config` with anything in any key, and populations whose configurations change in mid-training."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from horovod_tune.large_batch import HyperparameterError, TrainingSetup, from_config

BASE = {"lr": 0.01, "epochs": 6, "base_batch_size": 16, "global_batch_size": 64, "max_micro_batch_size": 16}
KINDS = ("sgd", "lars", "adamw", "lamb")
INPUTS = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))

HOSTILE = [
    *(0, -1, 1, 2**70, 1e300, 1e-300, math.nan, math.inf, -math.inf, True, False, None, 1 + 2j),
    *("", "x", [], {}, [1], (1, 2, 3), ["a"], [math.nan, 1]),
    *(np.float32(0.5), np.uint8(3), np.array([1.0, 2.0]), torch.tensor(0.5), abs, object()),
]
# Each key with an optimiser and a schedule that read it.
ALWAYS_READ = (
    *("epochs", "global_batch_size", "local_batch_size", "base_batch_size", "lr", "relative_lr", "scaling"),
    *("max_micro_batch_size", "optimizer", "momentum", "weight_decay", "max_norm", "schedule"),
    *("warmup_epochs", "warmup_start", "nesterov"),
)
KEYS: dict[str, dict[str, Any]] = {
    **{key: {} for key in ALWAYS_READ},
    "trust": {"optimizer": "lars"},
    "betas": {"optimizer": "lamb"},
    "eps": {"optimizer": "adamw"},
    "milestones": {"schedule": "multi_step"},
    "gamma": {"schedule": "multi_step", "milestones": [2, 4]},
    "power": {"schedule": "polynomial"},
}


def train(config: dict[str, Any], epochs: int = 1, start: dict[str, Any] | None = None) -> TrainingSetup:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1)
    setup = from_config(model, config, num_samples=200)
    if start is not None:
        setup.load_state_dict(start)
    for _ in range(epochs):
        for passes in setup.batches(torch.arange(200)):
            for rows in passes:
                setup.backward(model(INPUTS[rows]).square().mean(), samples=len(rows))
            setup.step()
    return setup


@pytest.mark.parametrize("key", KEYS)
def test_any_value_of_a_key_trains_or_is_refused_with_its_name(key: str) -> None:
    replaced = {"relative_lr": "lr", "local_batch_size": "global_batch_size"}.get(key)
    base = {name: value for name, value in BASE.items() if name != replaced}
    refused = 0
    for value in HOSTILE:
        config = {**base, **KEYS[key], key: value}
        try:
            from_config(torch.nn.Linear(5, 1), config, num_samples=200)
        except HyperparameterError as error:
            refused += 1
            assert key in str(error), f"{value!r}: {error}"
    assert refused > len(HOSTILE) / 2


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(KINDS, 2)))
def test_an_exploited_trial_may_change_its_optimiser(one: str, other: str) -> None:
    """Population based training: the donor's moments mean nothing to another optimiser."""
    state = train({**BASE, "optimizer": one}).state_dict()
    setup = train({**BASE, "optimizer": other}, epochs=2, start=state)
    assert float(setup.scheduler.epoch) == 3
    # A step counter, where there is one, counts the new optimiser's steps.
    own = [each for each in setup.optimizer.state_dict()["state"].values() if "step" in each]
    assert {int(each["step"]) for each in own} <= {8}


@pytest.mark.parametrize("kind", ["sgd", "lars"])
def test_an_exploited_trial_may_get_momentum(kind: str) -> None:
    """From the checkpoint of a training without any."""
    config = {**BASE, "optimizer": kind, "schedule": "constant", "lr": 0.1}
    state = train({**config, "momentum": 0.0}).state_dict()
    ends = []
    for momentum in (0.9, 0.0):
        setup = train({**config, "momentum": momentum}, epochs=2, start=state)
        ends.append(setup.optimizer.param_groups[0]["params"][0])
    assert torch.isfinite(ends[0]).all() and not torch.equal(*ends)
