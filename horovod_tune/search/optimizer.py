"""Chooses the next point from what a search remembers: a quasi-random start, then the model.

The choice is a function of the history, the seed and, with many results, the fit before, which a saved search
keeps: not of the clock, or of the order in which trials ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from bayes_opt.acquisition import AcquisitionFunction
from numpy.typing import NDArray
from scipy.stats import qmc

from horovod_tune.search.curve_rows import has_curves, rows_of
from horovod_tune.search.gp.acquisition import decayed, is_scale_free
from horovod_tune.search.gp.failure_model import Safety, diverged
from horovod_tune.search.gp.fitted_model import FitState, FittedModel, ModelOptions
from horovod_tune.search.gp.output_scales import SOFTNESSES
from horovod_tune.search.gp.posterior import Posterior
from horovod_tune.search.gp.proposal import propose
from horovod_tune.search.history import Ending, History, Trial
from horovod_tune.search.seeds import seed_for
from horovod_tune.search.space.dimensions import FloatArray
from horovod_tune.search.space.search_space import Point, SearchSpace

#: A quasi-random point is passed over where the logarithm of the probability that it does not fail is less
#: than this, up to so many times.
_SAFE_ENOUGH, _PASSED_OVER = -3.0, 8
#: Suggestions of the quasi-random start where trials report several times: one says more than its end.
_CURVES_START = 4
#: Points of a finite space that are looked at one by one when it is nearly used up.
_ENUMERABLE = 100_000


class Optimizer:
    """How points are chosen; `random_search_steps` is None for a number that goes with the space."""

    def __init__(
        self,
        acquisition: AcquisitionFunction,
        options: ModelOptions,
        random_search_steps: int | None,
    ) -> None:
        self.options = options
        #: The time at which a training ends, where that is known.
        self.horizon: float | None = None
        self._acquisition, self._steps = acquisition, random_search_steps
        self._fitted: tuple[object, FittedModel] | None = None
        self.learns_from_curves = False
        #: Where the next fit starts; a part of a saved search.
        self.fit_state: FitState | None = None

    @property
    def fitted(self) -> FittedModel | None:
        """The model of the latest suggestion, None before the first one it made."""
        return self._fitted[1] if self._fitted else None

    def next_point(self, space: SearchSpace, history: History, seed: int, maximise: bool) -> Point:
        """Return the next point, one that has been suggested no more often than any other."""
        rounds = history.rounds(space.size)

        def taken(point: Point) -> bool:
            return history.counts[point] > rounds

        usable, failed = _sorted_out(history, maximise)
        scored = [trial for trial in usable if trial.ending is Ending.SCORED]
        by_curves = is_scale_free(self._acquisition) and has_curves(history.trials.values())
        known = [trial for trial in usable if trial.curve] if by_curves else scored
        fewest = _CURVES_START if by_curves else min(max(space.dimension + 1, 4), 10)
        steps = self._steps if self._steps is not None else fewest
        if len(history.trials) < steps or len(known) < 2 or space.dimension == 0:
            start = _sobol(space, history, seed, taken, _safety(space, failed, known))
            return start if start is not None else _leftover(space, taken, None, seed)
        self.learns_from_curves = by_curves
        draws = seed_for(seed, history, "draws")
        acquisition = decayed(self._acquisition, len(history.trials))
        look = self._look_at_curves if by_curves else self._look_at_results
        posterior, centres = look(space, usable, failed, acquisition, draws, maximise)
        found = propose(posterior, space, centres, taken, seed_for(seed, history, "proposal"))
        return found if found is not None else _leftover(space, taken, posterior, seed)

    def _look_at_results(
        self,
        space: SearchSpace,
        usable: list[Trial],
        failed: list[Trial],
        acquisition: AcquisitionFunction,
        draws: int,
        maximise: bool,
    ) -> tuple[Posterior, FloatArray]:
        """Return what is known from the trials' last results, and the best points."""
        scored = [trial for trial in usable if trial.ending is Ending.SCORED]
        gains = np.asarray([_gain(trial, maximise) for trial in scored])
        points = np.asarray([trial.point for trial in scored])
        model = self._fit(space.features(points), gains, space.feature_groups, space.bendable)
        pending = _features_of(space, _running(usable))
        posterior = Posterior(model, pending, _safety(space, failed, scored), acquisition, draws)
        return posterior, points[np.argsort(-gains, kind="stable")[:5]]

    def _look_at_curves(
        self,
        space: SearchSpace,
        usable: list[Trial],
        failed: list[Trial],
        acquisition: AcquisitionFunction,
        draws: int,
        maximise: bool,
    ) -> tuple[Posterior, FloatArray]:
        """Return what is known from every report about the ends of trainings, and the best points."""
        rows = rows_of(usable, self.horizon)
        gains = rows.values if maximise else -rows.values
        points = _features_of(space, usable)
        features = np.concatenate([points[rows.trials], rows.times[:, None]], axis=1)
        groups = np.append(space.feature_groups, space.dimension)
        model = self._fit(features, gains, groups, np.append(space.bendable, False), timed=True)
        live = _features_of(space, _running(usable))
        pending = np.concatenate([live, np.full((len(live), 1), rows.target)], axis=1)
        safe = _safety(space, failed, [trial for trial in usable if trial.curve])
        context = np.asarray([rows.target])
        posterior = Posterior(model, pending, safe, acquisition, draws, context, draw_results=False)
        order = np.argsort(-posterior.means(points), kind="stable")[:5]
        return posterior, np.asarray([usable[i].point for i in order])

    def _fit(
        self,
        features: FloatArray,
        gains: FloatArray,
        groups: NDArray[np.int_],
        bendable: NDArray[np.bool_],
        timed: bool = False,
    ) -> FittedModel:
        options = self.options
        if is_scale_free(self._acquisition):
            options = replace(options, softnesses=SOFTNESSES)
        key = (features.tobytes(), gains.tobytes(), options)
        if self._fitted is None or self._fitted[0] != key:
            model = FittedModel(features, gains, groups, options, bendable, self.fit_state, timed)
            self._fitted, self.fit_state = (key, model), model.state
        return self._fitted[1]


def _gain(trial: Trial, maximise: bool) -> float:
    assert trial.value is not None
    return trial.value if maximise else -trial.value


def _features_of(space: SearchSpace, trials: Sequence[Trial]) -> FloatArray:
    points = [trial.point for trial in trials]
    return space.features(np.asarray(points, dtype=float).reshape(len(points), space.dimension))


def _running(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.ending is Ending.RUNNING]


def _sorted_out(history: History, maximise: bool) -> tuple[list[Trial], list[Trial]]:
    """Return the trials that say something about the objective, and those that failed or have diverged."""
    failed = history.with_ending(Ending.FAILED)
    others = [trial for trial in history.trials.values() if trial.ending is not Ending.FAILED]
    last = [trial.value if trial.ending is not Ending.RUNNING else trial.last for trial in others]
    known = [i for i, value in enumerate(last) if value is not None and np.isfinite(value)]
    losses = np.asarray([last[i] for i in known], dtype=float)
    beyond = diverged(-losses if maximise else losses)
    lost = {known[i] for i in np.flatnonzero(beyond)}
    usable = [trial for i, trial in enumerate(others) if i not in lost]
    return usable, failed + [others[i] for i in sorted(lost)]


def _safety(space: SearchSpace, failed: Sequence[Trial], safe: Sequence[Trial]) -> Safety | None:
    if not failed:
        return None
    return Safety(_features_of(space, safe), _features_of(space, failed), space.feature_groups)


def _sobol(
    space: SearchSpace, history: History, seed: int, taken: Callable[[Point], bool], safety: Safety | None
) -> Point | None:
    """Return the next free point of a scrambled Sobol sequence, None if there is none for long.

    Where trials have failed, points that are likely to fail too are passed over, as long as others come soon.
    """
    best: tuple[float, Point] | None = None
    tried = 0
    for _ in range(64):
        sequence = qmc.Sobol(max(space.dimension, 1), seed=np.random.default_rng(seed))
        if history.drawn:
            sequence.fast_forward(history.drawn)
        quantiles = sequence.random(1)[:, : space.dimension]
        history.drawn += 1
        point = space.canonical(space.from_quantiles(quantiles)[0])
        if taken(point):
            continue
        if safety is None or not space.dimension:
            return point
        chance = float(safety.log_probability(space.features(np.asarray([point])))[0])
        if chance > _SAFE_ENOUGH:
            return point
        best = max(best or (chance, point), (chance, point))
        tried += 1
        if tried == _PASSED_OVER:
            break
    return best[1] if best is not None else None


def _leftover(
    space: SearchSpace, taken: Callable[[Point], bool], posterior: Posterior | None, seed: int
) -> Point:
    """Return a free point of a space that is nearly used up, the most promising if there is a posterior."""
    if space.size <= _ENUMERABLE:
        pool = np.asarray(list(space.every_point()))
    else:
        generator = np.random.default_rng(seed)
        pool = space.from_quantiles(generator.random((10_000, space.dimension)))
    free = [point for point in map(space.canonical, pool) if not taken(point)]
    if not free:
        raise RuntimeError(f"no free point found among the {space.size} of the search space")
    if posterior is None:
        return free[0]
    return free[int(np.argmax(posterior(space.features(np.asarray(free)))))]
