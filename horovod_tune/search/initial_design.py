"""Points that are chosen without a model of the metric: at the start, and in a nearly exhausted space."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.stats import qmc

from horovod_tune.search.gp.feasibility import FailureModel
from horovod_tune.search.gp.proposal import Acquisition
from horovod_tune.search.history import History
from horovod_tune.search.space.search_space import Point, SearchSpace

#: A quasi-random point is skipped if its `FailureModel` value is at most the first number. After as many
#: skipped points as the second number, the safest of them is used.
_SAFE_ENOUGH, _PASSED_OVER = -3.0, 8
#: All points of a nearly exhausted space are compared if it has at most this many.
_ENUMERABLE = 100_000


def quasi_random_point(
    space: SearchSpace,
    history: History,
    seed: int,
    taken: Callable[[Point], bool],
    safety: FailureModel | None,
    middle: bool = False,
) -> Point | None:
    """Return the next free point of a scrambled Sobol sequence; None if the next 64 points are taken.

    With `middle`, numeric parameters are in the middle of their ranges, unless that point is taken. With
    `safety`, points that are likely to fail are skipped; after eight of them, the safest is returned.
    """
    ordered = [column.is_ordered for column in space.columns]
    passed_over: list[tuple[float, Point]] = []
    for _ in range(64):
        sequence = qmc.Sobol(max(space.dimension, 1), seed=np.random.default_rng(seed))
        if history.drawn:
            sequence.fast_forward(history.drawn)
        quantiles = sequence.random(1)[:, : space.dimension]
        history.drawn += 1
        drawn = space.from_quantiles(quantiles)
        if middle:
            middle, drawn = False, space.snap(np.where(ordered, 0.5, drawn))
        point = space.canonical(drawn[0])
        if taken(point):
            continue
        if safety is None or not space.dimension:
            return point
        log_p = float(safety(space.features([point]))[0])
        if log_p > _SAFE_ENOUGH:
            return point
        passed_over.append((log_p, point))
        if len(passed_over) == _PASSED_OVER:
            break
    return max(passed_over)[1] if passed_over else None


def remaining_point(
    space: SearchSpace, taken: Callable[[Point], bool], acquisition: Acquisition | None, seed: int
) -> Point:
    """Return a free point of a nearly exhausted space, the most promising one if there is an acquisition."""
    if space.size <= _ENUMERABLE:
        pool = np.asarray(space.every_point())
    else:
        generator = np.random.default_rng(seed)
        pool = space.from_quantiles(generator.random((10_000, space.dimension)))
    free = [point for point in map(space.canonical, pool) if not taken(point)]
    if not free:
        # The space is a range of a few neighbouring floats; they are repeated, as in an exhausted space.
        free = [space.canonical(pool[0])]
    if acquisition is None:
        return free[0]
    return free[int(np.argmax(acquisition(space.features(free))))]
