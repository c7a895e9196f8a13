"""The axes of numeric parameters in the model: warped, and, over powers of ten, logarithmic or linear."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from horovod_tune.search.gp.kernels import FloatArray


@dataclass(frozen=True)
class Axes:
    """Properties of the parameters' axes before there are results, one entry per parameter.

    Attributes:
        warpable: True if an axis may be warped.
        powers: for an axis that is logarithmic although its domain is linear, the logarithm of the upper
            end over the lower one; 0 for all others.
    """

    warpable: NDArray[np.bool_]
    powers: FloatArray

    def with_time(self) -> Axes:
        """Return these axes and a last one for the time of a report, which stays as it is."""
        return Axes(np.append(self.warpable, False), np.append(self.powers, 0.0))

    @property
    def spans_powers(self) -> bool:
        return bool(np.any(self.powers))
