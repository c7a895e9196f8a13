"""A rank that hangs is named with its position; one that works, or waits for Tune, is not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
from worker_kinds import Workers, skip_unless_installed

from horovod_tune.backends.torch_xla.hang_detector import Inactivity, explain
from horovod_tune.errors import TrainingFailed
from horovod_tune.messages import Report
from horovod_tune.session import session

pytestmark = pytest.mark.processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STALL_TIMEOUT_S = 3.0


def polled(
    step: Callable[[int], tuple[int, float]], *, limit_s: float, polls: int, every_s: float = 10.0
) -> int | None:
    """Return at which poll the ranks have stood still for ``limit_s``, when poll i finds ``step(i)``."""
    ranks = Inactivity(limit_s)
    for i in range(polls):
        ranks.listened_s += every_s
        if ranks.update(*step(i)):
            return i
    return None


@pytest.mark.parametrize(
    ("what", "step", "found"),
    [
        ("nothing", lambda i: (0, 0.0), 180),
        ("heartbeats cost CPU time", lambda i: (9, 0.002 * i), 180),
        ("a share of 0.9 % of a CPU, forever", lambda i: (0, 0.09 * i), 180),
        ("one rank compiles on one core", lambda i: (0, 10.0 * i), None),
        ("5 % of a core, as a step of 10 s that is prepared in 0.5 s", lambda i: (0, 0.5 * i), None),
        ("a second of computation every 5 minutes", lambda i: (0, 1.0 * (i // 30)), None),
        ("an operation on the device every 29 minutes", lambda i: (i // 174, 0.0), None),
        ("a process below a rank ends with its time", lambda i: (0, 9.0 if i % 100 else 0.0), None),
        ("torch_xla's counters begin again between trials", lambda i: (100 - i, 0.0), None),
    ],
)
def test_only_ranks_that_do_nothing_for_the_limit_stand_still(
    what: str, step: Callable[[int], tuple[int, float]], found: int | None
) -> None:
    assert polled(step, limit_s=1800, polls=3000) == found, what


def test_a_limit_that_is_shorter_than_a_window_holds() -> None:
    assert polled(lambda i: (0, 0.0), limit_s=45, polls=100, every_s=0.5) == 90


def test_waiting_for_tune_does_not_count() -> None:
    ranks = Inactivity(limit_s=60)
    found = []
    for number in range(7):
        if number == 3:
            ranks.restart()  # Tune has decided
        ranks.listened_s += 20
        found.append(ranks.update(0, 0.0))
    assert found == [False] * 6 + [True]


AT_SYNC, AT_QUEUE = "in sync", "in queue.get"
AT_REPORT = f'  File "{session.__file__}", line 9, in report'


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ({0: AT_SYNC}, 0),
        ({0: AT_SYNC, 1: AT_SYNC, 2: AT_QUEUE, 3: AT_SYNC}, 2),
        ({0: AT_SYNC, 1: AT_REPORT}, 0),
        ({0: AT_REPORT, 1: AT_SYNC, 2: AT_SYNC}, 1),
        ({4: AT_SYNC, 5: AT_QUEUE}, 4),
        ({0: AT_SYNC, 1: None, 2: AT_SYNC}, 1),
        ({2: AT_REPORT, 3: AT_REPORT}, None),  # they wait for Tune
        ({}, None),
    ],
)
def test_the_rank_at_the_position_of_the_fewest_is_named(where: Any, named: int | None) -> None:
    rank, text = explain(where, 1800) or (None, "")
    assert rank == named
    if named is not None:
        assert "stall_timeout_s=1800 s" in text and all(at is None or at in text for at in where.values())


@pytest.fixture(scope="module", params=["plain", "torch_xla"])
def workers(
    ray_session: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    skip_unless_installed(request.param)
    made = Workers(request.param, tmp_path_factory.mktemp(request.param), stall_timeout_s=STALL_TIMEOUT_S)
    yield made
    made.close()


def rank_here() -> int:
    live = session.current()
    assert live is not None
    return live.rank_info.rank


@pytest.mark.slow
def test_ranks_that_work_on_the_device_or_below_themselves_do_not_hang(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        import subprocess

        from horovod_tune import report

        loop = "import sys, time\nend = time.time() + float(sys.argv[1])\nwhile time.time() < end: pass"
        subprocess.run([sys.executable, "-c", loop, str(2 * config["limit_s"])], check=True)
        if config["on_device"]:
            import torch
            import torch_xla

            x = torch.zeros(2, device=torch_xla.device())
            for _ in range(8):
                time.sleep(config["limit_s"] / 4)  # as a long step on the device: the host has nothing to do
                x = x + 1
                torch_xla.sync()
        report(done=1)

    workers.begin(train, limit_s=STALL_TIMEOUT_S, on_device=workers.kind == "torch_xla")
    assert isinstance(workers.group.next_event(), Report)
    workers.events()
    assert workers.group.end_trial()


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_position_but_not_before(workers: Workers) -> None:
    """The last one: it ends these workers."""

    def train(config: dict[str, Any]) -> None:
        import threading

        from horovod_tune import report

        end = time.monotonic() + 2 * config["limit_s"]
        while time.monotonic() < end:  # as one that compiles: no word for long
            sum(range(10000))
        report(step=1)
        if rank_here() == 0:
            threading.Event().wait()  # as in a collective that another rank never enters
        report(step=2)

    workers.begin(train, limit_s=STALL_TIMEOUT_S)
    assert isinstance(workers.group.next_event(), Report)
    time.sleep(1.5 * STALL_TIMEOUT_S)  # Tune takes its time
    with pytest.raises(TrainingFailed) as caught:
        workers.events()
    text = str(caught.value)
    assert text.startswith(f"rank 0 of {workers.size} on ") and " hung:" in text
    assert "stall_timeout_s=3 s: no report" in text
    assert "threading.Event().wait()" in text and "in train\n" in text
    if workers.size > 1:
        assert "rank 1 is at:" in text and "report(step=2)" in text
