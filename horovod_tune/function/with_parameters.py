"""`with_parameters`: large objects that the function is sent without, put into Ray's object store once."""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from horovod_tune.errors import NotInTraining, SerializationError, TrainingFunctionError
from horovod_tune.function.training_function import check_training_function, function_name, unwrapped
from horovod_tune.function.variables import unpicklable
from horovod_tune.session.session import current


class Parameters:
    """The objects that `with_parameters` has bound to a function; where it is sent to, the trial's copies."""

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        self._values = values
        self._reference: Any = None
        self._put_in: tuple[str, str] | None = None

    def __reduce__(self) -> Any:
        return Parameters, ()

    def values(self) -> dict[str, Any]:
        return provided() if self._values is None else self._values

    def reference(self) -> Any:
        """Return what a TrialRequest carries: a Ray ObjectRef of `pack_values`' bytes. Runs in the driver.

        Raises:
            RuntimeError: Ray is not initialised.
            SerializationError: an object cannot be pickled.
        """
        import ray

        session = _session()
        if session is None:
            raise RuntimeError(
                "with_parameters needs Ray when its function is shipped: call ray.init() first"
            )
        if session != self._put_in:
            import numpy

            packed = numpy.frombuffer(pack_values(self.values()), dtype=numpy.uint8)
            self._put_in, self._reference = session, ray.put(packed)
        return self._reference


def _session() -> tuple[str, str] | None:
    """Return ids that identify the connected Ray cluster, or None: job ids start from 1 in every cluster."""
    import ray

    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_job_id(), context.get_node_id()


def with_parameters(func: Callable[..., Any], /, **parameters: Any) -> Callable[[dict[str, Any]], Any]:
    """Bind large objects (a model, a data set) to ``func(config, **parameters)``; returns ``bound(config)``.

    Replaces ``ray.tune.with_parameters``, whose objects ranks cannot fetch. All ranks of a host share the
    memory of the tensors: a model made in the driver is not copied for each rank. A rank that changes a
    tensor copies only the pages that it changes, and the next trial finds the original values. Other objects,
    such as NumPy arrays, are copied: pass large arrays as tensors (``torch.from_numpy``).

    Args:
        func: the training function; a generator function works too.
        parameters: anything that can be pickled. Tensors must be on the CPU.

    Raises:
        TrainingFunctionError: ``func`` is not a function that takes ``config`` and ``parameters``.

    Example:
        >>> def train(config, model):
        ...     return {"width": model["width"]}
        >>> with_parameters(train, model={"width": 3})({})
        {'width': 3}
    """
    if not callable(func) or inspect.isclass(func):
        raise TrainingFunctionError(f"with_parameters takes a function, got {func!r}")
    try:
        inspect.signature(func).bind({}, **parameters)
    except TypeError as error:
        raise TrainingFunctionError(
            f"{function_name(func)}{inspect.signature(func)} cannot be called with (config, "
            f"{', '.join(f'{name}=...' for name in parameters)}): {error}"
        ) from None
    check_training_function(partial(func, **parameters))
    held = Parameters(parameters)

    def bound(config: dict[str, Any]) -> Any:
        return func(config, **held.values())

    bound = wraps(func)(bound)
    # A partial has no name, and functools' module.
    bound.__name__ = function_name(func)
    bound.__module__ = getattr(unwrapped(func), "__module__", bound.__module__)
    for name in ("__wrapped__", "__signature__"):  # its signature is not that of `func`
        vars(bound).pop(name, None)
    bound._parameters = held  # type: ignore[attr-defined]
    return bound


def parameters_of(func: Any) -> Parameters | None:
    """Return what `with_parameters` bound to ``func``; None if nothing."""
    held = getattr(unwrapped(func), "_parameters", None)
    return held if isinstance(held, Parameters) else None


def pack_values(values: dict[str, Any]) -> bytes:
    """Return the objects as `torch.save` writes them, so that a rank can map the tensors into its memory.

    Raises:
        TrainingFunctionError: a tensor is not on the CPU.
        SerializationError: an object cannot be pickled, or is a `DistributedOptimizer`.
    """
    import torch

    for name, value in values.items():
        tensors = [value] if isinstance(value, torch.Tensor) else []
        if isinstance(value, torch.nn.Module):
            tensors = [*value.parameters(), *value.buffers()]
        for device in {tensor.device for tensor in tensors}:
            if device.type != "cpu":
                raise TrainingFunctionError(
                    f"the tensors of parameter {name!r} must be on the CPU, got one on {device}"
                )
    try:
        return _saved(torch, values)
    except Exception as error:  # whatever a user's __reduce__ raises
        for name, value in values.items():
            what = f"parameter {name!r} of with_parameters"
            if explained := unpicklable(what, value, lambda each: _saved(torch, each)):
                raise explained from error
        raise SerializationError(f"the parameters of with_parameters cannot be sent: {error}") from error


def _saved(torch: Any, value: Any) -> bytes:
    from horovod_tune.function import pickling  # which imports Ray

    file = io.BytesIO()
    with pickling.whole_registry():
        torch.save(value, file, pickle_module=pickling)
    return file.getvalue()


def provided() -> dict[str, Any]:
    """Return the objects of this rank's trial, fetched at the first call.

    Raises:
        NotInTraining: the function was sent without them.
    """
    live = current()
    if live is None or live.request.parameters is None:
        raise NotInTraining(
            "the parameters of with_parameters were not sent with the function: pass "
            "DistributedTrainableCreator the function that with_parameters returns"
        )
    if not live.parameters:  # per session: on TPU v2 and v3 a process has two ranks
        live.parameters.update(load_values(live.request.parameters))
    return live.parameters


def load_values(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what `pack_values` packed into a file. Tensors are mapped, and shared until a rank writes."""
    import torch

    # weights_only=False: the driver's own objects, as trusted as its function.
    mapped: dict[str, Any] = torch.load(path, mmap=True, weights_only=False)
    return mapped
