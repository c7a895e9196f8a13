"""What a trial can leave behind in its process: how to plant each, and how to look for it.

``look`` gives a value that is the same in every new process, so a later trial has to see it again.
"""

from __future__ import annotations

import builtins
import codecs
import contextlib
import copy
import copyreg
import csv
import ctypes
import decimal
import fcntl
import gc
import importlib
import io
import json
import locale
import logging
import multiprocessing
import numbers
import os
import pkgutil
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import threadpoolctl
import torch
import torch._dynamo
import yaml
from ray import cloudpickle


class _OwnDict(dict):
    """Like matplotlib's rcParams; and like Transformers' mappings, which import models when read."""

    extra = 0

    def values(self, *_: Any) -> Any:
        raise AssertionError("read by its own method")

    __iter__ = keys = __getitem__ = values


yaml.SafeLoader.mine = _OwnDict(a=1)
_OwnDict.__module__ = "yaml"

yaml.SafeLoader.named = {"lr": 1}
torch.nn.init.kaiming_normal_.setting = 1  # type: ignore[attr-defined]


# Kept by this module, as `typing` keeps the classes of annotations.
_class_of_script = type("Settings", (), {"__module__": "__main__"})
_CLASS_OF_SCRIPT = cloudpickle.dumps(_class_of_script)


_Logger: Any = type("Logger", (logging.Logger,), {"__module__": "__main__"})


class _LoggerThatStays(logging.Logger):
    pass


_handler = logging.NullHandler()
logging.getLogger("leaks").addHandler(_handler)


def _end_of_a_fork() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def _enter_a_context_of_warnings() -> None:
    warnings.catch_warnings().__enter__()
    warnings.simplefilter("error")


def _replace_an_operator() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("softplus", lambda x, *_: x + len([library]), "CPU")  # the library lives on in a cycle


def _is_locked() -> bool:
    with open(__file__) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _variable_of_c() -> Any:
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return getenv(b"LEAK")


def _attribute(owner: Any, name: str, value: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    return lambda: getattr(owner, name), lambda: setattr(owner, name, value)


LEAKS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a new environment variable": (lambda: os.environ.get("LEAK"), lambda: os.environ.update(LEAK="1")),
    "an environment variable that was removed": (
        lambda: "PATH" in os.environ,
        lambda: os.environ.pop("PATH"),
    ),
    "a variable of C": (_variable_of_c, lambda: os.putenv("LEAK", "1")),
    "another os.environ": (
        lambda: type(os.environ).__name__,
        lambda: setattr(os, "environ", dict(os.environ)),
    ),
    "an attribute of __main__": (
        lambda: hasattr(sys.modules["__main__"], "leak"),
        lambda: setattr(sys.modules["__main__"], "leak", 1),
    ),
    "file descriptor 0": (lambda: os.path.lexists("/proc/self/fd/0"), lambda: os.close(0)),
    "the priority for being killed": (
        lambda: Path("/proc/self/oom_score_adj").read_text(),
        lambda: Path("/proc/self/oom_score_adj").write_text("777"),
    ),
    "a type of a generic function": (
        lambda: len(pkgutil.iter_importer_modules.registry),
        lambda: pkgutil.iter_importer_modules.register(int, lambda *_: None),
    ),
    "the threads of BLAS": (
        lambda: [each["num_threads"] for each in threadpoolctl.threadpool_info()],
        lambda: threadpoolctl.threadpool_limits(2),
    ),
    "a function of psutil": (lambda: psutil.cpu_count(), lambda: setattr(psutil, "cpu_count", lambda: 77)),
    "a function of Ray": (lambda: ray.get.__name__, lambda: setattr(ray, "get", len)),
    "the working directory": (lambda: os.path.basename(os.getcwd())[:6], lambda: os.chdir("/")),
    "a key of a library's dict": (
        lambda: [*yaml.SafeLoader.named],
        lambda: yaml.SafeLoader.named.update(other=yaml.SafeLoader.named.pop("lr")),
    ),
    "a new attribute of a function": (
        lambda: hasattr(torch.nn.functional.softmax, "calls"),
        lambda: setattr(torch.nn.functional.softmax, "calls", 1),
    ),
    "the value of a function's attribute": _attribute(torch.nn.init.kaiming_normal_, "setting", 2),
    "the umask": (lambda: _umask(), lambda: os.umask(0o077)),
    "sys.path": (lambda: sys.path[:], lambda: sys.path.insert(0, "/leak")),
    "sys.argv": (lambda: sys.argv[:], lambda: sys.argv.append("--leak")),
    "another sys.argv": (lambda: sys.argv, lambda: setattr(sys, "argv", ("train.py", "--leak"))),
    "sys.stdout": (lambda: type(sys.stdout).__name__, lambda: setattr(sys, "stdout", io.BytesIO())),
    "file descriptor 1": (lambda: os.readlink("/proc/self/fd/1") == os.devnull, lambda: _close_stdout()),
    "sys.excepthook": (lambda: sys.excepthook is len, lambda: setattr(sys, "excepthook", len)),
    "the flags of dlopen": (sys.getdlopenflags, lambda: sys.setdlopenflags(0x102)),
    "the recursion limit": (sys.getrecursionlimit, lambda: sys.setrecursionlimit(5000)),
    "the switch interval": (sys.getswitchinterval, lambda: sys.setswitchinterval(0.1)),
    "the garbage collector": (gc.isenabled, gc.disable),
    "garbage collection thresholds": (gc.get_threshold, lambda: gc.set_threshold(12345, 2, 2)),
    "the trace function of new threads": (
        lambda: threading._trace_hook is None,
        lambda: threading.settrace(lambda *_: None),
    ),
    "a built-in function": (lambda: builtins.print.__name__, lambda: setattr(builtins, "print", repr)),
    "a function of the standard library": (
        lambda: json.dumps.__name__,
        lambda: setattr(json, "dumps", lambda _: ""),
    ),
    "a number of the standard library": _attribute(json.encoder, "INFINITY", 3.0),
    "warning filters": (lambda: len(warnings.filters), lambda: warnings.simplefilter("error")),
    "warning filters of a context": (lambda: len(warnings.filters), _enter_a_context_of_warnings),
    "the root logger's level": (lambda: logging.getLogger().level, lambda: logging.getLogger().setLevel(5)),
    "the root logger's handlers": (
        lambda: len(logging.getLogger().handlers),
        lambda: logging.getLogger().addHandler(logging.NullHandler()),
    ),
    "a logger of the user's": (
        lambda: logging.getLogger("leak").level,
        lambda: logging.getLogger("leak").setLevel(10),
    ),
    "an attribute of a logger": (
        lambda: hasattr(logging.getLogger("leak"), "leak"),
        lambda: setattr(logging.getLogger("leak"), "leak", 1),
    ),
    "a class of loggers": (
        lambda: isinstance(logging.root.manager.loggerDict.get("leak.class"), _Logger),
        lambda: (logging.setLoggerClass(_Logger), logging.getLogger("leak.class")),
    ),
    "an attribute of a new logger": (
        lambda: hasattr(logging.root.manager.loggerDict.get("leak.stays"), "leak"),
        lambda: (
            logging.setLoggerClass(_LoggerThatStays),
            setattr(logging.getLogger("leak.stays"), "leak", 1),
        ),
    ),
    "the level of a handler that is removed": (
        lambda: _handler.level,
        lambda: (_handler.setLevel(logging.ERROR), logging.getLogger("leaks").removeHandler(_handler)),
    ),
    "a handler without a hash": (
        lambda: len(logging.root.handlers),
        lambda: logging.root.addHandler(type("H", (logging.NullHandler,), {"__hash__": None})()),
    ),
    "the level of a handler": _attribute(_handler, "level", logging.ERROR),
    "the filters of a handler": (lambda: len(_handler.filters), lambda: _handler.addFilter(bool)),
    "a level's name": (lambda: logging.getLevelName(25), lambda: logging.addLevelName(25, "NOTICE")),
    "logging.disable": (lambda: logging.root.manager.disable, lambda: logging.disable(50)),
    "the default socket timeout": (socket.getdefaulttimeout, lambda: socket.setdefaulttimeout(1.5)),
    "the temporary directory": (lambda: tempfile.gettempdir(), lambda: setattr(tempfile, "tempdir", "/leak")),
    "the time zone": (lambda: time.timezone, lambda: _set_time_zone()),
    "the locale": (lambda: locale.setlocale(locale.LC_ALL), lambda: _other_locale()),
    "decimal's precision": (
        lambda: decimal.getcontext().prec,
        lambda: setattr(decimal.getcontext(), "prec", 3),
    ),
    "the start method of multiprocessing": (
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda: multiprocessing.set_start_method("spawn", force=True),
    ),
    "the limit of open files": (
        lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        ),
    ),
    "the CPUs": (lambda: sorted(os.sched_getaffinity(0)), lambda: os.sched_setaffinity(0, {0})),
    "an alarm": (
        lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        lambda: signal.setitimer(signal.ITIMER_REAL, 3600),
    ),
    "an attribute of a class of the script": (
        lambda: hasattr(cloudpickle.loads(_CLASS_OF_SCRIPT), "leak"),
        lambda: setattr(cloudpickle.loads(_CLASS_OF_SCRIPT), "leak", 1),
    ),
    "a module of the user's": (
        lambda: importlib.import_module("users_own_module").STATE,
        lambda: setattr(importlib.import_module("users_own_module"), "STATE", 2),
    ),
    "NumPy's error state": (lambda: np.geterr()["over"], lambda: np.seterr(all="raise")),
    "NumPy's printing": (
        lambda: np.get_printoptions()["precision"],
        lambda: np.set_printoptions(precision=2),
    ),
    "torch's random state": (lambda: _drawn(), lambda: torch.manual_seed(1)),
    "torch's seed": (torch.initial_seed, lambda: torch.manual_seed(7)),
    "the default dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "the default device": (lambda: torch.zeros(1).device.type, lambda: torch.set_default_device("meta")),
    "the number of threads": (torch.get_num_threads, lambda: torch.set_num_threads(3)),
    "grad mode": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
    "autocast's dtype": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
    ),
    "anomaly detection": (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.use_deterministic_algorithms(True),
    ),
    "cuDNN's flags": _attribute(torch.backends.cudnn, "benchmark", True),
    "the precision of float32 products": (
        torch.get_float32_matmul_precision,
        lambda: torch.set_float32_matmul_precision("medium"),
    ),
    "TF32 in cuBLAS": _attribute(torch.backends.cuda.matmul, "allow_tf32", True),
    "flushing of denormal numbers": (
        lambda: (torch.tensor([1e-40]) * 1.0).item() == 0.0,
        lambda: torch.set_flush_denormal(True),
    ),
    "determinism of MKL-DNN": _attribute(torch.backends.mkldnn, "deterministic", True),
    "the limit of cuDNN's benchmark": _attribute(torch.backends.cudnn, "benchmark_limit", 3),
    "opt_einsum's strategy": _attribute(torch.backends.opt_einsum, "strategy", "greedy"),
    "how modules are converted": (
        torch.__future__.get_overwrite_module_params_on_conversion,
        lambda: torch.__future__.set_overwrite_module_params_on_conversion(True),
    ),
    "checks of distributions": (
        lambda: torch.distributions.Distribution._validate_args,
        lambda: torch.distributions.Distribution.set_default_validate_args(False),
    ),
    "torch's printing": (lambda: str(torch.tensor(1.23456)), lambda: torch.set_printoptions(precision=2)),
    "hooks of every module": (
        lambda: len(torch.nn.modules.module._global_forward_hooks),
        lambda: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
    ),
    "hooks of every optimizer": (
        lambda: len(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks),
        lambda: sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook(repr),
    ),
    "saved tensor hooks": (
        lambda: _saved_tensor_is_packed(),
        lambda: torch.autograd.graph.saved_tensors_hooks(repr, repr).__enter__(),
    ),
    "torch.multiprocessing": (
        torch.multiprocessing.get_sharing_strategy,
        lambda: torch.multiprocessing.set_sharing_strategy("file_system"),
    ),
    "a kernel library of torch": (
        torch._C._get_nnpack_enabled,
        lambda: torch.backends.nnpack.set_flags(False),
    ),
    "TorchScript's fusion": (lambda: _fusion(), lambda: torch.jit.set_fusion_strategy([("STATIC", 1)])),
    "a default argument of torch's": _attribute(
        torch.nn.BatchNorm2d.__init__, "__defaults__", (1e-3, 0.01, True, True, None, None)
    ),
    "a keyword's default of torch's": (
        lambda: torch.optim.SGD.__init__.__kwdefaults__["maximize"],
        lambda: torch.optim.SGD.__init__.__kwdefaults__.update(maximize=True),
    ),
    "a setting of torch's compiler": _attribute(torch._dynamo.config, "suppress_errors", True),
    "the code of a function of torch": (
        lambda: torch.nn.functional.relu(torch.tensor(-1.0)).item(),
        lambda: setattr(torch.nn.functional.relu, "__code__", (lambda input, inplace=False: input).__code__),
    ),
    "constants of a class of torch": (
        lambda: len(torch.nn.Linear.__constants__),
        lambda: torch.nn.Linear.__constants__.append("mine"),
    ),
    "NumPy's bit generator": (
        lambda: type(np.random.get_bit_generator()).__name__,
        lambda: np.random.set_bit_generator(np.random.PCG64(1)),
    ),
    "a dict subclass of a library": (
        lambda: yaml.SafeLoader.mine.get("a"),
        lambda: yaml.SafeLoader.mine.update(a=2),
    ),
    "an attribute of a library's dict": _attribute(yaml.SafeLoader.mine, "extra", 1),
    "callbacks of the garbage collector": (
        lambda: len(gc.callbacks),
        lambda: gc.callbacks.append(lambda *_: None),
    ),
    "decimal's default context": _attribute(decimal.DefaultContext, "prec", 4),
    "a dialect of csv": (csv.list_dialects, lambda: csv.register_dialect("mine", delimiter="|")),
    "what copyreg pickles": (lambda: len(copyreg.dispatch_table), lambda: copyreg.pickle(range, repr)),
    "json's encoder": _attribute(json._default_encoder, "indent", 3),
    "a handler of codecs' errors": (
        lambda: codecs.lookup_error("leak"),
        lambda: codecs.register_error("leak", codecs.ignore_errors),
    ),
    "a function at each fork": (
        _end_of_a_fork,
        lambda: os.register_at_fork(after_in_child=lambda: os._exit(7)),
    ),
    "a subclass of an abstract class": (
        lambda: issubclass(torch.Tensor, numbers.Number),
        lambda: numbers.Number.register(torch.Tensor),
    ),
    "how copies are made": (
        lambda: len(copy._deepcopy_dispatch),
        lambda: copy._deepcopy_dispatch.update({torch.Size: lambda each, _: each}),
    ),
    "a default argument of NumPy's": _attribute(np.load, "__defaults__", (None, True, True, "ASCII")),
    "checks of sparse tensors": (
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
        torch.sparse.check_sparse_tensor_invariants.enable,
    ),
    "the precision of convolutions": (
        lambda: torch._C._get_fp32_precision_getter("mkldnn", "conv"),
        lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
    ),
    "what torch.compile does": (
        lambda: torch._dynamo.eval_frame._stance.stance,
        lambda: torch.compiler.set_stance("force_eager"),
    ),
    "a compiler of the user's": (
        lambda: "leak" in torch._dynamo.list_backends(),
        lambda: torch._dynamo.register_backend(lambda *_: None, name="leak"),
    ),
    "an operator of torch's": (
        lambda: torch.nn.functional.softplus(torch.zeros(1)).item(),
        _replace_an_operator,
    ),
    "the session of the process": (lambda: os.getsid(0) == os.getpid(), os.setsid),
    "a lock on a file": (_is_locked, lambda: fcntl.flock(os.open(__file__, os.O_RDONLY), fcntl.LOCK_EX)),
    "shared memory": (
        lambda: os.path.exists("/dev/shm/leak_of_ours"),
        lambda: shared_memory.SharedMemory("leak_of_ours", create=True, size=1),
    ),
    "the longest int in text": (sys.get_int_max_str_digits, lambda: sys.set_int_max_str_digits(0)),
    "a profiling timer": (
        lambda: signal.getitimer(signal.ITIMER_PROF)[0] > 0,
        lambda: signal.setitimer(signal.ITIMER_PROF, 3600),
    ),
    "the name of the process": (
        lambda: multiprocessing.current_process().name,
        lambda: setattr(multiprocessing.current_process(), "name", "mine"),
    ),
    "a patched method of torch": (
        lambda: torch.nn.Linear.forward.__module__,
        lambda: setattr(torch.nn.Linear, "forward", lambda self, x: x),
    ),
    "a method added to tensors": (
        lambda: hasattr(torch.Tensor, "leak"),
        lambda: setattr(torch.Tensor, "leak", lambda self: self),
    ),
}


def look(*names: str) -> dict[str, str]:
    return {name: repr(_look_at(LEAKS[name][0])) for name in names or LEAKS}


def _look_at(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:
        return type(error).__name__


def generators() -> dict[str, str]:
    """Return the next numbers of the generators of Python and NumPy, which differ in every process."""
    return {"random": repr(random.random()), "numpy": repr(np.random.random())}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _close_stdout() -> None:
    sys.__stdout__.flush()
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)


def _set_time_zone() -> None:
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()


def _other_locale() -> None:
    now = locale.setlocale(locale.LC_ALL)
    locale.setlocale(locale.LC_ALL, "C" if "UTF-8" in now else "C.UTF-8")


def _fusion() -> Any:
    now = torch.jit.set_fusion_strategy([])
    torch.jit.set_fusion_strategy(now)
    return now


def _drawn() -> float:
    state = torch.get_rng_state()
    drawn = torch.rand(1).item()
    torch.set_rng_state(state)
    return drawn


def _saved_tensor_is_packed() -> bool:
    packed = []
    with contextlib.suppress(Exception):
        x = torch.ones(1, requires_grad=True)
        packed.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
        (x * x).sum()
    return any(packed)
