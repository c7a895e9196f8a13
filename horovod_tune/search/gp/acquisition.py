"""Acquisition functions in bayesian-optimization's interface: `base_acq(mean, std)`, larger is better."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
from bayes_opt.acquisition import AcquisitionFunction, ExpectedImprovement
from numpy.typing import NDArray
from scipy.special import erfcx, ndtr

from horovod_tune.large_batch import bounds

FloatArray = NDArray[np.floating[Any]]

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_SQRT_HALF_PI = math.sqrt(math.pi / 2)


class LogExpectedImprovement(ExpectedImprovement):
    r"""The logarithm of the expected improvement, computed without underflow (Ament et al., 2023, eq. 8).

    .. math:: \log EI = \log\sigma + \log\big(\phi(z) + z\Phi(z)\big), \quad z = (\mu - y_{max} - \xi)/\sigma

    Plain expected improvement is 0 in floating point over most of the space once a few good points are
    known, and cannot be climbed there; its logarithm can. This is a drop-in replacement for
    `bayes_opt.acquisition.ExpectedImprovement`.

    >>> acquisition = LogExpectedImprovement()
    >>> acquisition.y_max = 1.0
    >>> round(float(acquisition.base_acq(np.array([1.0]), np.array([1.0]))[0]), 4)  # log(1/sqrt(2 pi))
    -0.9189
    """

    def __init__(self, xi: float = 0.0) -> None:
        super().__init__(xi=bounds.number("xi", xi, at_least=0))

    def base_acq(self, mean: FloatArray, std: FloatArray) -> FloatArray:
        """Return log EI, of the shape of `mean` and `std`; raise `ValueError` if `y_max` is not set."""
        if self.y_max is None:
            raise ValueError("y_max must be set before base_acq() is called outside of suggest()")
        return np.log(std) + log_h((mean - self.y_max - self.xi) / std)


def log_h(z: FloatArray) -> FloatArray:
    r"""Return :math:`\log(\phi(z) + z\Phi(z))` to full relative precision for every finite z.

    >>> log_h(np.array([0.0, -1e4])).round(2).tolist()
    [-0.92, -50000019.34]
    """
    z = np.asarray(z, dtype=float)
    result = np.empty_like(z)
    near = z > -1.0
    inner = z[near]
    result[near] = np.log(np.exp(-0.5 * inner**2 - _LOG_SQRT_2PI) + inner * ndtr(inner))
    far = z[~near]
    # phi(z) + z Phi(z) = phi(z) (1 - |z| sqrt(pi/2) erfcx(|z|/sqrt 2)); the bracket cancels for large |z|,
    # where its expansion 1/z^2 - 3/z^4 takes over.
    bracket = 1.0 - np.abs(far) * _SQRT_HALF_PI * erfcx(np.abs(far) / math.sqrt(2))
    expansion = (1.0 - 3.0 / far**2) / far**2
    result[~near] = -0.5 * far**2 - _LOG_SQRT_2PI + np.log(np.where(far < -1e3, expansion, bracket))
    return result


def is_scale_free(acquisition: AcquisitionFunction) -> bool:
    """Return True if the acquisition has no number on the objective's scale, so results may be warped."""
    return type(acquisition) is LogExpectedImprovement and not acquisition.xi


def decayed(acquisition: AcquisitionFunction, suggestions: int) -> AcquisitionFunction:
    """Return a copy of `acquisition` whose exploration has decayed over this many suggestions."""
    own = copy.deepcopy(acquisition)
    if getattr(own, "exploration_decay", None) is not None:
        for own.i in range(1, suggestions + 1):
            own.decay_exploration()  # type: ignore[attr-defined]
    return own
