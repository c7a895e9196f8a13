"""Translates a Tune search space, or bayesian-optimization's `pbounds`, to the model's space and back.

A *point* is a tuple with one coordinate for each modelled parameter (see `parameters`); many points are an
array of shape (points, parameters). Parameters whose option of a `tune.choice` is not chosen (see
`domains`) are inactive: their coordinate is 0, which the model ignores. `tune.randn` and
`tune.sample_from` are sampled whenever a configuration is made.
"""

from __future__ import annotations

import copy
import math
import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.tune.search.sample import Domain
from ray.tune.search.variant_generator import RecursiveDependencyError

from horovod_tune.ray_compat.schedules import is_placeholder
from horovod_tune.search.space.domains import (
    MISSING,
    Path,
    SpaceError,
    nested,
    nodes_of,
    option_of,
    path_name,
    put_at,
    value_at,
    written_key,
)
from horovod_tune.search.space.parameters import FloatArray, FloatRange, Parameter, equal_as_written
from horovod_tune.search.state_file import decode, encode

Point = tuple[float, ...]

#: The feature of an inactive parameter: the same for every point at which it is inactive.
_INACTIVE_FEATURE = 0.5


class SearchSpace:
    """A search space: the modelled parameters, what is sampled outside the model, and the constants.

    `spec` is a nested Tune search space. With `include_constants` a configuration holds the constants too;
    Tune itself adds them when the space came as `param_space`.

    Raises `SpaceError` for grid_search, and for a domain without values.
    """

    def __init__(self, spec: Mapping[str, Any], include_constants: bool = False) -> None:
        #: The nested Tune search space.
        self.spec = copy.deepcopy(dict(spec))
        self._include_constants = include_constants
        #: All domains; a choice comes before the domains in its options.
        self._nodes = list(nodes_of(self.spec, count()))
        self._modelled = [node for node in self._nodes if node.column is not None]
        self.columns: list[Parameter] = [node.parameter for node in self._modelled if node.parameter]
        self.dimension = len(self.columns)
        #: True if something is sampled outside the model, so that one point has many configurations.
        self.is_sampled = any(node.parameter is None for node in self._nodes)
        # Each parameter has one length scale, which all columns of a one-hot category share.
        widths = [1 if p.is_ordered else int(p.cardinality) for p in self.columns]
        self.feature_groups = np.repeat(np.arange(len(widths)), widths)
        #: See `FloatRange.powers`.
        self.powers = np.array([p.powers if isinstance(p, FloatRange) else 0.0 for p in self.columns], float)
        #: The first feature of each parameter, and the number of features.
        self.feature_starts = np.concatenate([[0], np.cumsum(widths)]).astype(int)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> SearchSpace:
        """Return the space that `as_json` described."""
        return cls(decode(state["spec"]), state["include_constants"])

    def as_json(self) -> dict[str, Any] | None:
        """Return the space for a saved search; None if JSON cannot express it."""
        try:
            return {"spec": encode(self.spec), "include_constants": self._include_constants}
        except TypeError:
            return None

    @property
    def size(self) -> float:
        """The number of different points; infinite if a parameter is continuous."""
        # By what they need: the product of the sizes of all parameters there, with what is in their options.
        below: dict[tuple[tuple[int, int], ...], float] = defaultdict(lambda: 1)
        for column, node in reversed(list(enumerate(self._modelled))):
            options = [(*node.needs, (column, number)) for number in range(len(node.options or ()))]
            combinations = (
                sum(below[needs] for needs in options) if options else self.columns[column].cardinality
            )
            below[node.needs] *= combinations
        return below[()]

    def nested(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a configuration with its flat keys, such as `model/depth`, nested as the space is."""
        tops = {written_key({}, key) for key in self.spec}
        flat = {
            key: value
            for key, value in config.items()
            if isinstance(key, str) and key not in self.spec and key.split("/")[0] in tops
        }
        return {**{key: value for key, value in config.items() if key not in flat}, **nested(flat)}

    def names(self) -> list[str]:
        """Return the name of every modelled parameter; inside an option, it has the option's number in it."""
        return [node.name for node in self._modelled]

    def describe(self) -> dict[str, str]:
        """Return a description of every modelled parameter, to compare with that of a saved search."""
        return dict(zip(self.names(), [column.describe() for column in self.columns], strict=True))

    def active(self, points: FloatArray) -> NDArray[np.bool_]:
        """Return which parameters exist at the points, shape (points, parameters)."""
        mask = np.ones(points.shape, dtype=bool)
        for i, node in enumerate(self._modelled):
            for choice, option in node.needs:
                mask[:, i] &= mask[:, choice] & (np.rint(points[:, choice]) == option)
        return mask

    def from_quantiles(self, quantiles: FloatArray) -> FloatArray:
        """Map numbers in [0, 1), shape (points, parameters), to points of the same shape."""
        columns = [p.from_quantiles(quantiles[:, i]) for i, p in enumerate(self.columns)]
        return np.column_stack([quantiles[:, :0], *columns])

    def snap(self, points: FloatArray) -> FloatArray:
        """Move each coordinate to that of the nearest allowed value."""
        columns = [p.snap(points[:, i]) for i, p in enumerate(self.columns)]
        return np.column_stack([points[:, :0], *columns])

    def features(self, points: FloatArray | Sequence[Point]) -> FloatArray:
        """Return the model's features, shape (points, features): numbers as they are, categories one-hot.

        Two different categories are at distance 1, two points at which a parameter is inactive at 0.
        """
        points = np.asarray(points, dtype=float).reshape(len(points), self.dimension)
        features = np.zeros((len(points), self.feature_starts[-1]))
        active = self.active(points)
        for i, parameter in enumerate(self.columns):
            start = self.feature_starts[i]
            if parameter.is_ordered:
                features[:, start] = np.where(active[:, i], points[:, i], _INACTIVE_FEATURE)
            else:
                one_hot = start + points[:, i].astype(int)
                features[np.arange(len(points)), one_hot] = math.sqrt(0.5) * active[:, i]
        return features

    def every_point(self) -> list[Point]:
        """Return every point of a finite space."""
        axes = [p.every_coordinate().tolist() for p in self.columns if not isinstance(p, FloatRange)]
        return list(dict.fromkeys(map(self.canonical, product(*axes))))

    def canonical(self, point: FloatArray | Point) -> Point:
        """Return the canonical coordinates of the values at `point`: equal configurations have equal ones."""
        own = [p.to_coordinate(p.to_value(c)) for p, c in zip(self.columns, point, strict=True)]
        active = self.active(np.asarray([own]))[0]
        return tuple(c if is_active else 0.0 for c, is_active in zip(own, active, strict=True))

    def config(self, point: Point, seed: int, given: Mapping[Path, Any] | None = None) -> dict[str, Any]:
        """Return the configuration at `point`, the sampled parts drawn with `seed` unless `given`."""
        given = given or {}
        full = copy.deepcopy(self.spec)
        coordinates = dict(enumerate(point))
        sampled: dict[Path, Domain] = {}
        for node in self._nodes:
            if not node.exists(coordinates):
                continue
            if node.path in given:
                value = given[node.path]
            elif node.parameter is None:
                sampled[node.path] = node.domain
                continue
            else:
                value = node.parameter.to_value(0.0 if node.column is None else point[node.column])
                if node.options is not None:
                    value = node.options[int(value)]
            put_at(full, node.path, copy.deepcopy(value))
        _draw_sampled(full, sampled, seed)
        if self._include_constants:
            return full
        return _only(full, [node.path for node in self._nodes if not node.needs])

    def point(self, config: Mapping[str, Any], empty: Collection[str] = ()) -> Point:
        """Return the point of a complete configuration; parameters whose names are in `empty` are None."""
        coordinates, _, missing = self._read(config, empty)
        if missing:
            raise SpaceError(f"'{missing[0]}' is missing from the configuration")
        return tuple(coordinates.get(i, 0.0) for i in range(self.dimension))

    def partial(self, config: Mapping[str, Any]) -> tuple[dict[int, float], dict[Path, Any], bool]:
        """Return a configuration's coordinates, values to use as given, and True if it leaves none open."""
        coordinates, given, missing = self._read(config)
        _refuse_unknown(config, self.spec, ())
        return coordinates, given, not missing

    def _read(
        self, config: Mapping[str, Any], empty: Collection[str] = ()
    ) -> tuple[dict[int, float], dict[Path, Any], list[str]]:
        """Return a configuration's coordinates, values to use as given, and the parameters that it lacks."""
        coordinates: dict[int, float] = {}
        given: dict[Path, Any] = {}
        missing: list[str] = []
        for node in self._nodes:
            if not node.exists(coordinates):
                continue
            name, parameter = path_name(node.path), node.parameter
            value = value_at(config, node.path, None if name in empty else MISSING)
            if value is MISSING:
                if node.column is not None:
                    missing.append(name)
                continue
            if parameter is None:
                given[node.path] = value
                continue
            if node.options is not None:
                value = option_of(node, value)
            elif problem := parameter.why_invalid(value):
                raise SpaceError(f"'{name}' {problem}")
            if node.column is not None:
                coordinates[node.column] = parameter.to_coordinate(value)
            if isinstance(parameter, FloatRange):
                # Converting to a coordinate and back may change the last bits; the trial must get `value`.
                given[node.path] = float(value)
        return coordinates, given, missing


def _only(full: Any, paths: list[Path]) -> Any:
    """Return the part of nested dictionaries that leads to `paths`; a list or tuple is kept whole."""
    if not isinstance(full, dict) or () in paths:
        return full
    part = {}
    for key in full:
        below = [path[1:] for path in paths if path[0] == key]
        if below:
            part[key] = _only(full[key], below)
    return part


def _refuse_unknown(config: Any, spec: Any, path: Path) -> None:
    # Trainables that are not distributed get a space with placeholders, which cannot be compared.
    if isinstance(spec, Domain) or is_placeholder(spec):
        return
    if isinstance(spec, dict) and isinstance(config, Mapping):
        own = {written_key(config, key): key for key in spec}
        for key, value in config.items():
            if key not in own:
                raise SpaceError(
                    f"'{path_name((*path, key))}' is not in the search space; it has {sorted(map(str, spec))}"
                )
            _refuse_unknown(value, spec[own[key]], (*path, key))
    elif isinstance(spec, (list, tuple)) and isinstance(config, (list, tuple)) and len(spec) == len(config):
        for index, (value, inner) in enumerate(zip(config, spec, strict=True)):
            _refuse_unknown(value, inner, (*path, index))
    elif not equal_as_written(spec, config):
        raise SpaceError(
            f"'{path_name(path)}' is the constant {spec!r}, got {config!r}; leave it out to use the constant"
        )


def _draw_sampled(config: dict[str, Any], domains: Mapping[Path, Domain], seed: int) -> None:
    """Sample what is outside the model, in an order that respects references."""
    waiting = dict(domains)
    generator = np.random.default_rng(seed)
    while waiting:
        for path, domain in waiting.items():
            try:
                with seeded(int(generator.integers(2**32))):
                    value = domain.sample(_Resolved(config), random_state=generator)
            except RecursiveDependencyError as error:
                stuck = error
                continue
            put_at(config, path, value)
            del waiting[path]
            break
        else:
            raise SpaceError(f"'{path_name(next(iter(waiting)))}' cannot be sampled: {stuck}") from stuck


class _Resolved(dict):
    """The configuration for a `sample_from` function: reading a value that is not sampled yet raises."""

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, Domain):
            raise RecursiveDependencyError(f"it depends on '{key}', which is not sampled yet")
        return _Resolved(value) if isinstance(value, dict) else value

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators that `sample_from` functions draw from, and restore them afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
