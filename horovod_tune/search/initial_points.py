"""Points that are chosen without a model of the metric.

Those that a user wants evaluated first (`points_to_evaluate`), the quasi-random start, and what is left when
a space is nearly used up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.stats import qmc

from horovod_tune.search.gp.feasibility import Safety
from horovod_tune.search.gp.proposal import Acquisition
from horovod_tune.search.history import History, Trial, as_number
from horovod_tune.search.space.domains import Path, SpaceError, nested
from horovod_tune.search.space.search_space import Point, SearchSpace
from horovod_tune.search.suggest_state import features_of


@dataclass
class Queued:
    """A point to evaluate: coordinates by parameter index, the rest open; values to use exactly as given."""

    coordinates: dict[int, float]
    exact: dict[Path, Any] = field(default_factory=dict)

    def is_whole(self, space: SearchSpace) -> bool:
        """Return True if it gives every parameter that exists where its options are chosen."""
        missing = [i for i in range(space.dimension) if i not in self.coordinates]
        if not missing or not space.is_conditional:
            return not missing
        return not space.active(np.asarray([self.complete(space, 0)]))[0][missing].any()

    def complete(self, space: SearchSpace, seed: int) -> Point:
        """Return the whole point, what is open drawn with `seed`."""
        drawn = space.from_quantiles(np.random.default_rng(seed).random((1, space.dimension)))[0]
        for index, coordinate in self.coordinates.items():
            drawn[index] = coordinate
        return space.canonical(drawn)

    def as_json(self) -> dict[str, Any]:
        return {
            "coordinates": list(self.coordinates.items()),
            "exact": [[list(path), value] for path, value in self.exact.items()],
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Queued:
        return cls(
            {int(index): float(coordinate) for index, coordinate in entry["coordinates"]},
            {tuple(path): value for path, value in entry["exact"]},
        )


def queue_points(
    space: SearchSpace,
    points: Sequence[Mapping[str, Any]] | None,
    rewards: Sequence[float | None] | None,
) -> tuple[list[Queued], list[tuple[Point, float]]]:
    """Check the user's points against the space; return those to run, and those with known results.

    Raises `SpaceError` naming the point and the parameter, for a point outside the space, a repeated one,
    and for rewards that do not go with the points.
    """
    points = list(points or [])
    if rewards is not None and not hasattr(rewards, "__len__"):
        raise SpaceError(f"evaluated_rewards must be a list of numbers, got {rewards!r}")
    if rewards is not None and len(rewards) != len(points):
        raise SpaceError(
            f"evaluated_rewards must have one value for each of the {len(points)} points_to_evaluate, "
            f"got {len(rewards)}"
        )
    queue: list[Queued] = []
    for number, config in enumerate(points):
        where = f"points_to_evaluate[{number}]"
        if not isinstance(config, Mapping):
            raise SpaceError(f"{where} must be a dictionary, got {config!r}")
        try:
            queued = Queued(*space.partial(_nested(config, space)))
        except SpaceError as error:
            raise SpaceError(f"{where}: {error}") from None
        try:
            json.dumps(queued.as_json())
        except TypeError as error:
            raise SpaceError(f"{where} gives a parameter a value that cannot be saved: {error}") from None
        if queued.is_whole(space) and queued in queue:
            raise SpaceError(f"{where} repeats points_to_evaluate[{queue.index(queued)}]")
        queue.append(queued)
    if rewards is None:
        return queue, []
    to_run: list[Queued] = []
    known: list[tuple[Point, float]] = []
    for number, (queued, reward) in enumerate(zip(queue, rewards, strict=True)):
        if reward is None:
            to_run.append(queued)
            continue
        value = None if isinstance(reward, bool) else as_number(reward)
        if value is None:
            raise SpaceError(
                f"evaluated_rewards[{number}] must be a number, or None for a point to be run, got {reward!r}"
            )
        if not queued.is_whole(space):
            raise SpaceError(f"points_to_evaluate[{number}] has a reward, so it must give every parameter")
        known.append((queued.complete(space, 0), value))
    return to_run, known


def _nested(config: Mapping[str, Any], space: SearchSpace) -> Mapping[str, Any]:
    """Return a configuration with its flat keys, such as `model/depth`, nested as the space is."""
    flat = [key for key in config if isinstance(key, str) and "/" in key and not space.has_key(key)]
    return nested(config) if flat else config


#: A quasi-random point is passed over where the logarithm of the probability that it does not fail is less
#: than this, up to so many times.
_SAFE_ENOUGH, _PASSED_OVER = -3.0, 8
#: Points of a finite space that are looked at one by one when it is nearly used up.
_ENUMERABLE = 100_000


def safety_of(space: SearchSpace, failed: Sequence[Trial], safe: Sequence[Trial]) -> Safety | None:
    if not failed:
        return None
    return Safety(features_of(space, safe), features_of(space, failed), space.feature_groups)


def quasi_random_point(
    space: SearchSpace,
    history: History,
    seed: int,
    taken: Callable[[Point], bool],
    safety: Safety | None,
    middle: bool = False,
) -> Point | None:
    """Return the next free point of a scrambled Sobol sequence, None if there is none for long.

    With `middle`, its numbers are those in the middle of their ranges, unless that point is taken. Where
    trials have failed, points that are likely to fail too are passed over, as long as others come soon.
    """
    best: tuple[float, Point] | None = None
    tried = 0
    for _ in range(64):
        sequence = qmc.Sobol(max(space.dimension, 1), seed=np.random.default_rng(seed))
        if history.drawn:
            sequence.fast_forward(history.drawn)
        quantiles = sequence.random(1)[:, : space.dimension]
        history.drawn += 1
        drawn = space.from_quantiles(quantiles)
        if middle:
            middle, drawn = False, space.in_the_middle(drawn)
        point = space.canonical(drawn[0])
        if taken(point):
            continue
        if safety is None or not space.dimension:
            return point
        log_p = float(safety.log_probability(space.features(np.asarray([point])))[0])
        if log_p > _SAFE_ENOUGH:
            return point
        best = max(best or (log_p, point), (log_p, point))
        tried += 1
        if tried == _PASSED_OVER:
            break
    return best[1] if best is not None else None


def leftover_point(
    space: SearchSpace, taken: Callable[[Point], bool], acquisition: Acquisition | None, seed: int
) -> Point:
    """Return a free point of a nearly exhausted space, the most promising one if there is an acquisition."""
    if space.size <= _ENUMERABLE:
        pool = np.asarray(list(space.every_point()))
    else:
        generator = np.random.default_rng(seed)
        pool = space.from_quantiles(generator.random((10_000, space.dimension)))
    free = [point for point in map(space.canonical, pool) if not taken(point)]
    if not free:
        # A range of a few neighbouring floats: they are repeated, as in a space that is used up.
        free = [space.canonical(pool[0])]
    if acquisition is None:
        return free[0]
    return free[int(np.argmax(acquisition(space.features(np.asarray(free)))))]
