"""The file a search is saved in: versioned JSON, also of the space, so that reading it executes no code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ray.tune.search.sample import Categorical, Float, Integer, LogUniform, Normal, Quantized

from horovod_tune.errors import HorovodTuneError

FORMAT = "horovod_tune.BayesOptSearch"
VERSION = 1

_FIELDS = {"metric", "mode", "space", "seed", "drawn", "queue", "trials"}


class StateFileError(HorovodTuneError, ValueError):
    """A file is not a saved search, or belongs to another search; the message says what differs."""


#: The state of a search that has no space yet.
EMPTY = {"empty": True}


def write(path: str, state: Mapping[str, Any]) -> None:
    # Tune passes a temporary path, and renames the file afterwards.
    Path(path).write_text(json.dumps({"format": FORMAT, "version": VERSION, **state}), encoding="utf-8")


def read(path: str) -> dict[str, Any]:
    """Return the state in `path`; raise `StateFileError` for a file that `write` did not write."""
    try:
        state = json.loads(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise StateFileError(
            f"{path} is not a saved BayesOptSearch: it is not text. Searches of Ray's own BayesOptSearch are "
            "pickles; start from that experiment's results instead, with analysis=<its directory>"
        ) from None
    except json.JSONDecodeError as error:
        raise StateFileError(f"{path} is not a saved BayesOptSearch: it is not JSON ({error})") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise StateFileError(f"{path} is not a saved BayesOptSearch: its 'format' is not {FORMAT!r}")
    if state.get("version") != VERSION:
        raise StateFileError(
            f"{path} has version {state.get('version')!r}; this horovod_tune reads version {VERSION}"
        )
    missing = set() if state.get("empty") else _FIELDS - set(state)
    if missing:
        raise StateFileError(f"{path} is damaged: it lacks {sorted(missing)}")
    return state


def check_same_search(
    state: Mapping[str, Any],
    metric: str | Sequence[str] | None,
    mode: str | Sequence[str] | None,
    limits: list[str],
) -> None:
    """Raise `StateFileError` if a state belongs to another metric, mode or limits."""
    for name, mine in (("metric", metric), ("mode", mode)):
        if mine is not None and state[name] is not None and state[name] != mine:
            raise StateFileError(f"the saved search has the {name} {state[name]!r}, this one {mine!r}")
    if limits != (before := state.get("limits", [])):
        raise StateFileError(f"the saved search has the limits {before}, this one {limits}")


def check_same_space(saved: Mapping[str, str], space: Mapping[str, str]) -> None:
    """Raise `StateFileError` if a saved space is another one."""
    if list(saved.items()) != list(space.items()):
        names = sorted(name for name in {*saved, *space} if saved.get(name) != space.get(name))
        detail = "; ".join(f"{n}: saved {saved.get(n)}, now {space.get(n)}" for n in names) or "another order"
        raise StateFileError(
            f"the saved search is over another space ({detail}). Start from its results with "
            "analysis=<the experiment's directory> instead"
        )


def encode(spec: Any) -> Any:
    """Return a space as JSON values; raise `TypeError` for functions, arrays and `tune.sample_from`."""
    # By exact type: a named tuple or a member of a string enum would come back as another value.
    if spec is None or type(spec) in (bool, str, int, float):
        return spec
    if type(spec) is dict:
        return {"dict": [[encode(key), encode(value)] for key, value in spec.items()]}
    if type(spec) in (list, tuple):
        return {type(spec).__name__: [encode(value) for value in spec]}
    if isinstance(spec, Categorical):
        return {"choice": [encode(value) for value in spec.categories]}
    if isinstance(spec, (Float, Integer)):
        sampler, step = spec.get_sampler(), None
        if isinstance(sampler, Quantized):
            sampler, step = sampler.get_sampler(), sampler.q
        if isinstance(sampler, Normal):
            kind, numbers = "normal", [sampler.mean, sampler.sd, step]
        else:
            kind = "float" if isinstance(spec, Float) else "integer"
            numbers = [spec.lower, spec.upper, isinstance(sampler, LogUniform), step]
        return {kind: [each.item() if isinstance(each, np.generic) else each for each in numbers]}
    raise TypeError(f"{type(spec).__name__} has no JSON form")


def decode(encoded: Any) -> Any:
    """Return the space that `encode` encoded."""
    if not isinstance(encoded, dict):
        return encoded
    ((kind, parts),) = encoded.items()
    if kind == "dict":
        return {decode(key): decode(value) for key, value in parts}
    if kind in ("list", "tuple"):
        return [decode(part) for part in parts] if kind == "list" else tuple(decode(part) for part in parts)
    if kind == "choice":
        return Categorical([decode(part) for part in parts]).uniform()
    if kind == "normal":
        mean, deviation, step = parts
        domain = Float(None, None).normal(mean, deviation)
    else:
        lower, upper, log, step = parts
        domain = Float(lower, upper) if kind == "float" else Integer(lower, upper)
        domain = domain.loguniform() if log else domain.uniform()
    return domain if step is None else domain.quantized(step)
