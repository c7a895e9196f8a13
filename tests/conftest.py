"""What the tests of real trials share: a Ray session of their own, and warm workers."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from sessions import local_ray

if TYPE_CHECKING:
    from trial_runner import TrialRunner

# A test says what it wants to see; Tune's tables and Ray's usage report are not it.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("TUNE_MAX_PENDING_TRIALS_PG", "2")
BEGAN_S = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheel-dir", help="try the wheel in this folder in place of one that is built for it")
    parser.addoption(
        "--begin-within",
        type=float,
        metavar="SECONDS",
        help="begin none of the long tests later; those left out are skipped and say so",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the modules of long tests last where time is limited, and begin them with another one each time."""
    if config.getoption("--begin-within") is None:
        return
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        if is_long(item):
            modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    names = list(modules)
    first = random.randrange(len(names)) if names else 0
    items[:] = [item for item in items if not is_long(item)]
    items += [item for name in names[first:] + names[:first] for item in modules[name]]


def pytest_runtest_setup(item: pytest.Item) -> None:
    within_s = item.config.getoption("--begin-within")
    if within_s is not None and is_long(item) and time.monotonic() - BEGAN_S > within_s:
        module = item.nodeid.partition("::")[0]
        pytest.skip(f"{module} left out: the {within_s:.0f} s for long tests are over")


def is_long(item: pytest.Item) -> bool:
    """Tell whether a test's module takes a minute or more."""
    return any(item.get_closest_marker(name) for name in ("long", "cluster", "example"))


@pytest.fixture(scope="module")
def ray_session() -> Iterator[Any]:
    """A local Ray of 4 CPUs for the module, ended after it."""
    with local_ray(num_cpus=4) as ray:
        yield ray


@pytest.fixture
def tune_run(ray_session: Any, tmp_path: Any) -> Callable[..., Any]:
    """`tune.run` that writes below the test's own folder and prints nothing."""
    from ray import tune

    def run(trainable: Any, **arguments: Any) -> Any:
        settings = {"storage_path": str(tmp_path), "verbose": 0, "name": "experiment", **arguments}
        return tune.run(trainable, **settings)

    return run


@pytest.fixture(scope="module")
def shared_runner(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialRunner]:
    # Here, since tests without a Ray need not wait for its import.
    from trial_runner import TrialRunner, sound

    runner = TrialRunner(tmp_path_factory.mktemp("warm"))
    runner.run(sound)
    yield runner
    runner.close()


@pytest.fixture
def runner(shared_runner: TrialRunner) -> Iterator[TrialRunner]:
    """One group of workers for a module's tests; after each one the next trial has to find a sound world."""
    from trial_runner import sound

    yield shared_runner
    (told,) = shared_runner.run(sound, size=7)
    assert (told["sums"], told["named"], told["size"]) == ([3.0, 9.0, 6.0], [2.0] * 7, 2)
    assert shared_runner.replaced_because == ""
