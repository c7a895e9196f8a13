"""An acquisition function averaged over several posteriors with different hyperparameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from horovod_tune.search.gp.kernels import FloatArray
from horovod_tune.search.gp.posterior import Posterior


class AveragedAcquisition:
    """The logarithm of the mean of what several posteriors expect, whose values are logarithms.

    They share the results, the points in flight and the scale.
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

    def with_slope(self, query: FloatArray) -> tuple[float, FloatArray]:
        """Return the acquisition at one query, shape (features,), and its gradient."""
        found = [each.with_slope(query) for each in self._posteriors]
        values = np.asarray([value for value, _ in found])
        total = np.logaddexp.reduce(values)
        weights = np.exp(values - total)
        return float(total - np.log(len(values))), weights @ np.stack([slope for _, slope in found])
