"""Runs in the driver: whether torch_xla is installed, found out without importing it."""

from __future__ import annotations

import importlib.util

from horovod_tune.errors import BackendMissing


def require_installed() -> None:
    """Raise BackendMissing where no rank could start, with the cure."""
    if importlib.util.find_spec("torch_xla") is None:
        raise BackendMissing("torch_xla is not installed. Run `pip install 'horovod_tune[tpu]'`.")
