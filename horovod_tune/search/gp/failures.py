"""Where trials fail: a Gaussian process on failed or not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from horovod_tune.search.gp.acquisition import log_probability_below
from horovod_tune.search.gp.fit import Conditioned
from horovod_tune.search.gp.kernels import FloatArray, Hyperparameters, MaternCovariance

#: A place is safe where the modelled label (0 for a result, 1 for a failure) is below the first with enough
#: probability; the second keeps the edge soft; the third is the length scale, times the square root of
#: the number of parameters.
_TOLERATED, _BLUR, _FAILURE_LENGTH = 0.3, 0.05, 0.5
#: The probability counts to this power: a failed trial costs more than its place in the budget.
_CAUTION = 3.0


class Safety:
    """The probability that a trial does not fail.

    `scored` and `failed` have the shape (points, features), `groups` names the parameter of each feature.
    """

    def __init__(self, scored: FloatArray, failed: FloatArray, groups: NDArray[np.int_]) -> None:
        features = np.concatenate([scored, failed])
        labels = np.concatenate([np.zeros(len(scored)), np.ones(len(failed))])
        count = int(groups.max()) + 1 if len(groups) else 0
        lengths = np.full(count, _FAILURE_LENGTH * max(1, count) ** 0.5)
        covariance = MaternCovariance(Hyperparameters(lengths, 0.25, 0.01), groups)
        noise = np.full(len(labels), covariance.noise)
        self._process = Conditioned(features, labels[:, None], noise, covariance, mean=float(labels.mean()))

    def log_probability(self, features: FloatArray) -> FloatArray:
        """Return the logarithm of the probability of not failing, shape (queries,)."""
        means, stds = self._process.predict(features)
        return _CAUTION * log_probability_below(_TOLERATED, means[:, 0], np.sqrt(stds**2 + _BLUR**2))

    def with_slope(self, query: FloatArray) -> tuple[float, FloatArray]:
        """Return the same at one query, and its gradient, shape (features,)."""
        mean, std, mean_slope, std_slope = self._process.predict_with_slopes(query)
        total = np.sqrt(std**2 + _BLUR**2)
        z = (_TOLERATED - mean[0]) / total
        log_p = log_probability_below(_TOLERATED, mean[:1], np.asarray([total]))[0]
        ratio = np.exp(norm.logpdf(z) - log_p)
        slope = ratio * (-mean_slope[:, 0] / total - z / total * (std / total) * std_slope)
        return _CAUTION * float(log_p), _CAUTION * slope
