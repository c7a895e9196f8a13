"""The posterior of the objective when a suggestion is made: results, failures and points in flight.

Targets are maximised here, whatever the search's mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from bayes_opt.acquisition import AcquisitionFunction, ExpectedImprovement, ProbabilityOfImprovement
from numpy.typing import NDArray
from scipy.stats import norm, qmc

from horovod_tune.search.gp.acquisition import LogExpectedImprovement, is_scale_free
from horovod_tune.search.gp.feasibility import Feasibility
from horovod_tune.search.gp.fit import Conditioned
from horovod_tune.search.gp.fitted_model import FittedModel
from horovod_tune.search.gp.kernels import FloatArray

_NOTHING = np.empty(0)
#: The number of joint draws of results and points in flight, and the most points that are drawn jointly.
DRAWS, _MOST_DRAWN = 16, 400


class PosteriorDraws:
    """The posterior of one metric, as several equally probable processes that share their points.

    `pending`, shape (points, features), are the points in flight. Without `draw_results`, only values at the
    points in flight are drawn. The first `expected` points in flight get their expected values instead
    of draws: the best of many draws is far better than the best trial will be.
    """

    def __init__(
        self,
        model: FittedModel,
        pending: FloatArray,
        seed: int,
        draw_results: bool = True,
        expected: int = 0,
    ) -> None:
        known, features, results = model.condition(), model.features, model.targets
        noise = np.full(len(features) + expected, model.covariance.noise)
        if expected:
            results = np.concatenate([results, known.predict(pending[:expected])[0][:, 0]])
            features, pending = np.concatenate([features, pending[:expected]]), pending[expected:]
            known = Conditioned(features, results[:, None], noise, model.covariance, known.mean)
        points = np.concatenate([features, pending])
        if len(points) > _MOST_DRAWN:
            targets = np.concatenate([results, known.predict(pending)[0][:, 0]])[:, None]
        elif draw_results:
            targets = _draws(known, points, seed)
            noise = np.full(len(features), 1e-6)
        elif len(pending):
            drawn = _draws(known, pending, seed)
            targets = np.concatenate([np.tile(results[:, None], drawn.shape[1]), drawn])
        else:
            targets = results[:, None]
        noise = np.concatenate([noise, np.full(len(pending), 1e-6 if len(noise) == 0 else noise.min())])
        self.process = Conditioned(points, targets, noise, model.covariance, mean=known.mean)
        #: The metric without noise at the results and at the points in flight, shape (points, draws).
        self.values = targets if draw_results and targets.shape[1] > 1 else self.process.predict(points)[0]


def _draws(known: Conditioned, points: FloatArray, seed: int) -> FloatArray:
    """Return joint quasi-random draws of the noise-free objective at `points`, shape (points, draws)."""
    mean, covariance = known.predict_joint(points)
    values, vectors = np.linalg.eigh(covariance)
    kept = values > 1e-10 * max(float(values[-1]), 1e-12)
    root = vectors[:, kept] * np.sqrt(values[kept])
    uniform = qmc.Sobol(root.shape[1], seed=np.random.default_rng(seed)).random(DRAWS)
    return mean + root @ norm.ppf(np.clip(uniform, 1e-9, 1 - 1e-9)).T


class Posterior:
    """An acquisition function over the model space, given the points in flight and the failures.

    `pending` has the shape (points, features). `context` has the features that follow each query's own: the
    time at which learning curves are compared. `draw_results` and `expected` are those of `PosteriorDraws`.
    The value to beat is the best at `rivals`, shape (points, features and context); if None, at the model's
    own points and those in flight. `allowed` selects the points that count, at least one; None selects all.
    """

    def __init__(
        self,
        model: FittedModel,
        pending: FloatArray,
        safety: Feasibility | None,
        acquisition: AcquisitionFunction,
        seed: int,
        context: FloatArray = _NOTHING,
        draw_results: bool = True,
        expected: int = 0,
        allowed: NDArray[np.bool_] | None = None,
        rivals: FloatArray | None = None,
    ) -> None:
        self._safety, self._context = safety, context
        self._model, self._acquisition = model, acquisition
        drawn = PosteriorDraws(model, pending, seed, draw_results, expected)
        self._process, self.rows = drawn.process, len(drawn.values)
        values = drawn.values if rivals is None else self._process.predict(rivals)[0]
        self.incumbents = (values if allowed is None else values[allowed]).max(axis=0)

    def means(self, features: FloatArray) -> FloatArray:
        """Return the mean over the draws at `features`, shape (queries, features): shape (queries,)."""
        return self._process.predict(self._in_context(features))[0].mean(axis=1)

    def _in_context(self, features: FloatArray) -> FloatArray:
        return np.concatenate([features, np.tile(self._context, (len(features), 1))], axis=1)

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the acquisition, shape (queries,), at `features`, shape (queries, features)."""
        means, stds = self._process.predict(self._in_context(features))
        stds = np.broadcast_to(stds[:, None], means.shape)
        log_safe = 0.0 if self._safety is None else self._safety(features)
        scale, offset, best = self._model.scale, self._model.offset, self.incumbents
        if not is_scale_free(self._acquisition):
            means, stds, best = means * scale + offset, stds * scale, best * scale + offset
        if isinstance(self._acquisition, (ExpectedImprovement, ProbabilityOfImprovement)):
            self._acquisition.y_max = best
        values = self._acquisition.base_acq(means, stds)
        # Expectations and probabilities are multiplied by the probability that the trial is feasible. The
        # logarithm of that probability is added to log EI, and to confidence bounds in the objective's unit.
        if isinstance(self._acquisition, LogExpectedImprovement):
            return np.asarray(np.logaddexp.reduce(values, axis=1) - np.log(values.shape[1]) + log_safe)
        if isinstance(self._acquisition, (ExpectedImprovement, ProbabilityOfImprovement)):
            return values.mean(axis=1) * np.exp(log_safe)
        return values.mean(axis=1) + scale * log_safe


class AveragedAcquisition:
    """The logarithm of the mean of several posteriors' acquisitions, which are logarithms themselves.

    The posteriors share the results, the points in flight and the scale.
    """

    def __init__(self, posteriors: Sequence[Posterior]) -> None:
        self._posteriors = posteriors
        self.rows = posteriors[0].rows

    def means(self, features: FloatArray) -> FloatArray:
        """Return the mean of the posteriors at `features`, shape (queries, features): shape (queries,)."""
        return np.mean([each.means(features) for each in self._posteriors], axis=0)

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the acquisition, shape (queries,), at `features`, shape (queries, features)."""
        values = np.stack([each(features) for each in self._posteriors])
        return np.asarray(np.logaddexp.reduce(values, axis=0) - np.log(len(values)))
