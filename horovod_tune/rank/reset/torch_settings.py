"""torch's process-wide settings, restored after each trial.

What belongs to a thread (grad mode, autocast, the default device, saved tensor hooks, flushing of denormal
numbers) is new with each trial's thread.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from horovod_tune.rank.reset.python_settings import SavedSettings, Setting, attribute, contents


class TorchBaseline:
    """How torch was before the first trial of this process."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._threads = torch.get_num_threads()
        self._interop = torch.get_num_interop_threads()
        self._settings = SavedSettings(_settings(torch))

    def restore(self) -> list[str]:
        """Restore everything; return what could not be restored."""
        torch = self._torch
        # Not compared first: it is read for the asking thread, and set for all that come after.
        torch.set_num_threads(self._threads)
        problems = self._settings.restore()
        if torch.get_num_interop_threads() != self._interop:
            problems.append("the number of torch's inter-op threads was changed, which cannot be undone")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            problems.append("torch.distributed is still initialised")
        if torch.autograd._profiler_enabled():
            problems.append("torch's profiler still runs")
        return problems

    def forget_compiled(self) -> None:
        """Drop what torch.compile keeps of the trial's functions."""
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None and hasattr(dynamo, "reset"):
            dynamo.reset()

    def check_gpu_memory(self) -> list[str]:
        """Free the cached GPU memory; return what is still held. Comes after the garbage collection."""
        cuda = self._torch.cuda
        if not (cuda.is_available() and cuda.is_initialized()):
            return []
        cuda.empty_cache()
        held = sum(cuda.memory_allocated(device) for device in range(cuda.device_count()))
        for device in range(cuda.device_count()):
            cuda.reset_peak_memory_stats(device)
        cuda.manual_seed_all(self._torch.initial_seed())
        return [f"{held} bytes of GPU memory are still held"] if held else []


def _settings(torch: Any) -> list[Setting]:
    printing = sys.modules["torch._tensor_str"].PRINT_OPTS
    backends = torch.backends
    return [
        Setting(
            "torch's random state", lambda: bytes(torch.get_rng_state().numpy()), _write_random_state(torch)
        ),
        Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
        Setting("deterministic algorithms", _deterministic(torch), _write_deterministic(torch)),
        *_fill_of_new_tensors(torch),
        Setting(
            "the precision of float32 products",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        Setting("anomaly detection", _anomaly(torch), lambda value: torch.set_anomaly_enabled(*value)),
        Setting("torch.set_warn_always", torch.is_warn_always_enabled, torch.set_warn_always),
        *(
            attribute(backends.cudnn, name)
            for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
        ),
        attribute(backends.mkldnn, "enabled"),
        attribute(backends.cuda.matmul, "allow_tf32"),
        *(_attention(torch, name) for name in ("flash", "mem_efficient", "math")),
        *(attribute(printing, name) for name in vars(printing)),
        Setting(
            "the sharing strategy of torch.multiprocessing",
            torch.multiprocessing.get_sharing_strategy,
            torch.multiprocessing.set_sharing_strategy,
        ),
        attribute(torch.hub, "_hub_dir"),
        *_safe_globals(torch),
        attribute(torch.nn.modules.module, "_global_is_full_backward_hook"),
        *_hooks(torch.nn.modules.module),
        *_hooks(sys.modules["torch.optim.optimizer"]),
    ]


def _write_random_state(torch: Any) -> Any:
    def write(state: bytes) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return write


def _deterministic(torch: Any) -> Any:
    return lambda: (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _write_deterministic(torch: Any) -> Any:
    return lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _anomaly(torch: Any) -> Any:
    return lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())


def _attention(torch: Any, kind: str) -> Setting:
    cuda = torch.backends.cuda
    return Setting(
        f"{kind} attention", getattr(cuda, f"{kind}_sdp_enabled"), getattr(cuda, f"enable_{kind}_sdp")
    )


def _fill_of_new_tensors(torch: Any) -> list[Setting]:
    if not hasattr(torch.utils, "deterministic"):
        return []  # torch before 2.2
    return [attribute(torch.utils.deterministic, "fill_uninitialized_memory")]


def _safe_globals(torch: Any) -> list[Setting]:
    serialization = torch.serialization
    if not hasattr(serialization, "get_safe_globals"):
        return []  # torch before 2.4

    def write(value: list[Any]) -> None:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(value)

    return [Setting("torch's safe globals", lambda: list(serialization.get_safe_globals()), write)]


def _hooks(module: ModuleType) -> list[Setting]:
    """Return the registries of hooks for every module or optimizer of the process."""
    return [
        contents(f"{module.__name__}.{name}", value)
        for name, value in vars(module).items()
        if name.startswith("_global_") and "hooks" in name and isinstance(value, dict)
    ]
