"""What `Lars` and `Lamb` share: options, checks of gradients, the step around each layer's own."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from horovod_tune.large_batch import bounds

TrustClip = tuple[float, float] | None
Closure = Callable[[], float] | None
Tensor = torch.Tensor
Tensors = list[torch.Tensor]
Group = dict[str, Any]
State = dict[str, Any]


class TrustRatioError(bounds.HyperparameterError, FloatingPointError):
    """A weight, gradient or trust ratio is not finite: says of which parameter.

    Nothing was changed, unless it is LAMB's ``eps=0`` that divides by a second moment of 0.
    """


def clipped(ratio: float, clip: TrustClip) -> float:
    """Return `ratio` within (lowest, highest).

    >>> clipped(7.0, (0.0, 5.0)), clipped(7.0, None)
    (5.0, 7.0)
    """
    return ratio if clip is None else min(max(ratio, clip[0]), clip[1])


def check_clip(clip: Any) -> None:
    """Check `trust_clip`."""
    if clip is None:
        return
    if not isinstance(clip, (tuple, list)) or len(clip) != 2:
        raise bounds.HyperparameterError(f"trust_clip must be None or (lowest, highest), got {clip!r}")
    low, high = clip
    bounds.at_least("trust_clip[0]", low, 0)
    if high != math.inf:
        bounds.number("trust_clip[1]", high)
    if high < low or high <= 0:
        raise bounds.HyperparameterError(
            f"trust_clip[1] must be more than 0 and at least trust_clip[0] ({low:g}), got {high!r}"
        )


class LayerWiseOptimizer(torch.optim.Optimizer, ABC):
    """A torch optimiser whose groups have ``layer_wise``, and ``names`` of their parameters where known."""

    def __init__(self, params: Any, options: dict[str, Any]) -> None:
        """Options are the subclass's ``locals()``: each but these two is one of its own."""
        super().__init__(
            params,
            {name: options[name] for name in options if name not in ("self", "params", "__class__")},
        )

    def add_param_group(self, param_group: Group) -> None:
        """Add a group and give its parameters their state.

        State is made now and not in the first step: `hvd.broadcast_optimizer_state` would make it by a step
        with zero gradients, in which weight decay changes the weights of those ranks that have none yet.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self.check_options(group)
        for parameter in group["params"]:
            if parameter.is_complex() or not parameter.is_floating_point():
                raise bounds.HyperparameterError(
                    f"{self.name_of(parameter)} must be real, got {parameter.dtype}"
                )
            self.state[parameter] = self.first_state(parameter)

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return what errors call a parameter: looked up, so that copies of the optimiser know it too."""
        for number, group in enumerate(self.param_groups):
            names = group.get("names") or group.get("param_names") or ()
            for index, each in enumerate(group["params"]):
                if each is parameter:
                    name = repr(names[index]) if index < len(names) else f"{index} of group {number}"
                    return f"parameter {name}"
        return "a parameter of no group"

    def check_options(self, group: Group) -> None:
        """Raise HyperparameterError where an option of the group is out of bounds."""
        for name in ("lr", "weight_decay", "eps"):
            value = group[name]
            bounds.at_least(name, value.item() if isinstance(value, torch.Tensor) else value, 0)
        check_clip(group["trust_clip"])
        for name in ("decoupled", "rate_in_momentum", "bias_correction", "layer_wise"):
            if group.get(name) is not None:
                bounds.flag(name, group[name])

    @abstractmethod
    def first_state(self, parameter: torch.Tensor) -> State:
        """Return a parameter's state before its first step."""

    @abstractmethod
    def prepare(self, group: Group, params: Tensors, grads: Tensors) -> list[float]:
        """Return what a step has to know of each layer beforehand, from `finite_norms`; changes nothing."""

    @abstractmethod
    def step_one(self, group: Group, weight: Tensor, gradient: Tensor, state: State, prepared: float) -> None:
        """Step one layer."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Make an optimiser step; `closure` evaluates the model again and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(*each, self.prepare(*each)) for each in self.with_gradients()]
        for group, params, grads, prepared in work:
            states = [self.state[parameter] for parameter in params]
            for each in zip(params, grads, states, prepared, strict=True):
                self.step_one(group, *each)
        return loss

    def finite_norms(self, params: Tensors, grads: Tensors) -> list[tuple[float, float]]:
        """Return the norms of each weight and gradient; raises TrustRatioError where one is not finite."""
        found = list(zip(norms(params), norms(grads), strict=True))
        for parameter, (of_weight, of_gradient) in zip(params, found, strict=True):
            if not math.isfinite(of_weight + of_gradient):
                self.refuse(parameter, f"weight norm {of_weight:g}, gradient norm {of_gradient:g}")
        return found

    def refuse(self, parameter: torch.Tensor, values: str) -> None:
        """Raise TrustRatioError with the values that the ratio was to be made of."""
        raise TrustRatioError(f"the trust ratio of {self.name_of(parameter)} must be finite, got {values}")

    def with_gradients(self) -> Iterator[tuple[Group, Tensors, Tensors]]:
        """Give each group with its parameters that have gradients, and those."""
        found = []
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in params:
                if parameter.grad.layout != torch.strided:
                    raise bounds.HyperparameterError(
                        f"{self.name_of(parameter)} must have a dense gradient, got a sparse one; "
                        "use nn.Embedding(sparse=False)"
                    )
            if params:
                found.append((group, params, [parameter.grad for parameter in params]))
        yield from found


def norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the Euclidean norms, of half precision in single precision; on a GPU with one synchronisation.

    >>> norms([torch.tensor([3.0, 4.0]), torch.ones(2, 2)])
    [5.0, 2.0]
    """
    if any(tensor.device.type == "cpu" for tensor in tensors):
        return [float(norm(tensor)) for tensor in tensors]
    wide = [tensor.float() if tensor.dtype in _HALF else tensor for tensor in tensors]
    return [float(value) for value in torch.stack(list(torch._foreach_norm(wide))).tolist()]


def norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean norm, shape ()."""
    wide = tensor.float() if tensor.dtype in _HALF else tensor
    if not wide.is_contiguous():
        return torch.linalg.vector_norm(wide)
    # On a CPU this takes three quarters of torch.linalg.vector_norm's time, and is more exact: in single
    # precision that is off by 3e-4 for ten million elements.
    flat = wide.view(-1)
    return torch.dot(flat, flat).sqrt()


_HALF = (torch.half, torch.bfloat16)
