"""The gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162): a batch beyond it gains little."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from scipy.special import stdtrit

from horovod_tune import bounds
from horovod_tune.large_batch.layer_wise import norm


class NoiseEstimate(NamedTuple):
    """The noise scale in samples, `trace` / `squared_gradient`, with its confidence interval."""

    noise_scale: float
    low: float
    high: float
    squared_gradient: float
    trace: float


class NoiseScale:
    r"""Estimates :math:`B_{simple} = \mathrm{tr}\,\Sigma / |G|^2` from moving averages of both.

    G is the true gradient, and Σ the covariance of one sample's gradient; g_i is the gradient of small batch
    i, of b_i samples, and g_B that of the whole batch, of B samples.

    The gradient of a batch of b samples has :math:`E|g_b|^2 = |G|^2 + \mathrm{tr}\,\Sigma / b`; two batch
    sizes give unbiased estimates of both (appendix A.1, where all small batches have one size):

    .. math::
        \mathrm{tr}\,\Sigma \approx \frac{\overline{|g_i|^2} - |g_B|^2}{\overline{1/b_i} - 1/B}, \quad
        |G|^2 \approx |g_B|^2 - \mathrm{tr}\,\Sigma / B

    The ratio of the averages is taken, not the average of the ratios, which is biased. The interval is
    Fieller's for a ratio of means, with the averages' own (co)variances and Student's t for their effective
    number of steps; it is open upwards if the gradient cannot be distinguished from 0.

    A `GradientAccumulator` updates it from gradients that are computed anyway: those of each rank's first
    pass, and that of the whole batch. Reading them two more times costs time; `every` makes that rarer.

    Args:
        every: Optimiser steps from one measurement to the next. 1 gives the narrowest confidence interval.
        decay: Decay of the moving averages per update: they reach back over about 1 / (1 - decay) updates.
        confidence: Confidence level of the interval.

    >>> noise = NoiseScale(decay=0.5)
    >>> noise.estimate() is None
    True
    >>> for _ in range(3):
    ...     noise.update(5.0, 1 / 4, 2.0, 16)  # a variance of 16, a gradient of norm 1
    >>> noise.estimate().noise_scale
    16.0
    """

    def __init__(self, *, every: int = 8, decay: float = 0.99, confidence: float = 0.95) -> None:
        self.every = bounds.count("every", every)
        self.decay = bounds.number("decay", decay, more_than=0, less_than=1)
        self.confidence = bounds.number("confidence", confidence, at_least=0, less_than=1)
        # Sums of the weights decay ** age, of their squares, and of weighted g = |G|², s = tr Σ, gg, gs, ss.
        self._sums = [0.0] * 7

    def update(
        self, mean_small_square: float, mean_inverse_small: float, big_square: float, big_batch_size: float
    ) -> None:
        """Update the averages with one optimiser step.

        Args:
            mean_small_square: Mean of the squared norms of the small batches' gradients.
            mean_inverse_small: Mean of 1 / size of the small batches.
            big_square: Squared norm of the gradient of the whole batch.
            big_batch_size: Samples in the whole batch.
        """
        bounds.number("mean_small_square", mean_small_square, at_least=0)
        bounds.number("big_square", big_square, at_least=0)
        bounds.number("big_batch_size", big_batch_size, more_than=0)
        bounds.number("mean_inverse_small", mean_inverse_small, more_than=1 / big_batch_size)
        trace = (mean_small_square - big_square) / (mean_inverse_small - 1 / big_batch_size)
        square = big_square - trace / big_batch_size
        keep = [self.decay, self.decay**2] + [self.decay] * 5
        new = [1.0, 1.0, square, trace, square * square, square * trace, trace * trace]
        self._sums = [factor * old + each for factor, old, each in zip(keep, self._sums, new, strict=True)]

    def estimate(self) -> NoiseEstimate | None:
        """Return the current estimate; None before the second update."""
        total, squares, *sums = self._sums
        if total <= 1:
            return None
        g, s, gg, gs, ss = (each / total for each in sums)
        steps = total**2 / squares  # effective
        spread = 1 / (steps - 1)  # of a mean, with Bessel's correction
        variances = (gg - g * g) * spread, (gs - g * s) * spread, (ss - s * s) * spread
        quantile = float(stdtrit(max(steps - 1, 1.0), 0.5 + self.confidence / 2))
        low, high = _fieller(s, g, variances, quantile)
        return NoiseEstimate(s / g if g > 0 else math.inf, low, high, g, s)

    def state_dict(self) -> dict[str, Any]:
        """Return the moving averages as plain numbers."""
        return {"sums": list(self._sums)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._sums = [float(each) for each in state_dict["sums"]]


def _fieller(
    top: float, bottom: float, variances: tuple[float, float, float], quantile: float
) -> tuple[float, float]:
    """Return the interval of all R >= 0 with (top - R bottom)² <= quantile² Var(top - R bottom)."""
    of_bottom, of_both, of_top = (quantile**2 * max(each, 0.0) for each in variances)
    of_both = quantile**2 * variances[1]
    a, b, c = bottom**2 - of_bottom, top * bottom - of_both, top**2 - of_top
    root = math.sqrt(max(b * b - a * c, 0.0))
    if bottom <= 0 or a <= 0:
        return (max((b - root) / a, 0.0) if a < 0 < c and bottom > 0 else 0.0), math.inf
    return max((b - root) / a, 0.0), max((b + root) / a, 0.0)


@contextmanager
def gradient_norms(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the list that the norms of the gradients of the backward pass in the context are added to.

    Hooks receive a pass's own gradient before it is added to the others, and before Horovod averages it.
    """
    sizes: list[torch.Tensor] = []
    hooks = [
        each.register_hook(lambda gradient: sizes.append(norm(gradient.detach())))
        for each in parameters
        if each.requires_grad
    ]
    try:
        yield sizes
    finally:
        for hook in hooks:
            hook.remove()
