"""`from_config`: a configuration as a training, in ten lines."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from horovod_tune.large_batch import HyperparameterError, Lamb, Lars, from_config

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
    more = {
        "optimizer": optimizer,
        "schedule": schedule,
        "warmup_epochs": warmup_epochs,
        "weight_decay": 1e-3,
    }
    config = {**BASE, **SCHEDULES[schedule], **more, "max_micro_batch_size": 24, "mine": 3}
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


def test_a_grad_scaler_goes_on_with_its_scale() -> None:
    def with_scaler(scale: float, **options: Any) -> tuple[torch.amp.GradScaler, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, **options)
        return scaler, from_config(new_model(), BASE, num_samples=200, scaler=scaler)

    _, setup = with_scaler(64.0)
    state = setup.state_dict()
    scaler, restored = with_scaler(65536.0)
    restored.load_state_dict(state)
    assert scaler.get_scale() == 64.0
    earlier = {name: part for name, part in state.items() if name != "scaler"}  # of an earlier version
    without = from_config(new_model(), BASE, num_samples=200)
    _, disabled = with_scaler(1.0, enabled=False)
    for saved in (earlier, without.state_dict(), disabled.state_dict()):
        restored.load_state_dict(saved)
        without.load_state_dict(state)
        disabled.load_state_dict(state)
    assert scaler.get_scale() == 64.0


def test_a_changed_configuration_goes_on_at_the_same_epoch() -> None:
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
    rates = {}
    for optimizer in KINDS:
        setup = from_config(
            new_model(),
            {**config, "relative_lr": 2.0, "optimizer": optimizer, "scaling": "none"},
            num_samples=200,
        )
        rates[optimizer] = setup.optimizer.param_groups[0]["lr"]
    assert rates == {"sgd": 0.2, "lars": 0.2, "adamw": 2e-3, "lamb": 0.01}


def test_the_ready_search_space_is_what_it_reads() -> None:
    from horovod_tune.search import large_batch_space

    space = large_batch_space(epochs=6, global_batch_sizes=[64, 128], base_batch_size=16, mine=1)
    for _ in range(40):
        config = {key: each.sample() if hasattr(each, "sample") else each for key, each in space.items()}
        setup = from_config(new_model(), config, num_samples=200)
        assert setup.split.global_batch_size in (64, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": None}, "config must have one of lr and relative_lr, got lr=None and relative_lr=None"),
        ({"relative_lr": 1.0}, "config must have one of lr and relative_lr, got lr=0.1 and relative_lr=1.0"),
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
    ],
)
def test_a_bad_configuration_is_named_with_its_bound(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HyperparameterError, match=message):
        from_config(new_model(), {**BASE, **change}, num_samples=200)


def test_keys_of_ones_own_are_left_alone() -> None:
    mine = {"hidden_size": 8, "batch_size": 16, "epochs_2": 3, "data_dir": "/data", "seed": 1}
    mine |= {"val_batch_size": 256, "total_batch_size": 512, "locl_batch_size": 8, "reps": 3, "relative_r": 1}
    assert from_config(new_model(), {**BASE, **mine}, num_samples=200).split.global_batch_size == 64
    local = {**BASE, "global_batch_size": None, "local_batch_size": 64, "total_batch_size": 256}
    assert from_config(new_model(), local, num_samples=200).split.global_batch_size == 64


def test_a_misspelt_key_beside_an_empty_other_half_is_named() -> None:
    config = {**BASE, "global_batch_size": None, "locl_batch_size": 64}
    with pytest.raises(
        HyperparameterError, match="no key 'locl_batch_size', did you mean 'local_batch_size'"
    ):
        from_config(new_model(), config, num_samples=200)


def test_a_configuration_that_is_none_is_named() -> None:
    with pytest.raises(HyperparameterError, match="config must be a dict, got None"):
        from_config(new_model(), None, num_samples=200)  # type: ignore[arg-type]


def test_a_state_of_something_else_is_refused() -> None:
    setup = from_config(new_model(), BASE, num_samples=200)
    with pytest.raises(
        HyperparameterError, match=r"state_dict must be .* lacks kind, noise_scale, optimizer"
    ):
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


def test_a_missing_key_is_named() -> None:
    with pytest.raises(HyperparameterError, match="config must have base_batch_size, epochs, got"):
        from_config(new_model(), {"lr": 0.1, "global_batch_size": 64}, num_samples=200)
