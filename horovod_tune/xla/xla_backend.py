"""torch_xla's backend, as the driver (is it installed?) and the coordinator (its launcher) use it."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from horovod_tune.errors import BackendMissing

if TYPE_CHECKING:
    from horovod_tune.spec.trial_spec import TrialSpec
    from horovod_tune.xla.xla_launcher import XlaLauncher


def require_installed() -> None:
    """Raise BackendMissing if no rank could start, with the cure; torch_xla is not imported for that."""
    if importlib.util.find_spec("torch_xla") is None:
        raise BackendMissing("torch_xla is not installed. Run `pip install 'horovod_tune[tpu]'`.")


def launcher(spec: TrialSpec, placement_group: Any, *, node_id: str) -> XlaLauncher:
    """Return what starts the ranks of a trial with torch_xla."""
    from horovod_tune.xla.xla_launcher import XlaLauncher

    return XlaLauncher(spec, placement_group, node_id=node_id)
