"""The results of an earlier experiment, modelled once, as what a new search begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from bayes_opt.acquisition import AcquisitionFunction

from horovod_tune.search.curve_rows import rows_of
from horovod_tune.search.gp.earlier_task import EarlierTask
from horovod_tune.search.gp.feasibility import Feasibility
from horovod_tune.search.gp.fitted_model import FittedModel, ModelOptions
from horovod_tune.search.gp.posterior import Posterior
from horovod_tune.search.history import Trial
from horovod_tune.search.objectives import Objectives
from horovod_tune.search.space.dimensions import FloatArray
from horovod_tune.search.space.search_space import SearchSpace

#: The earlier model is evaluated with every point, so it must be small.
_POINTS = 150


class EarlierExperiment:
    """A model of an earlier experiment's results, over the points of a space.

    If its trials ended at different times, the results are modelled as learning curves, at `horizon`.
    """

    def __init__(
        self,
        space: SearchSpace,
        trials: Sequence[Trial],
        objectives: Objectives,
        horizon: float | None,
        options: ModelOptions,
    ) -> None:
        points = np.asarray([trial.point for trial in trials])
        scores = np.asarray([objectives.score(trial, objectives.metrics[0]) for trial in trials], dtype=float)
        features, groups, powers = space.features(points), space.feature_groups, space.powers
        self._context = np.empty(0)
        timed = len({time for trial in trials for time in trial.curve}) > 1
        if timed:
            rows = rows_of(list(trials), horizon)
            self._context = np.asarray([rows.target])
            features, scores = features[rows.trials], scores[rows.trials]
            features = np.concatenate([features, rows.times[:, None]], axis=1)
            groups, powers = np.append(groups, space.dimension), np.append(powers, 0.0)
        options = replace(options, process_points=_POINTS)
        self._model = FittedModel(features, scores, groups, options, powers, timed=timed)
        self.task = EarlierTask(self._model.condition(), len(space.feature_groups), self._context)
        #: The points that were the best, in the model's view.
        self.best: FloatArray = points[np.argsort(-self.task(space.features(points)), kind="stable")[:5]]

    def as_acquisition(
        self, tried: FloatArray, feasibility: Feasibility | None, acquisition: AcquisitionFunction, draws: int
    ) -> Posterior:
        """Return what is believed as if this were the same task; `tried` are the features of new points."""
        pending = np.concatenate([tried, np.tile(self._context, (len(tried), 1))], axis=1)
        timed = len(self._context) > 0
        return Posterior(
            self._model, pending, feasibility, acquisition, draws, self._context, draw_results=not timed
        )
