"""Tune's class for a result with its checkpoint, which a trainable's `save` must return."""

from __future__ import annotations

from horovod_tune.errors import UnsupportedRay

try:
    from ray.train._internal.checkpoint_manager import _TrainingResult as TrainingResult
except ImportError as error:
    import ray

    raise UnsupportedRay(
        f"Ray {ray.__version__} does not keep Tune's results where horovod_tune knows them ({error}). "
        "Install a release of Ray that the README lists, or a newer horovod_tune."
    ) from error

__all__ = ["TrainingResult"]
