"""LARS and LAMB in float64 NumPy, written from the papers' algorithms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Arrays = list[np.ndarray]


def lars(
    weights: Sequence[np.ndarray],
    gradients: Sequence[Sequence[np.ndarray]],
    rates: Sequence[float],
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust: float = 0.001,
    eps: float = 0.0,
    nesterov: bool = False,
    layer_wise: bool = True,
) -> Arrays:
    """Return the weights after a step for each entry of `gradients`, with the rate of that step."""
    weights = [weight.copy() for weight in weights]
    buffers = [np.zeros_like(weight) for weight in weights]
    for grads, rate in zip(gradients, rates, strict=True):
        for layer, gradient in enumerate(grads):
            weight = weights[layer]
            ratio = 1.0
            if layer_wise:
                of_weight, of_gradient = np.sqrt(np.sum(weight**2)), np.sqrt(np.sum(gradient**2))
                bottom = of_gradient + weight_decay * of_weight + eps
                if of_weight > 0 and bottom > 0:
                    ratio = trust * of_weight / bottom
            step = rate * ratio * (gradient + weight_decay * weight)
            buffers[layer] = momentum * buffers[layer] + step
            move = momentum * buffers[layer] + step if nesterov else buffers[layer]
            weights[layer] = weight - move
    return weights


def lamb(
    weights: Sequence[np.ndarray],
    gradients: Sequence[Sequence[np.ndarray]],
    rates: Sequence[float],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    layer_wise: bool = True,
) -> Arrays:
    """Return the weights after a step for each entry of `gradients`, with the rate of that step."""
    weights = [weight.copy() for weight in weights]
    means = [np.zeros_like(weight) for weight in weights]
    squares = [np.zeros_like(weight) for weight in weights]
    for number, (grads, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        for layer, gradient in enumerate(grads):
            weight = weights[layer]
            means[layer] = betas[0] * means[layer] + (1 - betas[0]) * gradient
            squares[layer] = betas[1] * squares[layer] + (1 - betas[1]) * gradient**2
            mean, square = means[layer] / (1 - betas[0] ** number), squares[layer] / (1 - betas[1] ** number)
            update = mean / (np.sqrt(square) + eps) + weight_decay * weight
            ratio = 1.0
            if layer_wise:
                of_weight, of_update = np.sqrt(np.sum(weight**2)), np.sqrt(np.sum(update**2))
                if of_weight > 0 and of_update > 0:
                    ratio = of_weight / of_update
            weights[layer] = weight - rate * ratio * update
    return weights
