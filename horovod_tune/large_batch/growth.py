"""Batches that grow during training: at fixed epochs, by the gradient noise scale, or by curvature."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from horovod_tune.large_batch import bounds
from horovod_tune.large_batch.batches import GlobalBatch
from horovod_tune.large_batch.noise_scale import NoiseEstimate
from horovod_tune.large_batch.world import horovod, world_size


class BatchGrowth:
    """Grows the global batch by a policy: each rank makes more passes, and the rate follows the scaling rule.

    Args:
        policy: `FixedGrowth`, `NoiseScaleGrowth`, `CurvatureGrowth` or an object of your own. Its
            ``growth(epoch, global_batch_size, measure)`` returns the factor to multiply the batch by, the
            same on all ranks. Its attributes whose names begin with ``_`` are saved as its state. With
            `decay_at_limit` it gets the batch as it would be without a limit.
        batch: The batch to grow: that of `from_config`, or one of your own.
        max_global_batch_size: The limit of growth.
        decay_at_limit: If True, the rate is divided by the part of the factor that the limit does not allow
            (Smith et al. 2018, arXiv:1711.00489: first the batch grows, then the rate decays).

    Raises:
        HyperparameterError: The limit is below the batch at the start, and this batch does not depend on the
            number of ranks.
    """

    def __init__(
        self,
        policy: Any,
        batch: GlobalBatch,
        *,
        max_global_batch_size: int,
        decay_at_limit: bool = False,
    ) -> None:
        smallest = batch.split.global_batch_size if batch.keep == "global" else 1
        bounds.count("max_global_batch_size", max_global_batch_size, smallest)
        self.policy = policy
        self.batch = batch
        self._limit = max_global_batch_size
        self._decay_at_limit = decay_at_limit
        # The rate has been divided by this instead of growing the batch.
        self._refused = 1.0

    def update(self, measure: Any = None) -> bool:
        """Apply the policy, between two optimiser steps; return True if the batch has grown.

        Args:
            measure: The policy's input: a `NoiseEstimate`, an eigenvalue, or None. The same on all ranks.
        """
        size = self.batch.split.global_batch_size
        wanted = self.policy.growth(float(self.batch.scheduler.epoch), round(size * self._refused), measure)
        bounds.count("growth", wanted)
        # More workers may have brought the batch beyond the limit; it is not shrunk in that case.
        factor = max(1, min(wanted, self._limit // size))
        if factor > 1:
            self.batch.resize(size * factor)
        if self._decay_at_limit and factor < wanted:
            self.batch.scheduler.reduce(factor / wanted)
            self._refused *= wanted / factor
        return factor > 1

    def state_dict(self) -> dict[str, Any]:
        """Return batch, policy and what the limit has refused as plain numbers."""
        policy = {name: value for name, value in vars(self.policy).items() if name.startswith("_")}
        return {"batch": self.batch.state_dict(), "policy": policy, "refused": self._refused}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`, in a world of any size; load the scheduler's state first."""
        vars(self.policy).update(state_dict["policy"])
        self._refused = state_dict.get("refused", 1.0)  # not in states of earlier versions
        self.batch.load_state_dict(state_dict["batch"])


class FixedGrowth:
    r"""Multiply the batch by `factor` at each milestone.

    AdaBatch (Devarakonda et al. 2017, arXiv:1712.02029) doubles the batch at fixed intervals. Smith et al.
    (2018, arXiv:1711.00489) multiply the batch by q where a schedule would divide the rate by q, and keep the
    rate (``rule="none"`` of `LargeBatchLR`).

    Args:
        milestones: Epochs, increasing.
        factor: The growth factor, an integer of at least 2.

    >>> policy = FixedGrowth([10, 20], factor=5)
    >>> [policy.growth(epoch, 128, None) for epoch in (9.5, 10.0, 10.5, 30.0)]
    [1, 5, 1, 5]
    """

    def __init__(self, milestones: Sequence[float], *, factor: int = 2) -> None:
        self.milestones = bounds.increasing("milestones", milestones)
        self.factor = bounds.count("factor", factor, 2)
        self._passed = 0

    def growth(self, epoch: float, global_batch_size: int, measure: Any = None) -> int:
        """Return `factor` to the power of the number of milestones passed since the last call."""
        passed = max(bisect_right(self.milestones, epoch), self._passed)
        factor = self.factor ** (passed - self._passed)
        self._passed = passed
        return factor


class NoiseScaleGrowth:
    r"""Multiply the batch by `factor` while it stays below the noise scale (McCandlish et al. 2018).

    .. math:: B \leftarrow f B \quad \text{while } c\,\mathrm{low}(B_{simple}) \ge f B

    where low is the lower end of the confidence interval. In our measurements this saved no steps.

    Args:
        factor: The growth factor, an integer of at least 2.
        fraction: c, the wanted batch size as a multiple of the noise scale. At 1, training needs about twice
            as many samples as with the smallest batch, and twice as many steps as with the largest.

    >>> estimate = NoiseEstimate(1000.0, low=600.0, high=2000.0, squared_gradient=1.0, trace=1000.0)
    >>> [NoiseScaleGrowth().growth(3, batch, estimate) for batch in (64, 256, 512)]
    [8, 2, 1]
    """

    def __init__(self, *, factor: int = 2, fraction: float = 1.0) -> None:
        self.factor = bounds.count("factor", factor, 2)
        self.fraction = bounds.number("fraction", fraction, more_than=0)

    def growth(self, epoch: float, global_batch_size: int, measure: NoiseEstimate | None) -> int:
        """Return the factor for the estimate `measure`; 1 if there is none yet."""
        if measure is None:
            return 1
        low = bounds.number("the noise scale's lower end", measure.low, at_least=0)
        total = 1
        while self.fraction * low >= global_batch_size * total * self.factor:
            total *= self.factor
        return total


class CurvatureGrowth:
    r"""Multiply the batch by `factor` when the loss gets flatter (ABSA, Yao et al. 2018, arXiv:1810.01021).

    The batch grows when the Hessian's `largest_eigenvalue` has fallen below 1 / `decay` of what it was at the
    last growth, or `duration` epochs after that. In our measurements this mostly made training diverge.

    Args:
        factor: The growth factor, an integer of at least 2.
        decay: The factor by which the eigenvalue must fall, more than 1.
        duration: Epochs after which the batch grows in any case.

    >>> policy = CurvatureGrowth(decay=2.0, duration=10)
    >>> [policy.growth(epoch, 64, value) for epoch, value in [(1, 8.0), (2, 5.0), (3, 3.9), (13, 3.0)]]
    [1, 1, 2, 2]
    """

    def __init__(self, *, factor: int = 2, decay: float = 2.0, duration: float = 10.0) -> None:
        self.factor = bounds.count("factor", factor, 2)
        self.decay = bounds.number("decay", decay, more_than=1)
        self.duration = bounds.number("duration", duration, more_than=0)
        self._reference: float | None = None
        self._since = 0.0

    def growth(self, epoch: float, global_batch_size: int, measure: float) -> int:
        """Return the factor for the largest eigenvalue `measure`, whose sign is ignored."""
        eigenvalue = abs(bounds.number("the largest eigenvalue", measure))
        if self._reference is None:
            self._reference, self._since = eigenvalue, epoch
            return 1
        if eigenvalue >= self._reference / self.decay and epoch < self._since + self.duration:
            return 1
        self._reference, self._since = eigenvalue, epoch
        return self.factor


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

    Raises:
        HyperparameterError: A number is out of bounds, no parameter requires a gradient, or the curvature is
            not finite.

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
        product = _average(product)
        before, eigenvalue = eigenvalue, float(vector.double() @ product.double())
        bounds.number("the largest eigenvalue", eigenvalue)
        length = product.norm()
        if not length or abs(eigenvalue - before) <= tolerance * abs(eigenvalue):
            break
        vector = product / length
    return eigenvalue


def _average(product: torch.Tensor) -> torch.Tensor:
    size = world_size()
    if size == 1:
        return product
    if (hvd := horovod()) is None:
        torch.distributed.all_reduce(product)
        return product / size
    return hvd.allreduce(product, name="horovod_tune.large_batch.curvature", op=hvd.Average)
