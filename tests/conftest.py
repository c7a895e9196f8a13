"""What tests of real trials share, and the tiers: which tests run together, how long one may take."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sessions import end_shared_ray, shared_ray

# Tune's tables and Ray's usage report are not what a test looks at.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("TUNE_MAX_PENDING_TRIALS_PG", "2")
# Ray's own is 15: trials would wait for the tests that compute in other processes of pytest.
os.environ.setdefault("RAY_worker_niceness", "0")
# A driver that tries a TPU function on the CPU: torch_xla's CPU device is used where it is installed.
os.environ.setdefault("PJRT_DEVICE", "CPU")

HERE = Path(__file__).parent
ANALYSIS = HERE / "analysis"

# A test that takes longer needs the `slow` marker, or `contract` where `make test` has to run it.
SLOW_S = 5.0
# Without one it fails from this time on, and is only listed on a machine that is busy with other work: a test
# of 5 s may take several times as long there.
UNMARKED_LIMIT_S = 60.0
BUSY_LOAD_PER_CPU = 4.0
MAY_BE_LONG = ("slow", "contract", "cluster", "example", "wheel")
# Fixtures that take a minute and are made once for the session: the files that use them run in one process.
SHARED_FIXTURES = {"experiments", "killed"}

# In a file of which every test starts processes.
_ALL_WITH_PROCESSES = re.compile(r"^pytestmark = .*\bprocesses\b", re.MULTILINE)

_ray_since: Path | None = None
_durations: dict[str, float] = {}
_over_limit: dict[str, float] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheel-dir", help="try the wheel in this folder instead of one that is built for it")
    parser.addoption("--shard", metavar="I/N", help="collect only the files whose crc32 modulo N is I - 1")
    parser.addoption(
        "--durations-to", type=Path, metavar="FILE", help="add each test's seconds to this JSON file"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of other shards, or without a test for `make check`: they are not even imported."""
    if not collection_path.match("test_*.py"):
        return None
    if config.option.markexpr.startswith("not (processes") and _ALL_WITH_PROCESSES.search(
        collection_path.read_text()
    ):
        return True
    shard = config.getoption("--shard")
    if not shard:
        return None
    index, count = map(int, shard.split("/"))
    # The files that share the experiments stay together.
    unit = ANALYSIS if ANALYSIS in collection_path.parents else collection_path
    return zlib.crc32(unit.relative_to(HERE).as_posix().encode()) % count != index - 1 or None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Mark which tests pytest-xdist runs in one process, and put the longest files first."""
    for item in items:
        shared = not SHARED_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
        if shared or uses_ray(item):
            item.add_marker(pytest.mark.processes)
        if shared:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(600))  # the first of them runs ten searches
        if config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group("experiments" if shared else unit_of(item)))
    yield  # `-m` selects by the markers
    # Hosts, then real trials, which one after the other share a Ray session.
    with_ray = {item.path for item in items if uses_ray(item)}
    long = {item.path for item in items if any(map(item.get_closest_marker, MAY_BE_LONG))}
    items.sort(key=lambda item: (not is_on_hosts(item), item.path not in with_ray, item.path not in long))


def unit_of(item: pytest.Item) -> str:
    """Return what one process runs whole: the labs of hosts, which have the same addresses, or a file."""
    if is_on_hosts(item):
        return "hosts"
    # Each example is a search of its own.
    return item.nodeid if item.get_closest_marker("example") else item.nodeid.partition("::")[0]


def is_on_hosts(item: pytest.Item) -> bool:
    return item.get_closest_marker("cluster") is not None


def uses_ray(item: pytest.Item) -> bool:
    return "ray_session" in getattr(item, "fixturenames", ())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """End the shared Ray before tests that do not ask for it: some of our checks ask whether one runs."""
    global _ray_since
    if uses_ray(item):
        _ray_since = item.path
    elif _ray_since != item.path:  # otherwise an earlier test of this file has asked for it
        end_shared_ray()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that takes long and has no marker for it. Fixtures do not count, since tests share them."""
    report = yield
    is_long = call.when == "call" and report.passed and call.duration > SLOW_S
    if is_long and not any(item.get_closest_marker(name) for name in MAY_BE_LONG):
        report.user_properties.append(("over_limit_s", call.duration))
        is_busy = os.getloadavg()[0] > BUSY_LOAD_PER_CPU * (os.cpu_count() or 1)
        if call.duration > UNMARKED_LIMIT_S and not is_busy:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {call.duration:.0f} s. A test of more than {SLOW_S:g} s needs "
                "@pytest.mark.slow: `make test` then leaves it out, `make test-all` runs it."
            )
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.partition("@")[0]  # without pytest-xdist's group
    _durations[name] = round(_durations.get(name, 0.0) + report.duration, 2)
    _over_limit.update((name, value) for key, value in report.user_properties if key == "over_limit_s")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _over_limit:
        terminalreporter.section(f"tests over {SLOW_S:g} s without the slow marker")
        for name, seconds in sorted(_over_limit.items(), key=lambda each: -each[1]):
            terminalreporter.line(f"{seconds:6.1f} s  {name}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    end_shared_ray()
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("--shard"):
        session.exitstatus = pytest.ExitCode.OK  # none of the few files is in this shard
    path = session.config.getoption("--durations-to")
    if path is None or hasattr(session.config, "workerinput"):
        return
    before = json.loads(path.read_text()) if path.exists() else {}
    longest_first = sorted({**before, **_durations}.items(), key=lambda each: -each[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(longest_first), indent=0) + "\n")


@pytest.fixture(scope="module")
def ray_session() -> Iterator[Any]:
    """A local Ray of 4 CPUs, which all modules of this process share."""
    yield shared_ray()


@pytest.fixture
def tune_run(ray_session: Any, tmp_path: Any) -> Callable[..., Any]:
    """`tune.run` that writes below the test's own folder and prints nothing."""
    from ray import tune

    def run(trainable: Any, **arguments: Any) -> Any:
        settings = {"storage_path": str(tmp_path), "verbose": 0, "name": "experiment", **arguments}
        return tune.run(trainable, **settings)

    return run
