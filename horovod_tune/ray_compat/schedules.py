"""Tune's schedulers, searchers and limiters: settings and state that have no public interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from horovod_tune.compatibility import Patch


@Patch(
    "pass time_attr to BayesOptSearch explicitly",
    "ray.tune.schedulers:ASHAScheduler uses _time_attr _max_t",
    "ray.tune.schedulers:HyperBandScheduler uses _time_attr _max_t_attr",
    "ray.tune.schedulers:ResourceChangingScheduler uses _base_scheduler",
).otherwise(None)
def time_attr_of(scheduler: Any) -> str | None:
    """Return the time attribute of a scheduler that has a ``max_t``; None otherwise.

    Other schedulers, such as median stopping and population-based training, measure time in seconds by
    default, which is of little use for learning curves.
    """
    scheduler = getattr(scheduler, "_base_scheduler", scheduler)
    has_end = hasattr(scheduler, "_max_t") or hasattr(scheduler, "_max_t_attr")
    time_attr = getattr(scheduler, "_time_attr", None)
    return time_attr if has_end and isinstance(time_attr, str) else None


def end_of(scheduler: Any) -> dict[str, float]:
    """Return the value of its time attribute at which a scheduler ends a whole training; {} without one."""
    name, scheduler = time_attr_of(scheduler), getattr(scheduler, "_base_scheduler", scheduler)
    end = getattr(scheduler, "_max_t", None) or getattr(scheduler, "_max_t_attr", None)
    return {name: float(end)} if name is not None and isinstance(end, (int, float)) else {}


_SETTINGS = {
    "_max_t": "max_t",
    "_max_t_attr": "max_t",
    "_reduction_factor": "reduction_factor",
    "_eta": "reduction_factor",
    "_perturbation_interval": "perturbation_interval",
    "_grace_period": "grace_period",
    "_time_attr": "time_attr",
}


def describe_scheduler(scheduler: Any) -> str:
    """Return a scheduler's class with the settings that decide which trials are stopped."""
    if scheduler is None or isinstance(scheduler, str):
        return scheduler or "first in, first out"
    settings = {}
    for private, name in _SETTINGS.items():
        value = getattr(scheduler, private, None)
        if isinstance(value, (int, float, str)) and value != "training_iteration":
            settings[name] = f"{value:g}" if isinstance(value, float) else value
    inside = ", ".join(f"{name}={value}" for name, value in settings.items())
    return f"{type(scheduler).__name__}({inside})" if inside else type(scheduler).__name__


def describe_searcher(search: Any) -> str:
    """Return a search algorithm's class, with the limit of a ConcurrencyLimiter around it."""
    if search is None or isinstance(search, str):
        return search or "random and grid (Tune's own)"
    inner = getattr(search, "searcher", None)
    bound = getattr(search, "max_concurrent", None)
    if inner is None:
        return type(search).__name__
    return describe_searcher(inner) + (f", at most {bound:g} at a time" if bound else "")


def innermost(search: Any) -> Any:
    """Return the searcher inside a SearchGenerator, a ConcurrencyLimiter or a Repeater."""
    while getattr(search, "searcher", None) is not None:
        search = search.searcher
    return search


def space_of(search: Any) -> Any:
    """Return the space that was passed to the search algorithm itself; None if there is none."""
    search = innermost(search)
    return getattr(search, "space_spec", getattr(search, "_space", None))


@Patch(
    "a point of BayesOptSearch with a constant that is an object must leave it out",
    "ray.tune.impl.placeholder:_RefResolver.TOKEN",
).otherwise(False)
def is_placeholder(value: Any) -> bool:
    """Return True if Tune has replaced an object of the space by this value."""
    from ray.tune.impl.placeholder import _RefResolver

    return isinstance(value, tuple) and value[:1] == (_RefResolver.TOKEN,)


def release_slot(controller: Any, trial_id: str) -> None:
    """Stop Tune's limiters from counting a paused trial."""
    for limiter, live in _limiters(controller):
        if trial_id in live:
            live.remove(trial_id)
            if ended := getattr(limiter, "cached_results", None):
                # It holds back the results of a batch, which may wait for no other trial now. Told of one
                # again, it counts one trial less, and passes the results on if none is left.
                ended_id, (result, error) = next(iter(ended.items()))
                limiter.on_trial_complete(ended_id, result, error)
            elif hasattr(limiter, "num_unfinished_live_trials"):
                limiter.num_unfinished_live_trials -= 1


def acquire_slot(controller: Any, trial_id: str) -> None:
    """Make Tune's limiters count a trial again when it continues."""
    for limiter, live in _limiters(controller):
        if trial_id not in live:
            live.add(trial_id)
            if hasattr(limiter, "num_unfinished_live_trials"):
                limiter.num_unfinished_live_trials += 1


@Patch(
    "PromotingASHA runs fewer trials at once than max_concurrent",
    "ray.tune.search:ConcurrencyLimiter uses live_trials num_unfinished_live_trials cached_results searcher",
    "ray.tune.search.basic_variant:BasicVariantGenerator uses _live_trials",
).otherwise(())
def _limiters(controller: Any) -> Iterator[tuple[Any, set[str]]]:
    """Yield the limiters of a search's concurrent trials, each with the ids of the trials that it counts."""
    from ray.tune.search import ConcurrencyLimiter
    from ray.tune.search.basic_variant import BasicVariantGenerator

    search = controller.search_alg
    while search is not None:
        if isinstance(search, ConcurrencyLimiter):
            yield search, search.live_trials
        elif isinstance(search, BasicVariantGenerator):
            yield search, search._live_trials
        search = getattr(search, "searcher", None)
