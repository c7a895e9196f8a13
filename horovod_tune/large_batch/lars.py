"""LARS (You, Gitman and Ginsburg 2017, arXiv:1708.03888) as a torch optimiser."""

from __future__ import annotations

from typing import Any

import torch

from horovod_tune.large_batch import bounds
from horovod_tune.large_batch.layer_wise import Group, LayerWiseOptimizer, Tensor


class Lars(LayerWiseOptimizer):
    r"""SGD with momentum and a rate for each layer, proportional to the norm of its weights.

    .. math::
        r &= \eta\,\|w\| / (\|g\| + \lambda\|w\|) \\
        v &\leftarrow \mu v + \gamma\, r\, (g + \lambda w) \\
        w &\leftarrow w - v

    with the rate :math:`\gamma`, `trust` :math:`\eta`, `weight_decay` :math:`\lambda` and `momentum`
    :math:`\mu` (You et al. 2017, algorithm 1). Groups with ``layer_wise=False`` have r = 1: plain SGD at the
    full rate. `parameter_groups` makes groups of both kinds.

    Under ``hvd.DistributedOptimizer`` it uses the averaged gradient, so that N ranks with batches of B/N take
    the same step as one rank with a batch of B. Clip or unscale gradients before the step.

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
        HyperparameterError: An option is out of bounds, or `step` finds a sparse gradient.
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
        super().__init__(params, locals())

    def check_options(self, group: Group) -> None:
        super().check_options(group)
        bounds.number("momentum", group["momentum"], at_least=0, less_than=1)
        bounds.number("trust", group["trust"], more_than=0)
        if bounds.flag("nesterov", group["nesterov"]) and group["momentum"] == 0:
            raise bounds.HyperparameterError("momentum must be more than 0 with nesterov, got 0")

    def first_state(self, parameter: Tensor) -> dict[str, Any]:
        # Also without momentum: a changed configuration may use it later.
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def step_one(self, group: Group, weight: Tensor, weight_norm: float, gradient_norm: float) -> None:
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
