"""The user's training function in the driver: its name, and checks that a trial can call it."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from horovod_tune.errors import SpecError, TrainingFunctionError
from horovod_tune.function.variables import parts_of


def unwrapped(func: Any) -> Any:
    """Return the function that ``func`` wraps in any number of ``functools.partial`` objects.

    >>> unwrapped(partial(partial(max, 1), 2)) is max
    True
    """
    while isinstance(func, partial):
        func = func.func
    return func


def function_name(func: Any) -> str:
    """Return ``func``'s name for messages: that of the function that partial wraps, or of an object's class.

    >>> function_name(partial(max, 1)), function_name(lambda config: None), function_name(Exception())
    ('max', 'lambda', 'Exception')
    """
    inner = unwrapped(func)
    name = getattr(inner, "__name__", None) or type(inner).__name__
    return "lambda" if name == "<lambda>" else str(name)


def check_training_function(func: Any) -> None:
    """Raise TrainingFunctionError unless ``func(config)`` is a call that a trial can make."""
    name = function_name(func)
    inner = unwrapped(func)
    if inspect.isclass(inner):
        cure = f"; if its objects can be called with config, pass one: {name}(...)"
        if issubclass(inner, getattr(sys.modules.get("ray.tune"), "Trainable", ())):
            cure = ", which is already a Tune trainable; pass the training function itself"
        raise TrainingFunctionError(f"func must be a function that takes config, got the class {name}{cure}")
    if type(inner).__module__.startswith("ray.") and hasattr(inner, "remote"):
        own_name = str(getattr(inner, "_function_name", None) or name).rpartition(".")[2]
        raise TrainingFunctionError(
            f"func must be an ordinary function, but {own_name} is decorated with @ray.remote; "
            "remove the decorator, since ranks are started by DistributedTrainableCreator"
        )
    if not callable(func):
        raise TrainingFunctionError(
            f"func must be a function that takes config, got {type(func).__name__} {func!r:.200}"
        )
    called = inner if inspect.isroutine(inner) else type(inner).__call__
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise TrainingFunctionError(
            f"func must be an ordinary function, got the coroutine function {name}; define it with def, and "
            "call asyncio.run() in it if it needs an event loop"
        )
    _refuse_tunes_parameters(inner, name)
    _refuse_tunes_resources(func, name)
    _check_signature(func, name)


def check_config(config: Any, where: str = "") -> None:
    """Raise SpecError for a dict that Tune cannot write as JSON with sorted keys (they must be of one kind).

    Runs in the driver, for each trial: Tune's own error would end the search without naming the parameter.
    """
    if isinstance(config, dict):  # json writes other mappings as text
        try:
            sorted(config)
            unfit = [key for key in config if not isinstance(key, str | int | float | None)]
        except TypeError:
            unfit = list(config)
        if unfit:
            kinds = ", ".join(sorted({type(key).__name__ for key in unfit}))
            raise SpecError(
                f"the keys of {f'parameter {where}' if where else 'config'} must all be strings or all be "
                f"numbers, got {kinds} "
                f"({', '.join(map(repr, config)):.100}): Tune writes them as JSON, sorted"
            )
    elif not isinstance(config, list | tuple):
        return
    for label, part in parts_of(config):
        check_config(part, where + label if where else label[1:-1])


def _refuse_tunes_parameters(func: Any, name: str) -> None:
    # Tune's references to the object store work only with its own pickling: a training actor would wait for
    # them forever, and a TPU rank, which is not a Ray worker, cannot fetch them.
    if any(type(part).__name__ == "_ParameterRegistry" for _, part in parts_of(func)):
        raise TrainingFunctionError(
            f"{name} was made by ray.tune.with_parameters, whose objects ranks cannot fetch; use "
            "horovod_tune.with_parameters instead, with the same arguments"
        )


def _refuse_tunes_resources(func: Any, name: str) -> None:
    """Refuse a function given to ``tune.with_resources``, which would not set the ranks' resources."""
    for each in (func, unwrapped(func)):
        resources = getattr(each, "_resources", None)  # set by tune.with_resources
        bundles = getattr(resources, "bundles", None)
        if bundles is not None or (inspect.isroutine(each) and callable(resources)):
            asked = ", ".join(map(str, bundles)) if bundles is not None else "a function of config"
            raise TrainingFunctionError(
                f"{name} was given to tune.with_resources ({asked}), which does not apply to its ranks. "
                f"{RESOURCE_ARGUMENTS} (tune.with_resources marks the function itself: define it again, or "
                "delete its attribute _resources.)"
            )


RESOURCE_ARGUMENTS = (
    "Set a trial's resources with the arguments of DistributedTrainableCreator: num_hosts and num_slots (or "
    "num_workers) for its ranks, num_cpus_per_slot for each rank's CPUs, use_gpu=True for a GPU per rank."
)


def _check_signature(func: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(unwrapped(func))
    except ValueError:
        return  # some functions written in C have no signature
    with contextlib.suppress(ValueError):  # a partial binds what the function does not take: see below
        signature = inspect.signature(func)
    if "checkpoint_dir" in signature.parameters:
        raise TrainingFunctionError(
            f"{name}{signature} takes checkpoint_dir, which Tune no longer passes; call "
            "horovod_tune.get_checkpoint() in the function instead"
        )
    try:
        inspect.signature(func).bind({})
    except (TypeError, ValueError) as error:
        raise TrainingFunctionError(
            f"func must be callable as {name}(config) with one positional argument, got "
            f"{name}{signature}: {error}. Bind further arguments with functools.partial or with_parameters."
        ) from None
