"""Chooses the next point from the search's history: a quasi-random start, then the model.

The choice depends only on the history, the seed and, with many results, the previous fit (which is saved with
the search). It does not depend on the clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from bayes_opt.acquisition import AcquisitionFunction
from numpy.typing import NDArray

from horovod_tune.scoring import non_dominated
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
from horovod_tune.search.proposal import (
    candidates,
    in_another_option,
    propose,
    quasi_random_point,
    remaining_point,
)
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


#: An acquisition, the number of rows in its model, and the points around which it may be largest.
_Modelled = tuple[Acquisition, int, FloatArray]


@dataclass
class Optimizer:
    """Chooses points; `steps` is the `random_search_steps` of `BayesOptSearch`."""

    acquisition: AcquisitionFunction
    options: ModelOptions
    steps: int | None
    #: The value of `time_attr` at which a full training ends, if known.
    horizon: float | None = None
    learns_from_curves: bool = False
    #: Where the next fit of each metric and limit starts; saved with the search.
    fit_states: dict[str, FitState] = field(default_factory=dict)

    def next_point(self, space: SearchSpace, history: History, seed: int, objectives: Objectives) -> Point:
        """Return the next point, one that has been suggested no more often than any other."""
        return _Suggestion(self, space, history, seed, objectives).point()


class _Suggestion:
    """One suggestion; the methods `_model_...` return an acquisition, one for each kind of search."""

    def __init__(
        self, optimizer: Optimizer, space: SearchSpace, history: History, seed: int, objectives: Objectives
    ) -> None:
        self._optimizer, self._space, self._history = optimizer, space, history
        self._seed, self._draws_seed = seed, seed_for(seed, history, "draws")
        self._objectives, self._metric = objectives, objectives.metrics[0]
        self._usable, self._failed = objectives.split_failed(history)
        self._acquisition = decayed(optimizer.acquisition, len(history.trials))
        self._may_warp = is_scale_free(optimizer.acquisition)
        #: The model's options; warped scales of the scores are tried as well if the acquisition allows it.
        self._options = optimizer.options
        if self._may_warp:
            self._options = replace(self._options, softnesses=SOFTNESSES)
        self._earlier = self._earlier_model()
        #: The probability that a trial breaks no limit; None without limits, and while too little is known.
        self._within_limits: Feasibility | None = None
        #: The probability that a trial neither fails nor breaks a limit.
        self._feasibility = joint([])

    def point(self) -> Point:
        space, history, seed = self._space, self._history, self._seed
        counts, rounds = history.counts, history.rounds(space.size)

        def taken(point: Point) -> bool:
            return counts[point] > rounds

        by_curves = (
            len(self._objectives.metrics) == 1
            and self._may_warp
            and any(len(trial.curve) > 1 for trial in history.trials.values())
        )
        scored = [t for t in self._usable if (t.curve if by_curves else t.ending is Ending.SCORED)]
        safety = None
        if self._failed and space.dimension:
            safety = FailureModel(
                self._features_of(scored), self._features_of(self._failed), space.feature_groups
            )
        given = self._optimizer.steps
        fewest = _CURVES_START if by_curves else min(max(space.dimension + 1, 4), 10)
        steps = fewest if given is None else given
        asks_earlier = self._earlier is not None and len(scored) < _TRANSFER_START
        begins = len(history.trials) < steps or (len(scored) < 2 and not asks_earlier) or space.dimension == 0
        if self._earlier is not None and given is None:
            begins = asks_earlier and len(history.trials) % 2 == 1
        if begins:
            # The last point of the start is the middle of the space, which is usually nearer to the best
            # point than most points are. It is left out with curves, where the start has few points: with few
            # points, the middle can make a parameter look unimportant if its best value is there.
            middle = not by_curves and len(history.trials) == steps - 1
            start = quasi_random_point(space, history, seed, taken, safety, middle)
            return start if start is not None else remaining_point(space, taken, None, seed)
        self._optimizer.learns_from_curves = by_curves
        self._within_limits = self._model_limits()
        self._feasibility = joint([each for each in (safety, self._within_limits) if each is not None])
        if self._earlier is not None and asks_earlier:
            modelled = self._model_earlier(self._earlier)
        elif self._within_limits is not None and not self._objectives.keep_limits(scored).any():
            modelled = self._feasibility, len(scored), np.empty((0, space.dimension))
        elif by_curves:
            modelled = self._model_curves()
        elif len(self._objectives.metrics) == 1:
            modelled = self._model_final()
        else:
            modelled = self._model_pareto()
        acquisition, rows, centres = modelled
        proposed = propose(acquisition, rows, space, centres, taken, seed_for(seed, history, "proposal"))
        return proposed if proposed is not None else remaining_point(space, taken, acquisition, seed)

    def _earlier_model(self) -> EarlierModel | None:
        """Return a model of the earlier experiment; None if there is none, or it cannot be modelled.

        Trials that ended at different times are modelled as learning curves.
        """
        trials = [trial for trial in self._history.earlier if trial.ending is Ending.SCORED]
        if len(trials) < 2 or self._space.dimension == 0 or len(self._objectives.metrics) > 1:
            return None
        features = self._features_of(trials)
        scores = self._objectives.scores(trials, self._metric)
        context = np.empty(0)
        timed = len({time for trial in trials for time in trial.curve}) > 1
        if timed:
            rows = rows_of(trials, self._optimizer.horizon)
            context = np.asarray([rows.target])
            features, scores = np.column_stack([features[rows.trials], rows.times]), scores[rows.trials]
        options = replace(self._options, process_points=_EARLIER_POINTS)
        return EarlierModel(self._fit(f"earlier {self._metric}", features, scores, options, timed), context)

    def _model_earlier(self, earlier: EarlierModel) -> _Modelled:
        """Model only the earlier experiment's trials."""
        model, context, trials = earlier.model, earlier.context, self._history.earlier
        pending = with_context(self._features_of(self._usable), context)
        feasibility, failed = self._feasibility, [t for t in trials if t.ending is Ending.FAILED]
        trials = [trial for trial in trials if trial.ending is Ending.SCORED]
        if failed:
            succeeded, groups = self._features_of(trials), self._space.feature_groups
            feasibility = joint([feasibility, FailureModel(succeeded, self._features_of(failed), groups)])
        acquisition = Posterior(model, pending, feasibility, self._acquisition, self._draws_seed, context)
        rows = len(model.features) + len(pending)
        return acquisition, rows, _best_five(trials, earlier(self._features_of(trials)))

    def _model_final(self) -> _Modelled:
        """Model the trials' last results."""
        scored, pending = self._in_state(Ending.SCORED), self._features_of(self._in_state(Ending.RUNNING))
        scores = self._objectives.scores(scored, self._metric)
        features = self._features_of(scored)
        model = self._fit(self._metric, features, scores, self._options, task=self._earlier)
        allowed = self._allowed([scored[i] for i in model.kept], pending)
        feasibility, seed = self._feasibility, self._draws_seed
        acquisition: Acquisition = Posterior(
            model, pending, feasibility, self._acquisition, seed, allowed=allowed
        )
        best = self._best(scored, scores)
        # Every second suggestion compares options, as in top-two sampling (Russo, 2020): the model judges an
        # option by where others are good, is too sure of that, and would try variants of the best point only.
        turn, is_odd = divmod(len(self._history.trials), 2)
        if is_odd and self._may_warp:
            acquisition = in_another_option(acquisition, self._space, best[0], turn)
        return acquisition, len(model.features) + len(pending), best

    def _model_pareto(self) -> _Modelled:
        """Model several metrics; the points are up to ten of the Pareto front."""
        space, objectives = self._space, self._objectives
        options, seed = self._optimizer.options, self._draws_seed
        scored, pending = self._in_state(Ending.SCORED), self._features_of(self._in_state(Ending.RUNNING))
        by_metric = [objectives.scores(scored, metric) for metric in objectives.metrics]
        ranks = np.mean([np.argsort(np.argsort(scores, kind="stable")) for scores in by_metric], axis=0)
        # If there are too many trials, all metrics keep the same ones.
        kept = thin(ranks, options.process_points)
        points = np.asarray([scored[i].point for i in kept])
        features = space.features(points)
        drawn = [
            PosteriorDraws(self._fit(metric, features, scores[kept], options), pending, seed + n)
            for n, (metric, scores) in enumerate(zip(objectives.metrics, by_metric, strict=True))
        ]
        allowed = self._allowed([scored[i] for i in kept], pending)
        front = non_dominated(
            np.stack([scores[kept] for scores in by_metric], axis=1), ["max"] * len(by_metric)
        )
        centres = points[front][:10]
        pool = space.features(candidates(space, centres, 256, np.random.default_rng(seed)))
        gain = HypervolumeGain(drawn, allowed, self._feasibility, seed, pool)
        return gain, len(features) + len(pending), centres

    def _model_curves(self) -> _Modelled:
        """Model the learning curves, for the results of full trainings."""
        usable, mode = self._usable, self._objectives.modes[0]
        rows = rows_of(usable, self._optimizer.horizon)
        context = np.asarray([rows.target])
        points = self._features_of(usable)
        features = np.column_stack([points[rows.trials], rows.times])
        gains = rows.values if mode == "max" else -rows.values
        model = self._fit(self._metric, features, gains, self._options, timed=True, task=self._earlier)

        def ends_of(trials: Sequence[Trial]) -> FloatArray:
            return with_context(self._features_of(trials), context)

        # Most unfinished trials wait at a rung or were stopped there. The model gets their expected final
        # values instead of draws: if the final value of a stopped trial stayed uncertain, the search would
        # keep suggesting similar trials.
        begun = [trial for trial in usable if is_unfinished(trial, rows.target)]
        ends = model.condition().predict(ends_of(begun))[0][:, 0]
        begun = [begun[i] for i in np.sort(np.argsort(-ends, kind="stable")[:_MOST_EXPECTED])]
        silent = [trial for trial in self._in_state(Ending.RUNNING) if max(trial.curve, default=0.0) <= 0]
        pending = ends_of(begun + silent)
        # Trials are compared by predicted final values, since a curve may get worse later. If too few others
        # have trained for longer to tell whether that happens, a trial's latest report counts too.
        reported = [usable[i] for i in sorted(set(rows.trials))]
        ahead = trials_with_open_end(reported, rows.target, mode)
        latest = np.column_stack([self._features_of(ahead), [axis(max(trial.curve)) for trial in ahead]])
        rivals = np.concatenate([latest, ends_of(reported + silent)])
        allowed = self._allowed(ahead + reported, self._features_of(silent))
        number = len(model.features) + len(pending)
        models = model.drawn(_HYPERPARAMETERS if number <= _AVERAGED_ROWS else 1, self._draws_seed)
        posteriors = [
            Posterior(
                each,
                pending,
                self._feasibility,
                self._acquisition,
                self._draws_seed + index,
                context,
                expected=len(begun),
                allowed=allowed,
                rivals=rivals,
            )
            for index, each in enumerate(models)
        ]
        means = np.mean([each.means(points) for each in posteriors], axis=0)
        return averaged(posteriors), number, self._best(usable, means)

    def _model_limits(self) -> Feasibility | None:
        """Return the probability that all limits are kept; None if no limit has two known values."""
        # The values are scaled by `slack` below: the limit is at 0 and outliers are compressed.
        options = replace(self._optimizer.options, fixed_noise=None, linear_depth=math.inf)
        feasibilities = []
        for limit in self._objectives.limits:
            latest = [self._objectives.latest(trial, limit.metric) for trial in self._usable]
            values = np.asarray(latest, dtype=float)
            finite = np.flatnonzero(np.isfinite(values))
            if len(finite) < 2:
                continue
            features = self._features_of([self._usable[i] for i in finite])
            left = slack(values[finite], limit.bound, upwards=limit.sense.startswith(">"))
            feasibilities.append(of_limit(self._fit(str(limit), features, left, options)))
        return joint(feasibilities) if feasibilities else None

    def _fit(
        self,
        name: str,
        features: FloatArray,
        scores: FloatArray,
        options: ModelOptions,
        timed: bool = False,
        task: EarlierModel | None = None,
    ) -> FittedModel:
        """Return the model of a metric or a limit; if `timed`, the last feature is the time."""
        groups, powers, states = self._space.feature_groups, self._space.powers, self._optimizer.fit_states
        if timed:
            groups, powers = np.append(groups, self._space.dimension), np.append(powers, 0.0)
        model = FittedModel(features, scores, groups, options, powers, states.get(name), timed, task)
        states[name] = model.state
        return model

    def _features_of(self, trials: Sequence[Trial]) -> FloatArray:
        return self._space.features([trial.point for trial in trials])

    def _in_state(self, ending: Ending) -> list[Trial]:
        return [trial for trial in self._usable if trial.ending is ending]

    def _allowed(self, trials: Sequence[Trial], pending: FloatArray) -> NDArray[np.bool_]:
        """Return which of these trials, and of the points in flight, keep the limits; all if none does.

        A point in flight counts as keeping them if that is more probable than not.
        """
        if self._within_limits is None:
            return np.ones(len(trials) + len(pending), dtype=bool)
        results = self._objectives.keep_limits(trials)
        allowed = np.concatenate([results, self._within_limits(pending) > np.log(0.5)])
        # With more results than a model takes, those that keep the limits may all be left out.
        return allowed if allowed.any() else np.ones_like(allowed)

    def _best(self, trials: Sequence[Trial], scores: FloatArray) -> FloatArray:
        """Return up to five points with the best scores; points that break a limit come after all others."""
        if self._within_limits is not None:
            allowed = self._objectives.keep_limits(trials)
            scores = np.where(allowed, scores, scores - 1e3 * (np.ptp(scores) + 1.0))
        return _best_five(trials, scores)


def _best_five(trials: Sequence[Trial], scores: FloatArray) -> FloatArray:
    points = np.asarray([trial.point for trial in trials])
    return points[np.argsort(-scores, kind="stable")[:5]]
