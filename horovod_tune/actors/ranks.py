"""Assigns ranks, GPUs and network interfaces to actors: no Ray, no backend."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence

import psutil

from horovod_tune.errors import StartFailed
from horovod_tune.messages import Assignment, RankInfo, WorkerInfo


def assign_ranks(nodes: Sequence[str], first_node: str) -> list[RankInfo]:
    """Return each actor's rank. Ranks are consecutive on every node, and rank 0 is on ``first_node``.

    ``nodes`` are the actors' Ray node ids. At the start, ``first_node`` is the coordinator's, so that rank
    0's checkpoints need no network if the storage is local.

    >>> [each.rank for each in assign_ranks(["b", "a", "b"], first_node="b")]
    [0, 2, 1]
    >>> assign_ranks(["b", "a", "b"], first_node="b")[2]
    RankInfo(rank=1, size=3, local_rank=1, local_size=2, cross_rank=0, cross_size=1)
    """
    order = sorted(dict.fromkeys(nodes), key=lambda node: node != first_node)
    slots = Counter(nodes)
    start = {node: sum(slots[before] for before in order[:i]) for i, node in enumerate(order)}
    seen: Counter[str] = Counter()
    rank_infos = []
    for node in nodes:
        local_rank = seen[node]
        seen[node] += 1
        # Horovod's cross communicator connects the ranks that have the same local rank on their hosts.
        peers = [each for each in order if slots[each] > local_rank]
        rank_infos.append(
            RankInfo(
                rank=start[node] + local_rank,
                size=len(nodes),
                local_rank=local_rank,
                local_size=slots[node],
                cross_rank=peers.index(node),
                cross_size=len(peers),
            )
        )
    return rank_infos


def check_hosts(workers: Sequence[WorkerInfo], *, num_hosts: int, num_slots: int) -> None:
    """Raise StartFailed unless ``num_slots`` actors are on each of ``num_hosts`` nodes."""
    placed = Counter(worker.node_id for worker in workers)
    if len(placed) == num_hosts and set(placed.values()) == {num_slots}:
        return
    hosts = {worker.node_id: worker.host for worker in workers}
    got = ", ".join(f"{count} on {hosts[node]} (node {node[:8]})" for node, count in placed.items())
    raise StartFailed(
        f"the trial needs {num_slots} rank(s) on each of {num_hosts} host(s), but Ray placed {got}"
    )


def visible_gpus(workers: Sequence[WorkerInfo], rank_infos: Sequence[RankInfo]) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES per actor: the trial's GPUs on its host, by local rank; None without GPUs.

    So ``torch.cuda.set_device(hvd.local_rank())`` selects the GPU that Ray reserved for the rank, unless the
    process is from an earlier world: it keeps its value and its index there, `get_world().gpu`.
    """
    visible: dict[str, list[str]] = {}
    by_local_rank = sorted(zip(workers, rank_infos, strict=True), key=lambda each: each[1].local_rank)
    for worker, _ in by_local_rank:
        visible.setdefault(worker.node_id, []).extend(worker.gpu_ids)
    return [",".join(visible[worker.node_id]) or None for worker in workers]


def own_gpu(assignment: Assignment, gpu_ids: Sequence[object]) -> int | None:
    """Return the index of a rank's own GPU, which Ray reserved for it, among those that it sees.

    >>> own_gpu(Assignment((), {"CUDA_VISIBLE_DEVICES": "2,3"}), [3])
    1
    """
    visible = assignment.environment.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(str(gpu_ids[0])) if visible else None


def interfaces() -> dict[str, tuple[str, ...]]:
    """Return the IPv4 and IPv6 addresses of this host's interfaces that are up."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    ip = (socket.AF_INET, socket.AF_INET6)
    return {
        name: tuple(each.address.split("%")[0] for each in entries if each.family in ip)
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }


def choose_interface(
    addresses: Mapping[str, Sequence[str]], *, node_ip: str, nics: Sequence[str], single_host: bool
) -> str:
    """Return the interface for this host's collectives.

    ``addresses`` are the host's IP addresses by interface. The default is the loopback if all ranks are on
    one host, otherwise the interface with the node's address in Ray. The first of ``nics`` that has an
    IPv4 address here overrides both.

    Raises:
        StartFailed: the host has none of ``nics``, no interface has the address, or ``node_ip`` is IPv6 and
            the ranks are on several hosts.

    >>> here = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"]}
    >>> choose_interface(here, node_ip="10.0.0.5", nics=[], single_host=False)
    'eth0'
    >>> choose_interface(here, node_ip="fd00::2", nics=["eth0"], single_host=False)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    horovod_tune.errors.StartFailed: Ray's address of a host is fd00::2; ... only IPv4. Start Ray there ...
    """
    if ":" in node_ip and not single_host:
        raise StartFailed(
            f"Ray's address of a host is {node_ip}; trials on several hosts support only IPv4. "
            "Start Ray there with --node-ip-address and an IPv4 address."
        )
    there = ", ".join(f"{name} ({', '.join(ips)})" for name, ips in addresses.items())
    if nics:
        for name in nics:
            if any("." in ip for ip in addresses.get(name, ())):
                return name
        none = f"nics={list(nics)} names no interface of the host at {node_ip} with an IPv4 address"
        raise StartFailed(f"{none}; it has {there}")
    wanted = "127.0.0.1" if single_host else node_ip
    for name, ips in addresses.items():
        if wanted in ips:
            return name
    raise StartFailed(
        f"no network interface of the host at {node_ip} has the address {wanted}; it has {there}. "
        "Name the interface with nics=."
    )
