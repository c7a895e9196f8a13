"""Frees the concurrency slots of paused trials: Tune's limiters count trials even while they are paused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from horovod_tune.ray_compat.compatibility import Patch

_LIMITERS = Patch(
    "concurrency slots of paused trials",
    "PromotingASHA runs fewer trials at once than max_concurrent",
    "ray.tune.search:ConcurrencyLimiter uses live_trials num_unfinished_live_trials cached_results searcher",
    "ray.tune.search.basic_variant:BasicVariantGenerator uses _live_trials",
)


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


def _limiters(controller: Any) -> Iterator[tuple[Any, set[str]]]:
    """Yield the limiters of a search's concurrent trials, each with the ids of the trials that it counts."""
    if not _LIMITERS.fits:
        return
    from ray.tune.search import ConcurrencyLimiter
    from ray.tune.search.basic_variant import BasicVariantGenerator

    search = controller.search_alg
    while search is not None:
        if isinstance(search, ConcurrencyLimiter):
            yield search, search.live_trials
        elif isinstance(search, BasicVariantGenerator):
            yield search, search._live_trials
        search = getattr(search, "searcher", None)
