r"""An earlier experiment on other data as a prior: its shape, with a weight that the new results decide.

With :math:`m(x)` the earlier experiment's posterior mean, on its own standardised scale, the new task is

.. math:: f(x) = w\,m(x) + d(x),\qquad w \sim N(0, 1)

with a Gaussian process :math:`d` of its own: a linear kernel on :math:`m` added to the usual one (Rasmussen &
Williams, 2006, section 2.7, with one basis function). If the tasks are related, a few results
determine :math:`w`; if not, it shrinks to 0, and the search continues as without earlier results.
"""

from __future__ import annotations

import numpy as np

from horovod_tune.search.gp.kernels import Covariance, FloatArray
from horovod_tune.search.gp.process import Conditioned


class EarlierTask:
    """The mean of an earlier experiment's process, over the parameters only.

    ``context`` are features that its queries share after the parameters': the time at which its learning
    curves are looked at.
    """

    def __init__(self, process: Conditioned, parameters: int, context: FloatArray) -> None:
        self._process, self._parameters, self._context = process, parameters, context

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the mean, shape (points,), at `features`, whose further columns are left out."""
        own = features[:, : self._parameters]
        if len(self._context):
            own = np.concatenate([own, np.tile(self._context, (len(own), 1))], axis=1)
        return self._process.predict(own)[0][:, 0] - self._process.mean

    def with_slope(self, query: FloatArray) -> tuple[float, FloatArray]:
        """Return the mean at one query, shape (features,), and its slopes by them."""
        here = np.concatenate([query[: self._parameters], self._context])
        means, _, slopes, _ = self._process.predict_with_slopes(here)
        padded = np.zeros(len(query))
        padded[: self._parameters] = slopes[: self._parameters, 0]
        return float(means[0]) - self._process.mean, padded


class TransferCovariance:
    """The covariance of the module's formula: that of :math:`d`, and the earlier task's with its weight."""

    def __init__(self, own: Covariance, task: EarlierTask) -> None:
        self._own, self._task = own, task
        self.noise, self.signal = own.noise, own.signal
        #: The points of the latest call and the task there: a climb repeats them.
        self._latest: tuple[FloatArray, FloatArray] | None = None

    def _at(self, points: FloatArray) -> FloatArray:
        if self._latest is None or self._latest[0] is not points:
            self._latest = (points, self._task(points))
        return self._latest[1]

    def between(self, left: FloatArray, right: FloatArray) -> FloatArray:
        there = self._at(right)
        here = there if left is right else self._task(left)
        return self._own.between(left, right) + np.outer(here, there)

    def variance(self, queries: FloatArray) -> FloatArray:
        return self._own.variance(queries) + np.square(self._task(queries))

    def slopes(
        self, query: FloatArray, points: FloatArray
    ) -> tuple[FloatArray, FloatArray, float, FloatArray]:
        found, jacobian, prior, prior_slope = self._own.slopes(query, points)
        here, slope = self._task.with_slope(query)
        there = self._at(points)
        return (
            found + here * there,
            jacobian + there[:, None] * slope,
            prior + here * here,
            prior_slope + 2.0 * here * slope,
        )
