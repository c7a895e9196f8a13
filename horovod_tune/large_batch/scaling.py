"""Scaling rules: from a base rate, tuned with a base batch, to the rate of the global batch."""

from __future__ import annotations

import math
from typing import NamedTuple

from horovod_tune.large_batch import bounds

RULES = ("linear", "sqrt", "none")

# Malladi et al. derive "sqrt" for Adam, You et al. (2020) use it with LAMB. For LARS the papers do not agree
# on one; its steps depend only on the gradient's direction, whose noise falls with the root of the batch.
RULE_OF_OPTIMIZER = {"sgd": "linear", "lars": "sqrt", "adamw": "sqrt", "lamb": "sqrt"}


def scaling_factor(global_batch_size: int, base_batch_size: int, rule: str = "linear") -> float:
    r"""Return what the base learning rate is multiplied by, with :math:`k = B / B_0`.

    * ``linear``, :math:`k`: SGD with or without momentum (Goyal et al. 2017, arXiv:1706.02677). It keeps the
      sum of k small steps where gradients change little from step to step; hence a warm-up.
    * ``sqrt``, :math:`\sqrt k`: Adam-like optimisers (Malladi et al. 2022, arXiv:2205.10287; its betas and
      epsilon: `scaled_adam`), LAMB (You et al. 2020, arXiv:1904.00962). For SGD it keeps the variance of a
      step (Krizhevsky 2014, arXiv:1404.5997, who then used ``linear``).
    * ``none``, 1.

    Args:
        global_batch_size: Samples in an optimiser step, over all ranks and accumulation steps.
        base_batch_size: Samples in an optimiser step for which the base rate was tuned.
        rule: ``linear``, ``sqrt`` or ``none``.

    Raises:
        HyperparameterError: A batch is below 1, or there is no such rule.

    >>> [scaling_factor(4096, 256, rule) for rule in ("linear", "sqrt", "none")]
    [16.0, 4.0, 1.0]
    """
    k = bounds.count("global_batch_size", global_batch_size) / bounds.count(
        "base_batch_size", base_batch_size
    )
    return {"linear": k, "sqrt": math.sqrt(k), "none": 1.0}[bounds.one_of("rule", rule, RULES)]


class AdamHyperparameters(NamedTuple):
    """What `torch.optim.AdamW` and `Lamb` take."""

    lr: float
    betas: tuple[float, float]
    eps: float


def scaled_adam(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    *,
    global_batch_size: int,
    base_batch_size: int,
) -> AdamHyperparameters:
    r"""Return Adam's hyperparameters for k times the batch by the square root rule.

    .. math:: \eta' = \sqrt k\,\eta,\quad 1-\beta_i' = k\,(1-\beta_i),\quad \epsilon' = \epsilon/\sqrt k

    (Malladi et al. 2022, arXiv:2205.10287, definition 5.2.) The averages then reach back over as many samples
    as before, not as many steps.

    Raises:
        HyperparameterError: A beta would fall below 0: the batch grew by more than :math:`1/(1-\beta)`.

    >>> scaled_adam(1e-3, (0.75, 0.9375), 2e-8, global_batch_size=1024, base_batch_size=256)
    AdamHyperparameters(lr=0.002, betas=(0.0, 0.75), eps=1e-08)
    """
    lr, eps = bounds.at_least("lr", lr, 0), bounds.at_least("eps", eps, 0)
    root = scaling_factor(global_batch_size, base_batch_size, "sqrt")
    k = scaling_factor(global_batch_size, base_batch_size)
    scaled = []
    for index, beta in enumerate(bounds.betas(betas)):
        if k * (1 - beta) > 1:
            raise bounds.HyperparameterError(
                f"global_batch_size must be at most {1 / (1 - beta):g} times base_batch_size for "
                f"betas[{index}]={beta:g}, got {k:g} times"
            )
        scaled.append(1 - k * (1 - beta))
    return AdamHyperparameters(root * lr, (scaled[0], scaled[1]), eps / root)
