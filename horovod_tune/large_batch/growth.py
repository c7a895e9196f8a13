"""Batches that grow during training: at fixed epochs, by the gradient noise scale, or by curvature.

A policy is a function ``(epoch, global_batch_size, measure, last) -> factor``, a whole number by which to
multiply the batch, the same on all ranks. `last` is the epoch and the measure (None if it is not a number) of
the last growth, or of the first call if there was none; in the first call it is None.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from horovod_tune import bounds
from horovod_tune.large_batch.batches import GlobalBatch
from horovod_tune.large_batch.noise_scale import NoiseEstimate
from horovod_tune.large_batch.world import mean_over_ranks

Last = tuple[float, float | None] | None
Policy = Callable[[float, int, Any, Last], int]


class BatchGrowth:
    """Grows the global batch by a policy: each rank makes more passes, and the rate follows the scaling rule.

    Args:
        policy: `FixedGrowth`, `NoiseScaleGrowth`, `CurvatureGrowth` or a function of your own. With
            `decay_at_limit` it gets the batch as it would be without a limit.
        batch: The batch to grow: that of `from_config`, or one of your own.
        max_global_batch_size: The limit of growth, at least the batch at the start unless this follows the
            number of ranks.
        decay_at_limit: If True, the rate is divided by the part of the factor that the limit does not allow
            (Smith et al. 2018, arXiv:1711.00489: first the batch grows, then the rate decays).
    """

    def __init__(
        self, policy: Policy, batch: GlobalBatch, *, max_global_batch_size: int, decay_at_limit: bool = False
    ) -> None:
        smallest = batch.split.global_batch_size if batch.keep == "global" else 1
        self._limit = bounds.count("max_global_batch_size", max_global_batch_size, smallest)
        self.policy, self.batch, self._decay_at_limit = policy, batch, decay_at_limit
        self._last: Last = None
        # The rate has been divided by this instead of growing the batch.
        self._refused = 1.0

    def update(self, measure: Any = None) -> bool:
        """Apply the policy, between two optimiser steps; return True if the batch has grown.

        Args:
            measure: The policy's input: a `NoiseEstimate`, an eigenvalue, or None. The same on all ranks.
        """
        size, epoch = self.batch.split.global_batch_size, float(self.batch.scheduler.epoch)
        wanted = self.policy(epoch, round(size * self._refused), measure, self._last)
        if bounds.count("growth", wanted) > 1 or self._last is None:
            self._last = (epoch, float(measure) if isinstance(measure, Real) else None)
        # More workers may have brought the batch beyond the limit; it is not shrunk in that case.
        factor = max(1, min(wanted, self._limit // size))
        if factor > 1:
            self.batch.resize(size * factor)
        if self._decay_at_limit and factor < wanted:
            self.batch.scheduler.reduce(factor / wanted)
            self._refused *= wanted / factor
        return factor > 1

    def state_dict(self) -> dict[str, Any]:
        """Return the batch, the last growth and what the limit has refused as plain numbers."""
        return {"batch": self.batch.state_dict(), "last": self._last, "refused": self._refused}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`, in a world of any size; load the scheduler's state first."""
        self._last, self._refused = state_dict["last"], state_dict["refused"]
        self.batch.load_state_dict(state_dict["batch"])


@dataclass(frozen=True)
class FixedGrowth:
    """Multiply the batch by `factor` at each of `milestones`, epochs that increase.

    AdaBatch (Devarakonda et al. 2017, arXiv:1712.02029) doubles the batch at fixed intervals. Smith et al.
    (2018, arXiv:1711.00489) multiply the batch by q where a schedule would divide the rate by q, and keep the
    rate (``rule="none"`` of `LargeBatchLR`): in our measurements this saved two thirds of the steps.

    >>> policy = FixedGrowth([10, 20], factor=5)
    >>> [policy(epoch, 128, None, (9.5, None)) for epoch in (9.9, 10.0, 30.0)]
    [1, 5, 25]
    """

    milestones: Sequence[float]
    factor: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", bounds.increasing("milestones", self.milestones))
        bounds.count("factor", self.factor, 2)

    def __call__(self, epoch: float, global_batch_size: int, measure: Any, last: Last) -> int:
        before = bisect_right(self.milestones, last[0]) if last else 0
        return int(self.factor ** max(bisect_right(self.milestones, epoch) - before, 0))


@dataclass(frozen=True)
class NoiseScaleGrowth:
    r"""Multiply the batch by `factor` while it stays below the noise scale (McCandlish et al. 2018).

    .. math:: B \leftarrow f B \quad \text{while } c\,\mathrm{low}(B_{simple}) \ge f B

    where low is the lower end of the confidence interval, and c is `fraction`: the wanted batch as a multiple
    of the noise scale. At 1, training needs about twice as many samples as with the smallest batch, and about
    twice as many steps as with the largest. In our measurements this saved no steps.

    >>> estimate = NoiseEstimate(1000.0, low=600.0, high=2000.0, squared_gradient=1.0, trace=1000.0)
    >>> [NoiseScaleGrowth()(3, batch, estimate, None) for batch in (64, 256, 512)]
    [8, 2, 1]
    """

    factor: int = 2
    fraction: float = 1.0

    def __post_init__(self) -> None:
        bounds.count("factor", self.factor, 2)
        bounds.number("fraction", self.fraction, more_than=0)

    def __call__(
        self, epoch: float, global_batch_size: int, measure: NoiseEstimate | None, last: Last
    ) -> int:
        total = 1
        low = (
            0.0 if measure is None else bounds.number("the noise scale's lower end", measure.low, at_least=0)
        )
        while self.fraction * low >= global_batch_size * total * self.factor:
            total *= self.factor
        return total


@dataclass(frozen=True)
class CurvatureGrowth:
    """Multiply the batch by `factor` when the loss gets flatter (ABSA, Yao et al. 2018, arXiv:1810.01021).

    The batch grows when the Hessian's `largest_eigenvalue` has fallen below 1 / `decay` of what it was at the
    last growth, or `duration` epochs after that. In our measurements half of the trainings diverged.

    >>> policy = CurvatureGrowth(decay=2.0, duration=10)
    >>> [policy(epoch, 64, value, (1, 8.0)) for epoch, value in [(2, 5.0), (3, -3.9), (11, 7.0)]]
    [1, 2, 2]
    """

    factor: int = 2
    decay: float = 2.0
    duration: float = 10.0

    def __post_init__(self) -> None:
        bounds.count("factor", self.factor, 2)
        bounds.number("decay", self.decay, more_than=1)
        bounds.number("duration", self.duration, more_than=0)

    def __call__(self, epoch: float, global_batch_size: int, measure: float, last: Last) -> int:
        eigenvalue = abs(bounds.number("the largest eigenvalue", measure))
        if last is None or last[1] is None:
            return 1
        grows = eigenvalue < abs(last[1]) / self.decay or epoch >= last[0] + self.duration
        return self.factor if grows else 1


def largest_eigenvalue(
    loss: Callable[[], torch.Tensor],
    parameters: Iterable[torch.Tensor],
    *,
    max_products: int = 20,
    tolerance: float = 0.01,
) -> float:
    r"""Return the eigenvalue of the loss's Hessian that is largest in magnitude, with its sign.

    .. math:: v \leftarrow Hv / \|Hv\|, \quad \lambda = v^T H v

    where :math:`Hv = \nabla (v^T \nabla L)` is computed exactly, without forming H (Yao et al. 2018,
    arXiv:1802.08241, algorithm 1). With several ranks, L is the mean of their losses. Every rank must call
    this function, with a sub-sample of its own.

    Args:
        loss: Computes the mean loss of a sub-sample; it is called once.
        parameters: The parameters of the Hessian; those that require no gradient are left out.
        max_products: The most Hessian-vector products; each costs about as much as two gradients.
        tolerance: Relative change of the eigenvalue at which to stop.

    >>> weights = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    >>> loss = lambda: (torch.tensor([1.0, 2.0, 5.0]) * weights**2).sum() / 2
    >>> round(largest_eigenvalue(loss, [weights]), 1)
    5.0
    """
    bounds.count("max_products", max_products)
    bounds.number("tolerance", tolerance, more_than=0)
    chosen = [parameter for parameter in parameters if parameter.requires_grad]
    if not chosen:
        raise bounds.HyperparameterError("parameters must include one that requires a gradient, got none")
    gradients = torch.autograd.grad(loss(), chosen, create_graph=True, materialize_grads=True)
    flat = torch.cat([each.reshape(-1) for each in gradients])
    # The same first vector on all ranks.
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(len(flat), generator=generator, dtype=torch.float64).to(flat)
    vector /= vector.norm()
    eigenvalue = 0.0
    for _ in range(max_products):
        product = torch.zeros_like(vector)
        if flat.requires_grad:  # otherwise the loss is linear
            parts = torch.autograd.grad(flat, chosen, vector, retain_graph=True, materialize_grads=True)
            product = torch.cat([each.reshape(-1) for each in parts])
        product = mean_over_ranks(product)
        before, eigenvalue = eigenvalue, float(vector.double() @ product.double())
        bounds.number("the largest eigenvalue", eigenvalue)
        length = product.norm()
        if not length or abs(eigenvalue - before) <= tolerance * abs(eigenvalue):
            break
        vector = product / length
    return eigenvalue
