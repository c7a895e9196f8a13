"""Acquisition functions in bayesian-optimization's interface: `base_acq(mean, std)`, larger is better."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
from bayes_opt.acquisition import (
    AcquisitionFunction,
    ConstantLiar,
    ExpectedImprovement,
    GPHedge,
    ProbabilityOfImprovement,
    UpperConfidenceBound,
)
from numpy.typing import NDArray
from scipy.special import erfcx, log_ndtr, ndtr

FloatArray = NDArray[np.floating[Any]]

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_SQRT_HALF_PI = math.sqrt(math.pi / 2)


class LogExpectedImprovement(ExpectedImprovement):
    r"""The logarithm of the expected improvement, computed without underflow (Ament et al., 2023, eq. 8).

    .. math:: \log EI = \log\sigma + \log\big(\phi(z) + z\Phi(z)\big), \quad z = (\mu - y_{max} - \xi)/\sigma

    Plain expected improvement is 0 in floating point over most of the space once a few good points are
    known, and cannot be climbed there; its logarithm can. A drop-in for
    `bayes_opt.acquisition.ExpectedImprovement`.

    >>> acquisition = LogExpectedImprovement()
    >>> acquisition.y_max = 1.0
    >>> round(float(acquisition.base_acq(np.array([1.0]), np.array([1.0]))[0]), 4)  # log(1/sqrt(2 pi))
    -0.9189
    """

    def __init__(self, xi: float = 0.0) -> None:
        super().__init__(xi=xi)

    def base_acq(self, mean: FloatArray, std: FloatArray) -> FloatArray:
        """Return the logarithm of the expected improvement, of the shape of `mean` and `std`."""
        if self.y_max is None:
            raise ValueError("y_max must be set before base_acq() is called outside of suggest()")
        return np.log(std) + log_h((mean - self.y_max - self.xi) / std)

    def slopes(self, mean: FloatArray, std: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return `base_acq` and its derivatives by the mean and by the standard deviation."""
        if self.y_max is None:
            raise ValueError("y_max must be set before slopes() is called")
        z = (mean - self.y_max - self.xi) / std
        log_part = log_h(z)
        by_mean = np.exp(log_ndtr(z) - log_part) / std
        by_std = np.exp(-0.5 * z**2 - _LOG_SQRT_2PI - log_part) / std
        return np.log(std) + log_part, by_mean, by_std


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


def log_ndtr_slope(z: FloatArray) -> FloatArray:
    """Return the slope of the logarithm of the normal distribution function; near -z where z is far below 0.

    >>> log_ndtr_slope(np.array([0.0, -1e6])).round(2).tolist()
    [0.8, 1000000.0]
    """
    return 1.0 / (_SQRT_HALF_PI * erfcx(-np.asarray(z) / math.sqrt(2)))


def log_probability_below(threshold: float, mean: FloatArray, std: FloatArray) -> FloatArray:
    """Return the logarithm of the normal probability that a value is below `threshold`."""
    return log_ndtr((threshold - mean) / std)


def is_scale_free(acquisition: AcquisitionFunction) -> bool:
    """Return True if only the order of the results matters to it: no number is on the objective's scale."""
    return type(acquisition) is LogExpectedImprovement and not acquisition.xi


def acquisition_of(
    acquisition_function: AcquisitionFunction | None, utility_kwargs: dict | None
) -> AcquisitionFunction:
    """Return the acquisition function to use.

    `utility_kwargs` is the argument of Ray's BayesOptSearch: `kind` (ucb, ei or poi), `kappa`, `xi`.

    Raises:
        ValueError: For both at once, or an unknown kind.
        TypeError: For an object that cannot be used here.
    """
    if utility_kwargs is not None:
        if acquisition_function is not None:
            raise ValueError("give acquisition_function or utility_kwargs, not both")
        return _from_utility(dict(utility_kwargs))
    if acquisition_function is None:
        return LogExpectedImprovement()
    if isinstance(acquisition_function, ConstantLiar):
        raise TypeError(
            "acquisition_function cannot be a ConstantLiar: trials in flight are drawn from the model. "
            "Pass only its base_acquisition"
        )
    if isinstance(acquisition_function, GPHedge):
        raise TypeError("acquisition_function cannot be a GPHedge; give one of its functions")
    if not isinstance(acquisition_function, AcquisitionFunction):
        raise TypeError(
            "acquisition_function must be one of bayes_opt.acquisition's UpperConfidenceBound, "
            "ExpectedImprovement, ProbabilityOfImprovement, or an AcquisitionFunction with "
            f"base_acq(mean, std); got {acquisition_function!r}"
        )
    return acquisition_function


def decayed(acquisition: AcquisitionFunction, suggestions: int) -> AcquisitionFunction:
    """Return a copy of `acquisition` whose exploration has decayed as it does over so many suggestions."""
    own = copy.deepcopy(acquisition)
    if getattr(own, "exploration_decay", None) is not None:
        for own.i in range(1, suggestions + 1):
            own.decay_exploration()  # type: ignore[attr-defined]
    return own


def _from_utility(kwargs: dict) -> AcquisitionFunction:
    kind = kwargs.pop("kind", "ucb")
    kappa, xi = kwargs.pop("kappa", 2.576), kwargs.pop("xi", 0.0)
    decay = {
        "exploration_decay": kwargs.pop("kappa_decay", None),
        "exploration_decay_delay": kwargs.pop("kappa_decay_delay", None),
    }
    if kwargs:
        raise ValueError(
            "utility_kwargs knows kind, kappa, xi, kappa_decay and kappa_decay_delay; "
            f"got also {sorted(kwargs)}"
        )
    if kind == "ucb":
        return UpperConfidenceBound(kappa=kappa, **decay)
    if kind == "ei":
        return ExpectedImprovement(xi=xi, **decay)
    if kind == "poi":
        return ProbabilityOfImprovement(xi=xi, **decay)
    raise ValueError(f"utility_kwargs['kind'] must be 'ucb', 'ei' or 'poi', got {kind!r}")
