"""Finds the next point: from a quasi-random sequence, or where the acquisition is largest.

A space may have floats, grids and categories together.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize
from scipy.stats import qmc

from horovod_tune.search.gp.acquisition import Acquisition
from horovod_tune.search.gp.feasibility import FailureModel
from horovod_tune.search.history import History
from horovod_tune.search.space.parameters import FloatArray, FloatRange
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
    sequence = qmc.Sobol(max(space.dimension, 1), seed=np.random.default_rng(seed))
    if history.drawn:
        sequence.fast_forward(history.drawn)
    for _ in range(64):
        drawn = space.from_quantiles(sequence.random(1)[:, : space.dimension])
        history.drawn += 1
        if middle:
            middle, drawn = False, space.snap(np.where(ordered, 0.5, drawn))
        point = space.canonical(drawn[0])
        if taken(point):
            continue
        if safety is None:
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


#: A grid with more values than this is optimised by gradients like a continuous parameter, and the result is
#: rounded to the grid.
MAX_STEPPED_VALUES = 16
#: The numbers of points evaluated all over the space and of climbs from the best of them. Each evaluation
#: costs the square of the model's rows; with many rows, the best results are near the optimum already.
_FEW_ROWS, _MANY_ROWS = (1024, 4), (384, 2)
#: The step of finite differences, in coordinates from 0 to 1.
_STEP = 1e-5


def propose(
    acquisition: Acquisition,
    rows: int,
    space: SearchSpace,
    centres: FloatArray,
    taken: Callable[[Point], bool],
    seed: int,
) -> Point | None:
    """Return the best point found that is not `taken`, or None if all evaluated points are.

    `rows` is the number of results and points in flight in the acquisition's model, `centres`, shape (points,
    parameters), are good points whose surroundings are searched more closely.
    """
    generator = np.random.default_rng(seed)
    number, climbs = _MANY_ROWS if rows > 80 else _FEW_ROWS
    pool = candidates(space, centres, number, generator)
    values = acquisition(space.features(pool))
    starts = pool[_distinct(pool, values, climbs)]
    climbed = [_climb(acquisition, space, start) for start in starts]
    pool = np.concatenate([np.stack([point for point, _ in climbed]), pool])
    values = np.concatenate([[value for _, value in climbed], values])
    for index in np.argsort(-values, kind="stable"):
        point = space.canonical(pool[index])
        if not taken(point):
            return point
    return None


#: What is subtracted from the logarithm of an improvement to rank a point after all others.
_LAST = 1e6


def in_another_option(
    acquisition: Acquisition, space: SearchSpace, best: FloatArray, turn: int
) -> Acquisition:
    """Return an acquisition, a logarithm, that ranks the points with an option of the `best` point last.

    The option is that of one category: they take turns. A space without categories keeps its acquisition.
    """
    exists = space.active(best[None, :])[0]
    categories = [i for i, column in enumerate(space.columns) if exists[i] and not column.is_ordered]
    if not categories:
        return acquisition
    category = categories[turn % len(categories)]
    feature = space.feature_starts[category] + int(best[category])
    return lambda features: acquisition(features) - _LAST * (features[:, feature] > 0)


def candidates(
    space: SearchSpace, centres: FloatArray, number: int, generator: np.random.Generator
) -> FloatArray:
    """Return points all over the space, and points at several distances around the centres."""
    everywhere = space.from_quantiles(generator.random((number, space.dimension)))
    if not len(centres):
        return everywhere
    around = np.repeat(centres, max(1, number // (2 * len(centres))), axis=0)
    fresh = space.from_quantiles(generator.random(around.shape))
    spread = 10.0 ** generator.uniform(-3, -0.5, size=(len(around), 1))
    numeric = np.array([column.is_ordered for column in space.columns])
    moved = np.where(numeric, np.clip(around + spread * generator.standard_normal(around.shape), 0, 1), fresh)
    # Move few coordinates at a time: in many dimensions, moving all of them would leave any ridge.
    share = generator.uniform(size=(len(around), 1))
    mask = generator.uniform(size=around.shape) < np.maximum(share, 1.0 / space.dimension)
    return np.concatenate([everywhere, space.snap(np.where(mask, moved, around))])


def _distinct(pool: FloatArray, values: FloatArray, number: int) -> list[int]:
    """Return the indices of the best candidates that are not near one another."""
    chosen: list[int] = []
    for index in np.argsort(-values, kind="stable")[:400]:
        if all(np.max(np.abs(pool[index] - pool[other])) > 0.05 for other in chosen):
            chosen.append(int(index))
            if len(chosen) == number:
                break
    return chosen


def _climb(acquisition: Acquisition, space: SearchSpace, start: FloatArray) -> tuple[FloatArray, float]:
    """Alternate between gradient steps on the numbers and best single steps on grids and categories."""
    is_stepped = any(column.cardinality < math.inf for column in space.columns)
    point, value = start, _value(acquisition, space, start)
    for _ in range(3):
        before = value
        active = space.active(point[None, :])[0]  # other parameters have no effect
        smooth = [
            i
            for i, column in enumerate(space.columns)
            if active[i] and column.is_ordered and column.cardinality > MAX_STEPPED_VALUES
        ]
        if smooth:
            point, value = _climb_smooth(acquisition, space, point, value, smooth)
        if not is_stepped:
            break
        point, value = _climb_steps(acquisition, space, point, value)
        if not smooth or value <= before + 1e-6 * abs(before):
            break
    return point, value


def _value(acquisition: Acquisition, space: SearchSpace, point: FloatArray) -> float:
    return float(acquisition(space.features(point[None, :]))[0])


def _climb_smooth(
    acquisition: Acquisition, space: SearchSpace, point: FloatArray, value: float, smooth: list[int]
) -> tuple[FloatArray, float]:
    columns = [space.feature_starts[i] for i in smooth]
    # Central differences, all in one call: a call is hardly slower for many points than for one.
    steps = _STEP * np.eye(len(smooth))
    around = np.concatenate([np.zeros((1, len(smooth))), steps, -steps])
    queries = np.repeat(space.features(point[None, :]), len(around), axis=0)

    def objective(coordinates: FloatArray) -> tuple[float, FloatArray]:
        queries[:, columns] = coordinates + around
        here, above, below = np.split(acquisition(queries), [1, 1 + len(smooth)])
        return -float(here[0]), (below - above) / (2 * _STEP)

    optimum = minimize(
        objective,
        point[smooth],
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, 1.0)] * len(smooth),
        options={"maxiter": 40, "maxfun": 60},
    )
    moved = point.copy()
    moved[smooth] = optimum.x
    moved = space.snap(moved[None, :])[0]
    reached = _value(acquisition, space, moved)
    return (moved, reached) if reached > value else (point, value)


def _climb_steps(
    acquisition: Acquisition, space: SearchSpace, point: FloatArray, value: float
) -> tuple[FloatArray, float]:
    stepped = [(i, column) for i, column in enumerate(space.columns) if not isinstance(column, FloatRange)]
    for _ in range(20):
        steps = [(i, each) for i, column in stepped for each in column.neighbours(point[i])]
        options = np.repeat(point[None, :], len(steps), axis=0)
        for option, (i, coordinate) in zip(options, steps, strict=True):
            option[i] = coordinate
        values = acquisition(space.features(options))
        best = int(np.argmax(values))
        if values[best] <= value:
            break
        point, value = options[best], float(values[best])
    return point, value
