"""Parameters that exist under a condition: domains inside the options of a `tune.choice`, to any depth.

`tune.choice([{"name": "sgd", "momentum": tune.uniform(0, 1)}, {"name": "adam"}])` at `opt` has two nodes: the
choice, `opt`, and `opt[0]/momentum`, which exists if the first option is chosen. In a configuration the
latter is at `opt/momentum`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ray.tune.search.sample import Categorical, Domain
from ray.tune.search.variant_generator import parse_spec_vars

from horovod_tune.search.space.domains import Path, SpaceError, parameter_of, path_name
from horovod_tune.search.space.parameters import Choice, Parameter, readable


@dataclass(frozen=True, eq=False)
class Node:
    """A domain of the space; `parameter` is None if it is sampled outside the model."""

    path: Path
    domain: Domain
    parameter: Parameter | None
    #: The choices that contain it, outermost first, each with the option that it belongs to.
    conditions: tuple[tuple[Node, int], ...] = ()
    #: For a choice with domains in its options, the options as they were given.
    options: tuple[Any, ...] | None = None

    @property
    def shown(self) -> str:
        """The name under which Tune shows it."""
        return path_name(self.path)

    @property
    def name(self) -> str:
        """`shown` with the options that it belongs to: `opt[0]/momentum`."""
        parts = [str(part) for part in self.path]
        for choice, option in self.conditions:
            parts[len(choice.path) - 1] += f"[{option}]"
        return "/".join(parts)

    def is_chosen(self, chosen: Mapping[int, int]) -> bool:
        """Return True if it exists under `chosen`, which maps the id of a choice to its chosen option."""
        return all(chosen.get(id(choice), 0) == option for choice, option in self.conditions)


def nodes_of(spec: Any, path: Path = (), conditions: tuple[tuple[Node, int], ...] = ()) -> Iterator[Node]:
    """Yield the domains of a nested space; a choice comes before what depends on it."""
    for inner, domain in _domains(spec, path):
        where = (*path, *inner)
        options = tuple(domain.categories) if isinstance(domain, Categorical) else ()
        if not any(_domains(option, where) for option in options):
            yield Node(where, domain, parameter_of(path_name(where), domain), conditions)
            continue
        # By position: two options may be equal and yet hold domains of their own.
        node = Node(where, domain, Choice(range(len(options)), ordered=False), conditions, options)
        yield node
        for number, option in enumerate(options):
            yield from nodes_of(option, where, (*conditions, (node, number)))


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
    return [(found if isinstance(spec, dict) else found[1:], domain) for found, domain in domains]


def option_of(choice: Node, value: Any) -> int:
    """Return the number of the option that a value in a configuration belongs to.

    A value without some of an option's parameters belongs to it if there is only one such option.
    """
    for partly in (False, True):
        found = [n for n, option in enumerate(choice.options or ()) if _belongs(value, option, partly)]
        if len(found) == 1 or (found and not partly):
            return found[0]
    raise SpaceError(f"'{choice.shown}' must be one of {readable(choice.options or ())}, got {value!r}")


def _belongs(value: Any, option: Any, partly: bool) -> bool:
    if isinstance(option, Domain):
        if isinstance(option, Categorical) and any(_domains(o, ()) for o in option.categories):
            return any(_belongs(value, inner, partly) for inner in option.categories)
        parameter = parameter_of("", option)
        return parameter is None or parameter.why_invalid(value) is None
    if isinstance(option, dict):
        return (
            isinstance(value, Mapping)
            and value.keys() <= option.keys()
            and all(
                _belongs(value[key], inner, partly) if key in value else partly and isinstance(inner, Domain)
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
