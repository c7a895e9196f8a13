"""The part of a space outside the model: `tune.randn`, `tune.sample_from`, sampled reproducibly."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from ray.tune.search.sample import Domain
from ray.tune.search.variant_generator import RecursiveDependencyError

from horovod_tune.search.space.domains import Path, SpaceError, path_name, put_at


def draw_sampled(config: dict[str, Any], domains: Mapping[Path, Domain], seed: int) -> None:
    """Sample what is outside the model, in an order that respects references."""
    waiting = dict(domains)
    generator = np.random.default_rng(seed)
    while waiting:
        stuck: Exception | None = None
        for path, domain in list(waiting.items()):
            try:
                with seeded(int(generator.integers(2**32))):
                    value = domain.sample(_Resolved(config), random_state=generator)
            except RecursiveDependencyError as error:
                stuck = error
                continue
            put_at(config, path, value)
            del waiting[path]
            stuck = None
            break
        if stuck is not None:
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
