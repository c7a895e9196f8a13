"""Draws of a Gaussian process's hyperparameters from their posterior, by elliptical slice sampling.

A few results leave open which parameters matter; the single most probable hyperparameters would be
overconfident (Snoek et al., 2012, integrate expected improvement over them).
"""

from __future__ import annotations

import math

import numpy as np

from horovod_tune.search.gp.fit import MarginalLikelihood
from horovod_tune.search.gp.kernels import FloatArray

#: Steps of the chain from one draw to the next.
_STEPS = 3
#: A step that has found nothing after so many tries keeps its position: the likelihood is too narrow there.
_TRIES = 30


def draws(
    likelihood: MarginalLikelihood, start: FloatArray, number: int, generator: np.random.Generator
) -> list[FloatArray]:
    """Return draws of `theta` from a chain that begins at `start` (Murray, Adams & MacKay, 2010)."""
    found, theta, height = [], start, likelihood.log_likelihood(start)
    for _ in range(number):
        for _ in range(_STEPS):
            theta, height = _step(likelihood, theta, height, generator)
        found.append(theta)
    return found


def _step(
    likelihood: MarginalLikelihood, theta: FloatArray, height: float, generator: np.random.Generator
) -> tuple[FloatArray, float]:
    """Return the next state of the chain and its log likelihood: one on an ellipse through `theta`."""
    means = likelihood.means
    across = likelihood.stds * generator.standard_normal(len(theta))
    least = height + math.log(max(generator.random(), 1e-300))
    angle = generator.uniform(0.0, 2.0 * math.pi)
    low, high = angle - 2.0 * math.pi, angle
    for _ in range(_TRIES):
        there = means + (theta - means) * math.cos(angle) + across * math.sin(angle)
        reached = likelihood.log_likelihood(there)
        if reached > least:
            return there, reached
        low, high = (angle, high) if angle < 0 else (low, angle)
        angle = generator.uniform(low, high)
    return theta, height
