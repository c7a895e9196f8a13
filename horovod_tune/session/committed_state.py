"""Runs in each rank: `commit()` and `get_state()`, for state that survives a change of the world."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, Protocol

from horovod_tune.errors import HorovodTuneError, NotInitialized
from horovod_tune.session.session import require_session


class WorldChanges(BaseException):
    """Unwinds the training function at a commit, to call it again in the next world.

    `except Exception` does not catch it.
    """


class Collectives(Protocol):
    """The collectives of `commit` and `get_state`: every rank calls each method but `are_ready`."""

    # The call that makes a world, as named in errors.
    init_call: str

    def are_ready(self) -> bool:
        """Return True if the training function has made its world; may raise if that world is broken."""

    def any(self, flag: bool) -> bool:
        """Return True if ``flag`` is true on any rank."""

    def gather(self, number: int) -> list[int]:
        """Return the ``number`` of each rank, in the order of ranks."""

    def broadcast(self, state: Any, root: int) -> Any:
        """Return the ``state`` of rank ``root``."""


class States:
    """This process's state objects of `hvd.elastic.run`, which keep their own commits; by default none."""

    @property
    def exist(self) -> bool:
        """True if `hvd.elastic.run` has a state."""
        return False

    def dump(self) -> Any:
        """Return what was committed last; None if there is no state."""
        return None

    def load_later(self, dumped: Any) -> None:
        """Make the next state begin with what `dump` returned before the trial was restarted."""

    def offer_change(self) -> None:
        """Make the next commit end the world."""


class CommittedState:
    """One rank's committed state in one trial.

    Args:
        collectives: those of the backend.
        states: those of Horovod's own elastic API.
        stored: returns what `dump` returned before the trial was restarted; None if there is nothing.
    """

    def __init__(
        self,
        collectives: Collectives,
        states: States,
        stored: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        self._collectives = collectives
        self._states = states
        self._stored: Callable[[], bytes | None] | None = stored
        states.load_later(None)  # what the previous trial committed is obsolete
        self._state: Any = None
        self._number, self._get_was_called = 0, False
        # True if the world must change at the next commit; set by the actor's thread.
        self.change_pending = False

    @property
    def can_restore(self) -> bool:
        """True if the function can continue in another world: it has committed, or is expected to.

        It is expected to if it has called `get_state` or made a state of `hvd.elastic.run`.
        """
        return self._number > 0 or self._get_was_called or self._states.exist

    def commit(self, state: Any) -> None:
        """Keep a copy of ``state``. Raises `WorldChanges` on every rank if the world must change."""
        self._require_world("commit()")
        self.load_stored()
        self._state, self._number = copy.deepcopy(state), self._number + 1
        if self._collectives.any(self.change_pending):
            raise WorldChanges

    def get(self) -> Any:
        """Return a copy of the newest state that any rank of the world has."""
        self._require_world("get_state()")
        self._get_was_called = True
        self.load_stored()
        numbers = self._collectives.gather(self._number)
        newest = max(numbers)
        if min(numbers) < newest:
            self._state = self._collectives.broadcast(self._state, numbers.index(newest))
            self._number = newest
        return copy.deepcopy(self._state)

    def _require_world(self, caller: str) -> None:
        # Horovod would raise the same error as for a lost rank, and the function would be called again.
        if not self._collectives.are_ready():
            init_call = self._collectives.init_call
            raise NotInitialized(f"call {init_call} before {caller}, which is a collective of all ranks")

    def dump(self) -> bytes | None:
        """Return the last commit, for a restart of the trial; None if nothing was committed."""
        states = self._states.dump()
        if not self._number and states is None:
            return None
        from ray import cloudpickle  # not above: the import takes long

        return cloudpickle.dumps((self._number, self._state, states))

    def load_stored(self) -> None:
        """Load what the trial committed before it was restarted; only the first call does."""
        if self._stored is None:
            return
        stored, self._stored = self._stored(), None
        if stored is not None:
            self._number, self._state, states = pickle.loads(stored)
            self._states.load_later(states)


def commit(state: Any) -> None:
    """Keep a copy of ``state``, from which an elastic trial continues when a rank is lost or ranks join.

    A collective: every rank calls it at the same point, after `hvd.init()`. It costs a copy of ``state`` and
    one allreduce of one number. When the world changes, the training function is called again on each rank
    that remains and on those that join, and `get_state()` then returns what was committed last. So report
    an epoch before committing it: code after a commit may not be reached. Without ``min_workers`` the state
    is kept too, but the trial fails when a rank is lost.

    Args:
        state: anything that `copy.deepcopy` and pickle accept, such as
            ``{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}``.

    Raises:
        NotInTraining: called outside a training function that a trial runs.
        NotInitialized: called before `hvd.init()`.
        HorovodTuneError: called in a TPU trial.
        HorovodInternalError: a rank of the world is lost. Do not catch it: the trial handles it.
    """
    _committed("commit()").commit(state)


def get_state() -> Any:
    """Return the state that was committed last, the same on every rank; None if nothing was committed.

    A collective: every rank calls it at the same point, after `hvd.init()`.

    Raises:
        NotInTraining: called outside a training function that a trial runs.
        NotInitialized: called before `hvd.init()`.
        HorovodTuneError: called in a TPU trial.
        HorovodInternalError: as in `commit`.
    """
    return _committed("get_state()").get()


def _committed(caller: str) -> CommittedState:
    live = require_session(caller)
    if live.committed is None:
        raise HorovodTuneError(f"{caller} does not work in a TPU trial, whose number of ranks is fixed")
    return live.committed  # type: ignore[no-any-return]
