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
from horovod_tune.search.gp.acquisition import decayed, is_scale_free
from horovod_tune.search.gp.feasibility import (
    FailureModel,
    Feasibility,
    JointFeasibility,
    LimitFeasibility,
    slack,
)
from horovod_tune.search.gp.fitted_model import FitState, FittedModel, ModelOptions, thin
from horovod_tune.search.gp.hypervolume import HypervolumeGain
from horovod_tune.search.gp.output_scales import SOFTNESSES
from horovod_tune.search.gp.posterior import AveragedAcquisition, Posterior, PosteriorDraws
from horovod_tune.search.gp.proposal import Acquisition, candidates, propose
from horovod_tune.search.history import Ending, History, Trial, seed_for
from horovod_tune.search.initial_design import quasi_random_point, remaining_point
from horovod_tune.search.objectives import Objectives
from horovod_tune.search.space.parameters import FloatArray
from horovod_tune.search.space.search_space import Point, SearchSpace

#: The number of quasi-random suggestions at the start, if trials report several times: a curve says more than
#: a single result.
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
class SuggestState:
    """The input of one suggestion: the usable trials, the objectives, the probability of success."""

    space: SearchSpace
    usable: list[Trial]
    objectives: Objectives
    #: The probability that a trial neither fails nor breaks a limit; None while no trial has
    #: failed and `within_limits` is None.
    feasibility: JointFeasibility | None
    #: The probability that a trial breaks no limit; None without limits, and while too little is known.
    within_limits: Feasibility | None
    acquisition: AcquisitionFunction
    draws: int
    earlier: EarlierModel | None

    def features_of(self, trials: Sequence[Trial]) -> FloatArray:
        return self.space.features([trial.point for trial in trials])

    def in_state(self, ending: Ending) -> list[Trial]:
        return [trial for trial in self.usable if trial.ending is ending]

    def scores(self, trials: Sequence[Trial], metric: str) -> FloatArray:
        """Return the values of a metric, larger being better, shape (trials,)."""
        return np.asarray([self.objectives.score(trial, metric) for trial in trials], dtype=float)

    def allowed(self, trials: Sequence[Trial], pending: FloatArray) -> NDArray[np.bool_] | None:
        """Return which of these trials, and of the points in flight, keep the limits.

        A point in flight counts as keeping them if that is more probable than not. Return None if
        `within_limits` is None, or if no trial or point keeps the limits.
        """
        if self.within_limits is None:
            return None
        results = np.asarray([self.objectives.keeps_limits(trial) for trial in trials], dtype=bool)
        found = np.concatenate([results, self.within_limits(pending) > np.log(0.5)])
        # With more results than a model takes, those that keep the limits may all be left out.
        return found if found.any() else None

    def best(self, trials: Sequence[Trial], scores: FloatArray) -> FloatArray:
        """Return up to five points with the best scores; points that break a limit come after all others."""
        if self.within_limits is not None:
            allowed = np.asarray([self.objectives.keeps_limits(trial) for trial in trials], dtype=bool)
            scores = np.where(allowed, scores, scores - 1e3 * (np.ptp(scores) + 1.0))
        points = np.asarray([trial.point for trial in trials])
        return points[np.argsort(-scores, kind="stable")[:5]]


class Optimizer:
    """Chooses points.

    If `random_search_steps` is None, it is one more than the number of parameters (at least 4, at most
    10), or 4 if the search learns from curves. With an earlier experiment, see `_TRANSFER_START`.
    """

    def __init__(
        self,
        acquisition: AcquisitionFunction,
        options: ModelOptions,
        random_search_steps: int | None,
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
        rounds = history.rounds(space.size)

        def taken(point: Point) -> bool:
            return history.counts[point] > rounds

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
        if failed:
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
        feasibilities = [each for each in (safety, within_limits) if each is not None]
        state = SuggestState(
            space,
            usable,
            objectives,
            JointFeasibility(feasibilities, len(known)) if feasibilities else None,
            within_limits,
            decayed(self._acquisition, len(history.trials)),
            seed_for(seed, history, "draws"),
            earlier,
        )
        acquisition: Acquisition
        centres: FloatArray = np.empty((0, space.dimension))
        if asks_earlier and earlier is not None:
            acquisition = Posterior(
                earlier.model,
                earlier.in_context(state.features_of(usable)),
                state.feasibility,
                state.acquisition,
                state.draws,
                earlier.context,
                draw_results=not len(earlier.context),
            )
            points = np.asarray([trial.point for trial in history.earlier])
            centres = points[np.argsort(-earlier(space.features(points)), kind="stable")[:5]]
        elif state.feasibility is not None and within_limits and not any(map(objectives.keeps_limits, known)):
            acquisition = state.feasibility
        elif by_curves:
            acquisition, centres = self._model_curves(state)
        elif len(objectives.metrics) == 1:
            acquisition, centres = self._model_final(state)
        else:
            acquisition, centres = self._model_pareto(state)
        found = propose(acquisition, space, centres, taken, seed_for(seed, history, "proposal"))
        return found if found is not None else remaining_point(space, taken, acquisition, seed)

    def _earlier_model(
        self, space: SearchSpace, history: History, objectives: Objectives
    ) -> EarlierModel | None:
        """Return a model of the earlier experiment; None if there is none, or it cannot be modelled.

        If its trials ended at different times, they are modelled as learning curves, and the model is
        evaluated at the horizon.
        """
        trials, metric = history.earlier, objectives.metrics[0]
        if len(trials) < 2 or space.dimension == 0 or len(objectives.metrics) > 1:
            return None
        features = space.features([trial.point for trial in trials])
        scores = np.asarray([objectives.score(trial, metric) for trial in trials], dtype=float)
        context = np.empty(0)
        timed = len({time for trial in trials for time in trial.curve}) > 1
        if timed:
            rows = rows_of(trials, self.horizon)
            context = np.asarray([rows.target])
            features, scores = np.column_stack([features[rows.trials], rows.times]), scores[rows.trials]
        options = replace(self._options_with_scales, process_points=_EARLIER_POINTS)
        model = self._fit(f"earlier {metric}", features, scores, space, options, timed)
        return EarlierModel(model, model.condition(), context)

    @property
    def _options_with_scales(self) -> ModelOptions:
        """The model's options; warped scales of the scores are tried as well if the acquisition allows it."""
        if is_scale_free(self._acquisition):
            return replace(self.options, softnesses=SOFTNESSES)
        return self.options

    def _model_final(self, state: SuggestState) -> tuple[Acquisition, FloatArray]:
        """Return two things: the acquisition, from the trials' last results, and the best points."""
        scored, metric = state.in_state(Ending.SCORED), state.objectives.metrics[0]
        scores, features = state.scores(scored, metric), state.features_of(scored)
        options = self._options_with_scales
        model = self._fit(metric, features, scores, state.space, options, task=state.earlier)
        pending = state.features_of(state.in_state(Ending.RUNNING))
        allowed = state.allowed([scored[i] for i in model.kept], pending)
        acquisition = Posterior(
            model, pending, state.feasibility, state.acquisition, state.draws, allowed=allowed
        )
        return acquisition, state.best(scored, scores)

    def _model_pareto(self, state: SuggestState) -> tuple[Acquisition, FloatArray]:
        """Return the acquisition for several metrics, and up to ten points of the Pareto front."""
        space, objectives = state.space, state.objectives
        scored = state.in_state(Ending.SCORED)
        each = [state.scores(scored, metric) for metric in objectives.metrics]
        ranks = np.mean([np.argsort(np.argsort(scores, kind="stable")) for scores in each], axis=0)
        # If there are too many trials, all metrics keep the same ones.
        kept = thin(ranks, self.options.process_points)
        points = np.asarray([scored[i].point for i in kept])
        features, pending = space.features(points), state.features_of(state.in_state(Ending.RUNNING))
        drawn = [
            PosteriorDraws(
                self._fit(metric, features, scores[kept], space, self.options),
                pending,
                state.draws + number,
            )
            for number, (metric, scores) in enumerate(zip(objectives.metrics, each, strict=True))
        ]
        allowed = state.allowed([scored[i] for i in kept], pending)
        if allowed is None:
            allowed = np.ones(len(points) + len(pending), dtype=bool)
        front = non_dominated(np.stack([scores[kept] for scores in each], axis=1), ["max"] * len(each))
        centres = points[front][:10]
        pool = space.features(candidates(space, centres, 256, np.random.default_rng(state.draws)))
        return HypervolumeGain(drawn, allowed, state.feasibility, state.draws, pool), centres

    def _model_curves(self, state: SuggestState) -> tuple[Acquisition, FloatArray]:
        """Return two things: the acquisition for full trainings, from the curves, and the best points."""
        space, usable = state.space, state.usable
        rows = rows_of(usable, self.horizon)
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
        # Most unfinished trials wait at a rung or were stopped there. The model gets their expected final
        # values instead of draws: if the final value of a stopped trial stayed uncertain, the search would
        # keep suggesting similar trials.
        begun = [trial for trial in usable if is_unfinished(trial, rows.target)]
        ends = model.condition().predict(_at(rows.target, state.features_of(begun)))[0][:, 0]
        begun = [begun[i] for i in np.sort(np.argsort(-ends, kind="stable")[:_MOST_EXPECTED])]
        silent = [trial for trial in state.in_state(Ending.RUNNING) if max(trial.curve, default=0.0) <= 0]
        pending = _at(rows.target, state.features_of(begun + silent))
        context = np.asarray([rows.target])
        # Trials are compared by predicted final values, since a curve may get worse later. If too few others
        # have trained for longer to tell whether that happens, a trial's latest report counts too.
        reported = [usable[i] for i in sorted(set(rows.trials))]
        ahead = trials_with_open_end(reported, rows.target, state.objectives.modes[0])
        rivals = np.concatenate(
            [
                np.column_stack([state.features_of(ahead), [axis(max(trial.curve)) for trial in ahead]]),
                _at(rows.target, state.features_of(reported + silent)),
            ]
        )
        allowed = state.allowed(ahead + reported, state.features_of(silent))
        few = len(model.features) + len(pending) <= _AVERAGED_ROWS
        posterior = AveragedAcquisition(
            [
                Posterior(
                    each,
                    pending,
                    state.feasibility,
                    state.acquisition,
                    state.draws + number,
                    context,
                    draw_results=False,
                    expected=len(begun),
                    allowed=allowed,
                    rivals=rivals,
                )
                for number, each in enumerate(model.drawn(_HYPERPARAMETERS if few else 1, state.draws))
            ]
        )
        return posterior, state.best(usable, posterior.means(points))

    def _within_limits(
        self, space: SearchSpace, trials: Sequence[Trial], objectives: Objectives
    ) -> JointFeasibility | None:
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
            features = space.features(np.asarray([point for point, _ in known]))
            values = np.asarray([value for _, value in known])
            left = slack(values, limit.bound, upwards=limit.sense.startswith(">"))
            feasibilities.append(LimitFeasibility(self._fit(str(limit), features, left, space, options)))
        return JointFeasibility(feasibilities, len(trials)) if feasibilities else None

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


def _at(time: float, features: FloatArray) -> FloatArray:
    """Return `features`, shape (points, features), with one more: the time, on the model's axis."""
    return np.concatenate([features, np.full((len(features), 1), time)], axis=1)
