"""What the tests of warm workers share: one group of ranks for all trials of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from trial_runner import TrialRunner, sound


@pytest.fixture(scope="module")
def shared_runner(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialRunner]:
    runner = TrialRunner(tmp_path_factory.mktemp("warm"))
    runner.run(sound)
    yield runner
    runner.close()


@pytest.fixture
def runner(shared_runner: TrialRunner) -> Iterator[TrialRunner]:
    """One group for all these tests; after each one the next trial has to find a sound world."""
    yield shared_runner
    (told,) = shared_runner.run(sound, size=7)
    assert (told["sums"], told["named"], told["size"]) == ([3.0, 9.0, 6.0], [2.0] * 7, 2)
    assert shared_runner.replaced_because == ""
