"""Pickles a training function, or its parameters, for ranks: Ray's cloudpickle, and what it lacks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from types import MethodType, ModuleType
from typing import Any

from ray import cloudpickle

from horovod_tune.errors import SerializationError
from horovod_tune.function.training_function import function_name
from horovod_tune.function.variables import unpicklable

# Classes whose objects hold the rank and the number of ranks of the world in which they were made.
_WORLD_BOUND = (
    ("torch.utils.data.distributed", "DistributedSampler"),
    ("torch.distributed.distributed_c10d", "ProcessGroup"),
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed.optim", "ZeroRedundancyOptimizer"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"),
    ("torch.distributed.tensor", "DTensor"),
    ("horovod.torch.elastic.sampler", "ElasticSampler"),
    ("accelerate.accelerator", "Accelerator"),
    ("lightning.pytorch.trainer.trainer", "Trainer"),
    ("lightning.fabric.fabric", "Fabric"),
    ("pytorch_lightning.trainer.trainer", "Trainer"),
    ("lightning_fabric.fabric", "Fabric"),
)
# What a transformers.TrainingArguments holds of the world in which it was made.
_OF_ARGUMENTS = ("_setup_devices", "distributed_state")


class _MadeInDriver(pickle.PicklingError):
    """An object works only in the process that has made it; ``culprit`` is the object."""

    def __init__(self, text: str, culprit: Any) -> None:
        super().__init__(text)
        self.culprit = culprit


class Pickler(cloudpickle.Pickler):
    """Ray's cloudpickle, extended to what it cannot pickle, or pickles in a way that ranks cannot use."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj).__module__ == "horovod.torch.optimizer":
            # Made without a world it has no hooks, and the ranks would not average.
            raise _MadeInDriver(
                "it is an hvd.DistributedOptimizer that was made in the driver, where Horovod has no ranks "
                "(it and its model must be made after the function's hvd.init())",
                obj,
            )
        for its_module, name in _WORLD_BOUND:
            kind = getattr(sys.modules.get(its_module), name, None)
            if kind is not None and isinstance(obj, kind):
                raise _MadeInDriver("it was made in the driver, for the driver's one rank", obj)
        arguments = getattr(sys.modules.get("transformers.training_args"), "TrainingArguments", ())
        if isinstance(obj, arguments):
            state = {name: each for name, each in vars(obj).items() if name not in _OF_ARGUMENTS}
            return _arguments, (type(obj), state)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:  # such as torch.backends.cudnn
            name = obj.__name__
            if sys.modules.get(name) is obj:
                return importlib.import_module, (name,)
        if obj is os.environ:  # `from os import environ` in a script
            return getattr, (os, "environ")
        if isinstance(obj, MethodType) and type(obj.__self__).__module__.startswith("horovod."):
            horovod = sys.modules.get("horovod.torch")  # `from horovod.torch import rank` in a script
            if getattr(horovod, obj.__name__, None) == obj:
                return getattr, (horovod, obj.__name__)
        if isinstance(obj, functools._lru_cache_wrapper) and not travels_by_name(obj.__module__):
            # Sent as code: cloudpickle knows it only by its name.
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def _arguments(kind: Any, state: dict[str, Any]) -> Any:
    """Return a `TrainingArguments` that knows the world of this rank instead of the driver's."""
    made = kind.__new__(kind)
    vars(made).update(state)
    made.device  # noqa: B018  # looks for the world
    return made


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


@contextlib.contextmanager
def whole_registry() -> Iterator[None]:
    """Send by value what is registered for that with cloudpickle itself, too.

    Ray's copy of cloudpickle also sends the config. With another, a class of the script would arrive twice.
    """
    names = _sent_by_value() - cloudpickle.list_registry_pickle_by_value()
    added = [ModuleType(name) for name in names if name in sys.modules]  # only their names are used
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            with contextlib.suppress(ValueError):  # another thread has done so
                cloudpickle.unregister_pickle_by_value(module)


def _sent_by_value() -> set[str]:
    """Return the modules that are registered with Ray's cloudpickle or with cloudpickle itself."""
    both = (cloudpickle, sys.modules.get("cloudpickle") or cloudpickle)
    return set().union(*(each.list_registry_pickle_by_value() for each in both))


def dumps(function: Any) -> bytes:
    """Return ``function`` as bytes that ``cloudpickle.loads`` takes.

    >>> cloudpickle.loads(dumps(lambda config: config["lr"]))({"lr": 0.5})
    0.5

    Raises:
        SerializationError: something that the function refers to cannot be pickled, or used in a rank.
    """
    try:
        return _dumps(function)
    except Exception as error:  # whatever a user's __reduce__ raises
        explained = unpicklable(function_name(function), function, _dumps)
        raise explained or SerializationError(f"{function_name(function)} cannot be sent: {error}") from error


@whole_registry()
def _dumps(function: Any) -> bytes:
    with io.BytesIO() as file:
        Pickler(file).dump(function)
        return file.getvalue()


def refuse_horovod_of_driver(config: Any) -> None:
    """Raise SerializationError if ``config`` holds an object that was made for the driver's world."""
    try:
        if "torch" in sys.modules:
            _dumps(config)
    except _MadeInDriver as error:
        raise unpicklable("config", config, _dumps, of="config") or error from None
    except Exception:  # Tune pickles it in its own way
        return


def travels_by_name(module: str) -> bool:
    """Return True if objects of ``module`` are sent as names to import, and not as code.

    >>> travels_by_name("sys"), travels_by_name("__main__"), travels_by_name("no.such.module")
    (True, False, False)
    """
    if module == "__main__" or sys.modules.get(module) is None:  # None: its import is blocked
        return False
    return _sent_by_value().isdisjoint(itertools.accumulate(module.split("."), "{}.{}".format))
