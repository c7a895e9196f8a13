"""Chooses among the acquisition functions of a `GPHedge` (Brochu et al., 2010, section 3).

Each function proposes a candidate for every suggestion; one candidate is run. A function's gain is the sum of
the model's means at its candidates, and the next choice is drawn with the softmax of the gains as
probabilities.

With trials in flight, a suggestion's candidates count once its trial has ended, in whatever order trials end.
The means are those of the current model, in standardised units, so that the gains follow from the history
alone: they need no state of their own, and a restored search has the same ones.
"""

from __future__ import annotations

import numpy as np
from scipy.special import softmax

from horovod_tune.search.acquisition import Portfolio
from horovod_tune.search.belief import FittedModel
from horovod_tune.search.history import Ending, History
from horovod_tune.search.parameters import FloatArray
from horovod_tune.search.space import SearchSpace


def gains_of(portfolio: Portfolio, model: FittedModel, space: SearchSpace, history: History) -> FloatArray:
    """Return the gain of each of the portfolio's functions."""
    gains = np.asarray(portfolio.gains, dtype=float)
    members = len(gains)
    ended = [
        trial.candidates
        for trial in history.trials.values()
        if trial.ending is not Ending.RUNNING and len(trial.candidates) == members
    ]
    if not ended:
        return gains
    points = np.asarray(ended).reshape(len(ended) * members, space.dimension)
    means, _ = model.condition().predict(space.features(points))
    return gains + means.reshape(len(ended), members).sum(axis=0)


def draw(gains: FloatArray, seed: int) -> int:
    """Return the index of the function whose candidate is run."""
    return int(np.random.default_rng(seed).choice(len(gains), p=softmax(gains)))
