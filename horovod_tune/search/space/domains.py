"""Tune's domains, and bayesian-optimization's `pbounds`, as parameters of the model.

A domain inside an option of a `tune.choice` exists under a condition: `tune.choice([{"name": "sgd",
"momentum": tune.uniform(0, 1)}, {"name": "adam"}])` at `opt` has two nodes, the choice `opt` and
`opt[0]/momentum`, which exists if the first option is chosen. In a configuration it is at `opt/momentum`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bayes_opt.parameter import CategoricalParameter, FloatParameter, IntParameter
from ray.tune.search.sample import Categorical, Domain, Float, Integer, LogUniform, Normal, Quantized
from ray.tune.search.variant_generator import parse_spec_vars

from horovod_tune.errors import HorovodTuneError
from horovod_tune.search.space.parameters import Choice, FloatRange, Grid, Parameter, as_written, readable

Path = tuple[Any, ...]


class SpaceError(HorovodTuneError, ValueError):
    """A search space, or a configuration for it, cannot be used; the message names the parameter."""


#: Marks a missing value where None is a value.
MISSING: Any = object()


def path_name(path: Path) -> str:
    """Return the name under which Tune shows a nested parameter, such as `model/depth`."""
    return "/".join(str(part) for part in path)


def value_at(config: Any, path: Path, default: Any) -> Any:
    """Return the value at `path` in nested dictionaries, lists and tuples."""
    for part in path:
        try:
            config = config[written_key(config, part)]
        except (KeyError, IndexError, TypeError):
            return default
    return config


def written_key(config: Any, key: Any) -> Any:
    """Return the key of a configuration for a key of the space, which JSON turns into text.

    >>> written_key({"1": 0.5}, 1), written_key({1: 0.5}, 1), written_key({"true": 2}, True)
    ('1', 1, 'true')
    """
    if not isinstance(config, Mapping) or isinstance(key, str) or key in config:
        return key
    return next(iter(json.loads(as_written({key: None}))), key)


def put_at(spec: Any, path: Path, value: Any) -> Any:
    """Return `spec` with `value` at `path`, also in tuples; changed in place if possible.

    >>> put_at({"a": [1, ((2, 3),)]}, ("a", 1, 0, 0), 7)
    {'a': [1, ((7, 3),)]}
    """
    head, *rest = path
    inner = put_at(spec[head], tuple(rest), value) if rest else value
    if isinstance(spec, tuple):
        return (*spec[:head], inner, *spec[head + 1 :])
    spec[head] = inner
    return spec


_NUMBER = (int, float, np.integer, np.floating)


def from_mixed(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Tune space for a Tune space, `pbounds`, or a mixture of both.

    In `pbounds`, `(low, high)` and `(low, high, float)` are floats, `(low, high, int)` integers with both
    bounds included, any other sequence categories. A name with `/` stands for nested dictionaries. If the
    space has Tune domains too, only ranges and parameter objects are bounds; every other value is a constant.

    >>> sorted(from_mixed({"a": Float(5, 6).uniform(), "b": (8, 9), "c": 3}))
    ['a', 'b', 'c']
    """
    _, domains, grids = parse_spec_vars(dict(space))
    return nested(_converted("", space, is_tunes=bool(domains or grids)))


def _converted(name: str, value: Any, is_tunes: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _converted(f"{name}/{key}".strip("/"), inner, is_tunes) for key, inner in value.items()}
    if isinstance(value, CategoricalParameter):
        return Categorical(value.categories).uniform()
    if isinstance(value, (FloatParameter, IntParameter)):
        value = (*value.bounds, int if isinstance(value, IntParameter) else float)
    bounds = value.tolist() if isinstance(value, np.ndarray) and not is_tunes else value
    is_sequence = isinstance(bounds, tuple if is_tunes else Sequence) and not isinstance(bounds, (str, bytes))
    ends = bounds[:2] if is_sequence else ()
    # A bool is an int, and a category.
    is_range = len(ends) == 2 and all(type(end) is not bool and isinstance(end, _NUMBER) for end in ends)
    kind = (*bounds, float)[2] if is_range and len(bounds) < 4 else None
    if isinstance(kind, type) and kind is not bool and issubclass(kind, _NUMBER):
        low, high = bounds[:2]
        if not -math.inf < low < high < math.inf:
            raise SpaceError(f"'{name}' must have finite bounds in order, got {bounds!r}")
        if issubclass(kind, (float, np.floating)):
            return Float(float(low), float(high)).uniform()
        if int(low) != low or int(high) != high:
            raise SpaceError(f"'{name}' must have whole numbers as bounds, got {bounds!r}")
        return Integer(int(low), int(high) + 1).uniform()
    if is_tunes:
        return value
    if not is_sequence:
        what = "(low, high), (low, high, int), a sequence of categories or a Tune domain"
        raise SpaceError(f"'{name}' must be {what}, got {bounds!r}")
    if is_range and (isinstance(bounds[2], type) or str(bounds[2]) in ("int", "float")):
        raise SpaceError(f"'{name}' must be (low, high, int) or (low, high, float), got {bounds!r}")
    return Categorical(bounds).uniform()


def nested(flat: Mapping[str, Any]) -> dict[Any, Any]:
    """Return nested dictionaries for a dictionary with `/` in its keys.

    >>> nested({"model/depth": 3, "lr": 0.1})
    {'model': {'depth': 3}, 'lr': 0.1}
    """
    spec: dict[Any, Any] = {}
    for name, value in flat.items():
        given = value
        for part in reversed(name.split("/") if isinstance(name, str) else [name]):
            given = {part: given}
        _merge(spec, given, name, ())
    return spec


def _merge(spec: dict[Any, Any], given: Mapping[Any, Any], name: Any, above: Path) -> None:
    for key, value in given.items():
        path = (*above, key)
        if isinstance(value, Mapping) and isinstance(spec.setdefault(key, {}), dict):
            _merge(spec[key], value, name, path)
        elif key in spec:
            raise SpaceError(f"'{name}' gives '{path_name(path)}' a second time")
        else:
            spec[key] = value


def parameter_of(name: str, domain: Domain) -> Parameter | None:
    """Return the modelled parameter for a Tune domain; None if it is sampled outside the model.

    Bounds are Tune's: an integer's upper bound is exclusive, unless it is quantised with q > 1.
    """
    sampler = domain.get_sampler()
    step: float = 1
    quantised = isinstance(sampler, Quantized)
    if quantised:
        step, sampler = sampler.q, sampler.get_sampler()
    if isinstance(domain, Categorical):
        if not domain.categories:
            raise SpaceError(f"'{name}' must be a choice of at least one value, got none")
        return Choice(domain.categories)
    if not isinstance(domain, (Float, Integer)) or isinstance(sampler, Normal):
        return None
    lower, upper = domain.lower, domain.upper
    if isinstance(lower, str) or isinstance(upper, str):  # tune.randint accepts them
        raise SpaceError(f"'{name}' must have numbers as bounds, got {lower!r} and {upper!r}")
    if not (math.isfinite(lower) and math.isfinite(upper)) or lower > upper:
        raise SpaceError(f"'{name}' must have finite bounds in order, got {domain.domain_str}")
    if not math.isfinite(float(upper) - float(lower)):
        raise SpaceError(f"'{name}' must have bounds whose distance is a float, got {domain.domain_str}")
    log = isinstance(sampler, LogUniform)
    if isinstance(domain, Float) and not quantised:
        return Choice([float(lower)]) if lower == upper else FloatRange(lower, upper, log)
    first, last = _grid_ends(lower, upper, step)
    if isinstance(domain, Integer) and step == 1:
        last -= 1
    if log and first < 1:
        first = 1
    if last < first:
        raise SpaceError(f"'{name}' has no value: no multiple of {step} in {domain.domain_str}")
    step = int(step) if isinstance(domain, Integer) else float(step)
    only = Grid(first, first + 1, step).to_value(0.0)
    return Choice([only]) if first == last else Grid(first, last, step, log)


def _grid_ends(lower: float, upper: float, step: float) -> tuple[int, int]:
    """Return the first and last k with `lower <= k * step <= upper`, allowing for rounding in the bounds."""
    if isinstance(lower, int) and isinstance(upper, int) and isinstance(step, int):
        return -(-lower // step), upper // step  # exact where floats are not
    ends = []
    for bound, inwards in ((lower, math.ceil), (upper, math.floor)):
        nearest = round(bound / step)
        ends.append(nearest if math.isclose(bound / step, nearest) else inwards(bound / step))
    return ends[0], ends[1]


@dataclass(frozen=True, eq=False)
class Node:
    """A domain of the space; `parameter` is None if it is sampled outside the model."""

    path: Path
    #: Its path with the options that it belongs to: `opt[0]/momentum`.
    name: str
    domain: Domain
    parameter: Parameter | None
    #: Its place in a point; None if it has only one value, or is not modelled.
    column: int | None
    #: It exists if the choices at these columns, outermost first, have these options.
    needs: tuple[tuple[int, int], ...]
    #: For a choice with domains in its options, the options as they were given.
    options: tuple[Any, ...] | None

    def exists(self, coordinates: Mapping[int, float]) -> bool:
        """Return True if it exists at a point, given by column; a choice that is left open has no option."""
        return all(coordinates.get(column) == option for column, option in self.needs)


def nodes_of(
    spec: Any,
    columns: Iterator[int],
    path: Path = (),
    name: str = "",
    needs: tuple[tuple[int, int], ...] = (),
) -> Iterator[Node]:
    """Yield the domains of a nested space; a choice comes before what depends on it."""
    for inner, domain in _domains(spec, path):
        where, full_name = (*path, *inner), "/".join([*filter(None, [name]), *map(str, inner)])
        options = tuple(domain.categories) if isinstance(domain, Categorical) else ()
        parameter: Parameter | None
        if any(_domains(option, where) for option in options):
            # By position: two options may be equal and yet hold domains of their own.
            parameter = Choice(range(len(options)), ordered=False)
        else:
            parameter, options = parameter_of(path_name(where), domain), ()
        column = next(columns) if parameter is not None and parameter.cardinality > 1 else None
        yield Node(where, full_name, domain, parameter, column, needs, options or None)
        for number, option in enumerate(options):
            below = needs if column is None else (*needs, (column, number))
            yield from nodes_of(option, columns, where, f"{full_name}[{number}]", below)


def _domains(spec: Any, path: Path) -> list[tuple[Path, Domain]]:
    if isinstance(spec, Domain):
        return [((), spec)]
    if not isinstance(spec, (dict, list, tuple)):
        return []
    _, domains, grids = parse_spec_vars(spec if isinstance(spec, dict) else {0: spec})
    if grids:
        below = grids[0][0] if isinstance(spec, dict) else grids[0][0][1:]
        raise SpaceError(
            f"tune.grid_search at '{path_name((*path, *below))}' cannot be searched by a model: use "
            "tune.choice([...]) there, or leave search_alg out to run the whole grid"
        )
    return [(place if isinstance(spec, dict) else place[1:], domain) for place, domain in domains]


def option_of(choice: Node, value: Any) -> int:
    """Return the number of the option that a value in a configuration belongs to.

    A value without some of an option's parameters belongs to it if there is only one such option.
    """
    for partly in (False, True):
        options = [n for n, option in enumerate(choice.options or ()) if _belongs(value, option, partly)]
        if len(options) == 1 or (options and not partly):
            return options[0]
    raise SpaceError(
        f"'{path_name(choice.path)}' must be one of {readable(choice.options or ())}, got {value!r}"
    )


def _belongs(value: Any, option: Any, partly: bool) -> bool:
    if isinstance(option, Domain):
        if isinstance(option, Categorical) and any(_domains(o, ()) for o in option.categories):
            return any(_belongs(value, inner, partly) for inner in option.categories)
        parameter = parameter_of("", option)
        return parameter is None or parameter.why_invalid(value) is None
    if isinstance(option, dict):
        return (
            isinstance(value, Mapping)
            and value.keys() <= {written_key(value, key) for key in option}
            and all(
                # A table cannot tell None from a value that is missing.
                _belongs(value[written], inner, partly)
                if (written := written_key(value, key)) in value
                else partly and (inner is None or isinstance(inner, Domain))
                for key, inner in option.items()
            )
        )
    if isinstance(option, (list, tuple)):
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(option)
            and all(_belongs(v, o, partly) for v, o in zip(value, option, strict=True))
        )
    return Choice([option]).why_invalid(value) is None
