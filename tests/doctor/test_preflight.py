"""A search examines the machines once, before its first trial on several of them."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_tune.doctor import preflight
from horovod_tune.doctor.findings import Finding
from horovod_tune.doctor.preflight import Preflight
from horovod_tune.doctor.report import Report
from horovod_tune.errors import PreflightFailed
from horovod_tune.ray_compat import queries
from horovod_tune.spec.placement import Placement
from horovod_tune.spec.trial_spec import TrialSpec, make_spec


class Shipped:
    token = "a function"

    def modules(self) -> list[str]:
        return ["json"]


class Cluster:
    """A cluster of some nodes, and what a look at them finds; ``looks`` are the looks so far."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, float]] = [{"CPU": 2.0}] * 2
        self.problems: tuple[Finding, ...] = ()
        self.looks: list[dict[str, Any]] = []
        self.gcs_address = "10.0.0.1:6379"

    def check(self, modules: list[str], **arguments: Any) -> Report:
        self.looks.append({"modules": modules, **arguments})
        return Report((), self.problems)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(preflight.ray, "get_runtime_context", lambda: made)
    monkeypatch.setattr(preflight, "check", made.check)
    monkeypatch.setattr(preflight, "_examined", set())
    monkeypatch.setattr(queries, "resources_of_nodes", lambda: made.nodes)
    monkeypatch.setattr(queries, "check_cluster_holds", lambda placement: None)
    return made


def search(spec: TrialSpec, steps: int = 3) -> None:
    placement: Placement = spec.placement()
    callback = Preflight(spec, Shipped(), placement)  # type: ignore[arg-type]
    for step in range(steps):
        callback.on_step_begin(step, [])


TWO_HOSTS = make_spec(num_hosts=2, num_slots=2, nics=["eth1"])


def test_the_machines_are_examined_once_per_cluster(cluster: Cluster) -> None:
    search(TWO_HOSTS)
    search(TWO_HOSTS)
    assert cluster.looks == [{"modules": ["json"], "nics": TWO_HOSTS.nics, "backend": "horovod"}]
    cluster.gcs_address = "10.0.0.2:6379"
    search(TWO_HOSTS)
    assert len(cluster.looks) == 2


def test_a_cluster_that_grows_is_examined_when_it_has_enough_machines(cluster: Cluster) -> None:
    cluster.nodes = [{"CPU": 2.0}]
    search(TWO_HOSTS)
    assert not cluster.looks
    cluster.nodes *= 2
    search(TWO_HOSTS)
    assert len(cluster.looks) == 1


def test_trials_that_may_land_on_one_machine_need_no_look(cluster: Cluster) -> None:
    cluster.nodes = [{"CPU": 4.0}] * 3
    search(make_spec(num_workers=4))
    assert not cluster.looks
    cluster.nodes = [{"CPU": 3.0}] * 3
    search(make_spec(num_workers=4))
    assert len(cluster.looks) == 1


def test_a_machine_that_cannot_take_part_ends_the_search(cluster: Cluster) -> None:
    cluster.problems = (Finding("problem", "horovod", "Horovod is not installed", "install it", "n2"),)
    with pytest.raises(PreflightFailed, match="Horovod is not installed"):
        search(TWO_HOSTS)
    assert not preflight._examined, "the next search looks again"


def test_a_preflight_that_fails_itself_ends_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*modules: Any, **arguments: Any) -> Report:
        raise OSError("no such file")

    monkeypatch.setattr(preflight, "check", broken)
    search(TWO_HOSTS)
    (warning,) = caplog.records
    assert "preflight failed (OSError: no such file)" in warning.getMessage()


def test_a_warning_is_logged_and_ends_nothing(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.problems = (Finding("warning", "mymodel", "its import is slow", "wait", "n2"),)
    search(TWO_HOSTS)
    assert "its import is slow" in caplog.text and len(cluster.looks) == 1
