"""Bayesian optimisation as a Tune searcher, on bayesian-optimization 3.x.

Runs in the driver process. `BayesOptSearch` records the trials; `space/` translates between
Tune's domains and the model's space, `gp/` models the results, `optimizer` chooses the next point.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
from bayes_opt.acquisition import AcquisitionFunction
from ray.tune.result import DEFAULT_METRIC, TRAINING_ITERATION
from ray.tune.search import Searcher
from ray.tune.search.variant_generator import parse_spec_vars
from ray.tune.utils import flatten_dict
from threadpoolctl import ThreadpoolController

from horovod_tune.ray_compat.patches import drawn_values
from horovod_tune.scoring import as_number
from horovod_tune.search import state_file
from horovod_tune.search.earlier_experiment import fit_into, read_previous
from horovod_tune.search.gp.fitted_model import FitState
from horovod_tune.search.history import (
    Ending,
    History,
    Objectives,
    Trial,
    parse_limits,
    reward,
    seed_for,
)
from horovod_tune.search.initial_points import QueuedPoint, queue_points
from horovod_tune.search.optimizer import Optimizer
from horovod_tune.search.search_arguments import (
    acquisition_of,
    check_arguments,
    check_metrics,
    model_options,
    refuse_removed,
    seed_of,
)
from horovod_tune.search.space.domains import SpaceError, from_mixed
from horovod_tune.search.space.search_space import SearchSpace, seeded

logger = logging.getLogger(__name__)


class BayesOptSearch(Searcher):
    """Suggest configurations by Bayesian optimisation, with any number of trials in flight.

    A Gaussian process is fitted to the results, and to the learning curves of trials that report several
    times; the next suggestion maximises the expected improvement. The guide says what each trial teaches.

        search = ConcurrencyLimiter(BayesOptSearch(metric="loss", mode="min"), max_concurrent=4)
        tune.Tuner(trainable, param_space={"lr": tune.loguniform(1e-5, 1e-1), ...},
                   tune_config=tune.TuneConfig(search_alg=search, num_samples=40)).fit()

    * `space`: a Tune search space or bayesian-optimization's `pbounds`; by default the tuner's `param_space`.
    * `metric`, `mode` ('min' or 'max'): by default the tuner's, which count if both are given, with a
      warning if they differ. Lists of them, as in `metric=["accuracy", "latency_ms"], mode=["max", "min"]`,
      search for the Pareto front; the tuner's own `metric` is then only for its scheduler.
    * `limits`: conditions that a result must meet, such as `["latency_ms <= 20"]`, on any reported metrics.
    * `points_to_evaluate`: configurations to run first; missing parameters are drawn at random.
      `evaluated_rewards`: the metric values of these points, or None for a point that is still to be run.
    * `utility_kwargs`: as in Ray's BayesOptSearch, e.g. `{"kind": "ucb", "kappa": 2.576}`, or
      `acquisition_function`: one of `bayes_opt.acquisition`, or an object of your own subclass of its
      `AcquisitionFunction`; by default the logarithm of expected improvement.
    * `random_state`: an int (default: 42), a NumPy generator, or None for a different search each time. The
      same state and the same results give the same suggestions.
    * `random_search_steps`: suggestions from a Sobol sequence before the model takes over; by default one
      more than the number of parameters, at least 4 and at most 10, the last of which is the middle of all
      ranges. A search that learns from curves begins with 4, without the middle.
    * `gp_params`: settings of the Gaussian process, see `set_gp_params`.
    * `time_attr`: the metric that measures a trial's progress. The default is that of the tuner's ASHA,
      HyperBand or `PromotingASHA`; otherwise it is `training_iteration`. `max_t`: where a
      full training ends; by default the stop criterion of the tuner, otherwise the latest report so far.
    * `analysis`: an earlier experiment, on the same or on other data: its directory or URI, what `analyze`,
      `tune.run` or `Tuner.fit` returned, or a DataFrame of its results. Unless `random_search_steps` is
      given, the first suggestions alternate between quasi-random points and points where the earlier results
      were good.

    The search never ends before `num_samples`; when each point of a finite space has been suggested, it logs
    a warning and begins to repeat the best points.

    Raises `SpaceError` (a `ValueError`) for a space or a point that cannot be used, `ValueError` or
    `TypeError` for other arguments.
    """

    def __init__(
        self,
        space: Mapping[str, Any] | None = None,
        metric: str | Sequence[str] | None = None,
        mode: str | Sequence[str] | None = None,
        points_to_evaluate: Sequence[Mapping[str, Any]] | None = None,
        utility_kwargs: Mapping[str, Any] | None = None,
        random_state: int | np.random.Generator | np.random.RandomState | None = 42,
        random_search_steps: int | None = None,
        *,
        evaluated_rewards: Sequence[float | None] | None = None,
        acquisition_function: AcquisitionFunction | None = None,
        gp_params: Mapping[str, Any] | None = None,
        time_attr: str | None = None,
        max_t: float | None = None,
        analysis: Any = None,
        limits: Sequence[str] = (),
        **removed: Any,
    ) -> None:
        refuse_removed(removed)
        if space is not None and not isinstance(space, Mapping):
            raise SpaceError(
                f"space must be a dictionary of names to Tune domains or bounds, got {type(space).__name__}"
            )
        # Ray's class is declared for one metric; it takes lists too.
        objectives = check_metrics(metric, mode)
        several = isinstance(objectives[0], list)
        check_arguments(random_search_steps, time_attr, max_t)
        if (several or limits) and evaluated_rewards is not None:
            raise ValueError(
                "evaluated_rewards has one value per point: leave it out with several metrics or with limits"
            )
        if several and analysis is not None:
            raise ValueError("analysis is for one metric: leave it out if metric is a list")
        if several and (acquisition_function is not None or utility_kwargs is not None):
            raise ValueError(
                "acquisition_function and utility_kwargs are for one metric; a search with a list of metrics "
                "always maximises the expected gain in hypervolume"
            )
        super().__init__(*objectives)
        self._metric, self._mode = objectives
        self._limits = parse_limits(limits)
        self._seed = seed_of(random_state)
        acquisition = acquisition_of(acquisition_function, utility_kwargs)
        options = model_options({} if gp_params is None else gp_params)
        self._optimizer = Optimizer(acquisition, options, random_search_steps)
        self._given = (copy.deepcopy(points_to_evaluate), evaluated_rewards)
        self._earlier = None if analysis is None else read_previous(analysis)
        self._queue: list[QueuedPoint] = []
        self._history = History()
        self._time_attr, self._is_time_given = time_attr or TRAINING_ITERATION, time_attr is not None
        self._optimizer.horizon = max_t
        self._is_restored = False
        #: The description of a restored search's space, until the tuner's space is known.
        self._saved_space: dict[str, str] | None = None
        self._warned: set[str] = set()
        self._space: SearchSpace | None = None
        self._param_space: SearchSpace | None = None
        if space:
            self._set_space(SearchSpace(from_mixed(space), include_constants=True))

    @property
    def space_spec(self) -> dict[str, Any] | None:
        """The nested Tune search space; None until it is known."""
        return None if self._space is None else self._space.spec

    # Tune's callbacks.

    def set_search_properties(
        self, metric: str | None, mode: str | None, config: Mapping[str, Any], **spec: Any
    ) -> bool:
        """Adopt the tuner's metric, mode and space; return False if it has a different space.

        Raises `StateFileError` if a restored search has another space, metric or mode.
        """
        drawn_values.draw_with(_seeding)
        if not isinstance(self._metric, list):
            if self._is_restored:
                own = {"metric": self._metric, "mode": self._mode}
                state_file.check_same_search(own, metric, mode, [])
            for name, before, given in (("metric", self._metric, metric), ("mode", self._mode, mode)):
                if before and given and before != given:
                    what = f"{name}={given!r} of the tuner counts, not {name}={before!r} of BayesOptSearch"
                    self._warn_once(f"given {name}", what)
            self._metric, self._mode = metric or self._metric, mode or self._mode
        stop = spec.get("stop")
        if self._optimizer.horizon is None and isinstance(stop, Mapping):
            self._optimizer.horizon = as_number(stop.get(self._time_attr))
        if self._space is None or self._saved_space is not None:
            space = SearchSpace(config)
            if self._saved_space is None:
                self._set_space(space)
            elif self._space is None or space.dimension:
                state_file.check_same_space(self._saved_space, space.describe())
                self._space = space
            self._saved_space = None
            return True
        _, domains, grids = parse_spec_vars(dict(config))
        if not domains and not grids:
            return True
        return SearchSpace(config).describe() == self._space.describe()

    def set_time_attr(self, time_attr: str) -> None:
        """Use the scheduler's time attribute, unless one was passed as an argument."""
        if not self._is_time_given:
            self._time_attr = time_attr

    def set_param_space(self, param_space: Mapping[str, Any]) -> None:
        """Read configurations with the tuner's space as the user wrote it.

        In the space that Tune passes on, placeholders stand for functions and other objects.
        """
        self._param_space = SearchSpace(param_space)

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Return the next configuration, never None or `FINISHED`.

        Raises `RuntimeError` without a space, a metric or a mode.
        """
        space = self._ready()
        given: dict[Any, Any] = {}
        if self._queue:
            queued = self._queue.pop(0)
            given, counts = queued.exact, self._history.counts
            for attempt in range(64):
                point = queued.complete(space, self._seed + len(self._history.trials) + attempt)
                if not counts[point]:
                    break
        else:
            # One thread for linear algebra: the driver shares its machine with the trials, and threads that
            # wait for one another on busy cores make a suggestion of 40 ms take seconds. One thread also
            # sums in the same order on any number of cores, so suggestions do not depend on their number.
            with _libraries().limit(limits=1, user_api="blas"):
                point = self._optimizer.next_point(space, self._history, self._seed, self._objectives())
            if self._optimizer.learns_from_curves:
                # Logged as a warning, since messages at level INFO are not shown by default.
                self._warn_once(
                    "curves",
                    "the search learns from the curves of all trials, including running and stopped ones; "
                    f"training time is measured by {self._time_attr!r}",
                )
            if self._history.rounds(space.size) and not space.is_sampled:
                self._warn_once(
                    "exhausted",
                    f"all points of the search space have been suggested ({int(space.size)}); from here on "
                    "points are repeated, the most promising first",
                )
        self._history.add(trial_id, point)
        return space.config(point, seed_for(self._seed, self._history, "sampled"), given)

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Learn from a report of a running trial."""
        trial = self._history.trials.get(trial_id)
        if trial is not None:
            metric = self._objectives().metrics[0]
            value = as_number(result.get(metric))
            trial.last = trial.last if value is None else value  # not every report has the metric
            self._add_report(trial, result, value)

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Learn from a trial that ended in any way."""
        flat = flatten_dict(dict(result)) if result else {}
        trial = self._history.trials.get(trial_id) or self._adopt(trial_id, flat)
        if trial is None:
            return
        objectives = self._objectives()
        metric = objectives.metrics[0]
        value = as_number(flat.get(metric))
        value = trial.last if value is None else value
        self._add_report(trial, flat, value)
        trial.end(objectives.final_value(trial, value), error)
        if flat and trial.ending is Ending.UNKNOWN:
            self._warn_once(
                "metric",
                f"trial {trial_id} ended without a number for the metric {self._metric!r}, so the search "
                f"learned nothing from it; it reported {_reported(flat, objectives.metrics)}",
            )
        for limit in self._limits if flat and trial.ending is Ending.SCORED else ():
            if objectives.latest(trial, limit.metric) is None:
                self._warn_once(
                    str(limit),
                    f"trial {trial_id} ended without a number for {limit.metric!r}, so it violates the "
                    f"limit {limit}; it reported {sorted(flat)}",
                )

    def add_evaluated_point(
        self,
        parameters: Mapping[str, Any],
        value: float,
        error: bool = False,
        pruned: bool = False,
        intermediate_values: Sequence[float] | None = None,
    ) -> None:
        """Learn from a configuration, nested or with `/` in its keys, that was evaluated elsewhere.

        Raises `SpaceError` if it is outside the space, `ValueError` with several metrics or with limits, or
        if the value is no number, unless `error` is True.
        """
        if isinstance(self._metric, list) or self._limits:
            raise ValueError(
                "add_evaluated_point takes one value: it needs a search with one metric and without limits, "
                f"got metric={self._metric!r}, limits={[str(limit) for limit in self._limits]}"
            )
        space = self._reader(self._ready())
        if not isinstance(parameters, Mapping):
            raise SpaceError(f"parameters must be a dictionary, got {parameters!r}")
        number = reward(value)
        if number is None and not error:
            raise ValueError(f"value must be a number, got {value!r}")
        config = space.nested(parameters)
        space.partial(config)  # refuses unknown names
        self._history.add_known("evaluated", space.point(config), number, error)

    def on_pause(self, trial_id: str) -> None:
        """Keep a paused trial in flight. Called by HyperBandForBOHB, as is `on_unpause`."""

    on_unpause = on_pause

    def set_gp_params(self, **params: Any) -> None:
        """Change the Gaussian process.

        `alpha` fixes the noise variance (in standardised units), which is estimated otherwise;
        `n_restarts_optimizer` adds starting points (0 to 3) to the fit.

        Raises `ValueError` for an unknown name or a value out of bounds.
        """
        self._optimizer.options = model_options(params, self._optimizer.options)

    def save(self, checkpoint_path: str) -> None:
        """Save the search to a JSON file."""
        space = self._space
        if space is None and self._saved_space is None:
            state_file.write(checkpoint_path, state_file.EMPTY)  # Ray saves before the first suggestion too
            return
        state_file.write(
            checkpoint_path,
            {
                "metric": self._metric,
                "mode": self._mode,
                "space": self._saved_space if space is None else space.describe(),
                "spec": None if space is None else space.as_json(),
                "seed": self._seed,
                "limits": [str(limit) for limit in self._limits],
                "fits": self._optimizer.fit_states,
                "queue": [queued.as_json() for queued in self._queue],
                **self._history.as_json(),
            },
        )

    def restore(self, checkpoint_path: str) -> None:
        """Continue from a file that `save` wrote.

        Raises `state_file.StateFileError` (a `ValueError`) if the file is not a saved search, was written by
        a newer version, or belongs to a search with another space, metric, mode or limits.
        """
        state = state_file.read(checkpoint_path)
        if state.get("empty"):
            return
        state_file.check_same_search(state, self._metric, self._mode, [str(limit) for limit in self._limits])
        if self._space is not None:
            state_file.check_same_space(state["space"], self._space.describe())
        else:
            self._saved_space = state["space"]
            self._space = None if state.get("spec") is None else SearchSpace.from_json(state["spec"])
        self._is_restored = True
        self._metric, self._mode = self._metric or state["metric"], self._mode or state["mode"]
        self._seed = state["seed"]
        self._queue = [QueuedPoint.from_json(entry) for entry in state["queue"]]
        self._history = History.from_json(state)
        self._optimizer.fit_states = {name: FitState(*fit) for name, fit in state.get("fits", {}).items()}

    def _ready(self) -> SearchSpace:
        if self._space is None:
            raise RuntimeError(
                "BayesOptSearch has no search space: pass param_space to the tuner or space to BayesOptSearch"
            )
        if self._mode and not self._metric:
            self._metric = DEFAULT_METRIC
        if not self._metric or not self._mode:
            raise RuntimeError(
                "BayesOptSearch needs a metric and a mode, from its own arguments or the tuner's; it has "
                f"metric={self._metric!r}, mode={self._mode!r}"
            )
        # Not earlier, since the metric may come from the tuner. A saved search has these results.
        if self._earlier is not None and not self._history.earlier:
            used, message = fit_into(self._reader(self._space), self._earlier, self._metric, self._time_attr)
            self._history.earlier = used
            # Messages at level INFO are not shown by default.
            logger.log(logging.INFO if len(used) == len(self._earlier) else logging.WARNING, message)
        self._earlier = None
        return self._space

    def _reader(self, space: SearchSpace) -> SearchSpace:
        """Return the space that reads configurations: the tuner's, if its points are those of `space`."""
        own = self._param_space
        if own is None or own.names() != space.names():
            return space
        # Of a function that is repeated in a choice, Tune makes different placeholders.
        sizes, given = ([column.cardinality for column in each.columns] for each in (own, space))
        return own if sizes == given else space

    def _objectives(self) -> Objectives:
        metrics = (self._metric,) if isinstance(self._metric, str) else tuple(self._metric or ("None",))
        modes = (self._mode,) if isinstance(self._mode, str) else tuple(self._mode or ("min",))
        return Objectives(metrics, modes, self._limits)

    def _set_space(self, space: SearchSpace) -> None:
        points, rewards = self._given
        self._queue, scored = queue_points(self._reader(space), points, rewards)
        self._space = space
        for point, value in scored:
            self._history.add_known("given", point, value)

    def _adopt(self, trial_id: str, flat: Mapping[str, Any]) -> Trial | None:
        """Add a trial that was suggested under another id: Tune gives a restarted trial a new id."""
        config = {key[len("config/") :]: value for key, value in flat.items() if key.startswith("config/")}
        if self._space is None or not config:
            return None
        space = self._reader(self._space)
        try:
            point = space.point(space.nested(config))
        except SpaceError as error:
            logger.info("the search ignores trial %s: %s", trial_id, error)
            return None
        return self._history.add(trial_id, point)

    def _add_report(self, trial: Trial, flat: Mapping[str, Any], value: float | None) -> None:
        time = as_number(flat.get(self._time_attr))
        trial.others.update(self._objectives().other_metrics_in(flat))
        trial.add_report(time, value)
        if flat and time is None and self._time_attr != TRAINING_ITERATION:
            self._warn_once(
                "time",
                f"a report of trial {trial.trial_id} has no number for the time_attr {self._time_attr!r}, so "
                f"the search cannot place it on the learning curve; the report has {sorted(flat)}",
            )

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning(message)


def _reported(flat: Mapping[str, Any], metrics: Sequence[str]) -> str:
    """Return the names of the reported values, and the values of those metrics that are not numbers."""
    wrong = [f"{name}={flat[name]!r}" for name in metrics if name in flat and as_number(flat[name]) is None]
    return f"{', '.join(wrong)} and also {sorted(set(flat) - set(metrics))}" if wrong else str(sorted(flat))


# Finding the loaded libraries takes milliseconds; NumPy's and SciPy's are loaded before the first call.
_libraries = cache(ThreadpoolController)


def _seeding(searcher: Any, tag: str) -> AbstractContextManager[None]:
    """Return a context in which Tune draws `tune.sample_from`, with the seed of a `BayesOptSearch`."""
    if not isinstance(searcher, BayesOptSearch):
        return nullcontext()
    return seeded(int(np.random.SeedSequence([searcher._seed, *tag.encode()]).generate_state(1)[0]))
