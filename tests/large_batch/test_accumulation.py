"""`GradientAccumulator` on one rank; tests of several ranks are in test_worlds.py."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from horovod_tune.large_batch import (
    Cosine,
    GradientAccumulator,
    HyperparameterError,
    LargeBatchLR,
    NoiseScale,
    world,
)

INPUTS = torch.randn(64, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def new_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def sgd(model: torch.nn.Module, lr: float = 0.2) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows) - rows.sum(1, keepdim=True)).square().mean()


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_groups_of_any_cut_are_one_batch(seed: int, max_norm: float | None) -> None:
    draw = random.Random(seed)
    model, whole = new_model(), new_model()
    optimizer, reference = sgd(model), sgd(whole)
    accumulator = GradientAccumulator(optimizer, passes=6, local_batch_size=50, max_norm=max_norm)
    for _ in range(5):
        rows = INPUTS[draw.sample(range(64), draw.randint(6, 64))]
        cuts = sorted(draw.sample(range(1, len(rows)), draw.randint(0, 5)))
        for piece in torch.tensor_split(rows, cuts):
            accumulator.backward(loss_of(model, piece), samples=len(piece))
        assert accumulator.full == (len(cuts) == 5)
        result = accumulator.step()
        reference.zero_grad()
        loss_of(whole, rows).backward()
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
            assert result.gradient_norm == pytest.approx(float(norm))
        reference.step()
        assert result == (True, len(rows), result.gradient_norm)
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_skipped_step_changes_neither_weights_nor_schedule_nor_noise_scale() -> None:
    model = new_model()
    optimizer = sgd(model)
    scheduler = LargeBatchLR(optimizer, Cosine(10), steps_per_epoch=1)
    meter = NoiseScale()
    accumulator = GradientAccumulator(
        optimizer,
        passes=2,
        local_batch_size=8,
        max_norm=1.0,
        scaler=torch.amp.GradScaler("cpu", init_scale=64.0),
        scheduler=scheduler,
        noise_scale=meter,
    )
    before = copy.deepcopy(model.state_dict())
    accumulator.backward(loss_of(model, INPUTS[:4]), samples=4)
    accumulator.backward(loss_of(model, INPUTS[4:8]) * float("nan"), samples=4)
    assert accumulator.step().stepped is False
    assert scheduler.epoch == 0 and meter.state_dict() == NoiseScale().state_dict()
    assert str(model.state_dict()) == str(before)
    for _ in range(2):
        accumulator.backward(loss_of(model, INPUTS[:4]), samples=4)
    assert accumulator.step().stepped is True
    assert scheduler.epoch == 1 and str(model.state_dict()) != str(before)


def test_the_noise_scale_sees_each_pass_before_scale_weight_and_clipping() -> None:
    """Against the same numbers from autograd; of the passes of a rank, the first counts."""
    model = new_model()
    seen: list[tuple[float, ...]] = []

    class Recorder(NoiseScale):
        def update(self, *values: float) -> None:
            seen.append(values)
            super().update(*values)

    accumulator = GradientAccumulator(
        sgd(model, lr=0.0),
        passes=3,
        local_batch_size=20,
        max_norm=1e-3,
        scaler=torch.amp.GradScaler("cpu", init_scale=4096.0),
        noise_scale=Recorder(every=1),
    )
    pieces = INPUTS[:16].split([2, 4, 10])
    for piece in pieces:
        # Somebody looks at other gradients in between.
        torch.autograd.grad(loss_of(model, INPUTS), list(model.parameters()))
        accumulator.backward(loss_of(model, piece), samples=len(piece))
    accumulator.step()

    def square(rows: torch.Tensor) -> float:
        grads = torch.autograd.grad(loss_of(model, rows), list(model.parameters()))
        return float(sum(grad.square().sum() for grad in grads))

    assert seen == [pytest.approx((square(pieces[0]), 1 / 2, square(INPUTS[:16]), 16))]


def test_the_noise_scale_sees_groups_that_are_added_and_parameters_that_are_unfrozen() -> None:
    model = new_model()
    head, body = model[2], model[0]
    body.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([*head.parameters(), body.bias], lr=0.0)
    meter = NoiseScale(every=1)
    accumulator = GradientAccumulator(optimizer, passes=2, local_batch_size=8, noise_scale=meter)
    body.bias.requires_grad_(True)
    optimizer.add_param_group({"params": [body.weight]})
    for _ in range(2):
        for _ in range(2):  # Both passes are alike, so there is no noise.
            accumulator.backward(loss_of(model, INPUTS[:4]), samples=4)
        accumulator.step()
    assert meter.estimate().noise_scale == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": 1.0},
        {"noise_scale": NoiseScale(every=1)},
        {"max_norm": 1.0, "scaler": torch.amp.GradScaler("cpu", enabled=False)},
    ],
)
def test_a_gradient_that_is_not_finite_is_refused_and_training_can_go_on(options: dict[str, Any]) -> None:
    model = new_model()
    before = copy.deepcopy(model.state_dict())
    accumulator = GradientAccumulator(sgd(model), passes=2, local_batch_size=8, **options)
    for factor in (1.0, float("nan")):
        accumulator.backward(loss_of(model, INPUTS[:4]) * factor, samples=4)
    with pytest.raises(HyperparameterError, match="the gradient's norm must be finite, got nan"):
        accumulator.step()
    assert str(model.state_dict()) == str(before)
    accumulator.backward(loss_of(model, INPUTS[:4]), samples=4)
    assert accumulator.step().stepped


def test_a_loss_scale_that_has_fallen_to_0_is_an_error() -> None:
    model = new_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-148)
    accumulator = GradientAccumulator(sgd(model), passes=1, local_batch_size=4, scaler=scaler)
    for scale in (2.0**-149, 0.0):
        accumulator.backward(loss_of(model, INPUTS[:4]) * float("nan"), samples=4)
        if scale:
            assert not accumulator.step().stepped
    with pytest.raises(HyperparameterError, match=r"the loss scale, .* must be more than 0, got 0\.0"):
        accumulator.step()


def test_sparse_gradients_are_measured_and_clipped() -> None:
    ends = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = torch.nn.Embedding(5, 2, sparse=sparse)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        options = {"max_norm": 0.1, "noise_scale": NoiseScale()}
        accumulator = GradientAccumulator(optimizer, passes=2, local_batch_size=4, **options)
        for rows in ([1, 1], [1, 3]):
            accumulator.backward(table(torch.tensor(rows)).sum() / 2, samples=2)
        ends.append((accumulator.step().gradient_norm, table.weight))
    assert ends[0][0] == pytest.approx(ends[1][0]) and torch.allclose(ends[0][1], ends[1][1])


@pytest.mark.parametrize("every", [1, 3])
def test_the_noise_scale_is_measured_in_every_so_many_steps(every: int) -> None:
    model = new_model()
    meter = NoiseScale(every=every)
    accumulator = GradientAccumulator(sgd(model), passes=2, local_batch_size=8, noise_scale=meter)
    measured = []
    for _ in range(7):
        before = meter.state_dict()
        for rows in INPUTS[:8].split(4):
            accumulator.backward(loss_of(model, rows), samples=4)
        norm = accumulator.step().gradient_norm
        measured.append(meter.state_dict() != before)
        assert (norm is not None) == measured[-1]
    assert measured == [step % every == 0 for step in range(7)]


def test_a_group_can_be_resized_between_steps_only() -> None:
    model = new_model()
    accumulator = GradientAccumulator(sgd(model), passes=2, local_batch_size=8)
    accumulator.backward(loss_of(model, INPUTS[:4]), samples=4)
    with pytest.raises(HyperparameterError, match="between two steps, but 1 of 2"):
        accumulator.resize(4, 16)
    accumulator.step()
    accumulator.resize(1, 4)
    accumulator.backward(loss_of(model, INPUTS[:4]), samples=4)
    assert accumulator.full


def test_a_pass_too_many_is_refused() -> None:
    model = new_model()
    accumulator = GradientAccumulator(sgd(model), passes=1, local_batch_size=4)
    accumulator.backward(loss_of(model, INPUTS[:4]), samples=4)
    with pytest.raises(HyperparameterError, match=r"step\(\) must be called after 1 passes"):
        accumulator.backward(loss_of(model, INPUTS[:4]), samples=4)


def test_with_torch_distributed_the_ranks_rows_come_while_other_work_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_gather(rows: list[torch.Tensor], mine: torch.Tensor, group: Any, async_op: bool) -> Any:
        assert async_op
        return SimpleNamespace(wait=lambda: [row.copy_(mine) for row in rows])

    monkeypatch.setattr(world, "world_size", lambda _: 2)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    assert world.gather_async([1.0, 2.5])() == [[1.0, 2.5]] * 2
