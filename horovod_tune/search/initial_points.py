"""`points_to_evaluate`: the points to evaluate first, and those with known results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from horovod_tune.search.history import reward
from horovod_tune.search.space.domains import Path, SpaceError
from horovod_tune.search.space.search_space import Point, SearchSpace


@dataclass
class QueuedPoint:
    """A point to evaluate: `coordinates` by parameter index (others are open), `exact` values as given."""

    coordinates: dict[int, float]
    exact: dict[Path, Any] = field(default_factory=dict)

    def complete(self, space: SearchSpace, seed: int) -> Point:
        """Return the whole point; open parameters are drawn with `seed`."""
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
    def from_json(cls, entry: Mapping[str, Any]) -> QueuedPoint:
        return cls(
            {int(index): float(coordinate) for index, coordinate in entry["coordinates"]},
            {tuple(path): value for path, value in entry["exact"]},
        )


def queue_points(
    space: SearchSpace,
    points: Sequence[Mapping[str, Any]] | None,
    rewards: Sequence[float | None] | None,
) -> tuple[list[QueuedPoint], list[tuple[Point, float]]]:
    """Check the user's points against the space; return those to run, and those with known results.

    Raises `SpaceError`, which names the point and the parameter.
    """
    points = [] if points is None else points
    if not isinstance(points, Sequence):
        raise SpaceError(f"points_to_evaluate must be a list of dictionaries, got {points!r}")
    # Arrays and series have an order too; sets and dictionaries have none that belongs to the points.
    if rewards is not None and not isinstance(rewards, Sequence) and not hasattr(rewards, "tolist"):
        raise SpaceError(f"evaluated_rewards must be a list of numbers, got {rewards!r}")
    if rewards is not None and len(rewards) != len(points):
        raise SpaceError(
            f"evaluated_rewards must have one value for each of the {len(points)} points_to_evaluate, "
            f"got {len(rewards)}"
        )
    seen: list[QueuedPoint] = []
    to_run: list[QueuedPoint] = []
    evaluated: list[tuple[Point, float]] = []
    each_reward = [None] * len(points) if rewards is None else rewards
    for number, (config, given) in enumerate(zip(points, each_reward, strict=True)):
        where = f"points_to_evaluate[{number}]"
        if not isinstance(config, Mapping):
            raise SpaceError(f"{where} must be a dictionary, got {config!r}")
        try:
            coordinates, exact, is_complete = space.partial(space.nested(config))
        except SpaceError as error:
            raise SpaceError(f"{where}: {error}") from None
        queued = QueuedPoint(coordinates, exact)
        try:
            json.dumps(queued.as_json())
        except TypeError as error:
            raise SpaceError(f"{where} has a value that cannot be saved as JSON: {error}") from None
        if is_complete and queued in seen:
            raise SpaceError(f"{where} repeats points_to_evaluate[{seen.index(queued)}]")
        seen.append(queued)
        if given is None:
            to_run.append(queued)
            continue
        value = reward(given)
        if value is None:
            raise SpaceError(
                f"evaluated_rewards[{number}] must be a number, or None for a point to be run, got {given!r}"
            )
        if not is_complete:
            raise SpaceError(f"{where} has a reward, so it must give every parameter")
        evaluated.append((queued.complete(space, 0), value))
    return to_run, evaluated
