"""Runs in each rank: torch.distributed's process groups, new ones for every trial.

The default group exists when the training function is called. If the function calls ``init_process_group()``
itself, as under torchrun, that keeps the existing group, or replaces it if the settings differ.

Checked against torch 2.13: `_new_process_group_helper`, through which every group is made, the number that
names the group, and the texts of Gloo's errors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from horovod_tune.actors import sockets
from horovod_tune.errors import exception_chain
from horovod_tune.messages import FailureKind, RankInfo
from horovod_tune.ray_compat.compatibility import Patch, part
from horovod_tune.session import session
from horovod_tune.session.committed_state import NoStates
from horovod_tune.session.session import WorldBroken
from horovod_tune.torch_dist import nccl_watch

_C10D = "torch.distributed.distributed_c10d"
_GROUPS = Patch(
    "process groups",
    "every trial starts new workers",
    (
        part(f"{_C10D}:_new_process_group_helper"),
        part(f"{_C10D}:init_process_group", uses="_new_process_group_helper"),
        part(f"{_C10D}:_new_group_with_tag", uses="_new_process_group_helper"),
        part(f"{_C10D}:_set_pg_timeout"),
        part(f"{_C10D}:_process_group_name", uses="group_count"),
    ),
)
# How long a rank whose collective timed out waits for the others to record the same. A rank that has not is
# the one that never entered it.
PEER_WAIT_S = 2.0
# How long to wait for ranks that still import their modules, if the group's timeout is shorter.
ARRIVAL_TIMEOUT = timedelta(seconds=60)
# Gloo waits up to this many times its timeout for a peer to connect.
GLOO_WAITS = 5
# Modules whose functions have the default group as a default argument, if it exists at their import.
_WITH_DEFAULT_GROUP = ("torch.distributed.nn.functional", "torch.distributed.optim.zero_redundancy_optimizer")
# DTensor's caches of meshes, which hold groups. One that is missing here keeps its group in memory.
_MESH_CACHES = (
    ("torch.distributed.tensor._redistribute", "_planner_cache.clear"),
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)
# Parts of the messages of Gloo's errors, which are a plain RuntimeError. Those of other releases' TCPStore
# may be one too.
_GLOO_TEXTS = ("gloo/transport/", "connectFullMesh failed")
_STORE_TEXTS = ("Socket Timeout", "Broken pipe", "failed to recv", "Connection reset")
# Parts of such an error's message if it is a timeout. Other errors may have them, as DataLoader's does.
_TIMEOUT_TEXTS = ("Timed out waiting", "wait timeout after", "timed out after", "Socket Timeout")


class TorchWorld:
    """The process groups of this process; implements `actors.rank_backend.RankBackend`, and `Collectives`.

    Args:
        stall_timeout_s: the timeout of collectives in the default group.
        connect_timeout_s: how long making that group may take.
        use_gpu: True if the group has NCCL besides Gloo.
    """

    init_call = "dist.init_process_group()"

    def __init__(self, stall_timeout_s: float, connect_timeout_s: float, use_gpu: bool) -> None:
        self.collectives, self.states = self, NoStates()
        self._timeout = timedelta(seconds=stall_timeout_s)
        self._connect_timeout = timedelta(seconds=connect_timeout_s)
        self._use_gpu, self._is_watched = use_gpu, False
        self._backend = "cpu:gloo,cuda:nccl" if use_gpu else "gloo"
        self._dist: Any = None
        # None while no training function runs.
        self._world: Any = None
        self._store: Any = None
        self._name, self._groups_made = "", 0
        # True until the training function has called `init_process_group`.
        self._is_default_group_unclaimed = False
        # Keeps every group of this world alive. If a DDP model held the last reference to a group, the group
        # would be destroyed with the GIL held, for which its threads may wait: a deadlock.
        self._groups: list[Any] = []
        # Held while groups are aborted or destroyed.
        self._ending = threading.Lock()
        self._is_aborted = False
        self._watch: nccl_watch.NcclWatch | None = None
        # True if a collective of NCCL has timed out on this rank.
        self._has_timed_out = False
        self._group_sockets: dict[int, str] = {}
        # The sockets that were open before the group that is being made; None if none is.
        self._before: dict[int, str] | None = None

    def load(self) -> None:
        """Import torch, and wrap its `init_process_group`."""
        # DistributedDataParallel and fully_shard import it: two seconds, which pass while the trial starts.
        import torch.distributed as dist

        if self._dist is not None:
            return
        # Without the watch, torch's own watchdog ends the process.
        self._is_watched = self._use_gpu and nccl_watch.is_supported()
        if self._is_watched:
            for name, value in nccl_watch.ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        self._dist = dist
        real, c10d = dist.init_process_group, dist.distributed_c10d
        signature = inspect.signature(real)

        @functools.wraps(real)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            self._handle_init(signature.bind(*args, **kwargs).arguments, signature.parameters)

        self._real_init = real
        dist.init_process_group = c10d.init_process_group = init_process_group
        if _GROUPS.fits:
            c10d._new_process_group_helper = self._recorded(c10d._new_process_group_helper)

    def _recorded(self, real: Any) -> Any:
        @functools.wraps(real)
        def new_group(*args: Any, **kwargs: Any) -> Any:
            before = sockets.open_tcp_sockets()
            made = real(*args, **kwargs)
            if isinstance(made, tuple):  # this rank is a member of the group
                self._groups.append(made[0])
            # Without the store's, which other ranks may still use when this one has ended.
            store_port = self._store.port if self._store else None
            self._group_sockets |= sockets.open_tcp_sockets(except_port=store_port, before=before)
            return made

        return new_group

    def _handle_init(self, requested: dict[str, Any], parameters: Mapping[str, inspect.Parameter]) -> None:
        """Handle the training function's ``init_process_group(**requested)``."""
        defaults = {name: (each.default, "env://") for name, each in parameters.items()}
        requested = {name: value for name, value in requested.items() if value not in defaults[name]}
        is_ours = self._world is not None and requested.keys().isdisjoint({"init_method", "store"})
        is_unclaimed, self._is_default_group_unclaimed = (
            self._is_default_group_unclaimed and self._dist.is_initialized(),
            False,
        )
        if is_unclaimed:
            if is_ours and all(
                str(requested[n]).lower() == str(self._default_arguments.get(n)) for n in requested
            ):
                return
            self._destroy()
        if not is_ours:
            self._real_init(**requested)
            return
        with self._forming():
            self._make({**self._default_arguments, **requested})

    @property
    def _default_arguments(self) -> dict[str, Any]:
        return {"backend": self._backend, "rank": self._world.rank, "world_size": self._world.size}

    @contextlib.contextmanager
    def _forming(self) -> Iterator[None]:
        self._before = sockets.open_tcp_sockets()
        try:
            yield
        finally:
            self._before = None

    def _make(self, arguments: dict[str, Any]) -> None:
        """Make the default group, with new keys in the store, so that it does not find an earlier group's."""
        self._groups_made += 1
        if (store := self._store) is None:
            raise WorldBroken("a rank of this world was lost")
        store = self._dist.PrefixStore(f"{self._name}.{self._groups_made}", store)
        timeout = arguments.pop("timeout", self._timeout)
        # Ranks wait for each other here, since `close` can interrupt this wait, but not Gloo's wait for a
        # peer.
        if store.add("arrived", 1) == arguments["world_size"]:
            store.set("all_arrived", "")
        store.wait(["all_arrived"], max(timeout, ARRIVAL_TIMEOUT))
        if _GROUPS.fits:  # part of the group's name; a failed attempt increases it on one rank only
            self._dist.distributed_c10d._world.group_count = 0
        self._is_aborted = False
        hook = sys.excepthook  # torch wraps it, every time
        try:
            connecting = self._connect_timeout / GLOO_WAITS if _GROUPS.fits else timeout
            self._real_init(**arguments, store=store, timeout=connecting)
        finally:
            sys.excepthook = hook
        if _GROUPS.fits:
            self._dist.distributed_c10d._set_pg_timeout(timeout)

    def serve_store(self, host: str) -> int:
        """Open the next world's TCPStore on this host's address ``host``; return its port.

        As under torchrun, it accepts connections without a secret; it unpickles nothing.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.closing(socket.socket(family)) as listener:
            listener.bind((host, 0))
            listener.listen(socket.SOMAXCONN)
            port = int(listener.getsockname()[1])
            options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
            self._server = self._dist.TCPStore(host, port, is_master=True, **options)
        return port

    def enter(self, world: RankInfo, name: str) -> None:
        """Make the default group of world ``name``; return when every rank has made it.

        Raises:
            WorldBroken: a rank was lost meanwhile, did not arrive within the group's timeout (or a minute, if
                that is longer), or could not be reached within ``connect_timeout_s``.
        """
        self._drop_groups()
        self._world, self._name, self._groups_made = world, name, 0
        self._has_timed_out = False
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            with self._forming():
                store = self._dist.TCPStore(*address, is_master=False, timeout=self._connect_timeout)
                self._store = store
                self._publish("arrived")
                self._make(self._default_arguments)
                # Otherwise a rank whose function returns at once would leave while others still connect.
                if store.add(f"{name}.made", 1) == world.size:
                    store.set(f"{name}.all_made", "")
                store.wait([f"{name}.all_made"])
                store.set_timeout(self._timeout)
        except RuntimeError as error:
            missing = ", ".join(map(str, self._others("arrived", published=False)))
            without = f", rank(s) {missing} did not arrive" if missing else ""
            raise WorldBroken(f"the process group could not be made{without}: {error}") from error
        self._is_default_group_unclaimed = True
        if self._is_watched:
            live = session.current()
            assert live is not None, "a world is entered by the thread that trains in it"
            fail = functools.partial(self._handle_failure_on_gpu, live)
            self._watch = nccl_watch.NcclWatch(self._open_groups, fail)

    def _open_groups(self) -> list[Any]:
        return list(self._dist.distributed_c10d._world.pg_map) if self._dist is not None else []

    def _handle_failure_on_gpu(self, live: session.Session, has_timed_out: bool) -> None:
        """Break the world, in which a collective cannot complete."""
        self._has_timed_out = has_timed_out
        if has_timed_out:
            self._publish("timed out")
        # Before the groups are aborted, since the function then continues, and must not report.
        live.break_world(was_unnoticed=True)
        self._abort_groups()

    def leave(self) -> None:
        """Leave the world, before the training function is called again in another one."""
        self.end(has_returned=False)

    def end(self, *, has_returned: bool) -> None:
        """Destroy the groups, so that ranks which wait in a collective for this one get an error."""
        if self._world is None:
            return
        if has_returned:
            self._publish("returned")
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self._use_gpu and not has_returned:
            # Otherwise, destroying a group of NCCL may wait for collectives that a lost rank never enters.
            self._abort_groups()
        # A destroyed group stays connected while a model refers to it. What this rank has sent still arrives.
        sockets.shut_down(self._group_sockets)
        self._destroy()
        self._forget_groups()
        self._world, self._store, self._group_sockets = None, None, {}

    def _destroy(self) -> None:
        with self._ending:
            if self._dist.is_initialized():
                self._dist.destroy_process_group()

    def close(self) -> None:
        """Break the world, so that ranks which wait in a collective get an error, this one too."""
        store, self._store = self._store, None
        if store is not None:  # ranks that make a group wait in the store
            others = sockets.open_tcp_sockets(except_port=store.port)
            sockets.shut_down(sockets.open_tcp_sockets(before=others))
        self._abort_groups()

    def _abort_groups(self) -> None:
        # Gloo's abort() ends neither this rank's wait nor those of its peers.
        sockets.shut_down(self._group_sockets)
        with self._ending:
            # Once only, and not after a group was destroyed: NCCL would free its memory twice.
            groups, self._is_aborted = [] if self._is_aborted else self._open_groups(), True
            for group in groups:
                with contextlib.suppress(RuntimeError, AttributeError):  # older releases have none
                    group.abort()

    def abort(self) -> None:
        """Break a world that has lost a rank. Returns when no group of it is being made any more."""
        self.close()
        # A group that is being made opens more sockets.
        while (before := self._before) is not None:
            sockets.shut_down(sockets.open_tcp_sockets(before=before))
            time.sleep(0.05)

    def keep(self, timeout_s: float) -> list[str]:
        """Return why this process cannot enter another world; `end` has destroyed the groups."""
        return (
            []
            if _GROUPS.fits
            else ["torch makes process groups differently from the release that was checked"]
        )

    def release(self, timeout_s: float) -> list[str]:
        """Free the groups, after the models that used them; return why this process cannot be reused."""
        thread = self._drop_groups()
        thread.join(timeout_s)
        return ["a collective was started and never waited for"] if thread.is_alive() else []

    def _drop_groups(self) -> threading.Thread:
        groups, self._groups = self._groups, []
        # In a thread, since a group waits for its collectives.
        thread = threading.Thread(target=groups.clear, name="dropped groups", daemon=True)
        thread.start()
        return thread

    def _forget_groups(self) -> None:
        """Drop torch's own references to groups: default arguments, and caches of meshes."""
        kind = self._dist.ProcessGroup
        for module in filter(None, map(sys.modules.get, _WITH_DEFAULT_GROUP)):
            for function in filter(inspect.isfunction, vars(module).values()):
                if kind in map(type, defaults := function.__defaults__ or ()):
                    function.__defaults__ = tuple(None if type(each) is kind else each for each in defaults)
        for module_name, clear in _MESH_CACHES:
            with contextlib.suppress(KeyError, AttributeError):  # it is not loaded, or not in this release
                operator.attrgetter(clear)(sys.modules[module_name])()

    def describe_failure(self, error: BaseException, output: Any) -> tuple[FailureKind, str, dict[int, str]]:
        """Return the kind of a failure, no text, and the ranks for which the function waited in vain."""
        if self._dist is None:  # torch could not be imported
            return FailureKind.RAISED, "", {}
        chain = list(exception_chain(error))
        texts = [str(each) for each in chain if self._is_of_torch(each)]
        is_broken = any(isinstance(each, WorldBroken) for each in chain)
        if self._has_timed_out or (
            not is_broken and any(mark in text for text in texts for mark in _TIMEOUT_TEXTS)
        ):
            self._publish("timed out")
            time.sleep(PEER_WAIT_S)
            return FailureKind.STALLED, "", self._others("timed out", published=False)
        if is_broken or texts:
            returned = self._others("returned")
            return FailureKind.STALLED if returned else FailureKind.DISCONNECTED, "", returned
        return FailureKind.RAISED, "", {}

    def _is_of_torch(self, error: BaseException) -> bool:
        """Return True if a collective or the store raised ``error``."""
        marks = _GLOO_TEXTS + _STORE_TEXTS
        is_plain = isinstance(error, RuntimeError) and any(mark in str(error) for mark in marks)
        return is_plain or isinstance(error, self._dist.DistError)

    def _publish(self, what: str) -> None:
        """Publish this rank's state; the other ranks find it with `_others`."""
        with contextlib.suppress(RuntimeError, AttributeError):  # the store has ended, or was not reached
            self._store.set(f"{self._name}.{what}.{self._world.rank}", "")

    def _others(self, what: str, *, published: bool = True) -> dict[int, str]:
        """Return the ranks that have published ``what``, or have not, as in `AwaitedRanks`."""
        with contextlib.suppress(RuntimeError, AttributeError):
            keys = {rank: f"{self._name}.{what}.{rank}" for rank in range(self._world.size)}
            ranks = [rank for rank, key in keys.items() if self._store.check([key]) is published]
            return dict.fromkeys(ranks, "a collective")
        return {}

    def world_error(self, text: str) -> BaseException:
        """Return the error that `report` raises in a broken world."""
        return WorldBroken(text)

    def awaited_ranks(self, output: Any) -> dict[int, str]:
        """Return nothing: a collective that waits for a rank that has ended fails, see `end`."""
        return {}

    def are_ready(self) -> bool:
        """Wait for the GPU, then return True unless the training function has destroyed the default group.

        Raises:
            WorldBroken: a collective on the GPU has failed, perhaps during this wait.
        """
        if self._use_gpu and (cuda := sys.modules["torch"].cuda).is_initialized():
            cuda.synchronize()
            if self._is_aborted:
                raise WorldBroken("a collective on the GPU has failed")
        return bool(self._dist.is_initialized())

    def any(self, flag: bool) -> bool:
        """Return True if ``flag`` is true on any rank."""
        return True in self._gather(flag)

    def newest(self, number: int, state: Any) -> tuple[int, Any]:
        """Return the largest ``number`` of any rank, and that rank's ``state``."""
        numbers = self._gather(number)
        largest = max(numbers)
        if min(numbers) == largest:
            return number, state
        states = [state]
        self._dist.broadcast_object_list(states, src=numbers.index(largest))
        return largest, states[0]

    def _gather(self, value: Any) -> list[Any]:
        values = [None] * self._dist.get_world_size()
        self._dist.all_gather_object(values, value)
        return values
