"""Translates a Tune search space, or bayesian-optimization's `pbounds`, to the model's space and back.

A *point* is a tuple with one coordinate for each modelled parameter (see `parameters`); many points are an
array of shape (points, parameters). What the model cannot use (`tune.randn`, `tune.sample_from`) is sampled
beside it whenever a configuration is made.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
from ray.tune.search.sample import Domain
from ray.tune.search.variant_generator import assign_value, parse_spec_vars

from horovod_tune.search.domains import MISSING, Path, SpaceError, parameter_of, path_name, value_at
from horovod_tune.search.parameters import Categories, FloatArray, FloatRange, Grid, Parameter
from horovod_tune.search.sampling import draw_sampled

Point = tuple[float, ...]

_GRID_CURE = (
    "tune.grid_search at '{name}' cannot be searched by a model: use tune.choice([...]) there, or leave "
    "search_alg out to run the whole grid"
)


class SearchSpace:
    """What is searched: the modelled parameters, what is sampled beside them, and the constants.

    `spec` is a nested Tune search space. With `include_constants` a configuration holds the constants too;
    Tune itself adds them when the space came as `param_space`.

    Raises `SpaceError` for grid_search, and for a domain without values.
    """

    def __init__(self, spec: Mapping[str, Any], include_constants: bool = False) -> None:
        self._spec = copy.deepcopy(dict(spec))
        self._include_constants = include_constants
        _, domains, grids = parse_spec_vars(self._spec)
        if grids:
            raise SpaceError(_GRID_CURE.format(name=path_name(grids[0][0])))
        self.parameters: dict[Path, Parameter] = {}
        self.sampled: dict[Path, Domain] = {}
        self._settled: dict[Path, Any] = {}
        for path, domain in domains:
            parameter = parameter_of(path_name(path), domain)
            if parameter is None:
                self.sampled[path] = domain
            elif parameter.cardinality == 1:
                self._settled[path] = parameter.to_value(0.0)
            else:
                self.parameters[path] = parameter
        self.paths = list(self.parameters)
        self._columns = list(self.parameters.values())
        # Squared feature distance per parameter: one hyperparameter each, so all columns of a
        # one-hot category share one.
        widths = [int(p.cardinality) if isinstance(p, Categories) else 1 for p in self._columns]
        self.feature_groups = np.repeat(np.arange(len(widths)), widths)
        self._feature_starts = np.concatenate([[0], np.cumsum(widths)]).astype(int)

    @property
    def dimension(self) -> int:
        """The number of modelled parameters."""
        return len(self._columns)

    @property
    def size(self) -> float:
        """The number of different points; infinite where a parameter is continuous."""
        return math.prod((p.cardinality for p in self._columns), start=1)

    def column(self, index: int) -> Parameter:
        return self._columns[index]

    def describe(self) -> dict[str, str]:
        """Return a description of every modelled parameter, by which saved searches are recognised."""
        return {path_name(path): parameter.describe() for path, parameter in self.parameters.items()}

    def from_quantiles(self, quantiles: FloatArray) -> FloatArray:
        """Map numbers in [0, 1), shape (points, parameters), to points of the same shape."""
        columns = [p.from_quantiles(quantiles[:, i]) for i, p in enumerate(self._columns)]
        return np.stack(columns, axis=1) if columns else np.empty((len(quantiles), 0))

    def snap(self, points: FloatArray) -> FloatArray:
        """Move each coordinate to the nearest one that a value has."""
        columns = [p.snap(points[:, i]) for i, p in enumerate(self._columns)]
        return np.stack(columns, axis=1) if columns else points

    def features(self, points: FloatArray) -> FloatArray:
        """Return what the kernel sees, shape (points, features): numbers as they are, categories one-hot.

        One-hot columns are scaled so that two different categories are at distance 1.
        """
        features = np.zeros((len(points), int(self._feature_starts[-1])))
        for i, parameter in enumerate(self._columns):
            start = self._feature_starts[i]
            if isinstance(parameter, Categories):
                features[np.arange(len(points)), start + points[:, i].astype(int)] = math.sqrt(0.5)
            else:
                features[:, start] = points[:, i]
        return features

    def feature_column(self, index: int) -> int:
        """Return the feature that holds the number of parameter `index`."""
        return int(self._feature_starts[index])

    def every_point(self) -> Iterator[Point]:
        """Yield every point of a finite space."""
        axes = [p.from_quantiles((np.arange(p.cardinality) + 0.5) / p.cardinality) for p in self._columns]
        for i, parameter in enumerate(self._columns):
            if isinstance(parameter, Grid):
                ks = np.arange(parameter.first, parameter.last + 1)
                axes[i] = np.asarray([parameter.to_coordinate(k * parameter.step) for k in ks])
        yield from product(*(axis.tolist() for axis in axes))

    def canonical(self, point: FloatArray | Point) -> Point:
        """Return `point` as its values' own coordinates, so that equal values make equal points."""
        return tuple(p.to_coordinate(p.to_value(c)) for p, c in zip(self._columns, point, strict=True))

    def config(self, point: Point, seed: int, given: Mapping[Path, Any] | None = None) -> dict[str, Any]:
        """Return the configuration at `point`, the sampled parts drawn with `seed` unless `given`."""
        full = copy.deepcopy(self._spec)
        for path, value in self._settled.items():
            assign_value(full, path, copy.deepcopy(value))
        for path, parameter, coordinate in zip(self.paths, self._columns, point, strict=True):
            assign_value(full, path, copy.deepcopy(parameter.to_value(coordinate)))
        for path, value in (given or {}).items():
            assign_value(full, path, copy.deepcopy(value))
        draw_sampled(full, {p: d for p, d in self.sampled.items() if p not in (given or {})}, seed)
        if self._include_constants:
            return full
        varied = [*self._settled, *self.paths, *self.sampled]
        return _only(full, varied)

    def point(self, config: Mapping[str, Any]) -> Point:
        """Return the point of a complete configuration.

        Raises `SpaceError` where a modelled parameter is missing or not in its domain.
        """
        coordinates = []
        for path, parameter in self.parameters.items():
            value = value_at(config, path, MISSING)
            if value is MISSING:
                raise SpaceError(f"'{path_name(path)}' is missing from the configuration")
            complaint = parameter.complaint(value)
            if complaint:
                raise SpaceError(f"'{path_name(path)}' {complaint}")
            coordinates.append(parameter.to_coordinate(value))
        return tuple(coordinates)

    def partial(self, config: Mapping[str, Any]) -> tuple[dict[int, float], dict[Path, Any]]:
        """Read a configuration that may leave parameters open: its coordinates, and values to use as given.

        Raises `SpaceError` for an unknown name, a value outside its domain, or another constant.
        """
        coordinates: dict[int, float] = {}
        given: dict[Path, Any] = {}
        for index, (path, parameter) in enumerate(self.parameters.items()):
            value = value_at(config, path, MISSING)
            if value is not MISSING:
                complaint = parameter.complaint(value)
                if complaint:
                    raise SpaceError(f"'{path_name(path)}' {complaint}")
                coordinates[index] = parameter.to_coordinate(value)
                if isinstance(parameter, FloatRange):
                    # Its coordinate leads back to it but for the last bits; it is to be run as it is.
                    given[path] = float(value)
        for path in self.sampled:
            value = value_at(config, path, MISSING)
            if value is not MISSING:
                given[path] = value
        _refuse_unknown(config, self._spec, ())
        return coordinates, given


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
    if isinstance(spec, Domain):
        return
    if isinstance(spec, dict) and isinstance(config, Mapping):
        for key, value in config.items():
            if key not in spec:
                raise SpaceError(
                    f"'{path_name((*path, key))}' is not in the search space; it has {sorted(map(str, spec))}"
                )
            _refuse_unknown(value, spec[key], (*path, key))
    elif isinstance(spec, (list, tuple)) and isinstance(config, (list, tuple)):
        for index, (value, inner) in enumerate(zip(config, spec, strict=False)):
            _refuse_unknown(value, inner, (*path, index))
    elif type(config) is not type(spec) or config != spec:
        raise SpaceError(f"'{path_name(path)}' is the constant {spec!r}, got {config!r}")
