"""The two ways in which ranks come to be, by name."""

from __future__ import annotations

from collections.abc import Callable

from horovod_tune.workers.xla.plain_runtime import PlainProcesses
from horovod_tune.workers.xla.runtime import Runtime
from horovod_tune.workers.xla.torch_xla_runtime import TorchXla

RUNTIMES: dict[str, Callable[[], Runtime]] = {"torch_xla": TorchXla, "plain": PlainProcesses}
