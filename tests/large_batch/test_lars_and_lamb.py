"""`Lars` and `Lamb`: equal to NumPy in float64, and good citizens among torch's optimisers."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import references
import torch

from horovod_tune.large_batch import (
    HyperparameterError,
    Lamb,
    LargeBatchLR,
    Lars,
    TrustRatioError,
    Warmup,
    parameter_groups,
)

SHAPES = [(5, 3), (7,), (2, 3, 2, 2), (1,), (4, 4), ()]
STEPS = 12
KINDS = {"lars": Lars, "lamb": Lamb}


def random_case(seed: int) -> tuple[list[np.ndarray], list[list[np.ndarray]], list[float]]:
    """Weights, gradients and rates over six orders of magnitude, with zeros among them."""
    draw = np.random.default_rng(seed)
    layers = len(SHAPES)
    sizes = 10.0 ** draw.uniform(-3, 3, layers)
    weights = [np.asarray(draw.normal(size=shape) * size) for shape, size in zip(SHAPES, sizes, strict=True)]
    weights[seed % layers] = np.zeros(SHAPES[seed % layers])
    gradients = [
        [draw.normal(size=weight.shape) * 10.0 ** draw.uniform(-3, 3) for weight in weights]
        for _ in range(STEPS)
    ]
    gradients[3][(seed + 1) % layers] = np.zeros(SHAPES[(seed + 1) % layers])
    return weights, gradients, list(10.0 ** draw.uniform(-3, 0, STEPS))


def trained(kind: type, case: Any, **options: Any) -> list[np.ndarray]:
    weights, gradients, rates = case
    params = [torch.nn.Parameter(torch.from_numpy(weight.copy())) for weight in weights]
    optimizer = kind(params, **options)
    for grads, rate in zip(gradients, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for parameter, gradient in zip(params, grads, strict=True):
            parameter.grad = torch.from_numpy(np.array(gradient))
        optimizer.step()
    return [parameter.detach().numpy() for parameter in params]


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lars", {"momentum": 0.9, "trust": 0.02}),
        ("lars", {"momentum": 0.99, "trust": 0.3, "nesterov": True}),
        ("lars", {"momentum": 0.0, "eps": 1e-3}),
        ("lamb", {"betas": (0.0, 0.9), "eps": 1e-8}),
        ("lamb", {"betas": (0.9, 0.999), "eps": 1e-3}),
        *((kind, {"layer_wise": False}) for kind in KINDS),
    ],
    ids=str,
)
def test_every_option_equals_the_float64_reference(
    kind: str, options: dict[str, Any], weight_decay: float
) -> None:
    for seed in range(4):
        case = random_case(seed)
        found = trained(KINDS[kind], case, weight_decay=weight_decay, **options)
        expected = getattr(references, kind)(*case, weight_decay=weight_decay, **options)
        for ours, reference in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, reference, rtol=1e-10, atol=1e-10)


def test_lars_without_layers_is_torchs_sgd_and_lamb_torchs_adamw() -> None:
    case = random_case(1)
    # SGD's form differs from the paper's where the rate changes.
    steady = (*case[:2], [0.1] * STEPS)
    ours = trained(Lars, steady, layer_wise=False, nesterov=True, weight_decay=0.1)
    ours += trained(Lamb, case, layer_wise=False, weight_decay=0.1)
    theirs = trained(torch.optim.SGD, steady, momentum=0.9, nesterov=True, weight_decay=0.1)
    theirs += trained(torch.optim.AdamW, case, eps=1e-6, weight_decay=0.1)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)


# Squares of gradients underflow in float16, with LAMB as with torch's Adam.
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("lars", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        *(("lamb", dtype) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_single_and_half_precision_follow_the_reference(kind: str, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    start, gradient = torch.randn(40, 30, generator=draw), torch.randn(40, 30, generator=draw)
    parameter = torch.nn.Parameter(start.to(dtype, copy=True))
    options = {"trust": 0.1} if kind == "lars" else {"eps": 1e-4}
    optimizer = KINDS[kind]([parameter], lr=0.1, **options)
    parameter.grad = gradient.to(dtype)
    optimizer.step()
    (expected,) = getattr(references, kind)(
        [start.double().numpy()], [[gradient.double().numpy()]], [0.1], **options
    )
    error = (parameter.detach().double() - torch.from_numpy(expected)).abs().max()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 4e-2, torch.float16: 4e-3}[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_half_precision_do_not_overflow(kind: str) -> None:
    parameter = torch.nn.Parameter(torch.full((300, 300), 300.0, dtype=torch.float16))
    parameter.grad = torch.full((300, 300), 300.0, dtype=torch.float16)
    optimizer = KINDS[kind]([parameter], lr=1e-3)
    optimizer.step()
    assert torch.isfinite(parameter).all()


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_schedulers_closures_and_late_groups_work(kind: str) -> None:
    model = torch.nn.Linear(4, 4)
    late = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = KINDS[kind](parameter_groups(model), lr=0.5)
    optimizer.add_param_group({"params": [late], "names": ["late"]})
    scheduler = LargeBatchLR(optimizer, Warmup(4, start=0.5), steps_per_epoch=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean() + late.square().sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(6):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert losses[-1] < losses[0]
    assert optimizer.param_groups[-1]["lr"] == 0.5
    assert not torch.equal(late, torch.ones(3, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["weight", "gradient"])
@pytest.mark.parametrize(("name", "what"), [("weight", "trust ratio"), ("bias", "step")])
def test_a_nan_names_the_parameter_and_changes_nothing(
    kind: str, bad: float, where: str, name: str, what: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = KINDS[kind](parameter_groups(model), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.no_grad():
        parameter = getattr(model[1], name)
        (parameter if where == "weight" else parameter.grad)[-1] = bad
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
    said = rf"the {what} of parameter '1.{name}' must be finite, got .*{where} norm {bad:g}"
    with pytest.raises(TrustRatioError, match=said):
        optimizer.step()
    after = [model.state_dict(), optimizer.state_dict()["state"]]
    assert str(after) == str(before)


def test_sparse_gradients_are_refused_by_name() -> None:
    model = torch.nn.Embedding(10, 3, sparse=True)
    for kind in KINDS.values():
        optimizer = kind(parameter_groups(model), lr=0.1)
        model.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(HyperparameterError, match="'weight' must have a dense gradient, got a sparse"):
            optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_without_gradients_stay_and_keep_their_step(kind: str) -> None:
    used, unused = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    optimizer = KINDS[kind]([used, unused], lr=0.1, weight_decay=0.5)
    used.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(unused, torch.ones(2, 2)) and not torch.equal(used, torch.ones(2, 2))
    if kind == "lamb":
        assert (optimizer.state[used]["step"], optimizer.state[unused]["step"]) == (1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_grad_scaler_skips_an_overflow_and_unscales_the_rest(kind: str) -> None:
    model = torch.nn.Linear(3, 2, bias=False)
    twin = copy.deepcopy(model)
    optimizer, plain = (KINDS[kind](each.parameters(), lr=0.1) for each in (model, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, inputs in enumerate(torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1))):
        if step == 1:
            inputs = inputs * float("inf")
        optimizer.zero_grad()
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            plain.zero_grad()
            twin(inputs).square().mean().backward()
            plain.step()
    assert scaler.get_scale() == 512.0
    torch.testing.assert_close(model.weight, twin.weight)


def test_a_second_moment_of_0_without_eps_is_named_and_poisons_no_weight() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Lamb([weight], lr=0.1, eps=0.0)
    weight.grad = torch.tensor([1.0, 0.0])
    with pytest.raises(TrustRatioError, match=r"parameter 0 of group 0 .* got update norm nan with eps=0"):
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", KINDS.values())
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
