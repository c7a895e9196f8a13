"""LARS and LAMB as torch optimisers, and the groups of parameters that they and others take."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from horovod_tune import bounds

Group = dict[str, Any]


class TrustRatioError(bounds.HyperparameterError, FloatingPointError):
    """A weight, gradient or trust ratio is not finite; the message names the parameter.

    No weight has changed, unless LAMB with ``eps=0`` has divided by a second moment of 0.
    """


class LayerWiseOptimizer(torch.optim.Optimizer, ABC):
    """A torch optimiser whose groups have a flag ``layer_wise`` and, if known, parameter ``names``."""

    def add_param_group(self, param_group: Group) -> None:
        """Add a group and give its parameters their state."""
        # State is made now and not in the first step: otherwise `hvd.broadcast_optimizer_state` would make it
        # by a step with zero gradients, and weight decay would change the weights on ranks without state.
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "weight_decay", "eps"):
            value = group[name]
            bounds.number(name, value.item() if isinstance(value, torch.Tensor) else value, at_least=0)
        bounds.flag("layer_wise", group["layer_wise"])
        self.check_options(group)
        for parameter in group["params"]:
            if parameter.is_complex() or not parameter.is_floating_point():
                name = self.name_of(parameter)
                raise bounds.HyperparameterError(f"{name} must be real, got {parameter.dtype}")
            self.state[parameter] = self.first_state(parameter)

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return a parameter's name for errors, from the groups: this also works in a copied optimiser."""
        for number, group in enumerate(self.param_groups):
            names = group.get("names") or group.get("param_names") or ()
            for index, each in enumerate(group["params"]):
                if each is parameter:
                    name = repr(names[index]) if index < len(names) else f"{index} of group {number}"
                    return f"parameter {name}"
        return "a parameter of no group"

    @abstractmethod
    def check_options(self, group: Group) -> None:
        """Raise HyperparameterError if an option that only the subclass has is out of bounds."""

    @abstractmethod
    def first_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's state before its first step."""

    @abstractmethod
    def step_one(self, group: Group, weight: torch.Tensor, weight_norm: float, gradient_norm: float) -> None:
        """Update one layer from its gradient and its state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform an optimiser step; `closure` evaluates the model again and returns the loss."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        layers = [
            (group, parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for _, parameter in layers:
            if parameter.grad.layout != torch.strided:
                raise bounds.HyperparameterError(
                    f"{self.name_of(parameter)} must have a dense gradient, got a sparse one; "
                    "use nn.Embedding(sparse=False)"
                )
        of_weights = norms([parameter for _, parameter in layers])
        of_gradients = norms([parameter.grad for _, parameter in layers])
        steps = list(zip(layers, of_weights, of_gradients, strict=True))
        # All are checked before the first step, so that an error changes nothing.
        for (group, parameter), *both in steps:
            if not math.isfinite(sum(both)):
                self.refuse(group, parameter, "weight norm {:g}, gradient norm {:g}".format(*both))
        for (group, parameter), *both in steps:
            self.step_one(group, parameter, *both)
        return loss

    def refuse(self, group: Group, parameter: torch.Tensor, values: str) -> None:
        """Raise TrustRatioError with the values that the step depends on."""
        what = "trust ratio" if group["layer_wise"] else "step"
        raise TrustRatioError(f"the {what} of {self.name_of(parameter)} must be finite, got {values}")


def norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the Euclidean norms, with one synchronisation on a GPU; half precision is widened to single."""
    if not tensors or any(tensor.device.type == "cpu" for tensor in tensors):
        return [float(norm(tensor)) for tensor in tensors]
    wide = [_wide(tensor) for tensor in tensors]
    scalars = torch._foreach_norm(wide)
    return list(torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).tolist())


def norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean norm, shape ()."""
    wide = _wide(tensor)
    if not wide.is_contiguous():
        return torch.linalg.vector_norm(wide)
    # On a CPU this takes three quarters of torch.linalg.vector_norm's time, and is more exact: vector_norm's
    # error is 3e-4 for ten million elements in single precision.
    flat = wide.view(-1)
    return torch.dot(flat, flat).sqrt()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor, which may be sparse, in single precision or better."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return values.float() if values.dtype in (torch.half, torch.bfloat16) else values


class Lars(LayerWiseOptimizer):
    r"""SGD with momentum and a rate per layer, proportional to its weights' norm (arXiv:1708.03888).

    .. math::
        r &= \eta\,\|w\| / (\|g\| + \lambda\|w\|) \\
        v &\leftarrow \mu v + \gamma\, r\, (g + \lambda w) \\
        w &\leftarrow w - v

    with the rate :math:`\gamma`, `trust` :math:`\eta`, `weight_decay` :math:`\lambda` and `momentum`
    :math:`\mu` (You et al. 2017, algorithm 1). Groups with ``layer_wise=False`` have r = 1: plain SGD at the
    full rate. `parameter_groups` makes groups of both kinds.

    Average, unscale and clip gradients before the step.

    Args:
        params: As for any torch optimiser, or the result of `parameter_groups`.
        lr: The rate. Its usual values differ from SGD's, since r is proportional to `trust`.
        momentum: The fraction of v that is kept from step to step.
        weight_decay: λ, as in SGD.
        trust: The trust coefficient.
        eps: Added to the denominator of r.
        nesterov: If True, step by :math:`\mu v + \gamma r (g + \lambda w)` instead of v.
        layer_wise: The default for groups that do not set it.

    Raises:
        TrustRatioError: `step` finds a NaN or an infinity.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = Lars([weight], lr=1.0, momentum=0.0, trust=0.1)
    >>> weight.grad = torch.tensor([0.0, 2.0])  # r = 0.1 * 5 / 2
    >>> optimizer.step()
    >>> weight.data
    tensor([3.0000, 3.5000])
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        layer_wise: bool = True,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps}
        super().__init__(params, {**defaults, "nesterov": nesterov, "layer_wise": layer_wise})

    def check_options(self, group: Group) -> None:
        bounds.number("momentum", group["momentum"], at_least=0, less_than=1)
        bounds.number("trust", group["trust"], more_than=0)
        if bounds.flag("nesterov", group["nesterov"]) and group["momentum"] == 0:
            raise bounds.HyperparameterError("momentum must be more than 0 with nesterov, got 0")

    def first_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        # Also without momentum: a changed configuration may use it later.
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def step_one(self, group: Group, weight: torch.Tensor, weight_norm: float, gradient_norm: float) -> None:
        gradient, buffer = weight.grad, self.state[weight]["momentum_buffer"]
        assert gradient is not None, "step() skips parameters without a gradient"
        momentum = group["momentum"]
        rate, decay = float(group["lr"]), group["weight_decay"]
        denominator = gradient_norm + decay * weight_norm + group["eps"]
        if group["layer_wise"] and weight_norm and denominator:  # weights of 0 must be able to change
            rate *= group["trust"] * weight_norm / denominator
        buffer.mul_(momentum).add_(gradient, alpha=rate)
        if decay:
            buffer.add_(weight, alpha=rate * decay)
        if not group["nesterov"]:
            weight.sub_(buffer)
            return
        if decay:
            weight.mul_(1 - rate * decay)
        weight.sub_(buffer, alpha=momentum).sub_(gradient, alpha=rate)


class Lamb(LayerWiseOptimizer):
    r"""Adam with the step of each layer proportional to the norm of its weights (arXiv:1904.00962).

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1) g,\quad v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
        u &= \frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)} + \epsilon} + \lambda w \\
        w &\leftarrow w - \eta\, \frac{\|w\|}{\|u\|}\, u

    with η = `lr`, λ = `weight_decay` (You et al. 2020, algorithm 2, φ being the identity). Groups with
    ``layer_wise=False`` step by η u, as in AdamW. `parameter_groups` makes groups of both kinds.

    Average, unscale and clip gradients before the step.

    Args:
        params: As for any torch optimiser, or the result of `parameter_groups`.
        lr: The rate η.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ.
        layer_wise: The default for groups that do not set it.

    Raises:
        TrustRatioError: `step` finds a NaN or an infinity.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = Lamb([weight], lr=0.5, eps=0.0)
    >>> weight.grad = torch.tensor([7.0, 7.0])  # u = (1, 1) in the first step, of norm 2 ** 0.5
    >>> optimizer.step()
    >>> weight.data  # minus 0.5 * 5 / 2 ** 0.5
    tensor([1.2322, 2.2322])
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        layer_wise: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "layer_wise": layer_wise})

    def check_options(self, group: Group) -> None:
        bounds.betas("betas", group["betas"])

    def first_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    def step_one(self, group: Group, weight: torch.Tensor, weight_norm: float, gradient_norm: float) -> None:
        gradient, state = weight.grad, self.state[weight]
        assert gradient is not None, "step() skips parameters without a gradient"
        beta1, beta2 = group["betas"]
        state["step"] += 1
        first, second = (1 - beta ** state["step"] for beta in (beta1, beta2))
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # m / (a sqrt(v) + b) is Adam's step with both bias corrections.
        update = square.sqrt().mul_(first / math.sqrt(second)).add_(group["eps"] * first)
        torch.div(mean, update, out=update)
        if group["weight_decay"]:
            update.add_(weight, alpha=group["weight_decay"])
        rate = float(group["lr"])
        if group["layer_wise"]:
            update_norm = float(norm(update))
            if not math.isfinite(update_norm):
                self.refuse(group, weight, f"update norm {update_norm:g} with eps={group['eps']:g}")
            if weight_norm and update_norm:  # weights of 0 must be able to change
                rate *= weight_norm / update_norm
        weight.sub_(update, alpha=rate)


def parameter_groups(model: nn.Module, *, weight_decay: float = 0.0, **options: Any) -> list[dict[str, Any]]:
    """Return the model's parameters as two groups for `Lars`, `Lamb` or any torch optimiser.

    The second group has ``weight_decay=0`` and ``layer_wise=False``. It holds biases and scales, found by
    name and shape, and all parameters of normalisation modules. Their norms may be near 0, so a layer-wise
    rate would be too; decay would pull scales away from 1. (Goyal et al. 2017, section 5.3, and LARS and LAMB
    implementations exclude them.) Empty groups and frozen parameters are left out; shared ones appear once.

    Args:
        model: Any module. Its parameters' names go with the groups, for error messages.
        weight_decay: Weight decay of the first group.
        **options: Options of both groups, such as ``lr``.

    Raises:
        HyperparameterError: A lazy layer has not seen its first batch yet, or no parameter is trained.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    >>> for group in parameter_groups(model, weight_decay=0.1):
    ...     print(group["names"], group["weight_decay"], group["layer_wise"])
    ['0.weight'] 0.1 True
    ['0.bias', '1.weight', '1.bias'] 0.0 False
    """
    bounds.number("weight_decay", weight_decay, at_least=0)
    excluded = {id(parameter) for parameter in _of_normalisation(model)}
    groups: dict[bool, dict[str, Any]] = {
        True: {"params": [], "names": [], "weight_decay": weight_decay, "layer_wise": True, **options},
        False: {"params": [], "names": [], "weight_decay": 0.0, "layer_wise": False, **options},
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise bounds.HyperparameterError(
                f"model must have seen a batch before its parameters are grouped; {name!r} has no shape yet"
            )
        # `nn.MultiheadAttention` has a bias_k of three dimensions; weight_g is the scale of `weight_norm`.
        is_scale_or_bias = parameter.dim() <= 1 or re.search(r"(^|\.)(bias(_[^.]*)?|weight_g)$", name)
        group = groups[not (id(parameter) in excluded or is_scale_or_bias)]
        group["params"].append(parameter)
        group["names"].append(name)
    filled = [group for group in groups.values() if group["params"]]
    if not filled:
        raise bounds.HyperparameterError("model must have a parameter that requires a gradient, got none")
    return filled


def _of_normalisation(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters of normalisation modules, even those of several dimensions (`LayerNorm`)."""
    parameters: list[Any] = []
    for module in model.modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        if any("Norm" in kind and not kind.startswith("_WeightNorm") for kind in kinds):
            parameters += module.parameters(recurse=False)
        elif isinstance(module, nn.utils.parametrize.ParametrizationList):
            parameters += [module.original0 for each in module if type(each).__name__ == "_WeightNorm"]
    return parameters
