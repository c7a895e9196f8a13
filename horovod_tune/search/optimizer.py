"""Chooses the next point from what a search remembers: a quasi-random start, then the model.

The choice is a function of the history and the seed alone: not of the clock, of an earlier choice, or of the
order in which trials ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from bayes_opt.acquisition import AcquisitionFunction
from numpy.typing import NDArray
from scipy.stats import qmc

from horovod_tune.search.curves import has_curves, rows_of
from horovod_tune.search.gp.acquisition import decayed, is_scale_free
from horovod_tune.search.gp.failures import Safety
from horovod_tune.search.gp.output_scales import SOFTNESSES
from horovod_tune.search.gp.posterior import FitState, FittedModel, ModelOptions, Posterior
from horovod_tune.search.gp.proposal import propose
from horovod_tune.search.history import Ending, History, Trial
from horovod_tune.search.seeds import seed_for
from horovod_tune.search.space.dimensions import FloatArray
from horovod_tune.search.space.search_space import Point, SearchSpace

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

        scored = history.with_ending(Ending.SCORED)
        by_curves = is_scale_free(self._acquisition) and has_curves(history.trials.values())
        known = [trial for trial in history.trials.values() if trial.curve] if by_curves else scored
        steps = self._steps if self._steps is not None else min(max(space.dimension + 1, 4), 10)
        if len(history.trials) < steps or len(known) < 2 or space.dimension == 0:
            start = _sobol(space, history, seed, taken)
            return start if start is not None else _leftover(space, taken, None, seed)
        look = self._look_at_curves if by_curves else self._look_at_results
        posterior, centres = look(space, history, seed, maximise)
        found = propose(posterior, space, centres, taken, seed_for(seed, history, "proposal"))
        return found if found is not None else _leftover(space, taken, posterior, seed)

    def _look_at_results(
        self, space: SearchSpace, history: History, seed: int, maximise: bool
    ) -> tuple[Posterior, FloatArray]:
        """Return what is known from the trials' last results, and the best points."""
        scored = history.with_ending(Ending.SCORED)
        gains = np.asarray([_gain(trial, maximise) for trial in scored])
        points = np.asarray([trial.point for trial in scored])
        model = self._fit(space.features(points), gains, space.feature_groups, space.bendable)
        pending = _features_of(space, history.with_ending(Ending.RUNNING))
        acquisition = decayed(self._acquisition, len(history.trials))
        draws = seed_for(seed, history, "draws")
        posterior = Posterior(model, pending, _safety(space, history, scored), acquisition, draws)
        return posterior, points[np.argsort(-gains, kind="stable")[:5]]

    def _look_at_curves(
        self, space: SearchSpace, history: History, seed: int, maximise: bool
    ) -> tuple[Posterior, FloatArray]:
        """Return what is known from every report about the ends of trainings, and the best points."""
        trials = [trial for trial in history.trials.values() if trial.ending is not Ending.FAILED]
        rows = rows_of(trials, self.horizon)
        gains = rows.values if maximise else -rows.values
        points = _features_of(space, trials)
        features = np.concatenate([points[rows.trials], rows.times[:, None]], axis=1)
        groups = np.append(space.feature_groups, space.dimension)
        model = self._fit(features, gains, groups, np.append(space.bendable, False))
        live = _features_of(space, [trial for trial in trials if trial.ending is Ending.RUNNING])
        pending = np.concatenate([live, np.full((len(live), 1), rows.target)], axis=1)
        acquisition = decayed(self._acquisition, len(history.trials))
        posterior = Posterior(
            model,
            pending,
            _safety(space, history, trials),
            acquisition,
            seed_for(seed, history, "draws"),
            context=np.asarray([rows.target]),
            draw_results=False,
        )
        order = np.argsort(-posterior.means(points), kind="stable")[:5]
        return posterior, np.asarray([trials[i].point for i in order])

    def _fit(
        self, features: FloatArray, gains: FloatArray, groups: NDArray[np.int_], bendable: NDArray[np.bool_]
    ) -> FittedModel:
        options = self.options
        if is_scale_free(self._acquisition):
            options = replace(options, softnesses=SOFTNESSES)
        key = (features.tobytes(), gains.tobytes(), options)
        if self._fitted is None or self._fitted[0] != key:
            model = FittedModel(features, gains, groups, options, bendable, self.fit_state)
            self._fitted, self.fit_state = (key, model), model.state
        return self._fitted[1]


def _gain(trial: Trial, maximise: bool) -> float:
    assert trial.value is not None
    return trial.value if maximise else -trial.value


def _features_of(space: SearchSpace, trials: Sequence[Trial]) -> FloatArray:
    points = [trial.point for trial in trials]
    return space.features(np.asarray(points, dtype=float).reshape(len(points), space.dimension))


def _safety(space: SearchSpace, history: History, safe: Sequence[Trial]) -> Safety | None:
    failed = history.with_ending(Ending.FAILED)
    if not failed:
        return None
    return Safety(_features_of(space, safe), _features_of(space, failed), space.feature_groups)


def _sobol(space: SearchSpace, history: History, seed: int, taken: Callable[[Point], bool]) -> Point | None:
    """Return the next free point of a scrambled Sobol sequence, None if there is none for long."""
    for _ in range(64):
        sequence = qmc.Sobol(max(space.dimension, 1), seed=np.random.default_rng(seed))
        if history.drawn:
            sequence.fast_forward(history.drawn)
        quantiles = sequence.random(1)[:, : space.dimension]
        history.drawn += 1
        point = space.canonical(space.from_quantiles(quantiles)[0])
        if not taken(point):
            return point
    return None


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
