"""One parameter of a Tune space, or of bayesian-optimization's `pbounds`, as a parameter of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from bayes_opt.parameter import CategoricalParameter, FloatParameter, IntParameter
from ray.tune.search.sample import Categorical, Domain, Float, Integer, LogUniform, Normal, Quantized

from horovod_tune.search.parameters import Categories, FloatRange, Grid, Parameter

Path = tuple[Any, ...]


class SpaceError(ValueError):
    """A search space, or a configuration for it, cannot be used; the message names the parameter."""


class _Missing:
    """Stands for a value that is not there, where None is a value."""


MISSING = _Missing()


def path_name(path: Path) -> str:
    """Return the name under which Tune shows a nested parameter, such as `model/depth`."""
    return "/".join(str(part) for part in path)


def value_at(config: Any, path: Path, default: Any) -> Any:
    """Return the value at `path` in nested dictionaries, lists and tuples."""
    for part in path:
        try:
            config = config[part]
        except (KeyError, IndexError, TypeError):
            return default
    return config


def from_pbounds(pbounds: Mapping[str, Any]) -> dict[str, Any]:
    """Translate bayesian-optimization's own space into a Tune one.

    `(low, high)` and `(low, high, float)` are floats, `(low, high, int)` integers with both bounds
    included, any other sequence categories; its parameter objects are taken too. A `/` in a name nests.

    >>> sorted(from_pbounds({"x": (0, 1), "model/depth": (2, 8, int)}))
    ['model', 'x']
    """
    spec: dict[str, Any] = {}
    for name, bounds in pbounds.items():
        *parents, key = name.split("/")
        place = spec
        for parent in parents:
            place = place.setdefault(parent, {})
        place[key] = _domain_of_bounds(name, bounds)
    return spec


def _domain_of_bounds(name: str, bounds: Any) -> Domain:
    if isinstance(bounds, FloatParameter):
        bounds = (*bounds.bounds, float)
    elif isinstance(bounds, IntParameter):
        bounds = (*bounds.bounds, int)
    elif isinstance(bounds, CategoricalParameter):
        return Categorical(bounds.categories).uniform()
    try:
        length = len(bounds)
    except TypeError:
        raise SpaceError(
            f"'{name}' must be (low, high), (low, high, int), a sequence of categories or a Tune domain, "
            f"got {bounds!r}"
        ) from None
    numeric = length >= 2 and all(
        isinstance(b, (int, float, np.number)) and not isinstance(b, bool) for b in bounds[:2]
    )
    if numeric and (length == 2 or (length == 3 and bounds[2] in (float, int))):
        low, high = bounds[0], bounds[1]
        if not low < high:
            raise SpaceError(f"'{name}' needs a lower bound below its upper bound, got {bounds!r}")
        if length == 3 and bounds[2] is int:
            return Integer(int(low), int(high) + 1).uniform()
        return Float(float(low), float(high)).uniform()
    return Categorical(bounds).uniform()


def parameter_of(name: str, domain: Domain) -> Parameter | None:
    """Return the modelled parameter for a Tune domain; None where it is to be sampled beside the model.

    Bounds are Tune's: an integer's upper bound is left out, unless it is quantised with q > 1.
    """
    sampler = domain.get_sampler()
    step: float = 1
    quantised = isinstance(sampler, Quantized)
    if quantised:
        step, sampler = sampler.q, sampler.get_sampler()
    if isinstance(domain, Categorical):
        if not domain.categories:
            raise SpaceError(f"'{name}' is a choice among nothing; give it at least one value")
        return Categories(domain.categories)
    if not isinstance(domain, (Float, Integer)) or isinstance(sampler, Normal):
        return None
    lower, upper = domain.lower, domain.upper
    if not (math.isfinite(lower) and math.isfinite(upper)) or lower > upper:
        raise SpaceError(f"'{name}' must have finite bounds in order, got {domain.domain_str}")
    log = isinstance(sampler, LogUniform)
    if isinstance(domain, Float) and not quantised:
        return Categories([float(lower)]) if lower == upper else FloatRange(lower, upper, log)
    first, last = _grid_ends(lower, upper, step)
    if isinstance(domain, Integer) and step == 1:
        last -= 1
    if log and first < 1:
        first = 1
    if last < first:
        raise SpaceError(f"'{name}' has no value: no multiple of {step} in {domain.domain_str}")
    step = int(step) if isinstance(domain, Integer) else float(step)
    return (
        Categories([Grid(first, first + 1, step).to_value(0.0)])
        if first == last
        else Grid(first, last, step, log)
    )


def _grid_ends(lower: float, upper: float, step: float) -> tuple[int, int]:
    """Return the first and last k with `lower <= k * step <= upper`, forgiving rounding in the bounds."""
    ends = []
    for bound, inwards in ((lower, math.ceil), (upper, math.floor)):
        nearest = round(bound / step)
        ends.append(nearest if math.isclose(bound / step, nearest) else inwards(bound / step))
    return ends[0], ends[1]
