"""Chooses the next point from the search's history: a quasi-random start, then the model.

The choice depends only on the history, the seed and, with many results, the previous fit (which is saved with
the search). It does not depend on the clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from bayes_opt.acquisition import AcquisitionFunction
from numpy.typing import NDArray

from horovod_tune.analysis.scoring import non_dominated
from horovod_tune.search.curve_rows import axis, is_unfinished, rows_of, trials_with_open_end
from horovod_tune.search.earlier_experiment import EarlierModel
from horovod_tune.search.gp.acquisition import (
    Acquisition,
    Posterior,
    PosteriorDraws,
    averaged,
    decayed,
    is_scale_free,
)
from horovod_tune.search.gp.feasibility import FailureModel, Feasibility, joint, of_limit, slack
from horovod_tune.search.gp.fitted_model import SOFTNESSES, FitState, FittedModel, ModelOptions, thin
from horovod_tune.search.gp.hypervolume import HypervolumeGain
from horovod_tune.search.gp.kernels import with_context
from horovod_tune.search.history import Ending, History, Objectives, Trial, seed_for
from horovod_tune.search.proposal import candidates, propose, quasi_random_point, remaining_point
from horovod_tune.search.space.parameters import FloatArray
from horovod_tune.search.space.search_space import Point, SearchSpace

#: The number of quasi-random suggestions at the start, if trials report several times.
_CURVES_START = 4
#: Results to wait for before they are modelled together with an earlier experiment's. Until then the earlier
#: model and the quasi-random sequence take turns: comparing their results shows how far to trust that model.
_TRANSFER_START = 3
#: Expected final values are added to the model for at most this many unfinished trials, the most promising.
_MOST_EXPECTED = 200
#: With learning curves, expected improvement is averaged over 4 sets of the model's hyperparameters (the most
#: probable set, and draws) while the model has at most 150 rows; otherwise the most probable set is used.
_HYPERPARAMETERS, _AVERAGED_ROWS = 4, 150
#: At most this many results are in the earlier experiment's model, which is evaluated at every point.
_EARLIER_POINTS = 150


@dataclass(frozen=True)
class _SuggestState:
    """The input of one suggestion: the usable trials, the objectives, the probability of success."""

    space: SearchSpace
    usable: list[Trial]
    objectives: Objectives
    #: The probability that a trial neither fails nor breaks a limit.
    feasibility: Feasibility
    #: The probability that a trial breaks no limit; None without limits, and while too little is known.
    within_limits: Feasibility | None
    acquisition: AcquisitionFunction
    seed: int
    earlier: EarlierModel | None

    def features_of(self, trials: Sequence[Trial]) -> FloatArray:
        return self.space.features([trial.point for trial in trials])

    def in_state(self, ending: Ending) -> list[Trial]:
        return [trial for trial in self.usable if trial.ending is ending]

    def allowed(self, trials: Sequence[Trial], pending: FloatArray) -> NDArray[np.bool_]:
        """Return which of these trials, and of the points in flight, keep the limits; all if none does.

        A point in flight counts as keeping them if that is more probable than not.
        """
        if self.within_limits is None:
            return np.ones(len(trials) + len(pending), dtype=bool)
        results = self.objectives.keep_limits(trials)
        found = np.concatenate([results, self.within_limits(pending) > np.log(0.5)])
        # With more results than a model takes, those that keep the limits may all be left out.
        return found if found.any() else np.ones_like(found)

    def best(self, trials: Sequence[Trial], scores: FloatArray) -> FloatArray:
        """Return up to five points with the best scores; points that break a limit come after all others."""
        if self.within_limits is not None:
            allowed = self.objectives.keep_limits(trials)
            scores = np.where(allowed, scores, scores - 1e3 * (np.ptp(scores) + 1.0))
        return _best_five(trials, scores)


#: An acquisition, the number of rows in its model, and the points around which it may be largest.
_Modelled = tuple[Acquisition, int, FloatArray]


class Optimizer:
    """Chooses points; `random_search_steps` is that of `BayesOptSearch`."""

    def __init__(
        self, acquisition: AcquisitionFunction, options: ModelOptions, random_search_steps: int | None
    ) -> None:
        self.options = options
        #: The value of `time_attr` at which a full training ends, if known.
        self.horizon: float | None = None
        self._acquisition, self._steps = acquisition, random_search_steps
        self.learns_from_curves = False
        #: Where the next fit of each metric and limit starts; saved with the search.
        self.fit_states: dict[str, FitState] = {}

    def next_point(self, space: SearchSpace, history: History, seed: int, objectives: Objectives) -> Point:
        """Return the next point, one that has been suggested no more often than any other."""
        counts, rounds = history.counts, history.rounds(space.size)

        def taken(point: Point) -> bool:
            return counts[point] > rounds

        usable, failed = objectives.split_failed(history)
        by_curves = (
            len(objectives.metrics) == 1
            and is_scale_free(self._acquisition)
            and any(len(trial.curve) > 1 for trial in history.trials.values())
        )
        known = [trial for trial in usable if (trial.curve if by_curves else trial.ending is Ending.SCORED)]
        fewest = _CURVES_START if by_curves else min(max(space.dimension + 1, 4), 10)
        steps = self._steps if self._steps is not None else fewest
        safety = None
        if failed and space.dimension:
            good, bad = (space.features([trial.point for trial in trials]) for trials in (known, failed))
            safety = FailureModel(good, bad, space.feature_groups)
        earlier = self._earlier_model(space, history, objectives)
        asks_earlier = earlier is not None and len(known) < _TRANSFER_START
        begins = len(history.trials) < steps or (len(known) < 2 and not asks_earlier) or space.dimension == 0
        if earlier is not None and self._steps is None:
            begins = asks_earlier and len(history.trials) % 2 == 1
        if begins:
            # The last point of the start is the middle of the space, which is usually nearer to the best
            # point than most points are. It is left out with curves, where the start has few points: with few
            # points, the middle can make a parameter look unimportant if its best value is there.
            middle = not by_curves and len(history.trials) == steps - 1
            start = quasi_random_point(space, history, seed, taken, safety, middle)
            return start if start is not None else remaining_point(space, taken, None, seed)
        self.learns_from_curves = by_curves
        within_limits = self._within_limits(space, usable, objectives)
        state = _SuggestState(
            space,
            usable,
            objectives,
            joint([each for each in (safety, within_limits) if each is not None]),
            within_limits,
            decayed(self._acquisition, len(history.trials)),
            seed_for(seed, history, "draws"),
            earlier,
        )
        if asks_earlier and earlier is not None:
            modelled = self._model_earlier(state, earlier, history.earlier)
        elif within_limits is not None and not objectives.keep_limits(known).any():
            modelled = state.feasibility, len(known), np.empty((0, space.dimension))
        elif by_curves:
            modelled = self._model_curves(state)
        elif len(objectives.metrics) == 1:
            modelled = self._model_final(state)
        else:
            modelled = self._model_pareto(state)
        acquisition, rows, centres = modelled
        found = propose(acquisition, rows, space, centres, taken, seed_for(seed, history, "proposal"))
        return found if found is not None else remaining_point(space, taken, acquisition, seed)

    def _earlier_model(
        self, space: SearchSpace, history: History, objectives: Objectives
    ) -> EarlierModel | None:
        """Return a model of the earlier experiment; None if there is none, or it cannot be modelled.

        Trials that ended at different times are modelled as learning curves.
        """
        trials, metric = history.earlier, objectives.metrics[0]
        if len(trials) < 2 or space.dimension == 0 or len(objectives.metrics) > 1:
            return None
        features = space.features([trial.point for trial in trials])
        scores = objectives.scores(trials, metric)
        context = np.empty(0)
        timed = len({time for trial in trials for time in trial.curve}) > 1
        if timed:
            rows = rows_of(trials, self.horizon)
            context = np.asarray([rows.target])
            features, scores = np.column_stack([features[rows.trials], rows.times]), scores[rows.trials]
        options = replace(self._options_with_scales, process_points=_EARLIER_POINTS)
        return EarlierModel(self._fit(f"earlier {metric}", features, scores, space, options, timed), context)

    @property
    def _options_with_scales(self) -> ModelOptions:
        """The model's options; warped scales of the scores are tried as well if the acquisition allows it."""
        if is_scale_free(self._acquisition):
            return replace(self.options, softnesses=SOFTNESSES)
        return self.options

    def _model_earlier(self, state: _SuggestState, earlier: EarlierModel, trials: list[Trial]) -> _Modelled:
        """Model only the earlier experiment's `trials`."""
        model, context = earlier.model, earlier.context
        pending = with_context(state.features_of(state.usable), context)
        acquisition = Posterior(model, pending, state.feasibility, state.acquisition, state.seed, context)
        rows = len(model.features) + len(pending)
        return acquisition, rows, _best_five(trials, earlier(state.features_of(trials)))

    def _model_final(self, state: _SuggestState) -> _Modelled:
        """Model the trials' last results."""
        scored, metric = state.in_state(Ending.SCORED), state.objectives.metrics[0]
        scores, features = state.objectives.scores(scored, metric), state.features_of(scored)
        options = self._options_with_scales
        model = self._fit(metric, features, scores, state.space, options, task=state.earlier)
        pending = state.features_of(state.in_state(Ending.RUNNING))
        allowed = state.allowed([scored[i] for i in model.kept], pending)
        feasibility, seed = state.feasibility, state.seed
        acquisition = Posterior(model, pending, feasibility, state.acquisition, seed, allowed=allowed)
        return acquisition, len(model.features) + len(pending), state.best(scored, scores)

    def _model_pareto(self, state: _SuggestState) -> _Modelled:
        """Model several metrics; the points are up to ten of the Pareto front."""
        space, objectives = state.space, state.objectives
        scored = state.in_state(Ending.SCORED)
        each = [objectives.scores(scored, metric) for metric in objectives.metrics]
        ranks = np.mean([np.argsort(np.argsort(scores, kind="stable")) for scores in each], axis=0)
        # If there are too many trials, all metrics keep the same ones.
        kept = thin(ranks, self.options.process_points)
        points = np.asarray([scored[i].point for i in kept])
        features, pending = space.features(points), state.features_of(state.in_state(Ending.RUNNING))
        models = [
            self._fit(metric, features, scores[kept], space, self.options)
            for metric, scores in zip(objectives.metrics, each, strict=True)
        ]
        drawn = [PosteriorDraws(model, pending, state.seed + n) for n, model in enumerate(models)]
        allowed = state.allowed([scored[i] for i in kept], pending)
        front = non_dominated(np.stack([scores[kept] for scores in each], axis=1), ["max"] * len(each))
        centres = points[front][:10]
        pool = space.features(candidates(space, centres, 256, np.random.default_rng(state.seed)))
        gain = HypervolumeGain(drawn, allowed, state.feasibility, state.seed, pool)
        return gain, len(features) + len(pending), centres

    def _model_curves(self, state: _SuggestState) -> _Modelled:
        """Model the learning curves, for the results of full trainings."""
        space, usable = state.space, state.usable
        rows = rows_of(usable, self.horizon)
        context = np.asarray([rows.target])
        points = state.features_of(usable)
        gains = rows.values if state.objectives.modes[0] == "max" else -rows.values
        model = self._fit(
            state.objectives.metrics[0],
            np.column_stack([points[rows.trials], rows.times]),
            gains,
            space,
            self._options_with_scales,
            timed=True,
            task=state.earlier,
        )

        def ends_of(trials: Sequence[Trial]) -> FloatArray:
            return with_context(state.features_of(trials), context)

        # Most unfinished trials wait at a rung or were stopped there. The model gets their expected final
        # values instead of draws: if the final value of a stopped trial stayed uncertain, the search would
        # keep suggesting similar trials.
        begun = [trial for trial in usable if is_unfinished(trial, rows.target)]
        ends = model.condition().predict(ends_of(begun))[0][:, 0]
        begun = [begun[i] for i in np.sort(np.argsort(-ends, kind="stable")[:_MOST_EXPECTED])]
        silent = [trial for trial in state.in_state(Ending.RUNNING) if max(trial.curve, default=0.0) <= 0]
        pending = ends_of(begun + silent)
        # Trials are compared by predicted final values, since a curve may get worse later. If too few others
        # have trained for longer to tell whether that happens, a trial's latest report counts too.
        reported = [usable[i] for i in sorted(set(rows.trials))]
        ahead = trials_with_open_end(reported, rows.target, state.objectives.modes[0])
        latest = np.column_stack([state.features_of(ahead), [axis(max(trial.curve)) for trial in ahead]])
        rivals = np.concatenate([latest, ends_of(reported + silent)])
        allowed = state.allowed(ahead + reported, state.features_of(silent))
        number = len(model.features) + len(pending)
        models = model.drawn(_HYPERPARAMETERS if number <= _AVERAGED_ROWS else 1, state.seed)
        posteriors = [
            Posterior(
                each,
                pending,
                state.feasibility,
                state.acquisition,
                state.seed + index,
                context,
                expected=len(begun),
                allowed=allowed,
                rivals=rivals,
            )
            for index, each in enumerate(models)
        ]
        means = np.mean([each.means(points) for each in posteriors], axis=0)
        return averaged(posteriors), number, state.best(usable, means)

    def _within_limits(
        self, space: SearchSpace, trials: Sequence[Trial], objectives: Objectives
    ) -> Feasibility | None:
        """Return the probability that all limits are kept; None if no limit has two known values."""
        # The values are scaled by `slack` below: the limit is at 0 and outliers are compressed.
        options = replace(self.options, fixed_noise=None, linear_depth=math.inf)
        feasibilities = []
        for limit in objectives.limits:
            reported = [(trial.point, objectives.latest(trial, limit.metric)) for trial in trials]
            known = [
                (point, value) for point, value in reported if value is not None and math.isfinite(value)
            ]
            if len(known) < 2:
                continue
            points, values = map(np.asarray, zip(*known, strict=True))
            left = slack(values, limit.bound, upwards=limit.sense.startswith(">"))
            feasibilities.append(
                of_limit(self._fit(str(limit), space.features(points), left, space, options))
            )
        return joint(feasibilities) if feasibilities else None

    def _fit(
        self,
        name: str,
        features: FloatArray,
        scores: FloatArray,
        space: SearchSpace,
        options: ModelOptions,
        timed: bool = False,
        task: EarlierModel | None = None,
    ) -> FittedModel:
        """Return the model of a metric or a limit; if `timed`, the last feature is the time."""
        groups, powers = space.feature_groups, space.powers
        if timed:
            groups, powers = np.append(groups, space.dimension), np.append(powers, 0.0)
        earlier = self.fit_states.get(name)
        model = FittedModel(features, scores, groups, options, powers, earlier, timed, task)
        self.fit_states[name] = model.state
        return model


def _best_five(trials: Sequence[Trial], scores: FloatArray) -> FloatArray:
    points = np.asarray([trial.point for trial in trials])
    return points[np.argsort(-scores, kind="stable")[:5]]
