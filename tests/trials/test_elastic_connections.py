"""Elastic trials over several hosts: in each world one connection a host, which its ranks share."""

from __future__ import annotations

import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from processes import eventually
from sessions import simulated_nodes

from horovod_tune import commit, get_state, report
from horovod_tune.coordinator.worker_group import POLL_S

pytestmark = [pytest.mark.slow, pytest.mark.processes]

pytest.importorskip("horovod")

SLOTS = 2
TIMEOUT_S = 60.0
# How long Gloo waits for a rank that says nothing.
GLOO_S = 10.0
EPOCHS = 8
MOST_EPOCHS = 5000


@pytest.fixture(autouse=True)
def by_value() -> None:
    """The ranks cannot import this file, so its functions travel as code."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs, where the coordinator is, and two nodes with room for one more rank each."""
    with simulated_nodes({"num_cpus": SLOTS + 1}, {"num_cpus": SLOTS + 1}) as nodes:
        yield nodes


def ends_of_this_process() -> tuple[int, int]:
    """Return how many threads read channels or accept some here, and how many ends others connected to."""
    import psutil

    threads = [each.name for each in threading.enumerate() if each.name in ("channel", "relay")]
    ends = [each for each in psutil.Process().net_connections("unix") if "horovod_tune_" in str(each.laddr)]
    return len(threads), len(ends)


def harm(config: dict[str, Any]) -> None:
    """Kill or stop this process, the first time that any rank comes here."""
    try:
        Path(config["folder"], "harmed").touch(exist_ok=False)
    except FileExistsError:
        return
    # To this thread: `os.kill` to a process wakes its main thread, and this one may go on until that runs.
    signal.pthread_kill(threading.get_ident(), getattr(signal, f"SIG{config['signal']}"))


def train(config: dict[str, Any]) -> None:
    """Sum the epochs' numbers until a file says that it is enough; lose a rank beside a report."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    state = get_state() or {"epoch": 0, "sum": 0.0, "is_over": False}
    while not state["is_over"] and state["epoch"] < MOST_EPOCHS:
        epoch = state["epoch"] + 1
        is_over = float(Path(config["folder"], "enough").exists())
        if epoch > EPOCHS:
            time.sleep(0.02)  # others are starting
        mine = torch.tensor([epoch, is_over], dtype=torch.float64)
        mean, over = hvd.allreduce(mine).tolist()
        state = {"epoch": epoch, "sum": state["sum"] + mean, "is_over": over == 1.0}
        ends = hvd.allgather_object(ends_of_this_process()) if epoch % 10 == 0 else []
        # Where rank 0 is stopped before its report, nobody has a reason to miss it for timeout_s.
        is_harmed = epoch == 4 and hvd.rank() == config.get("harmed")
        if is_harmed and hvd.rank() != 0:
            harm(config)
        report(**state, size=hvd.size(), ends=ends)
        if is_harmed:
            harm(config)
        commit(state)


class Trial:
    """An elastic trial of two ranks on each of two hosts; this process is its coordinator, on a third."""

    def __init__(self, folder: Path, **config: Any) -> None:
        import ray

        from horovod_tune.coordinator.elastic_group import ElasticGroup
        from horovod_tune.gloo.gloo_launcher import GlooLauncher
        from horovod_tune.messages import TrialRequest
        from horovod_tune.spec import make_spec

        spec = make_spec(num_hosts=2, num_slots=SLOTS, min_workers=2, timeout_s=2 * GLOO_S)
        placement = spec.placement()
        bundles = [dict(each) for each in placement.bundles]
        self.placement_group = ray.util.placement_group(bundles, placement.strategy)
        ray.get(self.placement_group.ready(), timeout=60)
        here = ray.get_runtime_context().get_node_id()
        launcher = GlooLauncher(spec, self.placement_group, node_id=here)
        self.group = ElasticGroup(launcher, timeout_s=TIMEOUT_S, min_workers=2, max_workers=4, wait_s=60.0)
        self.folder = folder
        where = str(folder)
        self.order = TrialRequest(
            "id", "trial", where, where, "experiment", {"folder": where, **config}, cloudpickle.dumps(train)
        )
        self.reports: list[dict[str, Any]] = []
        self.times: list[float] = []

    def begin(self) -> None:
        self.group.begin(self.order)

    def next_report(self) -> dict[str, Any]:
        from horovod_tune.messages import Report

        event = self.group.next_event()
        assert isinstance(event, Report)
        self.group.proceed(event.index, None)
        self.reports.append(event.metrics)
        self.times.append(time.monotonic())
        return event.metrics

    def go_on_until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        end = time.monotonic() + 40
        while not holds(self.next_report()):
            assert time.monotonic() < end, (self.reports[-1], self.group.world_changes)

    def finish(self) -> None:
        """Go on to the end; every epoch was reported once, with the sum of an undisturbed run."""
        from horovod_tune.messages import Finished

        Path(self.folder, "enough").touch()
        self.go_on_until(lambda metrics: metrics["is_over"])
        assert isinstance(self.group.next_event(), Finished)
        assert [each["epoch"] for each in self.reports] == list(range(1, len(self.reports) + 1))
        assert all(each["sum"] == sum(range(each["epoch"] + 1)) for each in self.reports)

    @property
    def ways(self) -> list[list[str]]:
        """How this process speaks to each rank, by host."""
        found: dict[str, list[str]] = {}
        for worker in self.group.workers:
            assert worker.facts is not None
            is_connected = worker.channel is not None and worker.channel.is_open
            way = "connected" if is_connected else "through a neighbour" if worker.relay else "by Ray"
            found.setdefault(worker.facts.node_id, []).append(way)
        return sorted(found.values())

    def check_connections(self, *ranks: int) -> None:
        """Each host has one connection and nothing is left of earlier worlds, here and in the ranks."""
        assert self.ways == sorted(["connected", *["through a neighbour"] * (count - 1)] for count in ranks)
        hosts = {}
        for worker in self.group.workers:
            hosts.setdefault(worker.facts.node_id, []).append(worker)
        expected = []
        for workers in hosts.values():
            expected += [(1, len(workers) - 1), *[(1, 0)] * (len(workers) - 1)]
        self.go_on_until(lambda metrics: metrics["ends"])
        assert sorted(map(tuple, self.reports[-1]["ends"])) == sorted(expected)
        inbox = self.group._inbox._selector.get_map()
        assert len(inbox) == 1 + len(ranks), "the bell and a connection a host"

    def close(self) -> None:
        import ray

        self.group.close()
        ray.util.remove_placement_group(self.placement_group)


@pytest.fixture
def make(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    made: list[Trial] = []

    def begin(**config: Any) -> Trial:
        made.append(Trial(tmp_path, **config))
        began = time.monotonic()
        made[-1].begin()
        print(f"started in {time.monotonic() - began:.1f} s")
        assert made[-1].ways == [["connected", "through a neighbour"]] * 2
        return made[-1]

    yield begin
    for each in made:
        each.close()


def test_ranks_on_other_hosts_are_let_go_without_a_call_of_ray(
    make: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.actor import ActorMethod

    calls: Counter[str] = Counter()
    real = ActorMethod._remote

    def count(method: Any, *args: Any, **options: Any) -> Any:
        calls[method._method_name] += 1
        return real(method, *args, **options)

    trial = make()
    trial.check_connections(2, 2)
    monkeypatch.setattr(ActorMethod, "_remote", count)
    began = time.monotonic()
    for _ in range(200):
        trial.next_report()
    assert calls["proceed"] == 0, calls
    assert calls["poll"] <= 4 * (1 + (time.monotonic() - began) / POLL_S), "as signs of life only"
    assert time.monotonic() - began < 40 * POLL_S, "no report waited for a poll"
    trial.finish()


@pytest.mark.parametrize("name", ["KILL", "STOP"])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_others_go_on_without_the_rank_that_hands_on_to_them(
    make: Callable[..., Trial], name: str, rank: int
) -> None:
    """Ranks 0 and 2 are the first of their hosts. Another one, such as 3, costs as much."""
    trial = make(signal=name, harmed=rank)
    trial.go_on_until(lambda metrics: metrics["size"] == 3)
    lost_s = max(after - before for before, after in pairwise(trial.times))
    print(f"SIG{name} of rank {rank}: {lost_s:.1f} s without a report: {trial.group.world_changes}")
    assert lost_s < 20.0 + (GLOO_S if name == "STOP" else 0)
    trial.go_on_until(lambda metrics: metrics["size"] == 4)
    trial.check_connections(2, 2)
    trial.finish()


def test_a_trial_that_grows_and_shrinks_keeps_one_connection_a_host(make: Callable[..., Trial]) -> None:
    trial = make()
    trial.go_on_until(lambda metrics: metrics["epoch"] == 3)  # something is committed
    for size in (5, 4, 6, 4):
        assert trial.group.resize(size, b"")
        trial.go_on_until(lambda metrics, size=size: metrics["size"] == size)
        trial.check_connections(*({4: (2, 2), 6: (3, 3)}.get(size) or (2, 3)))
    trial.finish()


def test_a_report_that_is_lost_with_its_connection_is_sent_again(make: Callable[..., Trial]) -> None:
    trial = make()
    trial.next_report()
    first = next(worker for worker in trial.group.workers if 0 in worker.ranks)
    trial.group._releases.send(trial.group.workers, trial.group._run, trial.group._ask)
    eventually(lambda: select.select([first.channel], [], [], 1)[0], why="rank 0 reports again")
    trial.group._inbox.close_channel(first.channel)
    began = time.monotonic()
    for _ in range(3):
        trial.next_report()
    assert time.monotonic() - began < 3 * POLL_S
    assert trial.group.world_changes == [], "a connection is not a rank"
    trial.finish()
