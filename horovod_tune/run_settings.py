"""What a search of distributed trials changes about `tune.run`: what it refuses, and what it prints.

Runs in the driver, for trainables of `DistributedTrainableCreator` only.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import cloudpickle
from ray.tune import Callback
from ray.tune.result import TRAINING_ITERATION

from horovod_tune import ray_compat
from horovod_tune.best_effort import best_effort, best_effort_callback
from horovod_tune.errors import SerializationError, SpecError
from horovod_tune.experiment_facts import write_facts
from horovod_tune.function.training_function import RESOURCE_ARGUMENTS
from horovod_tune.function.variables import find_unpicklable

if TYPE_CHECKING:
    from horovod_tune.analysis.progress import ProgressCallback

logger = logging.getLogger(__name__)

# What loggers would print between our lines: at the end what the last screen has, the results' path and
# the failed trials; for each infinite metric in each report a line that names neither metric nor trial.
_REDUNDANT = {
    "ray.tune.tune": ("Wrote the latest version of all result", "Trials did not complete"),
    "tensorboardX.x2num": ("NaN or Inf found in input tensor",),
}


@best_effort_callback("the warning of trials without reports")
class SilentTrials(Callback):
    """Says once in a search that trials end without a report: such a trial counts as a success to Tune."""

    def __init__(self) -> None:
        self._said = False

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if not self._said and not _has_reported(trial):
            self._said = True
            logger.warning(
                "Trial %s ended without a report: rank 0 never called report() and returned no metrics, so "
                "Tune has no result of it. Call horovod_tune.report(...) in the training function.",
                trial,
            )


def _has_reported(trial: Any) -> bool:
    return TRAINING_ITERATION in (trial.last_result or {})


@best_effort_callback("writing the metadata of the experiment")
class ExperimentFacts(Callback):
    """Leaves metric and mode, versions and the cluster beside Tune's files when the first trial starts.

    `tune.run` tells metric, mode and scheduler to nobody who writes them down: without this, `horovod-tune
    show` and `report` have to be told the first two again. `rungs` are what PromotingASHA goes by and where.
    """

    def __init__(
        self, metric: str | None, mode: str | None, rungs: tuple[str, Sequence[float]] | None = None
    ) -> None:
        self._facts = metric, mode, rungs
        self._is_written = False

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if not self._is_written:
            write_facts(trial, *self._facts)
            self._is_written = True


def settings_for(
    is_ours: Callable[[Any], bool],
    wants_reuse: Callable[[Any], bool],
    callbacks_of: Callable[[Any], list[Callback]] = lambda trainable: [],
) -> ray_compat.Prepare:
    """Return what `ray_compat.prepare_runs` takes; the arguments of other searches stay as they are."""

    @contextmanager
    def prepare(trainable: Any, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not is_ours(trainable):
            yield arguments
            return
        if arguments.get("resources_per_trial") is not None:
            raise SpecError(f"resources_per_trial does not apply to distributed trials. {RESOURCE_ARGUMENTS}")
        quiet = not ray_compat.shows_tunes_own_output(arguments)
        try:
            changed = _settings(arguments, quiet=quiet, reuse=wants_reuse(trainable))
            with best_effort("preflight"):
                changed["callbacks"] += callbacks_of(trainable)
            with (
                _without_redundant_lines() if quiet else nullcontext(),
                ray_compat.without_reporter() if changed.get("verbose") == 0 else nullcontext(),
            ):
                yield changed
        except Exception as error:
            _name_unpicklable_value(arguments.get("config"), error)
            raise

    return prepare


@contextmanager
def _without_redundant_lines() -> Iterator[None]:
    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_REDUNDANT[record.name])

    loggers = [logging.getLogger(name) for name in _REDUNDANT]
    for each in loggers:
        each.addFilter(is_news)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(is_news)


def _tell_time_attr(search: Any, scheduler: Any) -> None:
    """Tell a search that learns from curves what the scheduler goes by."""
    while search is not None and not hasattr(search, "take_time_attr"):
        search = getattr(search, "searcher", None)
    time_attr = ray_compat.time_attr_of(scheduler)
    if search is not None and time_attr is not None:
        search.take_time_attr(time_attr)


def _settings(arguments: dict[str, Any], *, quiet: bool, reuse: bool) -> dict[str, Any]:
    _tell_time_attr(arguments.get("search_alg"), arguments.get("scheduler"))
    metric, mode = ray_compat.metric_and_mode(arguments)
    rungs = getattr(arguments.get("scheduler"), "rung_times", None)
    callbacks = [*(arguments.get("callbacks") or []), SilentTrials(), ExperimentFacts(metric, mode, rungs)]
    changed = {**arguments, "callbacks": callbacks}
    if reuse and type(arguments.get("scheduler")).__name__ in ("PopulationBasedTraining", "PB2"):
        changed["reuse_actors"] = True  # as our trials do anyway; Tune then does not advise it
    if quiet:
        from horovod_tune.analysis.progress import ProgressCallback

        changed["verbose"] = 0
        if not any(isinstance(each, ProgressCallback) for each in changed["callbacks"]):
            with best_effort("showing the progress"):
                changed["callbacks"].append(_progress(metric, mode))
    return changed


def _progress(metric: str | None, mode: str | None) -> ProgressCallback:
    from horovod_tune.analysis.progress import ProgressCallback

    known = metric is not None and mode in ("min", "max")  # Tune refuses the others itself
    live = None if importlib.util.find_spec("rich") else False
    return ProgressCallback(metric if known else None, mode if known else None, live=live)


def _name_unpicklable_value(config: Any, error: Exception) -> None:
    """Raise SerializationError where the search has ended because ``config`` cannot be pickled."""
    found = find_unpicklable(config, cloudpickle.dumps) if isinstance(config, dict) else None
    if found is not None:
        where, what, cause = found
        raise SerializationError(
            f"config cannot be sent to the trials, because of config{where}, which is of type "
            f"{type(what).__module__}.{type(what).__qualname__}: {cause}. Make it inside the training "
            "function, from what config says of it."
        ) from error
