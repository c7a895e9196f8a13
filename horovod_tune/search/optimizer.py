"""Chooses the next point from the search's history: a quasi-random start, then the model.

The choice is a function of the history, the seed and, with many results, the fit before, which a saved search
keeps: not of the clock, or of the order in which trials ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from bayes_opt.acquisition import AcquisitionFunction

from horovod_tune.analysis.scoring import non_dominated
from horovod_tune.search.curve_rows import axis, has_curves, is_unfinished, rows_of, trials_with_open_end
from horovod_tune.search.earlier_experiment import EarlierExperiment
from horovod_tune.search.gp.acquisition import decayed, is_scale_free
from horovod_tune.search.gp.earlier_task import EarlierTask
from horovod_tune.search.gp.feasibility import (
    Feasibility,
    FeasibilityOnly,
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
from horovod_tune.search.initial_design import failure_model_of, quasi_random_point, remaining_point
from horovod_tune.search.objectives import Objectives
from horovod_tune.search.space.dimensions import FloatArray
from horovod_tune.search.space.search_space import Point, SearchSpace
from horovod_tune.search.suggest_state import SuggestState, features_of, running, split_failed

#: Suggestions of the quasi-random start if trials report several times: a curve has more information.
_CURVES_START = 4
#: Results to wait for before they are modelled together with an earlier experiment's. Until then its model
#: and the quasi-random sequence suggest in turns: the difference shows how far it can be trusted.
_TRANSFER_START = 3
#: Unfinished trials whose expected ends are added to the model, the most promising ones: each is a row more.
_MOST_EXPECTED = 200
#: Hyperparameters that expected improvement is averaged over, the most probable ones and draws, and the most
#: rows of the model with which it is; with more only the most probable ones are used.
_HYPERPARAMETERS, _AVERAGED_ROWS = 4, 150


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
        #: Where the next fit of each metric and limit starts; a part of a saved search.
        self.fit_states: dict[str, FitState] = {}
        self._earlier: tuple[object, EarlierExperiment] | None = None

    def next_point(self, space: SearchSpace, history: History, seed: int, objectives: Objectives) -> Point:
        """Return the next point, one that has been suggested no more often than any other."""
        rounds = history.rounds(space.size)

        def taken(point: Point) -> bool:
            return history.counts[point] > rounds

        usable, failed = split_failed(history, objectives)
        scored = [trial for trial in usable if trial.ending is Ending.SCORED]
        by_curves = self._uses_learning_curves(history, objectives)
        known = [trial for trial in usable if trial.curve] if by_curves else scored
        fewest = _CURVES_START if by_curves else min(max(space.dimension + 1, 4), 10)
        steps = self._steps if self._steps is not None else fewest
        safety = failure_model_of(space, failed, known)
        earlier = self._transfer_prior(space, history, objectives)
        begins, asks_earlier = len(history.trials) < steps or len(known) < 2 or space.dimension == 0, False
        if earlier is not None and self._steps is None:
            begins = len(known) < _TRANSFER_START and len(history.trials) % 2 == 1
            asks_earlier = len(known) < _TRANSFER_START and not begins
        if begins:
            # The best is nearer to the middle than to most points. Curves begin with fewer points: the model
            # would then take a parameter whose best value is in the middle for an unimportant one.
            middle = not by_curves and len(history.trials) == steps - 1
            start = quasi_random_point(space, history, seed, taken, safety, middle)
            return start if start is not None else remaining_point(space, taken, None, seed)
        self.learns_from_curves = by_curves
        within_limits = self._within_limits(space, usable, objectives)
        feasibilities: list[Feasibility] = [
            feasibility for feasibility in (safety, within_limits) if feasibility is not None
        ]
        state = SuggestState(
            space,
            usable,
            objectives,
            JointFeasibility(feasibilities) if feasibilities else None,
            within_limits,
            decayed(self._acquisition, len(history.trials)),
            seed_for(seed, history, "draws"),
            None if earlier is None else earlier.task,
        )
        if asks_earlier:
            assert earlier is not None
            tried = features_of(space, usable)
            acquisition: Acquisition = earlier.as_acquisition(
                tried, state.feasibility, state.acquisition, state.draws
            )
            centres: FloatArray = earlier.best
        elif within_limits is not None and not any(objectives.keeps_limits(trial) for trial in known):
            acquisition = FeasibilityOnly(JointFeasibility(feasibilities), len(known))
            centres = np.empty((0, space.dimension))
        elif by_curves:
            acquisition, centres = self._model_curves(state)
        elif len(objectives.metrics) == 1:
            acquisition, centres = self._model_final(state)
        else:
            acquisition, centres = self._model_pareto(state)
        found = propose(acquisition, space, centres, taken, seed_for(seed, history, "proposal"))
        return found if found is not None else remaining_point(space, taken, acquisition, seed)

    def _transfer_prior(
        self, space: SearchSpace, history: History, objectives: Objectives
    ) -> EarlierExperiment | None:
        """Return the earlier experiment that the search begins with, if there is one."""
        if len(history.earlier) < 2 or space.dimension == 0 or len(objectives.metrics) > 1:
            return None
        key = [(trial.point, trial.value) for trial in history.earlier]
        if self._earlier is None or self._earlier[0] != key:
            found = EarlierExperiment(
                space, history.earlier, objectives, self.horizon, self._options_with_scales
            )
            self._earlier = (key, found)
        return self._earlier[1]

    @property
    def _options_with_scales(self) -> ModelOptions:
        """The model's options, with warped scales where the acquisition function allows them."""
        if is_scale_free(self._acquisition):
            return replace(self.options, softnesses=SOFTNESSES)
        return self.options

    def _model_final(self, state: SuggestState) -> tuple[Acquisition, FloatArray]:
        """Return what is known from the trials' last results, and the best points."""
        scored = [trial for trial in state.usable if trial.ending is Ending.SCORED]
        scores = state.scores(scored, state.objectives.metrics[0])
        points = np.asarray([trial.point for trial in scored])
        model = self._fit(
            state.objectives.metrics[0],
            state.space.features(points),
            scores,
            state.space,
            self._options_with_scales,
            task=state.earlier,
        )
        pending = features_of(state.space, running(state.usable))
        allowed = state.allowed([scored[i] for i in model.kept], pending)
        acquisition = Posterior(
            model, pending, state.feasibility, state.acquisition, state.draws, allowed=allowed
        )
        return acquisition, points[np.argsort(-state.within_first(scored, scores), kind="stable")[:5]]

    def _model_pareto(self, state: SuggestState) -> tuple[Acquisition, FloatArray]:
        """Return the acquisition for several metrics, and the points that are good in one of them."""
        space, objectives = state.space, state.objectives
        scored = [trial for trial in state.usable if trial.ending is Ending.SCORED]
        each = [state.scores(scored, metric) for metric in objectives.metrics]
        ranks = np.mean([np.argsort(np.argsort(scores, kind="stable")) for scores in each], axis=0)
        # All metrics keep the same trials where there are too many.
        kept = thin(ranks, self.options.process_points)
        points = np.asarray([scored[i].point for i in kept])
        features, pending = space.features(points), features_of(space, running(state.usable))
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
        """Return what is known from every report about the ends of trainings, and the best points."""
        space, usable = state.space, state.usable
        rows = rows_of(usable, self.horizon)
        points = features_of(space, usable)
        metric = state.objectives.metrics[0]
        gains = rows.values if state.objectives.modes[0] == "max" else -rows.values
        model = self._fit(
            metric,
            np.concatenate([points[rows.trials], rows.times[:, None]], axis=1),
            gains,
            space,
            self._options_with_scales,
            timed=True,
            task=state.earlier,
        )
        # Of those that have reported, most wait at a rung or were stopped there: what is expected of them is
        # enough. As long as the end of a stopped trial is open, the search keeps suggesting others like it.
        begun = [trial for trial in usable if is_unfinished(trial, rows.target)]
        ends = model.condition().predict(_at(rows.target, features_of(space, begun)))[0][:, 0]
        begun = [begun[i] for i in np.sort(np.argsort(-ends, kind="stable")[:_MOST_EXPECTED])]
        silent = [trial for trial in running(usable) if max(trial.curve, default=0.0) <= 0]
        live = features_of(space, begun + silent)
        pending = _at(rows.target, live)
        context = np.asarray([rows.target])
        # Ends are compared with ends: a good report before a curve got worse is not a fair value to beat.
        # While it is open whether curves get worse, the latest reports count as well.
        reported = [usable[i] for i in sorted(set(rows.trials))]
        ahead = trials_with_open_end(reported, rows.target, state.objectives.modes[0])
        rivals = np.concatenate(
            [
                np.column_stack([features_of(space, ahead), [axis(max(trial.curve)) for trial in ahead]]),
                _at(rows.target, features_of(space, reported + silent)),
            ]
        )
        allowed = state.allowed(ahead + reported, features_of(space, silent))
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
        order = np.argsort(-state.within_first(usable, posterior.means(points)), kind="stable")[:5]
        return posterior, np.asarray([usable[i].point for i in order])

    def _uses_learning_curves(self, history: History, objectives: Objectives) -> bool:
        return (
            len(objectives.metrics) == 1
            and is_scale_free(self._acquisition)
            and has_curves(history.trials.values())
        )

    def _within_limits(
        self, space: SearchSpace, trials: Sequence[Trial], objectives: Objectives
    ) -> JointFeasibility | None:
        """Return the probability that all limits are kept; None if too little is known about each."""
        # The scale has the limit at 0.
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
        return JointFeasibility(feasibilities) if feasibilities else None

    def _fit(
        self,
        name: str,
        features: FloatArray,
        scores: FloatArray,
        space: SearchSpace,
        options: ModelOptions,
        timed: bool = False,
        task: EarlierTask | None = None,
    ) -> FittedModel:
        """Return the model of a metric or a limit; if `timed`, the last feature is the time."""
        key = (features.tobytes(), scores.tobytes(), options)
        if name not in self._fitted or self._fitted[name][0] != key:
            groups, powers = space.feature_groups, space.powers
            if timed:
                groups, powers = np.append(groups, space.dimension), np.append(powers, 0.0)
            earlier = self.fit_states.get(name)
            model = FittedModel(features, scores, groups, options, powers, earlier, timed, task)
            self._fitted[name], self.fit_states[name] = (key, model), model.state
        return self._fitted[name][1]


def _at(time: float, features: FloatArray) -> FloatArray:
    """Return `features`, shape (points, features), with one more: the time, on the model's axis."""
    return np.concatenate([features, np.full((len(features), 1), time)], axis=1)
