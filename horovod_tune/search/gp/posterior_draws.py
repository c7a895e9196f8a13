"""A Gaussian process given the results, with draws of noisy results and of points in flight."""

from __future__ import annotations

import numpy as np
from scipy.stats import norm, qmc

from horovod_tune.search.gp.fitted_model import FittedModel
from horovod_tune.search.gp.kernels import FloatArray
from horovod_tune.search.gp.process import Conditioned

#: Joint draws of what is in flight and what is noisy, and the most points that are drawn.
DRAWS, _MOST_DRAWN = 16, 400


class PosteriorDraws:
    """Beliefs about one metric, as several equally probable processes that share their points.

    `pending`, shape (points, features), are the points in flight. Without `draw_results` observed results are
    not drawn, only those in flight. The first `expected` of these are set to their expected values instead:
    the best of many draws is far better than the best trial will be.
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
        #: The metric without noise at the results and at what is in flight, shape (points, draws).
        self.values = targets if draw_results and targets.shape[1] > 1 else self.process.predict(points)[0]


def _draws(known: Conditioned, points: FloatArray, seed: int) -> FloatArray:
    """Return joint quasi-random draws of the noise-free objective at `points`, shape (points, draws)."""
    mean, covariance = known.predict_joint(points)
    values, vectors = np.linalg.eigh(covariance)
    kept = values > 1e-10 * max(float(values[-1]), 1e-12)
    root = vectors[:, kept] * np.sqrt(values[kept])
    uniform = qmc.Sobol(root.shape[1], seed=np.random.default_rng(seed)).random(DRAWS)
    return mean + root @ norm.ppf(np.clip(uniform, 1e-9, 1 - 1e-9)).T
