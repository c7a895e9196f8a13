"""How much a point is worth: bayesian-optimization's acquisition functions, averaged over the posterior.

Targets are maximised here, whatever the search's mode.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np
from bayes_opt.acquisition import AcquisitionFunction, ExpectedImprovement, ProbabilityOfImprovement
from numpy.typing import ArrayLike, NDArray
from scipy.special import erfcx, ndtr
from scipy.stats import norm, qmc

from horovod_tune import bounds
from horovod_tune.search.gp.feasibility import Feasibility
from horovod_tune.search.gp.fit import Conditioned
from horovod_tune.search.gp.fitted_model import FittedModel
from horovod_tune.search.gp.kernels import FloatArray, with_context

#: Maps features, shape (queries, features), to how much these points are worth, shape (queries,).
Acquisition = Callable[[FloatArray], FloatArray]

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_SQRT_HALF_PI = math.sqrt(math.pi / 2)


class LogExpectedImprovement(ExpectedImprovement):
    r"""The logarithm of the expected improvement, computed without underflow (Ament et al., 2023, eq. 8).

    .. math:: \log EI = \log\sigma + \log\big(\phi(z) + z\Phi(z)\big), \quad z = (\mu - y_{max} - \xi)/\sigma

    Plain expected improvement is 0 in floating point over most of the space once a few good points are
    known, and cannot be climbed there; its logarithm can.

    >>> acquisition = LogExpectedImprovement()
    >>> acquisition.y_max = 1.0
    >>> round(float(acquisition.base_acq(np.array([1.0]), np.array([1.0]))[0]), 4)  # log(1/sqrt(2 pi))
    -0.9189
    """

    def __init__(self, xi: float = 0.0) -> None:
        super().__init__(xi=bounds.number("xi", xi, at_least=0))

    def base_acq(self, mean: FloatArray, std: FloatArray) -> FloatArray:
        """Return log EI, of the shape of `mean` and `std`."""
        if self.y_max is None:
            raise ValueError("y_max must be set before base_acq() is called outside of suggest()")
        return np.log(std) + log_h((mean - self.y_max - self.xi) / std)


def log_h(z: FloatArray) -> FloatArray:
    r"""Return :math:`\log(\phi(z) + z\Phi(z))` to full relative precision for every finite z.

    >>> log_h(np.array([0.0, -1e4])).round(2).tolist()
    [-0.92, -50000019.34]
    """
    z = np.asarray(z, dtype=float)
    result, near = np.empty_like(z), z > -1.0
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


#: The number of joint draws of results and points in flight, and the most points that are drawn jointly.
DRAWS, _MOST_DRAWN = 16, 400


class PosteriorDraws:
    """The posterior of one metric, as several equally probable processes that share their points.

    `pending`, shape (points, features), are the points in flight. The results are drawn too, unless they are
    those of learning curves. The first `expected` points in flight get their expected values instead of
    draws: the best of many draws is far better than the best trial will be.
    """

    def __init__(
        self,
        model: FittedModel,
        pending: FloatArray,
        seed: int,
        expected: int = 0,
    ) -> None:
        posterior, features, results = model.condition(), model.features, model.targets
        noise = np.full(len(features) + expected, model.covariance.noise)
        if expected:
            results = np.concatenate([results, posterior.predict(pending[:expected])[0][:, 0]])
            features, pending = np.concatenate([features, pending[:expected]]), pending[expected:]
            posterior = Conditioned(features, results[:, None], noise, model.covariance, posterior.mean)
        points = np.concatenate([features, pending])
        targets = results[:, None]
        if len(points) > _MOST_DRAWN:
            targets = np.concatenate([targets, posterior.predict(pending)[0]])
        elif not model.timed:
            targets = _draws(posterior, points, seed)
            noise = np.full(len(features), 1e-6)
        elif len(pending):
            drawn = _draws(posterior, pending, seed)
            targets = np.concatenate([np.tile(targets, drawn.shape[1]), drawn])
        noise = np.concatenate([noise, np.full(len(pending), noise.min())])
        self.process = Conditioned(points, targets, noise, model.covariance, mean=posterior.mean)
        #: The metric without noise at the results and at the points in flight, shape (points, draws).
        self.values = targets if not model.timed and targets.shape[1] > 1 else self.process.predict(points)[0]


def _draws(posterior: Conditioned, points: FloatArray, seed: int) -> FloatArray:
    """Return joint quasi-random draws at `points`, without noise, shape (points, draws)."""
    mean, covariance = posterior.predict_joint(points)
    values, vectors = np.linalg.eigh(covariance)
    kept = values > 1e-10 * max(float(values[-1]), 1e-12)
    root = vectors[:, kept] * np.sqrt(values[kept])
    uniform = qmc.Sobol(root.shape[1], seed=np.random.default_rng(seed)).random(DRAWS)
    return mean + root @ norm.ppf(np.clip(uniform, 1e-9, 1 - 1e-9)).T


class Posterior:
    """An acquisition function over the model space, given the points in flight and their feasibility.

    `pending` and `expected` are those of `PosteriorDraws`. `context` has the features that follow each
    query's own: the time at which learning curves are compared. The value to beat is the best at `rivals`,
    shape (points, features and context); if None, at the model's own points and those in flight. `allowed`
    selects the points that count, at least one; None selects all.
    """

    def __init__(
        self,
        model: FittedModel,
        pending: FloatArray,
        feasibility: Feasibility,
        acquisition: AcquisitionFunction,
        seed: int,
        context: ArrayLike = (),
        expected: int = 0,
        allowed: NDArray[np.bool_] | None = None,
        rivals: FloatArray | None = None,
    ) -> None:
        self._feasibility, self._context = feasibility, context
        self._model, self._acquisition = model, acquisition
        drawn = PosteriorDraws(model, pending, seed, expected)
        self._process = drawn.process
        values = drawn.values if rivals is None else self._process.predict(rivals)[0]
        self.incumbents = (values if allowed is None else values[allowed]).max(axis=0)

    def means(self, features: FloatArray) -> FloatArray:
        """Return the mean over the draws at `features`, shape (queries, features): shape (queries,)."""
        return self._process.predict(with_context(features, self._context))[0].mean(axis=1)

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the acquisition, shape (queries,), at `features`, shape (queries, features)."""
        means, stds = self._process.predict(with_context(features, self._context))
        stds = np.broadcast_to(stds[:, None], means.shape)
        log_feasible = self._feasibility(features)
        scale, offset, best = self._model.scale, self._model.offset, self.incumbents
        if not is_scale_free(self._acquisition):
            means, stds, best = means * scale + offset, stds * scale, best * scale + offset
        if isinstance(self._acquisition, (ExpectedImprovement, ProbabilityOfImprovement)):
            self._acquisition.y_max = best
        values = self._acquisition.base_acq(means, stds)
        # Expectations and probabilities are multiplied by the probability that the trial is feasible. The
        # logarithm of that probability is added to log EI, and to confidence bounds in the objective's unit.
        if isinstance(self._acquisition, LogExpectedImprovement):
            return np.asarray(np.logaddexp.reduce(values, axis=1) - np.log(values.shape[1]) + log_feasible)
        if isinstance(self._acquisition, (ExpectedImprovement, ProbabilityOfImprovement)):
            return values.mean(axis=1) * np.exp(log_feasible)
        return values.mean(axis=1) + scale * log_feasible


def averaged(acquisitions: Sequence[Acquisition]) -> Acquisition:
    """Return the logarithm of the mean of acquisitions that are logarithms themselves."""

    def log_mean(features: FloatArray) -> FloatArray:
        values = np.stack([each(features) for each in acquisitions])
        return np.asarray(np.logaddexp.reduce(values, axis=0) - np.log(len(values)))

    return log_mean
