"""Chooses the next point from what a search remembers: a quasi-random start, then the model.

The choice is a function of the history and the seed alone: not of the clock, of an earlier choice, or of the
order in which trials ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from scipy.stats import qmc

from horovod_tune.search.acquisition import Lie, Portfolio, decayed
from horovod_tune.search.belief import Belief, FittedModel, ModelOptions
from horovod_tune.search.hedge import draw, gains_of
from horovod_tune.search.history import Ending, History, Trial
from horovod_tune.search.parameters import FloatArray
from horovod_tune.search.proposal import propose
from horovod_tune.search.seeds import seed_for
from horovod_tune.search.space import Point, SearchSpace
from horovod_tune.search.warping import SOFTNESSES

#: Points of a finite space that are looked at one by one when it is nearly used up.
_ENUMERABLE = 100_000


class Chooser:
    """How points are chosen; `random_search_steps` is None for a number that goes with the space."""

    def __init__(
        self,
        portfolio: Portfolio,
        options: ModelOptions,
        random_search_steps: int | None,
    ) -> None:
        self.options = options
        self._portfolio, self._steps = portfolio, random_search_steps
        self._fitted: tuple[object, FittedModel] | None = None

    @property
    def fitted(self) -> FittedModel | None:
        """The model of the latest suggestion, None before the first one it made."""
        return self._fitted[1] if self._fitted else None

    def next_point(
        self, space: SearchSpace, history: History, seed: int, maximise: bool
    ) -> tuple[Point, tuple[Point, ...]]:
        """Return the next point, one that has been suggested no more often than any other.

        With a `GPHedge` also what each of its functions would have suggested, otherwise nothing.
        """
        rounds = history.rounds(space.size)

        def taken(point: Point) -> bool:
            return history.counts[point] > rounds

        scored = history.with_ending(Ending.SCORED)
        steps = self._steps if self._steps is not None else min(max(space.dimension + 1, 4), 10)
        if len(history.trials) < steps or len(scored) < 2 or space.dimension == 0:
            start = _sobol(space, history, seed, taken)
            return (start if start is not None else _leftover(space, taken, None, seed)), ()
        gains = np.asarray([_gain(trial, maximise) for trial in scored])
        model = self._fit(space, scored, gains)
        centres = np.asarray([scored[i].point for i in np.argsort(-gains, kind="stable")[:5]])
        candidates = []
        for belief in self._beliefs(model, space, history, seed):
            found = propose(belief, space, centres, taken, seed_for(seed, history, "proposal"))
            candidates.append(found if found is not None else _leftover(space, taken, belief, seed))
        if len(candidates) == 1:
            return candidates[0], ()
        chosen = draw(gains_of(self._portfolio, model, space, history), seed_for(seed, history, "hedge"))
        return candidates[chosen], tuple(candidates)

    def _fit(self, space: SearchSpace, scored: list[Trial], gains: FloatArray) -> FittedModel:
        points = np.asarray([trial.point for trial in scored])
        options = self.options
        if self._portfolio.is_scale_free:
            options = replace(options, softnesses=SOFTNESSES)
        key = (points.tobytes(), gains.tobytes(), options)
        if self._fitted is None or self._fitted[0] != key:
            model = FittedModel(space.features(points), gains, space.feature_groups, options)
            self._fitted = (key, model)
        return self._fitted[1]

    def _beliefs(
        self, model: FittedModel, space: SearchSpace, history: History, seed: int
    ) -> Iterator[Belief]:
        """Yield what is believed through each acquisition function."""
        pending = _features_of(space, history, Ending.RUNNING)
        failed = _features_of(space, history, Ending.FAILED)
        by_lie: dict[Lie, Belief] = {}
        for plain, lie in self._portfolio.members:
            acquisition = decayed(plain, len(history.trials))
            if lie not in by_lie:
                draws = seed_for(seed, history, "draws")
                by_lie[lie] = Belief(model, pending, failed, acquisition, draws, lie)
            yield by_lie[lie].through(acquisition)


def _gain(trial: Trial, maximise: bool) -> float:
    assert trial.value is not None
    return trial.value if maximise else -trial.value


def _features_of(space: SearchSpace, history: History, ending: Ending) -> FloatArray:
    points = [trial.point for trial in history.with_ending(ending)]
    return space.features(np.asarray(points, dtype=float).reshape(len(points), space.dimension))


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


def _leftover(space: SearchSpace, taken: Callable[[Point], bool], belief: Belief | None, seed: int) -> Point:
    """Return a free point of a space that is nearly used up, the most promising if there is a belief."""
    if space.size <= _ENUMERABLE:
        pool = np.asarray([space.canonical(point) for point in space.every_point()])
    else:
        generator = np.random.default_rng(seed)
        pool = space.from_quantiles(generator.random((10_000, space.dimension)))
    free = [point for point in map(space.canonical, pool) if not taken(point)]
    if not free:
        raise RuntimeError(f"no free point found among the {space.size} of the search space")
    if belief is None:
        return free[0]
    return free[int(np.argmax(belief(space.features(np.asarray(free)))))]
