"""Keeps Tune from importing torch, MLflow and W&B in the driver before a search's first trial starts.

Together they take seconds, also where nothing uses them.
"""

from __future__ import annotations

import importlib.abc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from horovod_tune.compatibility import Patch, wrap

_LOGGER = "ray.tune.logger.tensorboardx:TBXLoggerCallback"
_USAGE = "ray.air._internal.usage"
# The modules of these classes import what they are for.
_INTEGRATIONS = ("WandbLoggerCallback", "MLflowLoggerCallback", "CometLoggerCallback", "AimLoggerCallback")


class _NoTorch(importlib.abc.MetaPathFinder):
    """Makes ``import torch`` fail in the thread that has made this object."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("left out", name=fullname)


@Patch(
    "each search imports torch in the driver before it starts",
    f"{_LOGGER}.__init__(self) uses tensorboardX SummaryWriter",
).once
def log_without_torch() -> None:
    """Leave torch out of tensorboardX, which needs it for the type of an argument only."""
    from ray.tune.logger.tensorboardx import TBXLoggerCallback

    @wrap(TBXLoggerCallback, "__init__")
    def make(original: Callable[..., None], self: Any, *args: Any, **keywords: Any) -> None:
        finder = _NoTorch()
        sys.meta_path.insert(0, finder)
        try:
            original(self, *args, **keywords)
        finally:
            sys.meta_path.remove(finder)


@Patch(
    "each search imports MLflow and W&B in the driver before it starts, where they are installed",
    f"{_USAGE}:_count_callbacks(callbacks) uses {' '.join(_INTEGRATIONS)} "
    "CustomLoggerCallback CustomCallback",
    f"{_USAGE}:tag_callbacks(callbacks) uses _count_callbacks",
).once
def count_callbacks_without_imports() -> None:
    """Count callbacks for Ray's usage statistics without importing those that no callback is of."""
    from ray.air._internal import usage
    from ray.tune import Callback
    from ray.tune.logger import LoggerCallback
    from ray.tune.utils.callback import DEFAULT_CALLBACK_CLASSES

    defaults = {each.__name__ for each in DEFAULT_CALLBACK_CLASSES}

    @wrap(usage, "_count_callbacks")
    def count(original: Callable[..., Any], callbacks: Sequence[Any] | None) -> Any:
        names = [type(each).__name__ for each in callbacks or ()]
        if set(names).intersection(_INTEGRATIONS):
            return original(callbacks)
        counts = Counter[str]()
        for name, each in zip(names, callbacks or (), strict=True):
            if isinstance(each, Callback):
                custom = "CustomLoggerCallback" if isinstance(each, LoggerCallback) else "CustomCallback"
                counts[name if name in defaults else custom] += 1
        return counts
