"""Horovod's elastic API in this rank: connects `hvd.elastic.run` and its states to the trial's coordinator.

Stock Horovod queries a driver through its elastic rendezvous handler and listens for notifications, and both
unpickle unauthenticated input (CVE-2024-10190). Neither ever starts here: the notification manager and
`run_fn` of `hvd.elastic` are replaced as soon as Horovod is loaded, in trials of a fixed size too.

Checked against Horovod 0.28.1: `horovod.common.elastic.notification_manager` and `run_fn`,
`horovod.torch.elastic.state.*StateHandler.sync`.
"""

from __future__ import annotations

import functools
import logging
import pickle
import time
from collections.abc import Callable
from typing import Any

from ray import cloudpickle

from horovod_tune.compatibility import wrap
from horovod_tune.errors import NotElastic
from horovod_tune.rank.training import reason_of_leaving
from horovod_tune.session import session
from horovod_tune.session.committed_state import States

logger = logging.getLogger(__name__)

# Maximum bytes of one broadcast: some of Horovod's sizes have 32 bits.
PIECE_BYTES = 1 << 28
_HANDLERS = ("ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler")
# The attributes in which they keep the last commit.
_SAVED = ("_saved_model_state", "_saved_optimizer_state", "_saved_sampler_state")


class Notifications(States):
    """Makes the states of `hvd.elastic.run` leave their world; replaces Horovod's notification manager."""

    def __init__(self) -> None:
        self._listeners: list[Any] = []
        self._dumped: Any = None

    def init(self, *_: Any, **__: Any) -> None:
        """Do nothing: Horovod's manager would open a network service here."""

    def register_listener(self, listener: Any) -> None:
        """Register a state of `hvd.elastic.run`, which calls this before it first synchronises the state."""
        live = session.current()
        if live is not None:
            live.committed.load_stored()
        dumped, self._dumped = self._dumped, None
        if dumped is not None:
            _load(listener, dumped)
        self._listeners.append(listener)

    def remove_listener(self, listener: Any) -> None:
        self._listeners = [each for each in self._listeners if each is not listener]

    @property
    def exist(self) -> bool:
        return bool(self._listeners)  # `hvd.elastic.run` saves a state before it calls the function

    def dump(self) -> Any:
        return _dump(self._listeners[-1]) if self._listeners else None

    def load_later(self, dumped: Any) -> None:
        self._dumped = dumped

    def offer_change(self) -> None:
        """Make every state's next `commit` raise `HostsUpdatedInterrupt`."""
        from horovod.runner.elastic.worker import HostUpdateResult

        for listener in list(self._listeners):
            listener.on_hosts_updated(time.time(), HostUpdateResult.added)


notifications = Notifications()


def _dump(state: Any) -> dict[str, Any]:
    handlers = getattr(state, "_handlers", {})
    saved = {
        name: {key: value for key, value in vars(handler).items() if key in _SAVED}
        for name, handler in handlers.items()
    }
    return {"values": state._saved_state, "handlers": saved}


def _load(state: Any, dumped: dict[str, Any]) -> None:
    state._saved_state = {**state._saved_state, **dumped["values"]}
    for name, saved in dumped["handlers"].items():
        if name in state._handlers:
            vars(state._handlers[name]).update(saved)
    state.restore()


def install() -> None:
    """Replace Horovod's notifications and reset with ours; once per process, when Horovod is imported."""
    import horovod.common.elastic
    import horovod.torch.elastic
    import horovod.torch.elastic.state as states

    horovod.common.elastic.notification_manager = notifications
    wrap(horovod.torch.elastic, "run_fn")(run_and_report)
    for name in _HANDLERS:
        wrap(getattr(states, name), "sync")(_sync_and_save)


def _sync_and_save(sync: Callable[[Any], None], handler: Any) -> None:
    """Make a handler's `restore` return to what was synchronised.

    Horovod's handlers broadcast rank 0's state, but keep each rank's own as its last commit: a rank that
    joined, and becomes rank 0 after the next loss, would continue with its initial weights.
    """
    sync(handler)
    handler.save()


def run_and_report(run_fn: Callable[..., Any], function: Callable[..., Any], _: Any) -> Any:
    """Call Horovod's ``run_fn``; the coordinator learns with which error ``function`` left its world."""
    from horovod.common.exceptions import HostsUpdatedInterrupt

    left_with = "", ""
    own_error: Exception | None = None

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        nonlocal left_with, own_error
        try:
            return function(*args, **kwargs)
        except HostsUpdatedInterrupt:  # it was asked to leave
            raise
        except Exception as error:
            live = session.current()
            if live is not None:
                left_with = reason_of_leaving(live, error) or left_with
                own_error = None if left_with[0] else error
            raise

    def leave() -> None:
        nonlocal left_with
        if own_error is not None:  # the function would fail again in the next world
            raise own_error
        reason, left_with = left_with, ("", "")  # a state that cannot be synchronised has another
        reset(*reason)

    return run_fn(recorded, leave)


def reset(text: str = "", stalled: str = "") -> None:
    """Leave this rank's world and enter the next one; the arguments are those of `Session.wait_for_world`.

    Raises:
        HorovodInternalError: the trial is not elastic, or no trial is running.
    """
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError

    live = session.current()
    if live is None:
        raise HorovodInternalError("the world broke outside a trial")
    while True:
        hvd.shutdown()
        try:
            live.wait_for_world(text, stalled)
        except NotElastic as error:
            raise HorovodInternalError(str(error)) from None
        try:
            hvd.init()
            return
        except (ValueError, HorovodInternalError) as error:
            # A rank was lost while the world was formed. The coordinator forms another, or ends this process.
            text, stalled = f"the next world could not be formed: {error}", ""
            logger.warning(text)


class Collectives:
    """Collectives through Horovod, for `horovod_tune.commit` and `horovod_tune.get_state`."""

    init_call = "hvd.init()"

    def __init__(self, are_ready: Callable[[], bool]) -> None:
        self.are_ready = are_ready

    def any(self, flag: bool) -> bool:
        import horovod.torch as hvd
        import torch

        view = torch.tensor([1.0 if flag else 0.0])
        return bool(hvd.allreduce(view, op=hvd.Max, name="horovod_tune.any").item())

    def gather(self, number: int) -> list[int]:
        import horovod.torch as hvd

        return list(hvd.allgather_object(number, name="horovod_tune.commits"))

    def broadcast(self, state: Any, root: int) -> Any:
        """Return rank ``root``'s ``state``, as `hvd.broadcast_object` does.

        Horovod's function copies the bytes one by one (0.2 s per megabyte), and its size overflows at 2 GiB.
        """
        import horovod.torch as hvd
        import torch

        name, is_root = "horovod_tune.state", hvd.rank() == root
        pickled = bytearray(cloudpickle.dumps(state) if is_root else b"")
        size = int(hvd.broadcast(torch.tensor([len(pickled)]), root, name=f"{name}.size").item())
        if not is_root:
            pickled = bytearray(size)
        view = torch.frombuffer(pickled, dtype=torch.uint8)
        for start in range(0, size, PIECE_BYTES):
            hvd.broadcast_(view[start : start + PIECE_BYTES], root, name=f"{name}.{start}")
        return state if is_root else pickle.loads(pickled)
