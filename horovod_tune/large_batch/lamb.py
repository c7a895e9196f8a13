"""LAMB (You et al. 2020, arXiv:1904.00962) as a torch optimiser."""

from __future__ import annotations

import math
from typing import Any

import torch

from horovod_tune.large_batch import bounds
from horovod_tune.large_batch.layer_wise import Group, LayerWiseOptimizer, Tensor, norm


class Lamb(LayerWiseOptimizer):
    r"""Adam with the step of each layer proportional to the norm of its weights.

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1) g,\quad v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
        u &= \frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)} + \epsilon} + \lambda w \\
        w &\leftarrow w - \eta\, \frac{\|w\|}{\|u\|}\, u

    with η = `lr`, λ = `weight_decay` (You et al. 2020, algorithm 2, φ being the identity). Groups with
    ``layer_wise=False`` step by η u, as in AdamW. `parameter_groups` makes groups of both kinds.

    Under ``hvd.DistributedOptimizer`` it uses the averaged gradient, so that N ranks with batches of B/N take
    the same step as one rank with a batch of B. Clip or unscale gradients before the step.

    Args:
        params: As for any torch optimiser, or the result of `parameter_groups`.
        lr: The rate η.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ.
        layer_wise: The default for groups that do not set it.

    Raises:
        HyperparameterError: An option is out of bounds, or `step` finds a sparse gradient.
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
        super().__init__(params, locals())

    def check_options(self, group: Group) -> None:
        super().check_options(group)
        bounds.betas(group["betas"])

    def first_state(self, parameter: Tensor) -> dict[str, Any]:
        return {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    def step_one(self, group: Group, weight: Tensor, weight_norm: float, gradient_norm: float) -> None:
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
