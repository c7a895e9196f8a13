"""Patches `ray.tune.run`, which every search goes through, and what it prints."""

from __future__ import annotations

import importlib
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from types import FunctionType
from typing import Any

from horovod_tune.compatibility import Patch, wrap

_OUTPUT = "ray.tune.experimental.output"
# True while this thread runs a search without Tune's own output.
_IS_SILENT: ContextVar[bool] = ContextVar("is_silent", default=False)
# The raylet's text lists possible causes, not the actual one.
_DEATH = re.compile("^A worker died or was killed while executing a task by an unexpected system error")


@Patch(
    "Tune prints its own tables, and arguments of tune.run that do not apply are not refused",
    "ray.tune.tune:run uses run_or_experiment metric mode config resources_per_trial search_alg scheduler "
    "verbose progress_reporter callbacks reuse_actors",
    f"{_OUTPUT}:get_air_verbosity(verbose)",
    f"{_OUTPUT}:AirVerbosity.VERBOSE",
    f"{_OUTPUT}:IS_NOTEBOOK",
).once
def prepare_runs(prepare: Callable[[Any, dict[str, Any]], AbstractContextManager[dict[str, Any]]]) -> None:
    """Run every search inside ``prepare(run_or_experiment, arguments)``, which yields the arguments.

    The code of Tune's function is replaced, not the function, since callers may have it already: Python
    evaluates ``tune.run`` before its argument, ``horovod_tune.DistributedTrainableCreator(...)``, and the
    Tuner imports it by name. No name that ``run`` looks up when it is called would do: none that is called
    before ``config`` and ``verbose`` have been used gets the arguments (``_ray_auto_init``), those that get
    some come later and cannot change the others (``_create_default_callbacks``, ``TuneController``), and
    none spans the search, whose errors and log lines are changed.
    """
    run = importlib.import_module("ray.tune.tune").run
    original = FunctionType(run.__code__, run.__globals__, run.__name__)
    original.__kwdefaults__ = run.__kwdefaults__

    def run_prepared(run_or_experiment: Any, **arguments: Any) -> Any:
        from ray.util.client import ray as client

        if client.is_connected():
            return original(run_or_experiment, **arguments)
        with prepare(run_or_experiment, arguments) as prepared:
            return original(run_or_experiment, **prepared)

    run.__wrapped__, run.__code__ = original, _call.__code__
    run.__kwdefaults__ = {"run_prepared": run_prepared}  # a function's code cannot get new free variables


def _call(run_or_experiment: Any, *, run_prepared: Callable[..., Any], **arguments: Any) -> Any:
    return run_prepared(run_or_experiment, **arguments)


def trainables_of(run_or_experiment: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return the trainables that were passed to ``tune.run``, each with the spec of its Experiment, or {}.

    They may be passed as a class, a registered name, a ``tune.Experiment``, or a list of these.
    """
    from ray.tune import Experiment, TuneError
    from ray.tune.registry import get_trainable_cls

    many = run_or_experiment if isinstance(run_or_experiment, list) else [run_or_experiment]
    found = []
    for each in many:
        spec = dict(each.spec) if isinstance(each, Experiment) else {}
        trainable = each.run_identifier if isinstance(each, Experiment) else each
        if isinstance(trainable, str):
            with suppress(TuneError):  # Tune itself reports an unknown name
                trainable = get_trainable_cls(trainable)
        found.append((trainable, spec))
    return found


def metric_and_mode(arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return ``tune.run``'s metric and mode: its own arguments, else the searcher's or the scheduler's."""
    search, scheduler = arguments.get("search_alg"), arguments.get("scheduler")
    scheduler = getattr(scheduler, "_base_scheduler", scheduler)  # in a ResourceChangingScheduler
    given = [
        (arguments.get("metric"), arguments.get("mode")),
        (getattr(search, "metric", None), getattr(search, "mode", None)),
        (getattr(scheduler, "_metric", None), getattr(scheduler, "_mode", None)),
    ]
    for metric, mode in given:
        if isinstance(metric, str):
            return metric, mode if isinstance(mode, str) else None
    return None, None


def shows_tunes_own_output(arguments: dict[str, Any]) -> bool:
    """Return True if the user has chosen what Tune prints."""
    from ray.tune.experimental.output import AirVerbosity, get_air_verbosity

    verbose = arguments.get("verbose")
    # A number comes from the user; the default of `RunConfig` is an `AirVerbosity`.
    is_chosen = verbose is not None and not isinstance(verbose, AirVerbosity)
    old_output = get_air_verbosity(AirVerbosity.VERBOSE) is None  # RAY_AIR_NEW_OUTPUT=0
    return is_chosen or arguments.get("progress_reporter") is not None or old_output


@contextmanager
def without_reporter() -> Iterator[None]:
    """Silence Tune for a search that this thread runs: at ``verbose=0`` it still prints failures.

    The raylet's paragraph on a dead process is left out too: a trial's error names the rank. In a notebook,
    Ray prints no native stack trace when the kernel ends later.
    """
    _allow_silent_reporter()
    token = _IS_SILENT.set(True)
    try:
        with _without_raylets_deaths():
            yield
    finally:
        _IS_SILENT.reset(token)
        _end_notebooks_quietly()


@Patch(
    "Tune prints a box when a search starts and a table when a trial fails",
    f"{_OUTPUT}:TuneTerminalReporter.experiment_started uses tabulate",
    f"{_OUTPUT}:TuneTerminalReporter.on_trial_error(self, iteration, trials, trial, info) uses _start_block",
    f"{_OUTPUT}:_infer_params(config)",
).once
def _allow_silent_reporter() -> None:
    output = importlib.import_module(_OUTPUT)
    reporter = output.TuneTerminalReporter
    # `_infer_params` fails if the keys of a config are numbers.
    for owner, name in (
        (reporter, "experiment_started"),
        (reporter, "on_trial_error"),
        (output, "_infer_params"),
    ):

        @wrap(owner, name)
        def show(original: Any, *args: Any, **keywords: Any) -> Any:
            return None if _IS_SILENT.get() else original(*args, **keywords)


@Patch(
    "Ray prints a paragraph when a rank's process dies, besides our line",
    "ray._private.worker:print_to_stdstream(data, ignore_prefix) uses stdout_deduplicator",
    "ray._private.ray_logging:stdout_deduplicator.skip_re",
).otherwise(nullcontext())
@contextmanager
def _without_raylets_deaths() -> Iterator[None]:
    from ray._private.ray_logging import stdout_deduplicator

    before = stdout_deduplicator.skip_re  # the user's RAY_DEDUP_LOGS_SKIP_REGEX
    stdout_deduplicator.skip_re = before or _DEATH
    try:
        yield
    finally:
        stdout_deduplicator.skip_re = before


def _end_notebooks_quietly() -> None:
    # Jupyter ends kernels with SIGTERM. Ray sets a Python handler for it that exits, then a native one in
    # its place that prints the stack. Setting the first one again removes the second.
    if "ipykernel" in sys.modules and threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler):
            signal.signal(signal.SIGTERM, handler)
