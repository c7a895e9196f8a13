"""What is wrong between nodes, from facts made by hand: no cluster needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sound_machine import SOUND

from horovod_tune.doctor.findings import Node, diagnose_nodes
from horovod_tune.doctor.report import Report
from horovod_tune.horovod_build.installed import InstalledHorovod, InstalledTorch
from horovod_tune.horovod_build.patches import PATCH_LEVEL


def machine(number: int, **changes: object) -> Node:
    address = f"10.0.0.{number}"
    node = Node(f"n{number}", address, info=SOUND, interface="eth0", interface_address=address)
    return replace(node, **changes)


def test_sound_machines_have_no_problem() -> None:
    looks = (machine(1), machine(2), machine(3))
    assert diagnose_nodes(looks) == []
    assert Report(looks, ()).ok


@pytest.mark.parametrize(
    ("changes", "said", "ok"),
    [
        ({"info": replace(SOUND, horovod=None)}, "Horovod is not installed", False),
        ({"info": replace(SOUND, torch=InstalledTorch("2.12.1"))}, "torch 2.12.1; n1 n3 have 2.13.0", False),
        ({"info": replace(SOUND, python="3.10.2")}, "Python 3.10; n1 n3 have 3.11", False),
        (
            {"info": replace(SOUND, horovod=InstalledHorovod("0.27.0", "2.13.0+cpu", gloo=True))},
            "Horovod 0.27.0; n1 n3 have 0.28.1",
            False,
        ),
        ({"info": None, "failure": "it did not respond in time"}, "did not respond in time", False),
        (
            {"info": None, "failure": "ModuleNotFoundError: No module named 'horovod_tune'"},
            "horovod_tune is not installed",
            False,
        ),
        ({"info": replace(SOUND, broken={"mymodel": "no"})}, "mymodel cannot be", False),
        ({"interface": None, "interface_failure": "nics names no interface"}, "names no interface", False),
        ({"interface": "lo", "interface_address": "127.0.0.1"}, "no other machine can reach", False),
        ({"info": replace(SOUND, slow={"mymodel": 60.0})}, "mymodel takes more than 60 s", True),
    ],
)
def test_what_is_wrong_with_one_machine_is_attributed_to_it(
    changes: dict[str, object], said: str, ok: bool
) -> None:
    looks = (machine(1), machine(2, **changes), machine(3))
    problems = diagnose_nodes(looks)
    assert {problem.node for problem in problems} == {"n2"}
    assert any(said in problem.what for problem in problems), problems
    assert all(problem.cure for problem in problems)
    report = Report(looks, tuple(problems))
    assert report.ok is ok
    assert ("Problem: n2: " if not ok else "Warning: n2: ") in str(report)


def test_a_machine_that_no_other_reaches_is_blamed_once_and_a_pair_by_itself() -> None:
    cut = (
        machine(1, unreached={"n3": "timed out"}),
        machine(2, unreached={"n3": "timed out"}),
        machine(3, unreached={"n1": "timed out", "n2": "timed out"}),
    )
    cut_off = diagnose_nodes(cut)
    assert [problem.node for problem in cut_off] == ["n3"]
    assert "from n1 n2 at 10.0.0.3 (eth0): timed out" in cut_off[0].what
    without = machine(4, interface=None, interface_address=None, interface_failure="none")
    assert {problem.node for problem in diagnose_nodes((*cut, without))} == {"n3", "n4"}
    (pair,) = diagnose_nodes((machine(1), machine(2, unreached={"n3": "refused"}), machine(3)))
    assert pair.node == "n3" and "from n2 at" in pair.what


def test_the_cure_for_another_horovod_is_the_build_of_the_others() -> None:
    theirs = replace(SOUND, horovod=InstalledHorovod(f"0.28.1+{PATCH_LEVEL}.nccl", gloo=True))
    found = diagnose_nodes((machine(1, info=theirs), machine(2), machine(3, info=theirs)))
    assert [(each.node, each.cure) for each in found] == [("n2", "horovod-tune install-horovod --gpu nccl")]


@pytest.mark.parametrize("backend", ["horovod", "torch"])
def test_a_machine_with_an_ipv6_address_gets_the_cure_that_helps(backend: str) -> None:
    """With any `nics`, `choose_interface` refuses it."""
    other = machine(2, address="fd00::2", interface=None, interface_failure="only IPv4")
    (found,) = diagnose_nodes((machine(1), other), backend=backend)
    assert "address for it is fd00::2; trials on several hosts support only IPv4" in found.what
    assert "--node-ip-address" in found.cure


def test_a_torch_trial_needs_no_horovod() -> None:
    facts = replace(SOUND, horovod=None)
    assert Report((), diagnose_nodes((machine(1, info=facts), machine(2, info=facts)), backend="torch")).ok
