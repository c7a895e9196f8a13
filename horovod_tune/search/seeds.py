"""Seeds: the user's `random_state`, and a separate seed for each draw."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_tune.search.history import History


def seed_of(random_state: Any) -> int:
    """Return the seed of a `random_state`; None gives a new one each time.

    Raises `ValueError` for anything but an integer of 0 or more, a NumPy generator or None.
    """
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**32))
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31))
    if (
        isinstance(random_state, (int, np.integer))
        and not isinstance(random_state, bool)
        and random_state >= 0
    ):
        return int(random_state)
    raise ValueError(
        f"random_state must be an integer of 0 or more, a NumPy generator or None, got {random_state!r}"
    )


def seed_for(seed: int, history: History, purpose: str) -> int:
    """Return a separate seed for each suggestion and each purpose in it."""
    words = [seed, len(history.trials), *purpose.encode()]
    return int(np.random.SeedSequence(words).generate_state(1)[0])
