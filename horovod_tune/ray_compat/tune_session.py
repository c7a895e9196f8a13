"""Runs in each rank: puts our session behind ``ray.tune.report``, without importing Tune."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from horovod_tune.compatibility import Patch, wrap
from horovod_tune.ray_compat.patches.actors import LIGHTNING_VARIABLE
from horovod_tune.session.reported_values import merge_metrics
from horovod_tune.session.session import Session, current

_SESSION_MODULE = "ray.train._internal.session"
_REPORT_MODULE = "ray.tune.trainable.trainable_fn_utils"
_SESSION = Patch(
    "ray.tune.report does not work inside a rank: call horovod_tune.report",
    f"{_SESSION_MODULE}:get_session uses _session",
    f"{_SESSION_MODULE}:_session",
)
_REPORT = Patch(
    "ray.tune.report takes no keywords inside a rank: call horovod_tune.report(loss=...)",
    f"{_REPORT_MODULE}:report(metrics, checkpoint) uses get_session",
    f"{_REPORT_MODULE}:_in_tune_session uses get_session world_rank",
)
_MLFLOW_MODULE = "ray.air.integrations.mlflow"


class _TrialInfo:
    """The session interface that ``ray.tune.get_context()`` and ``ray.tune.report`` use.

    Its values are those of the calling thread's rank: on TPU v2 and v3 a process has two ranks.
    """

    run_id = None
    accelerator = None

    def __init__(self, session: Session) -> None:
        self._session = session
        self.metadata: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        live = current() or self._session
        match name:
            case "trial_id" | "trial_name" | "trial_dir" | "experiment_name":
                return getattr(live.request, name)
            case "trial_resources":
                return pickle.loads(live.request.resources)
            case "storage":
                return pickle.loads(live.request.storage)
            case "loaded_checkpoint":
                return live.get_checkpoint()
            case "local_rank":
                return live.rank_info.local_rank
            case "world_rank" | "world_size":
                return getattr(live.rank_info, name.removeprefix("world_"))
            case "local_world_size":
                return live.rank_info.local_size
            case "node_rank":
                return live.rank_info.cross_rank
        raise AttributeError(name)

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, **_: Any) -> None:
        (current() or self._session).report(metrics, checkpoint)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a hook after a module's import, so that a rank need not import ray.tune itself (0.6 s).

    The import is not over before the hook is: a second rank in this process waits for both.
    """

    def __init__(self, hooks: Mapping[str, Callable[[ModuleType], object]]) -> None:
        self._hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hook = self._hooks.get(fullname)
        if hook is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            hook(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_installed: _TrialInfo | None = None


def install_session(session: Session | None) -> None:
    """Make Tune's functions in this process, such as ``tune.report``, use ``session``; None removes it."""
    global _installed
    _installed = None if session is None else _TrialInfo(session)
    module = sys.modules.get(_SESSION_MODULE)
    if module is not None:
        _install(module)


@_SESSION.otherwise(None)
def _install(module: ModuleType) -> None:
    module._session = _installed  # type: ignore[attr-defined]


@_REPORT.otherwise(None)
def _accept_keywords(module: ModuleType) -> None:
    """Make ``ray.tune.report(loss=1)`` of the old guides work again inside a rank."""
    before = module.report

    @wrap(module, "report")
    def report(original: Any, metrics: Any = None, *, checkpoint: Any = None, **keywords: Any) -> None:
        original(merge_metrics(metrics, keywords), checkpoint=checkpoint)

    # Ray mistakes a session that has a rank for one of Ray Train: its errors would name Train's functions.
    module._in_tune_session = lambda: module.get_session() is not None  # type: ignore[attr-defined]
    tune = sys.modules.get("ray.tune")
    if tune is not None and getattr(tune, "report", None) is before:
        tune.report = module.report  # type: ignore[attr-defined]


@Patch(
    "setup_mlflow starts a run on every rank: call it on rank 0 only",
    f"{_MLFLOW_MODULE}:setup_mlflow uses rank_zero_only _in_tune_session",
    f"{_MLFLOW_MODULE}:_NoopModule",
).otherwise(None)
def _set_up_mlflow_once(module: ModuleType) -> None:
    """Make ``setup_mlflow`` return Ray's no-op module on ranks other than 0, as in Ray Train."""

    @wrap(module, "setup_mlflow")
    def setup_mlflow(original: Any, *args: Any, rank_zero_only: bool = True, **keywords: Any) -> Any:
        live = current()
        if rank_zero_only and live is not None and live.rank_info.rank != 0:
            return module._NoopModule()
        return original(*args, rank_zero_only=rank_zero_only, **keywords)


def prepare_rank_process() -> None:
    """Install the hooks of this process, once, before the first training function."""
    os.environ.update(LIGHTNING_VARIABLE)
    # Before a trial begins: its config may import the user's modules, which import these.
    # The hook for ray.tune only reads `fits`, which logs a warning if Tune's modules have changed.
    hooks: dict[str, Callable[[ModuleType], object]] = {
        _SESSION_MODULE: _install,
        _REPORT_MODULE: _accept_keywords,
        _MLFLOW_MODULE: _set_up_mlflow_once,
        "ray.tune": lambda _: _SESSION.fits and _REPORT.fits,
    }
    for name in [name for name in hooks if sys.modules.get(name) is not None]:  # None: its import is blocked
        hooks.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(hooks))
