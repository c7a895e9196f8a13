"""`from_config`: a configuration as a training; any value of any key; a state under another configuration."""

from __future__ import annotations

import io
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from horovod_tune.large_batch import (
    AdamHyperparameters,
    HyperparameterError,
    Lamb,
    Lars,
    from_config,
    scaled_adam,
)
from horovod_tune.search import large_batch_space

BASE = {"lr": 0.1, "epochs": 6, "base_batch_size": 16, "global_batch_size": 64}
INPUTS = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
ANSWERS = INPUTS.sum(1, keepdim=True)


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))


def train(model: torch.nn.Module, setup: Any, epochs: range) -> list[float]:
    rates = []
    for epoch in epochs:
        order = torch.randperm(200, generator=torch.Generator().manual_seed(epoch))
        for passes in setup.batches(order):
            rates.append(setup.optimizer.param_groups[0]["lr"])
            for rows in passes:
                loss = (model(INPUTS[rows]) - ANSWERS[rows]).square().mean()
                setup.backward(loss, samples=len(rows))
            setup.step()
    return rates


KINDS = {"sgd": torch.optim.SGD, "lars": Lars, "adamw": torch.optim.AdamW, "lamb": Lamb}
SCHEDULES = {
    "constant": {},
    "multi_step": {"milestones": [3, 5]},
    "polynomial": {"power": 1.0},
    "cosine": {},
    "one_cycle": {},
    "inverse_sqrt": {},
}


@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup_epochs", [0, 1.5])
def test_every_combination_trains(optimizer: str, schedule: str, warmup_epochs: float) -> None:
    model = new_model()
    before = (model(INPUTS) - ANSWERS).square().mean().item()
    config = {**BASE, **SCHEDULES[schedule], "max_micro_batch_size": 24, "weight_decay": 1e-3, "mine": 3}
    config |= {"optimizer": optimizer, "schedule": schedule, "warmup_epochs": warmup_epochs}
    config |= {"lr": {"sgd": 0.02, "lars": 0.1, "adamw": 0.01, "lamb": 0.02}[optimizer]}
    setup = from_config(model, config, num_samples=200)
    assert isinstance(setup.optimizer, KINDS[optimizer])
    rates = train(model, setup, range(6))
    assert len(rates) == 24 and float(setup.scheduler.epoch) == 6
    assert (model(INPUTS) - ANSWERS).square().mean().item() < before
    scale = 4.0 if optimizer == "sgd" else 2.0
    assert max(rates) <= config["lr"] * scale * (1 + 1e-9)
    if warmup_epochs and schedule != "one_cycle":
        assert rates[0] == pytest.approx(config["lr"])
    noise = {"noise_scale", "noise_scale_low", "noise_scale_high"}
    assert set(setup.metrics()) == {"lr", "global_batch_size", *noise}


@pytest.mark.parametrize("schedule", ["cosine", "one_cycle", "polynomial"])
def test_the_reported_rate_is_that_of_the_last_step_and_not_of_the_next(schedule: str) -> None:
    config = {**BASE, **SCHEDULES[schedule], "schedule": schedule}
    model = new_model()
    setup = from_config(model, config, num_samples=200)
    assert setup.metrics()["lr"] == setup.optimizer.param_groups[0]["lr"], "the first, before any step"
    rates = train(model, setup, range(6))
    assert setup.metrics()["lr"] == rates[-1] > 0
    assert setup.optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-3 * max(rates))


@pytest.mark.long
def test_the_minute_long_imagenet_recipe() -> None:
    """Goyal et al. 2017: 8192 images a step, 0.1 for 256; five epochs from 0.1 to 3.2, then steps of 0.1."""
    config = {"lr": 0.1, "base_batch_size": 256, "global_batch_size": 8192, "epochs": 90, "warmup_epochs": 5}
    config |= {"schedule": "multi_step", "milestones": [30, 60, 80], "max_micro_batch_size": 32}
    setup = from_config(torch.nn.Linear(1, 1), config, num_samples=1_281_167)
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


@pytest.mark.parametrize("size", [16, 4])
def test_a_batch_that_is_resized_in_an_epoch_counts_from_the_next_step(size: int) -> None:
    model = new_model()
    setup = from_config(model, {**BASE, "global_batch_size": 8, "max_micro_batch_size": 8}, num_samples=64)
    seen, samples = [], []
    for passes in setup.batches(torch.arange(64)):
        for rows in passes:
            setup.backward(model(INPUTS[rows]).mean(), samples=len(rows))
            seen += rows.tolist()
        samples.append(setup.step().samples)
        if len(samples) == 2:
            setup.batch.resize(size)
    assert seen == list(range(64)) and float(setup.scheduler.epoch) == 1
    assert samples[:2] == [8, 8] and set(samples[2:]) == {size}


@pytest.mark.parametrize("optimizer", KINDS)
def test_a_round_trip_through_a_checkpoint_changes_no_bit(optimizer: str) -> None:
    config = {**BASE, "optimizer": optimizer, "lr": 0.01, "warmup_epochs": 2.5, "max_micro_batch_size": 16}
    whole = new_model()
    train(whole, from_config(whole, config, num_samples=200), range(6))
    model = new_model()
    setup = from_config(model, config, num_samples=200)
    train(model, setup, range(2))
    saved = io.BytesIO()
    torch.save([model.state_dict(), setup.state_dict()], saved)
    saved.seek(0)
    states = torch.load(saved, weights_only=True)
    model = new_model()
    setup = from_config(model, config, num_samples=200)
    model.load_state_dict(states[0])
    setup.load_state_dict(states[1])
    train(model, setup, range(2, 6))
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_grad_scaler_continues_with_its_scale() -> None:
    def with_scaler(scale: float, **options: Any) -> tuple[torch.amp.GradScaler, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, **options)
        return scaler, from_config(new_model(), BASE, num_samples=200, scaler=scaler)

    _, setup = with_scaler(64.0)
    state = setup.state_dict()
    scaler, restored = with_scaler(65536.0)
    restored.load_state_dict(state)
    assert scaler.get_scale() == 64.0
    without = from_config(new_model(), BASE, num_samples=200)
    _, disabled = with_scaler(1.0, enabled=False)
    for saved in (without.state_dict(), disabled.state_dict()):
        restored.load_state_dict(saved)
        without.load_state_dict(state)
        disabled.load_state_dict(state)
    assert scaler.get_scale() == 64.0


def test_a_changed_configuration_continues_at_the_same_epoch() -> None:
    model = new_model()
    setup = from_config(model, {**BASE, "schedule": "constant"}, num_samples=200)
    train(model, setup, range(2))
    changed = {**BASE, "schedule": "constant", "lr": 0.3, "global_batch_size": 32}
    other = from_config(model, changed, num_samples=200)
    other.load_state_dict(setup.state_dict())
    assert float(other.scheduler.epoch) == 2 and other.scheduler.steps_per_epoch == 7
    assert other.optimizer.param_groups[0]["lr"] == pytest.approx(0.6)


def test_a_relative_rate_is_one_of_each_optimiser() -> None:
    config = {key: value for key, value in BASE.items() if key != "lr"}
    config |= {"relative_lr": 2.0, "scaling": "none"}
    rates = {}
    for kind in KINDS:
        setup = from_config(new_model(), {**config, "optimizer": kind}, num_samples=200)
        rates[kind] = setup.optimizer.param_groups[0]["lr"]
    assert rates == {"sgd": 0.2, "lars": 0.2, "adamw": 2e-3, "lamb": 0.01}


def test_the_ready_search_space_is_what_it_reads() -> None:
    space = large_batch_space(epochs=6, global_batch_sizes=[64, 128], base_batch_size=16, mine=1)
    for _ in range(40):
        config = {key: each.sample() if hasattr(each, "sample") else each for key, each in space.items()}
        setup = from_config(new_model(), config, num_samples=200)
        assert setup.split.global_batch_size in (64, 128)


def test_a_rate_of_ones_own_replaces_the_search_spaces() -> None:
    space = large_batch_space(
        epochs=6, global_batch_sizes=np.array([64]), base_batch_size=16, optimizers=["sgd"], lr=0.1
    )
    assert "relative_lr" not in space and space["global_batch_size"] == 64 and space["lr"] == 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": -4}, "epochs must be more than 0, got -4"),
        ({"epochs": "10"}, "epochs must be a finite number, got '10'"),
        ({"base_batch_size": None}, "base_batch_size must be an integer of at least 1, got None"),
        ({"optimizers": "sgd"}, "optimizers must be a list with at least one value, got 'sgd'"),
        ({"optimizers": ["SGD"]}, r"optimizers\[0\] must be one of adamw, lamb, lars, sgd, got 'SGD'"),
        ({"global_batch_sizes": []}, r"global_batch_sizes must be a list with at least one value, got \[\]"),
        ({"global_batch_sizes": 64}, "global_batch_sizes must be a list with at least one value, got 64"),
        ({"global_batch_sizes": [8, 1.5]}, r"global_batch_sizes\[1\] must be an integer .*, got 1.5"),
        ({"local_batch_size": 8}, "local_batch_size must be left out, as global_batch_sizes is given, got 8"),
    ],
)
def test_a_search_space_that_no_trial_could_use_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"epochs": 6, "global_batch_sizes": [64], "base_batch_size": 16, **change}
    with pytest.raises(HyperparameterError, match=message):
        large_batch_space(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": None}, "must have exactly one of lr and relative_lr, got lr=None and relative_lr=None"),
        ({"relative_lr": 1.0}, "must have exactly one of lr and relative_lr, got lr=0.1 and relative_lr=1.0"),
        ({"lr": 0}, "lr must be more than 0, got 0"),
        ({"warmup_epochs": 6}, r"warmup_epochs must be less than epochs \(6\), got 6"),
        ({"warmup_start": 1.5}, "warmup_start must be at least 0 and at most 1, got 1.5"),
        ({"warm_up_epochs": 2}, "config has no key 'warm_up_epochs', did you mean 'warmup_epochs'?"),
        ({"schedule": "multi_step"}, "config must have milestones with multi_step, got None"),
        ({"LR": 0.2}, "config has no key 'LR', did you mean 'lr'?"),
        ({"learning_rate": 0.2}, "config has no key 'learning_rate', did you mean 'lr'?"),
        ({"epoch": 3}, "config has no key 'epoch', did you mean 'epochs'?"),
        ({"wd": 1e-4}, "config has no key 'wd', did you mean 'weight_decay'?"),
        ({"momentum": 1.0}, "momentum must be at least 0 and less than 1, got 1.0"),
        (
            {"global_batch_size": None, "locl_batch_size": 64},
            "no key 'locl_batch_size', did you mean 'local_batch_size'",
        ),
    ],
)
def test_a_bad_configuration_is_named_with_its_bound(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HyperparameterError, match=message):
        from_config(new_model(), {**BASE, **change}, num_samples=200)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "config must be a dict, got None"),
        ({"lr": 0.1, "global_batch_size": 64}, "config must have base_batch_size, epochs, got"),
    ],
)
def test_a_configuration_that_lacks_everything_or_a_key_is_refused(config: Any, message: str) -> None:
    with pytest.raises(HyperparameterError, match=message):
        from_config(new_model(), config, num_samples=200)


def test_keys_of_ones_own_are_left_alone() -> None:
    mine = {"hidden_size": 8, "batch_size": 16, "epochs_2": 3, "data_dir": "/data", "seed": 1}
    mine |= {"val_batch_size": 256, "total_batch_size": 512, "locl_batch_size": 8, "reps": 3, "relative_r": 1}
    assert from_config(new_model(), {**BASE, **mine}, num_samples=200).split.global_batch_size == 64
    local = {**BASE, "global_batch_size": None, "local_batch_size": 64, "total_batch_size": 256}
    assert from_config(new_model(), local, num_samples=200).split.global_batch_size == 64


def test_an_argument_that_the_optimizer_does_not_take_is_refused_by_one_rank_too() -> None:
    with pytest.raises(HyperparameterError, match="noise_scal must be an argument of from_config or of hvd"):
        from_config(new_model(), BASE, num_samples=200, noise_scal=3)
    from_config(new_model(), BASE, num_samples=200, sparse_as_dense=True)


def test_a_state_of_something_else_is_refused() -> None:
    setup = from_config(new_model(), BASE, num_samples=200)
    with pytest.raises(HyperparameterError, match=r"state_dict must .* lacks kind, noise_scale, optimizer"):
        setup.load_state_dict({})


@pytest.mark.parametrize(
    ("order", "got"),
    [
        (list(range(64)), "got list; torch.as_tensor"),
        (torch.zeros(8, 8), r"got Tensor of shape \(8, 8\)"),
        (torch.arange(64).numpy(), r"got ndarray of shape \(64,\)"),
    ],
)
def test_an_order_that_is_no_tensor_of_indices_is_refused(order: Any, got: str) -> None:
    setup = from_config(new_model(), BASE, num_samples=200)
    with pytest.raises(HyperparameterError, match=f"order must be a tensor of indices.* {got}"):
        next(setup.batches(order))


SMALL = {**BASE, "lr": 0.01, "max_micro_batch_size": 16}
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


@pytest.mark.parametrize("key", KEYS)
def test_any_value_of_a_key_trains_or_is_refused_with_its_name(key: str) -> None:
    replaced = {"relative_lr": "lr", "local_batch_size": "global_batch_size"}.get(key)
    base = {name: value for name, value in SMALL.items() if name != replaced}
    refused = 0
    for value in HOSTILE:
        config = {**base, **KEYS[key], key: value}
        try:
            from_config(torch.nn.Linear(5, 1), config, num_samples=200)
        except HyperparameterError as error:
            refused += 1
            assert key in str(error), f"{value!r}: {error}"
    assert refused > len(HOSTILE) / 2


def trained(config: dict[str, Any], epochs: int, start: dict[str, Any] | None = None) -> Any:
    model = new_model()
    setup = from_config(model, config, num_samples=200)
    if start is not None:
        setup.load_state_dict(start)
    train(model, setup, range(epochs))
    return setup


def test_the_noise_scale_outlives_a_world_of_one_rank_with_one_pass() -> None:
    setup = trained(SMALL, 3)
    config = {**SMALL, "max_micro_batch_size": 64}
    alone = trained(config, 1)
    assert alone.noise_scale.estimate() is None
    alone.load_state_dict(setup.state_dict())
    setup = trained(SMALL, 0, alone.state_dict())
    assert setup.noise_scale.estimate() == alone.noise_scale.estimate() is not None


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(KINDS, 2)))
def test_an_exploited_trial_may_change_its_optimiser(one: str, other: str) -> None:
    """Population based training: the donor's moments mean nothing to another optimiser."""
    state = trained({**SMALL, "optimizer": one}, 1).state_dict()
    setup = trained({**SMALL, "optimizer": other}, 2, state)
    assert float(setup.scheduler.epoch) == 3
    # A step counter, where there is one, counts the new optimiser's steps.
    own = [each for each in setup.optimizer.state_dict()["state"].values() if "step" in each]
    assert {int(each["step"]) for each in own} <= {8}


@pytest.mark.parametrize("kind", ["sgd", "lars"])
def test_an_exploited_trial_may_get_momentum(kind: str) -> None:
    """From the checkpoint of a training without any."""
    config = {**SMALL, "optimizer": kind, "schedule": "constant"}
    state = trained({**config, "momentum": 0.0}, 1).state_dict()
    ends = []
    for momentum in (0.9, 0.0):
        setup = trained({**config, "momentum": momentum}, 2, state)
        ends.append(setup.optimizer.param_groups[0]["params"][0])
    assert torch.isfinite(ends[0]).all() and not torch.equal(*ends)
