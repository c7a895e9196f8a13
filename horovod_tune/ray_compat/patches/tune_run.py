"""Patches `ray.tune.run`, which every search goes through, and how it reports a failed trial.

Without `prepare_runs` a search of distributed trials prints every result as a table (1,700 lines for the
README's example), and accepts arguments that do not apply to it. Without `without_reporter` Tune prints a
box and a table even at ``verbose=0``, and Ray a paragraph for each rank that dies. Without `shorten_errors`
a rank's error is below 35 frames of Ray and of this package.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from horovod_tune.errors import HorovodTuneError, MetricNotReported, TrainingFailed
from horovod_tune.ray_compat.compatibility import Patch, part, wrap

logger = logging.getLogger(__name__)

Prepare = Callable[[Any, dict[str, Any]], AbstractContextManager[dict[str, Any]]]

_RUN_TAKES = "run_or_experiment metric mode config resources_per_trial search_alg scheduler verbose "
_RUN_TAKES += "progress_reporter callbacks reuse_actors"
_OUTPUT = "ray.tune.experimental.output"
_RUNS = Patch(
    "runs",
    "Tune prints its own tables, and arguments of tune.run that mean nothing here are not refused",
    (
        part("ray.tune.tune:run", uses=_RUN_TAKES),
        part(f"{_OUTPUT}:get_air_verbosity(verbose)"),
        part(f"{_OUTPUT}:AirVerbosity.VERBOSE"),
        part(f"{_OUTPUT}:IS_NOTEBOOK"),
    ),
)
_REPORTER = Patch(
    "reporter",
    "Tune prints a box when a search starts and a table when a trial fails",
    (
        part(f"{_OUTPUT}:_detect_reporter"),
        part(f"{_OUTPUT}:TuneTerminalReporter.experiment_started", uses="tabulate"),
        part(
            f"{_OUTPUT}:TuneTerminalReporter.on_trial_error(self, iteration, trials, trial, info)",
            uses="_start_block",
        ),
        part("ray.tune.utils.callback:_create_default_callbacks", uses="_detect_reporter"),
    ),
)
_DEATHS = Patch(
    "deaths of processes",
    "Ray prints a paragraph when a rank's process dies, besides our line",
    (
        part("ray._private.worker:print_to_stdstream(data, ignore_prefix)", uses="stdout_deduplicator"),
        part("ray._private.ray_logging:stdout_deduplicator.skip_re"),
    ),
)
# The raylet does not know the cause, and lists possible ones.
_DEATH = re.compile("^A worker died or was killed while executing a task by an unexpected system error")
# True while this thread runs a search that prints nothing of Tune's.
_IS_SILENT: ContextVar[bool] = ContextVar("is_silent", default=False)
_CONTROLLER = "ray.tune.execution.tune_controller:TuneController"
_ERRORS = Patch(
    "errors of trials",
    "the error of a failed trial begins with frames of Ray and not with its cause",
    (
        part(
            f"{_CONTROLLER}._trial_task_failure(self, trial, exception)",
            uses="_fail_fast RAISE _print_trial_errors _process_trial_failure",
        ),
        part("ray.exceptions:RayTaskError", uses="proctitle pid ip"),
        part("ray.exceptions:RayTaskError.as_instanceof_cause(self)"),
        part("ray.tune.registry:get_trainable_cls(trainable_name)"),
    ),
)
_METRICS = Patch(
    "missing metrics",
    "the error of a metric that no trial reports is Ray's, with the whole result",
    (
        part(f"{_CONTROLLER}._validate_result_metrics(self, result)", uses="_metric"),
        part("ray.tune.registry:get_trainable_cls(trainable_name)"),
        part("ray.tune.result:AUTO_RESULT_KEYS"),
    ),
)
_KNOW_RUN = ("ray.tune.tune", "ray.tune", "ray.tune.impl.tuner_internal")


def prepare_runs(prepare: Prepare, name: str) -> Callable[..., Any] | None:
    """Run every search inside ``prepare(run_or_experiment, arguments)``; once per process.

    It yields the arguments to run with. A ``run`` that was imported before (``from ray.tune import run``)
    stays Tune's own.

    Args:
        prepare: the context of a search.
        name: the module whose attribute ``run`` is the function returned. Under Ray Client, Tune pickles it
            by that name, so that the server's process prepares the search.
    """
    if not _RUNS.is_due:
        return None
    original = importlib.import_module("ray.tune.tune").run

    @functools.wraps(original)
    def run(run_or_experiment: Any, **arguments: Any) -> Any:
        from ray.util.client import ray as client

        if client.is_connected():
            return original(run_or_experiment, **arguments)
        with prepare(run_or_experiment, arguments) as prepared:
            return original(run_or_experiment, **prepared)

    run.__module__ = name
    for each in _KNOW_RUN:
        module = importlib.import_module(each)
        if getattr(module, "run", None) is original:
            module.run = run  # type: ignore[attr-defined]
    return run


def trainables_of(run_or_experiment: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return the trainables that ``tune.run`` was given, and the arguments of a ``tune.Experiment`` of each.

    They may be given as classes, by a registered name, as an Experiment, or as a list of these.
    """
    from ray.tune import Experiment, TuneError
    from ray.tune.registry import get_trainable_cls

    many = run_or_experiment if isinstance(run_or_experiment, list) else [run_or_experiment]
    found = []
    for each in many:
        spec = dict(each.spec) if isinstance(each, Experiment) else {}
        trainable = each.run_identifier if isinstance(each, Experiment) else each
        if isinstance(trainable, str):
            with suppress(TuneError):  # Tune's own error names it
                trainable = get_trainable_cls(trainable)
        found.append((trainable, spec))
    return found


def metric_and_mode(arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return ``tune.run``'s metric and mode: its own arguments, else the searcher's or the scheduler's."""
    search, scheduler = arguments.get("search_alg"), arguments.get("scheduler")
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
    # A number is the user's; where there was none, a `RunConfig` has Tune's own constant.
    is_chosen = verbose is not None and not isinstance(verbose, AirVerbosity)
    old_output = get_air_verbosity(AirVerbosity.VERBOSE) is None  # RAY_AIR_NEW_OUTPUT=0
    return is_chosen or arguments.get("progress_reporter") is not None or old_output


@contextmanager
def without_reporter() -> Iterator[None]:
    """Silence Tune for a search that this thread runs: at ``verbose=0`` it still prints failures.

    The raylet's paragraph on a dead process is left out too: a trial's error names the rank.
    """
    if _REPORTER.is_due:
        _allow_silent_reporter()
    token = _IS_SILENT.set(True)
    try:
        with _without_raylets_deaths():
            yield
    finally:
        _IS_SILENT.reset(token)


@contextmanager
def _without_raylets_deaths() -> Iterator[None]:
    if not _DEATHS.fits:
        yield
        return
    from ray._private.ray_logging import stdout_deduplicator

    before = stdout_deduplicator.skip_re  # the user's RAY_DEDUP_LOGS_SKIP_REGEX
    stdout_deduplicator.skip_re = before or _DEATH
    try:
        yield
    finally:
        stdout_deduplicator.skip_re = before


def _allow_silent_reporter() -> None:
    output = importlib.import_module(_OUTPUT)

    class SilentReporter(output.TuneTerminalReporter):  # type: ignore[misc, name-defined]
        def experiment_started(self, *args: Any, **keywords: Any) -> None: ...
        def on_trial_error(self, *args: Any, **keywords: Any) -> None: ...

    @wrap(output, "_detect_reporter")
    def detect(original: Any, verbosity: Any, num_samples: int, *args: Any, **keywords: Any) -> Any:
        if _IS_SILENT.get():
            return SilentReporter(verbosity, num_samples=num_samples)
        return original(verbosity, num_samples, *args, **keywords)


def name_missing_metric(is_ours: Callable[[type], bool]) -> None:
    """Name the metrics that a distributed trial reports if the requested one is not among them."""
    if not _METRICS.is_due:
        return
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.registry import get_trainable_cls
    from ray.tune.result import AUTO_RESULT_KEYS

    unasked = {*AUTO_RESULT_KEYS, "done", "trial_id", "experiment_tag", "should_checkpoint"}
    unasked |= {"world_size", "hosts", "start_s"}

    @wrap(TuneController, "_validate_result_metrics")
    def validate(original: Any, self: Any, result: dict[str, Any]) -> None:
        try:
            original(self, result)
        except ValueError as error:
            asked = re.search(r"specified metric\(s\) `(.+?)` that", str(error))
            trials = self.get_trials()
            if not asked or not trials or not is_ours(get_trainable_cls(trials[0].trainable_name)):
                raise
            names = [name for name in result if name not in unasked and not name.startswith("config/")]
            reported = ", ".join(map(repr, names)) or "no metrics"
            raise MetricNotReported(f"trials report {reported}; metric={asked[1]!r} was asked for") from None


def shorten_errors(is_ours: Callable[[type], bool]) -> None:
    """Make a distributed trial's error begin with its cause, in the log and error.txt; once per process."""
    if not _ERRORS.is_due:
        return
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.registry import get_trainable_cls

    @wrap(TuneController, "_trial_task_failure")
    def fail(original: Any, self: Any, trial: Any, exception: Exception) -> None:
        cause = getattr(exception, "cause", None)
        if not isinstance(cause, HorovodTuneError) or not is_ours(get_trainable_cls(trial.trainable_name)):
            original(self, trial, exception)
            return
        short = _begin_with_cause(exception, cause)
        if self._fail_fast == self.RAISE:
            raise short
        if self._print_trial_errors:
            logger.error("Trial %s failed: %s", trial, short)
        self._process_trial_failure(trial, exception=short)


def _begin_with_cause(error: Any, cause: HorovodTuneError) -> Exception:
    """Return Ray's ``error`` of an actor's method with a text that begins with ``cause``."""
    from ray.exceptions import RayTaskError

    text = f"{type(cause).__module__}.{type(cause).__name__}: {cause}"
    if not isinstance(cause, TrainingFailed):  # which has the traceback that counts, that of its rank
        text += f"\n\nRaised in the trial's coordinator:\n{error}"

    class CauseFirst(RayTaskError):
        def __str__(self) -> str:
            return text

    first = CauseFirst("train", text, cause, proctitle="train", pid=1, ip="-")
    shown: Exception = first.as_instanceof_cause()
    return shown
