"""The probability that limits are kept, modelled from the trials' reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from horovod_tune.search.gp.feasibility import JointFeasibility, LimitFeasibility, slack
from horovod_tune.search.gp.fitted_model import FitState, FittedModel, ModelOptions
from horovod_tune.search.history import Trial
from horovod_tune.search.objectives import Objectives
from horovod_tune.search.space.search_space import SearchSpace


class LimitModels:
    """A model for each limit; each fit starts from the one before."""

    def __init__(self) -> None:
        #: By the limit as written; a part of a saved search.
        self.states: dict[str, FitState] = {}

    def fit(
        self, space: SearchSpace, trials: Sequence[Trial], objectives: Objectives, options: ModelOptions
    ) -> JointFeasibility | None:
        """Return the probability that all limits are kept; None if too little is known about each."""
        # The scale has the limit at 0.
        plain = replace(options, fixed_noise=None, linear_depth=math.inf, softnesses=())
        feasibilities = []
        for limit in objectives.limits:
            reported = [(trial, objectives.latest(trial, limit.metric)) for trial in trials]
            known = [
                (trial.point, value)
                for trial, value in reported
                if value is not None and math.isfinite(value)
            ]
            if len(known) < 2:
                continue
            features = space.features(np.asarray([point for point, _ in known]))
            values = np.asarray([value for _, value in known])
            left = slack(values, limit.bound, upwards=limit.sense.startswith(">"))
            earlier = self.states.get(str(limit))
            model = FittedModel(features, left, space.feature_groups, plain, space.powers, earlier)
            assert model.state is not None
            self.states[str(limit)] = model.state
            feasibilities.append(LimitFeasibility(model))
        return JointFeasibility(feasibilities) if feasibilities else None
