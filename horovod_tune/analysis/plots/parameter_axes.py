"""Where trials stand on a hyperparameter's axis, and the marks on it."""

from __future__ import annotations

import math

import numpy as np

from horovod_tune.analysis.importance import best_or_last
from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.varying_parameters import Parameter


def trial_values(analysis: Analysis) -> np.ndarray:
    return np.array([best_or_last(analysis, index) for index in range(len(analysis.trials))])


def spread(parameter: Parameter, seed: int = 0) -> np.ndarray:
    """Positions, with categories' points moved apart a little so that they do not hide each other."""
    if parameter.kind != "category":
        return parameter.positions
    return parameter.positions + np.random.default_rng(seed).uniform(-0.18, 0.18, len(parameter.values))


def log_ticks(low: float, high: float) -> list[float]:
    """Round marks between two powers of ten: whole decades, or 1, 2, 5 where there are few.

    >>> log_ticks(-3.2, 0.1)
    [0.001, 0.01, 0.1, 1.0]
    """
    decades = range(math.floor(low), math.ceil(high) + 1)
    every = max(1, round(len(decades) / 6))
    marks = [10.0**decade for decade in decades if low <= decade <= high and decade % every == 0]
    if len(marks) < 2:
        marks = [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= math.log10(m) + d <= high]
    return marks
