"""Which actor is which rank; the choice of GPUs and interfaces. Pure."""

from __future__ import annotations

import pytest

from horovod_tune.actors import ranks
from horovod_tune.errors import StartFailed
from horovod_tune.messages import WorkerInfo


def facts(node, gpus=()):
    return WorkerInfo(node, "10.0.0.1", f"host-{node}", 1, 0.0, gpu_ids=gpus)


def test_ranks_are_consecutive_on_each_host_and_the_coordinators_host_comes_first():
    rank_infos = ranks.assign_ranks(["a", "b", "a", "b"], first_node="b")
    assert [each.rank for each in rank_infos] == [2, 0, 3, 1]
    assert [each.local_rank for each in rank_infos] == [0, 0, 1, 1]
    assert [each.cross_rank for each in rank_infos] == [1, 0, 1, 0]
    assert {(each.size, each.local_size, each.cross_size) for each in rank_infos} == {(4, 2, 2)}


def test_hosts_with_different_numbers_of_ranks_have_the_cross_communicators_of_horovodrun():
    rank_infos = ranks.assign_ranks(["a", "a", "b"], first_node="a")
    assert [(w.local_size, w.cross_rank, w.cross_size) for w in rank_infos] == [
        (2, 0, 2),
        (2, 0, 1),
        (1, 1, 2),
    ]


def test_a_host_with_the_wrong_number_of_slots_is_never_accepted():
    ranks.check_hosts([facts("a"), facts("b")], num_hosts=2, num_slots=1)
    with pytest.raises(StartFailed) as raised:
        ranks.check_hosts([facts("a"), facts("a"), facts("b")], num_hosts=2, num_slots=2)
    assert "2 rank(s) on each of 2 host(s)" in str(raised.value)
    assert "2 on host-a" in str(raised.value) and "1 on host-b" in str(raised.value)


def test_each_rank_sees_its_hosts_gpus_and_its_own_at_its_local_rank():
    members = [facts("a", ("5",)), facts("b", ("0",)), facts("a", ("2",))]
    rank_infos = ranks.assign_ranks([each.node_id for each in members], first_node="a")
    visible = ranks.visible_gpus(members, rank_infos)
    assert visible == ["5,2", "0", "5,2"]
    for member, rank_info, devices in zip(members, rank_infos, visible, strict=True):
        assert devices.split(",")[rank_info.local_rank] == member.gpu_ids[0]
    without = [facts("a"), facts("a")]
    assert ranks.visible_gpus(without, ranks.assign_ranks(["a", "a"], first_node="a")) == [None, None]


ADDRESSES = {"lo": ["127.0.0.1"], "ib1": ["fe80::1"], "eth0": ["10.0.0.5"], "ib0": ["10.9.0.5"]}


@pytest.mark.parametrize(
    ("nics", "single_host", "chosen"), [((), True, "lo"), (("ens1", "ib1", "ib0"), False, "ib0")]
)
def test_collectives_of_one_host_stay_on_the_loopback_and_nics_names_others(nics, single_host, chosen):
    found = ranks.choose_interface(ADDRESSES, node_ip="10.0.0.5", nics=nics, single_host=single_host)
    assert found == chosen


@pytest.mark.parametrize(("nics", "node_ip"), [(("ens1",), "10.0.0.5"), ((), "10.0.0.77")])
def test_an_interface_that_is_not_there_is_an_error_that_lists_those_that_are(nics, node_ip):
    with pytest.raises(StartFailed) as raised:
        ranks.choose_interface(ADDRESSES, node_ip=node_ip, nics=nics, single_host=False)
    assert "eth0 (10.0.0.5)" in str(raised.value)
