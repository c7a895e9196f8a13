"""The preflight's judgement, from facts made by hand: no cluster needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from horovod_tune.doctor import HorovodFacts, NodeInfo, TorchFacts
from horovod_tune.horovod_build.patches import PATCH_LEVEL
from horovod_tune.preflight import MachineLook, PreflightReport, judge
from horovod_tune.preflight.check import check

GIB = 1024**3
FACTS = NodeInfo(
    host="n",
    system="Linux",
    python="3.11.7",
    executable="/usr/bin/python3",
    cpus=4,
    memory=8 * GIB,
    packages={"horovod_tune": "0.1.0", "ray": "2.60.0"},
    torch=TorchFacts("2.13.0+cpu"),
    horovod=HorovodFacts("0.28.1", PATCH_LEVEL, "2.13.0+cpu", gloo=True),
    host_addresses=("10.0.0.1",),
    interfaces={"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",)},
    temporary_free=100 * GIB,
    shared_memory=4 * GIB,
    shared_memory_free=4 * GIB,
    open_files=65536,
)


def machine(number: int, **changes: object) -> MachineLook:
    look = MachineLook(
        f"n{number}",
        f"10.0.0.{number}",
        facts=FACTS,
        interface="eth0",
        interface_address=f"10.0.0.{number}",
        clock_ahead_s=0.01,
    )
    return replace(look, **changes)


def test_sound_machines_have_no_problem() -> None:
    looks = (machine(1), machine(2), machine(3))
    assert judge(looks) == ()
    assert PreflightReport(looks, ()).ok


@pytest.mark.parametrize(
    ("changes", "said", "ok"),
    [
        ({"facts": replace(FACTS, horovod=None)}, "Horovod is not installed", False),
        ({"facts": replace(FACTS, torch=TorchFacts("2.12.1"))}, "torch 2.12.1; n1 n3 have 2.13.0", False),
        ({"facts": replace(FACTS, python="3.10.2")}, "Python 3.10; n1 n3 have 3.11", False),
        (
            {"facts": replace(FACTS, horovod=HorovodFacts("0.27.0", PATCH_LEVEL, "2.13.0+cpu", gloo=True))},
            "Horovod 0.27.0; n1 n3 have 0.28.1",
            False,
        ),
        ({"facts": replace(FACTS, shared_memory=GIB // 8)}, "/dev/shm", True),
        ({"facts": replace(FACTS, temporary_free=GIB // 8)}, "GiB left", True),
        ({"facts": replace(FACTS, host_addresses=("127.0.1.1",))}, "resolves to 127.0.1.1", True),
        ({"facts": None, "failure": "it gave no answer in time"}, "no answer in time", False),
        (
            {"facts": None, "failure": "ModuleNotFoundError: No module named 'horovod_tune'"},
            "horovod_tune is not installed",
            False,
        ),
        ({"failed_imports": {"mymodel": "ModuleNotFoundError: no"}}, "needs mymodel", False),
        (
            {"interface": None, "interface_failure": "nics=['ib0'] names no interface"},
            "names no interface",
            False,
        ),
        ({"interface": "lo", "interface_address": "127.0.0.1"}, "no other machine reaches", False),
        ({"slow_imports": {"mymodel": 90.0}}, "mymodel, whose import took 90 s there or more: slow", True),
        ({"address": "fd00::2"}, "Ray knows it by fd00::2; Horovod's rendezvous and Gloo speak IPv4", False),
        ({"clock_ahead_s": 75.0}, "75 s ahead of", True),
        ({"clock_ahead_s": -75.0}, "75 s behind", True),
    ],
)
def test_what_is_wrong_with_one_machine_is_said_of_it(
    changes: dict[str, object], said: str, ok: bool
) -> None:
    looks = (machine(1), machine(2, **changes), machine(3))
    problems = judge(looks)
    assert {problem.node for problem in problems} == {"n2"}
    assert any(said in problem.problem for problem in problems), problems
    assert all(problem.cure for problem in problems)
    report = PreflightReport(looks, problems)
    assert report.ok is ok
    assert "n2" in str(report) and ("problem" if not ok else "warning") in str(report)


def test_an_unpatched_horovod_makes_127_0_1_1_a_problem() -> None:
    old = replace(
        FACTS,
        horovod=HorovodFacts("0.28.1", None, "2.13.0+cpu", gloo=True),
        host_addresses=("127.0.1.1",),
    )
    report = PreflightReport(
        (), judge((machine(1, facts=replace(old, host_addresses=("10.0.0.1",))), machine(2, facts=old)))
    )
    assert not report.ok
    assert [problem.node for problem in report.problems if problem.level == "problem"] == ["n2"]


def test_a_machine_that_nobody_reaches_is_blamed_once_and_a_pair_by_itself() -> None:
    cut_off = judge(
        (
            machine(1, unreached={"n3": "timed out"}),
            machine(2, unreached={"n3": "timed out"}),
            machine(3, unreached={"n1": "timed out", "n2": "timed out"}),
        )
    )
    assert [problem.node for problem in cut_off] == ["n3"]
    pair = judge((machine(1), machine(2, unreached={"n3": "refused"}), machine(3)))
    assert [(problem.node, "from n2" in problem.problem) for problem in pair] == [("n3", True)]


def test_a_tpu_trial_needs_no_horovod() -> None:
    facts = replace(FACTS, horovod=None, packages={**FACTS.packages, "torch_xla": "2.9.0"})
    assert PreflightReport((), judge((machine(1, facts=facts), machine(2, facts=facts)), use_tpu=True)).ok


def test_what_is_no_module_name_is_refused_before_anybody_is_asked() -> None:
    with pytest.raises(ValueError, match="func_module_names must be dotted module names, got 'os; import x'"):
        check(["os; import x"], num_hosts=2)
    assert check([], num_hosts=1).looks == ()
