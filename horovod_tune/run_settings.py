"""Changes to `tune.run` for distributed searches: refused arguments, metadata and output.

Runs in the driver, for trainables of `DistributedTrainableCreator` only, however they were passed to Tune.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from ray import cloudpickle
from ray.tune import Callback
from ray.tune.result import TRAINING_ITERATION
from ray.tune.schedulers import PopulationBasedTraining
from ray.tune.search.sample import Categorical
from ray.tune.search.variant_generator import parse_spec_vars

from horovod_tune.backend_choice import placement_of
from horovod_tune.best_effort import best_effort, best_effort_callback
from horovod_tune.errors import MetricNotReported, SpecError
from horovod_tune.experiment_metadata import space_metadata, write_end, write_metadata
from horovod_tune.function.training_function import (
    RESOURCE_ARGUMENTS,
    check_config,
    function_name,
    unwrapped,
)
from horovod_tune.function.variables import unpicklable
from horovod_tune.ray_compat import queries, schedules
from horovod_tune.ray_compat.patches import tune_run
from horovod_tune.trainable import DistributedTrainable, is_distributed

logger = logging.getLogger(__name__)

_NO_METRIC = (
    'no metric: to find the best trial, write tune.run(..., metric="loss", mode="min") or '
    'TuneConfig(metric="loss", mode="min")'
)
# With `num_to_keep` and short epochs Tune logs this every second, in three lines; once per search is enough.
_SNAPSHOTS = "Experiment state snapshotting has been triggered"
# Log lines that are left out. The first two give the results' path and the failed trials, which our summary
# shows too. The last comes with each NaN or infinite metric, but names neither the metric nor the trial.
_REDUNDANT = {
    "ray.tune.tune": ("Wrote the latest version of all result", "Trials did not complete"),
    "tensorboardX.x2num": ("NaN or Inf found in input tensor",),
}


@best_effort_callback("the warning about trials without reports")
class SilentTrials(Callback):
    """Warns, once per search, of a trial that ends without a report: Tune counts that as a success."""

    def __init__(self) -> None:
        self._warned = False

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if not self._warned and TRAINING_ITERATION not in (trial.last_result or {}):
            self._warned = True
            logger.warning(
                "Trial %s ended without a report: rank 0 never called report() and returned no metrics, so "
                "Tune has no result for it. Call horovod_tune.report(...) in the training function.",
                trial,
            )


@best_effort_callback("storing how trials have ended")
class StoredEnds(Callback):
    """Makes Tune store that a trial's function has returned: `analyze` tells it so from a stopped one."""

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        queries.store_end(trial)


@best_effort_callback("the warnings about unused arguments")
class UnusedArguments(Callback):
    """Warns, once per search, of arguments of which Tune silently uses others instead."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._search = schedules.innermost(arguments.get("search_alg"))
        # Tune sets the searcher's to its own before `setup`. A BayesOptSearch logs that itself.
        both = () if hasattr(self._search, "set_time_attr") else ("metric", "mode")
        self._own = {name: getattr(self._search, name, None) for name in both}

    def setup(self, *args: Any, total_num_samples: Any = None, **info: Any) -> None:
        for name, own in self._own.items():
            given, used = self._arguments.get(name), getattr(self._search, name, None)
            if isinstance(own, str) and isinstance(given, str) and own != given:
                which = "the tuner's" if used == given else "its own, and the tuner's for all else,"
                text = "%s=%r was given to %s, and %s=%r to the tuner: %s counts for the search"
                logger.warning(text, name, own, type(self._search).__name__, name, given, which)
        samples = self._arguments.get("num_samples")
        if not samples or not (self._arguments.get("resume") or self._arguments.get("resume_config")):
            return
        _, _, grids = parse_spec_vars(self._arguments.get("config") or {})
        asked = math.inf if samples < 0 else samples * math.prod(len(grid.categories) for _, grid in grids)
        if asked > total_num_samples:
            warn_of_unused_samples(samples)


def warn_of_unused_samples(num_samples: int) -> None:
    """Log that a continued search has the number of trials of its first start."""
    logger.warning(
        "num_samples=%s is not used: a search that continues keeps that of its first start. For more trials, "
        "start a search of another name with BayesOptSearch(analysis=<this experiment's folder>).",
        num_samples,
    )


@best_effort_callback("the warning about trials that start over")
class TrialsThatStartOver(Callback):
    """Warns, once per search, of a trial that a scheduler has paused and that has no checkpoint."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = type(scheduler).__name__
        self._started: set[str] | None = set()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if self._started is None or trial.checkpoint is not None or trial.num_failures:
            return
        if trial.trial_id not in self._started or TRAINING_ITERATION not in (trial.last_result or {}):
            self._started.add(trial.trial_id)
            return
        self._started = None
        logger.warning(
            "Trial %s starts over: it was paused and has saved no checkpoint. With %s, save them: "
            "report(..., checkpoint=directory).",
            trial,
            self._scheduler,
        )


@best_effort_callback("writing the metadata of the experiment")
class ExperimentMetadata(Callback):
    """Writes a search's metadata to its folder when the first trial starts; at the end, marks it as ended."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self._first: str | None = None

    def setup(self, *args: Any, total_num_samples: Any = None, **info: Any) -> None:
        if isinstance(total_num_samples, int):
            self._metadata["num_samples"] = total_num_samples

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if self._first is None:
            self._first = trial.trial_id
            write_metadata(trial, self._metadata | {"ended": False})

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        if trials and self._first is None:  # a resumed search with nothing left to do
            self.on_trial_start(0, trials, trials[0])
        for trial in trials:
            if trial.trial_id == self._first:
                write_end(trial)


@contextmanager
def prepare(run_or_experiment: Any, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a search; only those of distributed trials change. For `prepare_runs`."""
    given = tune_run.trainables_of(run_or_experiment)
    ours = [trainable for trainable, _ in given if is_distributed(trainable)]
    if not ours:
        with best_effort("the hint on DistributedTrainableCreator"):
            for hint in filter(None, (hint_for(trainable) for trainable, _ in given)):
                logger.warning(hint)
        _prepare_search(arguments)
        yield arguments
        return
    specs = [{name: arguments.get(name) for name in ("config", "resources_per_trial")}]
    specs += [spec for _, spec in given]
    if any(spec.get("resources_per_trial") is not None for spec in specs):
        raise SpecError(f"resources_per_trial does not apply to distributed trials. {RESOURCE_ARGUMENTS}")
    config = next((spec["config"] for spec in specs if spec.get("config")), None)
    check_config(config)  # Tune's own error would not name the parameter
    quiet = not tune_run.shows_tunes_own_output(arguments)
    try:
        if quiet:
            with best_effort("showing the progress"):
                where = queries.cluster_size() or "starting Ray"
                print(f"searching with {_describe(ours[0])}: {where}", flush=True)
                if compares_without_metric(arguments, config):
                    print(_NO_METRIC, flush=True)
        changed = _settings(arguments, config, quiet=quiet)
        with best_effort("preflight"):
            changed["callbacks"] += _preflights(ours)
        with (
            _without_redundant_lines(quiet=quiet),
            tune_run.without_reporter() if changed.get("verbose") == 0 else nullcontext(),
        ):
            yield changed
    except Exception as error:
        if isinstance(error.__context__, MetricNotReported):  # Tune puts its traceback in a TuneError
            raise error.__context__.with_traceback(None) from None
        cure = "Make it inside the training function, from plain values in config."
        if unfit := unpicklable("config", config or {}, _copied_and_pickled, cure, "config"):
            raise unfit from error
        raise


def hint_for(trainable: Any) -> str:
    """Return what to write if a function was passed to Tune that needs DistributedTrainableCreator; or ""."""
    function = unwrapped(trainable)
    if not inspect.isfunction(function):
        return ""
    name, used = function_name(function), function.__code__.co_names
    modules = [*used, *(getattr(function.__globals__.get(each), "__name__", "") for each in used)]
    why = ""
    try:
        calls = re.findall(r"\b(\w+)\.report\(\s*(?:\*\*|\w+\s*=[^=])", inspect.getsource(function))
    except OSError:  # typed into an interpreter
        calls = []
    if any(function.__globals__.get(owner) is sys.modules.get("ray.tune") for owner in calls):
        why = "reports by keywords, while Tune's own functions must report a dictionary"
    if any(module.partition(".")[0] == "horovod" for module in modules):
        why = "uses Horovod, but each of its trials will be a single process"
    wrapped = f"horovod_tune.DistributedTrainableCreator({name}, num_slots=2)"
    return f"{name} {why}: pass {wrapped} to Tune instead of {name}" if why else ""


def compares_without_metric(arguments: dict[str, Any], config: Any) -> bool:
    """Return True if a search of several trials has no metric by which to compare them."""
    search = schedules.innermost(arguments.get("search_alg"))
    several = arguments.get("num_samples", 1) != 1 or search is not None or bool(_searched(search, config))
    # `BayesOptSearch` may have a list of metrics.
    return several and not (tune_run.metric_and_mode(arguments)[0] or getattr(search, "metric", None))


def _searched(search: Any, config: Any) -> list[str]:
    """Return the flat names of the hyperparameters."""
    space = schedules.space_of(search)
    return list(space_metadata({**(config or {}), **(space if isinstance(space, dict) else {})})["space"])


def _copied_and_pickled(part: Any) -> bytes:
    # As Tune does. cloudpickle takes modules and files, which copy.deepcopy does not.
    return cloudpickle.dumps(copy.deepcopy(part))


def _describe(trainable: type[DistributedTrainable]) -> str:
    spec = trainable._spec
    hosts = f" on {spec.num_hosts} hosts" if (spec.num_hosts or 1) > 1 else ""
    if spec.use_tpu:
        return f"{trainable._name}, TPU trials{hosts}"
    ranks = "1 rank" if spec.world_size == 1 else f"{spec.world_size} ranks"
    return f"{trainable._name}, {ranks} per trial{hosts}"


def _preflights(trainables: list[type[DistributedTrainable]]) -> Iterator[Callback]:
    """Yield the checks of trials that may span machines."""
    for trainable in dict.fromkeys(trainables):
        placement = placement_of(trainable._spec)
        if len(placement.bundles) > 1:
            from horovod_tune.doctor.preflight import Preflight

            yield Preflight(trainable._spec, trainable._shipped, placement)


@contextmanager
def _without_redundant_lines(*, quiet: bool) -> Iterator[None]:
    warned_of_snapshots = False

    def is_news(record: logging.LogRecord) -> bool:
        nonlocal warned_of_snapshots
        text = str(record.msg)
        if text.startswith(_SNAPSHOTS):
            first, warned_of_snapshots = not warned_of_snapshots, True
            return first
        return not (quiet and text.startswith(_REDUNDANT.get(record.name, ())))

    loggers = [logging.getLogger(name) for name in (*_REDUNDANT, "ray.tune.execution.experiment_state")]
    for each in loggers:
        each.addFilter(is_news)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(is_news)


def _prepare_search(arguments: dict[str, Any]) -> None:
    """Pass a `BayesOptSearch` what Tune doesn't: the scheduler's time_attr, and the space as it was given.

    Without `config`, Tune doesn't pass on its metric, mode and stop criterion either.
    """
    search = schedules.innermost(arguments.get("search_alg"))
    if not hasattr(search, "set_time_attr"):
        return
    time_attr = schedules.time_attr_of(arguments.get("scheduler"))
    if time_attr is not None:
        search.set_time_attr(time_attr)
    if arguments.get("config"):
        search.set_param_space(arguments["config"])
    elif search.space_spec:
        search.set_search_properties(*map(arguments.get, ("metric", "mode")), {}, stop=arguments.get("stop"))


def _settings(arguments: dict[str, Any], config: Any, *, quiet: bool) -> dict[str, Any]:
    metric, mode = tune_run.metric_and_mode(arguments)
    callbacks = [*(arguments.get("callbacks") or []), SilentTrials(), StoredEnds()]
    callbacks.append(UnusedArguments(arguments))
    callbacks.append(TrialsThatStartOver(arguments.get("scheduler")))
    changed = {**arguments, "callbacks": callbacks, "config": _with_python_numbers(arguments.get("config"))}
    _prepare_search(changed)
    with best_effort("writing the metadata of the experiment"):
        callbacks.append(ExperimentMetadata(search_metadata(arguments, config, metric, mode)))
    if isinstance(arguments.get("scheduler"), PopulationBasedTraining):
        changed["reuse_actors"] = True  # our trials do so anyway; otherwise Tune advises users to set it
    if quiet:
        changed["verbose"] = 0
        with best_effort("showing the progress"):
            from horovod_tune.analysis.progress import ProgressCallback

            known = metric is not None and mode in ("min", "max")  # Tune rejects other modes itself
            if not any(isinstance(each, ProgressCallback) for each in callbacks):
                callbacks.append(ProgressCallback(metric, mode) if known else ProgressCallback())
            for each in callbacks:
                if isinstance(each, ProgressCallback):
                    each.searched = _searched(arguments.get("search_alg"), config)
                    each.ends = schedules.end_of(arguments.get("scheduler"))
    return changed


def _with_python_numbers(space: Any) -> Any:
    """Return a copy of a space without NumPy's numbers, for which Tune would put in references to them."""
    if isinstance(space, (np.number, np.bool_)):
        return space.item()
    if type(space) is dict:
        return {key: _with_python_numbers(value) for key, value in space.items()}
    if type(space) in (list, tuple):
        return type(space)(map(_with_python_numbers, space))
    if isinstance(space, Categorical):
        space = copy.copy(space)
        space.categories = _with_python_numbers(list(space.categories))
    return space


def search_metadata(
    arguments: dict[str, Any], config: Any, metric: str | None, mode: str | None
) -> dict[str, Any]:
    """Return a search's metadata, from the arguments of `tune.run` and the search space."""
    search, scheduler = arguments.get("search_alg"), arguments.get("scheduler")
    budget: Any = arguments.get("time_budget_s")
    space = schedules.space_of(search)
    return {
        "metric": metric,
        "mode": mode,
        "time_budget_s": budget.total_seconds() if hasattr(budget, "total_seconds") else budget,
        "searcher": schedules.describe_searcher(search),
        "scheduler": schedules.describe_scheduler(scheduler),
        "ends": schedules.end_of(scheduler),
        **space_metadata({**(config or {}), **(space if isinstance(space, dict) else {})}),
    }
