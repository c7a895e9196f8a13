r"""The scales on which results can be modelled, so that differences count where they matter.

Losses of training runs differ by powers of ten far from the best ones, but only by a few percent near them.
On their own scale, the model mostly fits the large differences. A warped scale

.. math:: t = -\log(g + c)

spreads the best results, where :math:`g` is a result's distance from the best one, in units of the distance
from the median to the best; a smaller softness :math:`c` spreads them more. It spreads noise too, so the
results decide which scale is used: the one under which they are most probable, the Jacobian of the
transformation included (Snelson, Rasmussen & Ghahramani, 2004, "Warped Gaussian Processes", section 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from horovod_tune.search.gp.kernels import FloatArray

#: The softnesses that are tried besides the results' own scale, if the acquisition function allows it.
SOFTNESSES = (1.0, 0.1)
#: The lead that a scale needs: this times log10(10 / softness) is subtracted from its log posterior. Without
#: it warped scales win by chance, which costs most if results are noisy.
_PENALTY = 2.0


@dataclass(frozen=True)
class Scale:
    """Results on one scale: `targets` have mean 0 and deviation 1, and are `(t - offset) / deviation`.

    `log_slopes` are the log derivatives of `targets` with respect to the results; both have shape (points,).
    """

    targets: FloatArray
    offset: float
    deviation: float
    log_slopes: FloatArray
    #: Added to the log posterior of the model.
    log_prior: float = 0.0


def scales(results: FloatArray, depth: float, softnesses: Sequence[float]) -> Iterator[Scale]:
    """Yield `results`, shape (points,), larger being better, on their own scale and on the warped ones.

    On their own scale, results below the median by more than `depth` times the distance from the median to
    the best are compressed logarithmically, so that a few outliers do not flatten the rest. There is no other
    scale if at least half of the results equal the best, since distances then have no unit.

    >>> own, *_ = scales(np.array([0.0, 1.0, 2.0, -100.0, 1.0]), 3.0, ())
    >>> (own.targets * own.deviation + own.offset).round(2).tolist()
    [0.0, 1.0, 2.0, -6.6, 1.0]
    """
    middle, best = float(np.median(results)), float(np.max(results))
    unit = best - middle
    if unit <= 0:
        yield _standardised(results, np.zeros_like(results))
        return
    below = (middle - results) / unit - depth
    squeezed = middle - unit * (depth + np.log1p(np.maximum(below, 0.0)))
    yield _standardised(np.where(below > 0, squeezed, results), -np.log1p(np.maximum(below, 0.0)))
    gap = (best - results) / unit
    for softness in softnesses:
        warped = -np.log(gap + softness)
        # The slope of -log(g + c) is 1 / (g + c), whose logarithm is the value itself.
        yield _standardised(warped, warped - math.log(unit), _PENALTY * math.log10(softness / 10))


def _standardised(values: FloatArray, log_slopes: FloatArray, log_prior: float = 0.0) -> Scale:
    offset, deviation = float(np.mean(values)), float(np.std(values)) or 1.0
    targets = (values - offset) / deviation
    return Scale(targets, offset, deviation, log_slopes - math.log(deviation), log_prior)
