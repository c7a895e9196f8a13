"""The serialised training function: cloudpickle bytes, which the coordinator never unpickles."""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from typing import Any, ClassVar

from horovod_tune.errors import SerializationError
from horovod_tune.function.pickling import dumps, travels_by_name
from horovod_tune.function.training_function import function_name, unwrapped
from horovod_tune.function.variables import find_largest, type_name
from horovod_tune.function.with_parameters import parameters_of

MB = 1_000_000
_has_warned = False  # Tune pickles the function more than once


def _warn_of_horovod_in_driver() -> None:
    """Warn once if `hvd.init()` was called in the driver."""
    global _has_warned
    horovod = sys.modules.get("horovod.torch")
    # init() sets the ranks of the world, and shutdown() leaves them.
    if horovod is not None and horovod.global_process_set.ranks and not _has_warned:
        _has_warned = True
        warnings.warn(
            "Horovod was initialised in the driver, where hvd.rank() is 0 and hvd.size() is 1. Anything "
            "computed from them outside the training function (samplers, data shards, learning rates) is "
            "wrong in every rank. Move hvd.init() and all that depends on it into the function.",
            stacklevel=2,
        )


class ShippedFunction:
    """The training function and its parameters, serialised for the ranks when Tune ships the trainable class.

    What it refers to may so be defined after `DistributedTrainableCreator` is called. `pickled` raises
    SerializationError if there are more than ``max_bytes``.
    """

    _live: ClassVar[weakref.WeakValueDictionary[str, ShippedFunction]] = weakref.WeakValueDictionary()

    def __init__(
        self, function: Any, token: str, sent: tuple[bytes, Any] = (b"", None), *, max_bytes: float = math.inf
    ) -> None:
        self.token, self._function, self._sent, self._max_bytes = token, function, sent, max_bytes
        self._live[token] = self

    def parameters(self) -> Any:
        """Return a Ray ObjectRef of the objects of `with_parameters`; None if the function has none."""
        if self._function is None:
            return self._sent[1]
        parameters = parameters_of(self._function)
        return None if parameters is None else parameters.reference()

    def pickled(self) -> bytes:
        if self._function is None:
            return self._sent[0]
        _warn_of_horovod_in_driver()
        pickled = dumps(self._function)
        if len(pickled) <= self._max_bytes:
            return pickled
        cause = ""
        if largest := find_largest(self._function, len(pickled), dumps):
            where, part, size = largest
            cause = f" ({size / MB:.0f} MB in its {where} of type {type_name(part)})"
        raise SerializationError(
            f"{function_name(self._function)} cannot be sent to its ranks: it and all that it refers to must "
            f"be at most {self._max_bytes / MB:.1f} MB, Ray's limit (FUNCTION_SIZE_ERROR_THRESHOLD), got "
            f"{len(pickled) / MB:.1f} MB{cause}. Pass large objects with horovod_tune.with_parameters, or "
            "load them inside the function."
        )

    def modules(self) -> list[str]:
        """Return the function's module, in a list, if ranks import it by name; otherwise nothing."""
        name = getattr(unwrapped(self._function), "__module__", None)
        return [name] if name is not None and travels_by_name(name) else []

    def __reduce__(self) -> Any:
        return ShippedFunction._arrive, (self.token, self.pickled(), self.parameters())

    @classmethod
    def _arrive(cls, token: str, *sent: Any) -> ShippedFunction:
        # In the driver, return the original, so that a later run ships the new values of its globals.
        return cls._live.get(token) or cls(None, token, sent)
