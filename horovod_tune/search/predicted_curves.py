"""How learning curves continue, as the model that chooses the next trial expects."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from horovod_tune.analysis.reader.records import PredictedCurve
from horovod_tune.search.curve_rows import CurveRows, axis, is_unfinished, time_at
from horovod_tune.search.gp.axes import Axes
from horovod_tune.search.gp.earlier_task import EarlierTask
from horovod_tune.search.gp.fitted_model import FitState, FittedModel, ModelOptions
from horovod_tune.search.gp.kernels import FloatArray
from horovod_tune.search.history import Ending, Trial
from horovod_tune.search.space.search_space import SearchSpace
from horovod_tune.search.suggest_state import features_of

#: Times at which a curve is predicted, evenly on the model's axis.
_TIMES = 8
#: Standard deviations on each side of the middle. The model is too sure of itself, as few trials that begin
#: badly are trained to the end: 1.28 would hold 80 of 100 ends if it were right, and holds 58 on LCBench.
#: These hold 82 on the eight tasks that they were chosen on, 77 on eight others (90 under Tune's ASHA).
_REACH = 2.5
#: More curves than this are not predicted: those of the best trials that may continue come first.
_MOST = 200


def curve_data(
    space: SearchSpace, points: FloatArray, rows: CurveRows, mode: str
) -> tuple[FloatArray, FloatArray, NDArray[np.int_], Axes]:
    """Return what a model of learning curves is fitted to: features, gains, feature groups and axes.

    `points`, shape (trials, features), are the trials' places. The last feature of a row is its time.
    """
    features = np.concatenate([points[rows.trials], rows.times[:, None]], axis=1)
    gains = rows.values if mode == "max" else -rows.values
    return features, gains, np.append(space.feature_groups, space.dimension), space.axes.with_time()


def predicted_curves(
    space: SearchSpace,
    trials: list[Trial],
    rows: CurveRows,
    mode: str,
    options: ModelOptions,
    state: FitState,
    task: EarlierTask | None,
) -> dict[str, PredictedCurve]:
    """Return how `trials` are expected to continue that have reported and are not at the end, by trial_id.

    The first time of a curve is that of the last report; half of 100 reports are above `middle`.
    `state` is the fit that the hyperparameters are taken from, unless there are few results.
    """
    unfinished = [index for index, trial in enumerate(trials) if is_unfinished(trial, rows.target)]
    if not unfinished:
        return {}
    points = features_of(space, trials)
    features, gains, groups, axes = curve_data(space, points, rows, mode)
    model = FittedModel(features, gains, groups, options, axes, state, timed=True, refit=False, task=task)
    process = model.condition()

    def at(indices: list[int], times: FloatArray) -> tuple[FloatArray, FloatArray]:
        queries = np.concatenate([points[indices], times[:, None]], axis=1)
        means, deviations = process.predict(queries)
        return means[:, 0], np.sqrt(np.square(deviations) + model.covariance.noise)

    if len(unfinished) > _MOST:
        final, _ = at(unfinished, np.full(len(unfinished), rows.target))
        may_go_on = np.asarray([trials[index].ending is Ending.RUNNING for index in unfinished])
        order = np.lexsort([-final, ~may_go_on])
        unfinished = [unfinished[i] for i in order[:_MOST]]
    ends = {index: max(trials[index].curve) for index in unfinished}
    grid = np.stack([np.linspace(axis(ends[index]), rows.target, _TIMES) for index in unfinished])
    means, deviations = at(list(np.repeat(unfinished, _TIMES)), grid.ravel())
    worst, middle, best = (
        model.as_results(means + side * _REACH * deviations).reshape(grid.shape) for side in (-1, 0, 1)
    )
    sign = 1.0 if mode == "max" else -1.0
    low, high = (worst, best) if mode == "max" else (-best, -worst)
    return {
        trials[index].trial_id: PredictedCurve(
            (ends[index], *time_at(grid[row, 1:]).round(6).tolist()),
            tuple((sign * middle[row]).tolist()),
            tuple(low[row].tolist()),
            tuple(high[row].tolist()),
        )
        for row, index in enumerate(unfinished)
    }
