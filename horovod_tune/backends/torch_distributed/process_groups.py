"""Runs in each rank: makes and ends torch.distributed's process groups.

The default group exists when the training function is called. If the function calls ``init_process_group()``
itself, as under torchrun, the call keeps the existing group, or replaces it if the settings differ.

Checked against torch 2.13: `_new_process_group_helper`, which makes every group, and `group_count`, the
number in a group's name.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import threading
import weakref
from datetime import timedelta
from typing import Any

from horovod_tune.actors.sockets import SocketRecorder
from horovod_tune.backends.torch_distributed.world_store import WorldStore, wait_for_all
from horovod_tune.compatibility import Patch, wrap
from horovod_tune.session.session import WorldBroken

_C10D = "torch.distributed.distributed_c10d"
GROUPS = Patch(
    "in a world that has lost a rank, others wait until torch's timeout, and other groups have torch's own",
    f"{_C10D}:_new_process_group_helper",
    f"{_C10D}:init_process_group uses _new_process_group_helper",
    f"{_C10D}:_new_group_with_tag uses _new_process_group_helper",
    f"{_C10D}:_set_pg_timeout",
    f"{_C10D}:_get_default_timeout(backend)",
    f"{_C10D}:_process_group_name uses group_count",
)
# DTensor caches local shapes and groups by mesh, and meshes of the same ranks are equal.
MESHES = Patch(
    "sharded models may get other ranks' shards once the world of an elastic trial has changed",
    "torch.distributed.device_mesh:DeviceMesh.__eq__ uses _thread_id",
    "torch.distributed.device_mesh:DeviceMesh uses _pg_registry",
)
# The least time to wait for the other ranks, which may still import modules, even if the timeout is shorter.
ARRIVAL_TIMEOUT = timedelta(seconds=60)
# Gloo waits up to this many times its timeout for a peer to connect.
GLOO_WAITS = 5


class ProcessGroups:
    """The process groups of this process: of one world, or in an elastic trial of one after another.

    Args:
        backend: of the default group, as for `init_process_group`.
        timeout: that of collectives, unless the training function has chosen another one.
        connect_timeout: how long making the default group may take.
    """

    def __init__(self, backend: str, timeout: timedelta, connect_timeout: timedelta) -> None:
        self._backend, self._timeout, self._connect_timeout = backend, timeout, connect_timeout
        # That of the latest default group, and of groups that are made without one.
        self._latest_timeout = timeout
        # The module `torch.distributed`; None before `install`.
        self.dist: Any = None
        self.sockets = SocketRecorder()
        # None before the first world, and between worlds.
        self.store: WorldStore | None = None
        self._default_arguments: dict[str, Any] = {}
        # True until the training function has called `init_process_group`.
        self._is_default_group_unclaimed = False
        # Keeps the groups of the last world alive. If a DDP model held the last reference to a group, the
        # group would be destroyed with the GIL held, while its threads may wait for the GIL: a deadlock.
        self._ended: list[Any] = []
        self._worlds_left = 0
        # The meshes of this world, by id. Caches of DTensor keep them, and with them their groups.
        self._meshes = weakref.WeakValueDictionary[int, Any]()
        # Held while groups are aborted or destroyed.
        self._ending = threading.Lock()
        self.are_aborted = False

    def install(self) -> None:
        """Wrap torch's `init_process_group`, and the function that makes every group, if not done yet."""
        if self.dist is not None:
            return
        import torch.distributed as dist

        self.dist, self._real_init, c10d = dist, dist.init_process_group, dist.distributed_c10d
        wrap(dist, "init_process_group")(self._init_process_group)
        device_mesh: Any = sys.modules.get("torch.distributed.device_mesh", dist)
        c10d.init_process_group = device_mesh.init_process_group = dist.init_process_group
        if GROUPS.fits:
            c10d._get_default_timeout = lambda backend: self._latest_timeout
            wrap(c10d, "_new_process_group_helper")(self._new_group)
        if MESHES.fits:
            wrap(device_mesh.DeviceMesh, "__init__")(self._new_mesh)

    def _new_mesh(self, real: Any, mesh: Any, *args: Any, **kwargs: Any) -> None:
        """Make a mesh that does not equal those of earlier worlds, in which this rank had another number."""
        real(mesh, *args, **kwargs)
        self._meshes[id(mesh)] = mesh
        if self._worlds_left:
            mesh._thread_id = -self._worlds_left

    def _new_group(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        # The store's sockets are left out: other ranks may still use the store when this one has ended.
        with self.sockets.recording(except_port=self.store.port if self.store else None):
            return real(*args, **kwargs)

    def _init_process_group(self, real: Any, *args: Any, **kwargs: Any) -> None:
        """Handle the training function's ``init_process_group(*args, **kwargs)``."""
        signature = inspect.signature(real)
        defaults = {name: (each.default, "env://") for name, each in signature.parameters.items()}
        given = signature.bind(*args, **kwargs).arguments
        requested = {name: value for name, value in given.items() if value not in defaults[name]}
        store = None if "store" in requested else self.store
        if "init_method" in requested and store:
            place = {"rank": store.world.rank, "world_size": store.world.size}
            if place | requested == requested | place:
                # A fixed address or file would be shared with trials that run at the same time.
                del requested["init_method"]
            else:
                store = None
        self._latest_timeout = requested.get("timeout", self._timeout)
        is_unclaimed = self._is_default_group_unclaimed and self.dist.is_initialized()
        self._is_default_group_unclaimed = False
        if is_unclaimed:
            ours = self._default_arguments
            if store and all(str(requested[n]).lower() == str(ours.get(n)) for n in requested):
                return
            self._destroy()
        if not store:
            self._real_init(**requested)
            return
        with self.sockets.forming():
            self._make(store, {**self._default_arguments, **requested})

    def make_default(self, store: WorldStore) -> None:
        """Make the default group of this store's world; the training function may then claim the group."""
        world = store.world
        self._default_arguments = {"backend": self._backend, "rank": world.rank, "world_size": world.size}
        self._latest_timeout = self._timeout
        self._make(store, self._default_arguments)
        self._is_default_group_unclaimed = True

    def _make(self, store: WorldStore, arguments: dict[str, Any]) -> None:
        if store.is_closed:
            raise WorldBroken("a rank of this world was lost")
        keys = store.for_next_group()
        timeout = self._latest_timeout
        # `close` can interrupt this wait for the other ranks, but not Gloo's wait for a peer.
        wait_for_all(keys, "arrived", arguments["world_size"], max(timeout, ARRIVAL_TIMEOUT))
        if GROUPS.fits:  # part of the group's name; a failed attempt increases it on one rank only
            self.dist.distributed_c10d._world.group_count = 0
        self.are_aborted = False
        connecting = self._connect_timeout / GLOO_WAITS if GROUPS.fits else timeout
        self._real_init(**{**arguments, "store": keys, "timeout": connecting})
        if GROUPS.fits:
            self.dist.distributed_c10d._set_pg_timeout(timeout)

    def all(self) -> list[Any]:
        """Return the groups that are not destroyed."""
        return list(self.dist.distributed_c10d._world.pg_map) if self.dist is not None else []

    def abort(self) -> None:
        """End this rank's and its peers' waits in collectives, with an error."""
        # Gloo's abort() ends neither.
        self.sockets.shut_down()
        with self._ending:
            # Once only, and not after a group was destroyed: NCCL would free its memory twice.
            groups, self.are_aborted = [] if self.are_aborted else self.all(), True
            for group in groups:
                with contextlib.suppress(RuntimeError, AttributeError):  # older releases have no abort()
                    group.abort()

    def end(self) -> None:
        """Destroy the groups of this world."""
        self._ended += self.all()
        self._destroy()

    def leave(self) -> None:
        """Destroy and forget the groups of a world that this rank leaves for another one."""
        self.end()
        self.sockets.forget()
        self._worlds_left += 1
        for mesh in self._meshes.values():
            mesh._pg_registry.clear()
        self._meshes.clear()
        self.store = None

    def _destroy(self) -> None:
        with self._ending:
            if self.dist.is_initialized():
                self.dist.destroy_process_group()

    def free(self) -> None:
        """Free the groups of the last world, in a thread, since a group waits for its collectives."""
        gc.collect()  # a sharded model is part of a cycle, and has groups
        groups, self._ended = self._ended, []
        threading.Thread(target=groups.clear, name="ended groups", daemon=True).start()
