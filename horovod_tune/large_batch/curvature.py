"""The Hessian's largest eigenvalue by power iteration, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from horovod_tune.large_batch import bounds
from horovod_tune.large_batch.world import horovod, world_size


class Curvature(NamedTuple):
    """The eigenvalue of largest magnitude, with its sign, and the cost of finding it.

    Attributes:
        eigenvalue: In units of the loss by squared weights.
        products: Products of the Hessian with a vector; each costs about two gradients.
        seconds: Wall clock.
        converged: Whether the last product changed it by no more than the tolerance.
    """

    eigenvalue: float
    products: int
    seconds: float
    converged: bool


def largest_eigenvalue(
    loss: Callable[[], torch.Tensor],
    parameters: Iterable[torch.Tensor],
    *,
    max_products: int = 20,
    tolerance: float = 0.01,
    seed: int = 0,
) -> Curvature:
    r"""Return the eigenvalue of largest magnitude of the loss's Hessian.

    .. math:: v \leftarrow Hv / \|Hv\|, \quad \lambda = v^T H v

    with :math:`Hv = \nabla (v^T \nabla L)`, exactly and without the matrix (Yao et al. 2018,
    arXiv:1802.08241, algorithm 1). In a world of several ranks it is that of the mean loss: every rank
    calls it, with a sub-sample of its own.

    Args:
        loss: Computes the mean loss of a sub-sample; it is called once.
        parameters: With respect to which; those without gradients are left out.
        max_products: The most products of the Hessian with a vector.
        tolerance: Relative change of the eigenvalue at which to stop.
        seed: Of the first vector, the same on all ranks.

    Raises:
        HyperparameterError: A number is out of bounds, no parameter requires a gradient, or the curvature is
            not finite.

    >>> weights = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    >>> found = largest_eigenvalue(lambda: (torch.tensor([1.0, 2.0, 5.0]) * weights**2).sum() / 2, [weights])
    >>> round(found.eigenvalue, 1), found.converged
    (5.0, True)
    """
    bounds.count("max_products", max_products)
    bounds.more_than("tolerance", tolerance, 0)
    started = time.perf_counter()
    chosen = [parameter for parameter in parameters if parameter.requires_grad]
    if not chosen:
        raise bounds.HyperparameterError("parameters must have one that requires a gradient, got none")
    generator = torch.Generator().manual_seed(seed)
    vector = [torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each) for each in chosen]
    _normalise(vector)
    gradients = torch.autograd.grad(loss(), chosen, create_graph=True, allow_unused=True)
    eigenvalue, products, converged = 0.0, 0, False
    while products < max_products and not converged:
        product = _average(_hessian_product(gradients, chosen, vector))
        products += 1
        before, eigenvalue = eigenvalue, _dot(vector, product)
        bounds.number("the largest eigenvalue", eigenvalue)
        converged = products > 1 and abs(eigenvalue - before) <= tolerance * abs(eigenvalue)
        vector = product
        if _normalise(vector) == 0:  # A linear loss.
            converged = True
    return Curvature(eigenvalue, products, time.perf_counter() - started, converged)


def _hessian_product(
    gradients: tuple[torch.Tensor | None, ...], parameters: list[torch.Tensor], vector: list[torch.Tensor]
) -> list[torch.Tensor]:
    pairs = [
        (gradient, each)
        for gradient, each in zip(gradients, vector, strict=True)
        if gradient is not None and gradient.requires_grad
    ]
    if not pairs:
        return [torch.zeros_like(parameter) for parameter in parameters]
    products = torch.autograd.grad(
        [gradient for gradient, _ in pairs],
        parameters,
        grad_outputs=[each for _, each in pairs],
        retain_graph=True,
        allow_unused=True,
    )
    return [
        torch.zeros_like(parameter) if product is None else product.detach().clone()
        for product, parameter in zip(products, parameters, strict=True)
    ]


def _average(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    hvd = horovod()
    if hvd is None or world_size() == 1:
        return tensors
    averaged = hvd.grouped_allreduce(tensors, name="horovod_tune.large_batch.curvature", op=hvd.Average)
    return list(averaged)


def _dot(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(one, other, strict=True))


def _normalise(vector: list[torch.Tensor]) -> float:
    """Make the vector's norm 1, and return what it was."""
    norm = _dot(vector, vector) ** 0.5
    if norm:
        for part in vector:
            part.div_(norm)
    return norm
