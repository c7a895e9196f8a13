"""Chooses the next point from what a search remembers: a quasi-random start, then the model.

The choice is a function of the history, the seed and, with many results, the fit before, which a saved search
keeps: not of the clock, or of the order in which trials ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from bayes_opt.acquisition import AcquisitionFunction
from numpy.typing import NDArray
from scipy.stats import qmc

from horovod_tune.analysis.dominance import non_dominated
from horovod_tune.search.aims import Aims
from horovod_tune.search.curve_rows import has_curves, rows_of
from horovod_tune.search.earlier_experiment import EarlierExperiment
from horovod_tune.search.gp.acquisition import decayed, is_scale_free
from horovod_tune.search.gp.chances import AllOf, Chance, ChancesAlone
from horovod_tune.search.gp.drawn import Drawn
from horovod_tune.search.gp.earlier_task import EarlierTask
from horovod_tune.search.gp.failure_model import Safety, diverged
from horovod_tune.search.gp.fitted_model import FitState, FittedModel, ModelOptions, thin
from horovod_tune.search.gp.hypervolume import HypervolumeGain
from horovod_tune.search.gp.output_scales import SOFTNESSES
from horovod_tune.search.gp.posterior import Posterior
from horovod_tune.search.gp.proposal import Belief, candidates, propose
from horovod_tune.search.history import Ending, History, Trial
from horovod_tune.search.limit_models import LimitModels
from horovod_tune.search.seeds import seed_for
from horovod_tune.search.space.dimensions import FloatArray
from horovod_tune.search.space.search_space import Point, SearchSpace

#: A quasi-random point is passed over where the logarithm of the probability that it does not fail is less
#: than this, up to so many times.
_SAFE_ENOUGH, _PASSED_OVER = -3.0, 8
#: Suggestions of the quasi-random start where trials report several times: one says more than its end.
_CURVES_START = 4
#: Results that are waited for before they are modelled beside an earlier experiment's. Until then its model
#: and the quasi-random sequence suggest in turns: the difference shows how far it can be trusted.
_TRANSFER_START = 3
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
        self._fitted: dict[str, tuple[object, FittedModel]] = {}
        self.learns_from_curves = False
        #: Where the next fit of each metric starts; a part of a saved search, as that of the limits is.
        self.fit_states: dict[str, FitState] = {}
        self.limits = LimitModels()
        self._earlier: tuple[object, EarlierExperiment] | None = None

    @property
    def fitted(self) -> FittedModel | None:
        """The model of the first metric at the latest suggestion, None before the first one it made."""
        return next((model for _, model in self._fitted.values()), None)

    def next_point(self, space: SearchSpace, history: History, seed: int, aims: Aims) -> Point:
        """Return the next point, one that has been suggested no more often than any other."""
        rounds = history.rounds(space.size)

        def taken(point: Point) -> bool:
            return history.counts[point] > rounds

        usable, failed = _sorted_out(history, aims)
        scored = [trial for trial in usable if trial.ending is Ending.SCORED]
        by_curves = (
            len(aims.metrics) == 1
            and is_scale_free(self._acquisition)
            and has_curves(history.trials.values())
        )
        known = [trial for trial in usable if trial.curve] if by_curves else scored
        fewest = _CURVES_START if by_curves else min(max(space.dimension + 1, 4), 10)
        steps = self._steps if self._steps is not None else fewest
        safety = _safety(space, failed, known)
        earlier = self._look_back(space, history, aims)
        asks_earlier = False
        if earlier is not None and self._steps is None and len(known) < _TRANSFER_START:
            asks_earlier = len(history.trials) % 2 == 0
            steps = len(history.trials) + 1
        if (len(history.trials) < steps or len(known) < 2 or space.dimension == 0) and not asks_earlier:
            start = _sobol(space, history, seed, taken, safety)
            return start if start is not None else _leftover(space, taken, None, seed)
        self.learns_from_curves = by_curves
        within = self.limits.fit(space, usable, aims, self.options) if aims.limits else None
        chances: list[Chance] = [chance for chance in (safety, within) if chance is not None]
        now = _Situation(
            space,
            usable,
            aims,
            AllOf(chances) if chances else None,
            within,
            decayed(self._acquisition, len(history.trials)),
            seed_for(seed, history, "draws"),
            None if earlier is None else earlier.task,
        )
        if asks_earlier:
            assert earlier is not None
            tried = _features_of(space, usable)
            belief: Belief = earlier.belief(tried, now.chance, now.acquisition, now.draws)
            centres: FloatArray = earlier.best
        elif within is not None and not any(aims.keeps_limits(trial) for trial in known):
            belief = ChancesAlone(AllOf(chances), len(known))
            centres = np.empty((0, space.dimension))
        elif by_curves:
            belief, centres = self._look_at_curves(now)
        elif len(aims.metrics) == 1:
            belief, centres = self._look_at_results(now)
        else:
            belief, centres = self._look_at_front(now)
        found = propose(belief, space, centres, taken, seed_for(seed, history, "proposal"))
        return found if found is not None else _leftover(space, taken, belief, seed)

    def _look_back(self, space: SearchSpace, history: History, aims: Aims) -> EarlierExperiment | None:
        """Return the earlier experiment that the search begins with, if there is one."""
        if len(history.earlier) < 2 or space.dimension == 0 or len(aims.metrics) > 1:
            return None
        key = [(trial.point, trial.value) for trial in history.earlier]
        if self._earlier is None or self._earlier[0] != key:
            found = EarlierExperiment(space, history.earlier, aims, self.horizon, self._options_with_scales)
            self._earlier = (key, found)
        return self._earlier[1]

    @property
    def _options_with_scales(self) -> ModelOptions:
        """The model's options, with warped scales where the acquisition function allows them."""
        if is_scale_free(self._acquisition):
            return replace(self.options, softnesses=SOFTNESSES)
        return self.options

    def _look_at_results(self, now: _Situation) -> tuple[Belief, FloatArray]:
        """Return what is known from the trials' last results, and the best points."""
        scored = [trial for trial in now.usable if trial.ending is Ending.SCORED]
        gains = now.gains(scored, now.aims.metrics[0])
        points = np.asarray([trial.point for trial in scored])
        model = self._fit(
            now.aims.metrics[0],
            now.space.features(points),
            gains,
            now.space.feature_groups,
            now.space.bendable,
            task=now.earlier,
        )
        pending = _features_of(now.space, _running(now.usable))
        allowed = now.allowed([scored[i] for i in model.kept], pending)
        belief = Posterior(model, pending, now.chance, now.acquisition, now.draws, allowed=allowed)
        return belief, points[np.argsort(-now.within_first(scored, gains), kind="stable")[:5]]

    def _look_at_front(self, now: _Situation) -> tuple[Belief, FloatArray]:
        """Return what several metrics are believed to be, and the points that are good in one of them."""
        space, aims = now.space, now.aims
        scored = [trial for trial in now.usable if trial.ending is Ending.SCORED]
        each = [now.gains(scored, metric) for metric in aims.metrics]
        ranks = np.mean([np.argsort(np.argsort(gains, kind="stable")) for gains in each], axis=0)
        # All metrics keep the same trials where there are too many.
        kept = thin(ranks, self.options.process_points)
        points = np.asarray([scored[i].point for i in kept])
        features, pending = space.features(points), _features_of(space, _running(now.usable))
        drawn = [
            Drawn(
                self._fit(metric, features, gains[kept], space.feature_groups, space.bendable, scales=False),
                pending,
                now.draws + number,
            )
            for number, (metric, gains) in enumerate(zip(aims.metrics, each, strict=True))
        ]
        allowed = now.allowed([scored[i] for i in kept], pending)
        if allowed is None:
            allowed = np.ones(len(points) + len(pending), dtype=bool)
        front = non_dominated(np.stack([gains[kept] for gains in each], axis=1), ["max"] * len(each))
        centres = points[front][:10]
        pool = space.features(candidates(space, centres, 256, np.random.default_rng(now.draws)))
        return HypervolumeGain(drawn, allowed, now.chance, now.draws, pool), centres

    def _look_at_curves(self, now: _Situation) -> tuple[Belief, FloatArray]:
        """Return what is known from every report about the ends of trainings, and the best points."""
        space, usable = now.space, now.usable
        rows = rows_of(usable, self.horizon)
        gains = rows.values if now.aims.modes[0] == "max" else -rows.values
        points = _features_of(space, usable)
        features = np.concatenate([points[rows.trials], rows.times[:, None]], axis=1)
        groups = np.append(space.feature_groups, space.dimension)
        bendable = np.append(space.bendable, False)
        metric = now.aims.metrics[0]
        model = self._fit(metric, features, gains, groups, bendable, timed=True, task=now.earlier)
        live = _features_of(space, _running(usable))
        pending = np.concatenate([live, np.full((len(live), 1), rows.target)], axis=1)
        context = np.asarray([rows.target])
        allowed = now.allowed([usable[rows.trials[i]] for i in model.kept], live)
        posterior = Posterior(
            model,
            pending,
            now.chance,
            now.acquisition,
            now.draws,
            context,
            draw_results=False,
            allowed=allowed,
        )
        order = np.argsort(-now.within_first(usable, posterior.means(points)), kind="stable")[:5]
        return posterior, np.asarray([usable[i].point for i in order])

    def _fit(
        self,
        metric: str,
        features: FloatArray,
        gains: FloatArray,
        groups: NDArray[np.int_],
        bendable: NDArray[np.bool_],
        timed: bool = False,
        scales: bool = True,
        task: EarlierTask | None = None,
    ) -> FittedModel:
        options = self._options_with_scales if scales else self.options
        key = (features.tobytes(), gains.tobytes(), options)
        if metric not in self._fitted or self._fitted[metric][0] != key:
            model = FittedModel(
                features, gains, groups, options, bendable, self.fit_states.get(metric), timed, task=task
            )
            self._fitted[metric] = (key, model)
            if model.state is not None:
                self.fit_states[metric] = model.state
        return self._fitted[metric][1]


@dataclass(frozen=True)
class _Situation:
    """What a suggestion is made from: the trials that count, what is looked for and what may go wrong."""

    space: SearchSpace
    usable: list[Trial]
    aims: Aims
    #: The probability that a trial neither fails nor breaks a limit, and the second alone.
    chance: Chance | None
    within: Chance | None
    acquisition: AcquisitionFunction
    draws: int
    #: What an earlier experiment says, to be weighed against what is seen.
    earlier: EarlierTask | None = None

    def gains(self, trials: Sequence[Trial], metric: str) -> FloatArray:
        """Return the values of a metric, larger being better, shape (trials,)."""
        return np.asarray([self.aims.gain(trial, metric) for trial in trials], dtype=float)

    def allowed(self, trials: Sequence[Trial], pending: FloatArray) -> NDArray[np.bool_] | None:
        """Return which of these trials, and of the points in flight, keep the limits; None without limits.

        A point in flight does where that is more probable than not.
        """
        if self.within is None:
            return None
        results = np.asarray([self.aims.keeps_limits(trial) for trial in trials], dtype=bool)
        in_flight = self.within.log_probability(pending) > np.log(0.5) if len(pending) else results[:0]
        found = np.concatenate([results, in_flight])
        # With more results than a model takes, those that keep the limits may all be left out.
        return found if found.any() else None

    def within_first(self, trials: Sequence[Trial], gains: FloatArray) -> FloatArray:
        """Return `gains` with those that break a limit far behind all others."""
        if self.within is None:
            return gains
        allowed = np.asarray([self.aims.keeps_limits(trial) for trial in trials], dtype=bool)
        return np.where(allowed, gains, gains - 1e3 * (np.ptp(gains) + 1.0))


def _features_of(space: SearchSpace, trials: Sequence[Trial]) -> FloatArray:
    points = [trial.point for trial in trials]
    return space.features(np.asarray(points, dtype=float).reshape(len(points), space.dimension))


def _running(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.ending is Ending.RUNNING]


def _sorted_out(history: History, aims: Aims) -> tuple[list[Trial], list[Trial]]:
    """Return the trials that say something about the metrics, and those that failed or have diverged."""
    failed = history.with_ending(Ending.FAILED)
    others = [trial for trial in history.trials.values() if trial.ending is not Ending.FAILED]
    lost: set[int] = set()
    for metric in aims.metrics:
        gains = [aims.gain(trial, metric) for trial in others]
        known = [i for i, gain in enumerate(gains) if gain is not None and np.isfinite(gain)]
        beyond = diverged(-np.asarray([gains[i] for i in known], dtype=float))
        lost |= {known[i] for i in np.flatnonzero(beyond)}
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


def _leftover(space: SearchSpace, taken: Callable[[Point], bool], belief: Belief | None, seed: int) -> Point:
    """Return a free point of a space that is nearly used up, the most promising if there is a belief."""
    if space.size <= _ENUMERABLE:
        pool = np.asarray(list(space.every_point()))
    else:
        generator = np.random.default_rng(seed)
        pool = space.from_quantiles(generator.random((10_000, space.dimension)))
    free = [point for point in map(space.canonical, pool) if not taken(point)]
    if not free:
        raise RuntimeError(f"no free point found among the {space.size} of the search space")
    if belief is None:
        return free[0]
    return free[int(np.argmax(belief(space.features(np.asarray(free)))))]
