"""The kinds of workers, behind one face: a worker group that runs trials without Tune."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import ray

from horovod_tune.backend_choice import make_launcher
from horovod_tune.coordinator.policy import Limits
from horovod_tune.coordinator.worker_group import WorkerGroup
from horovod_tune.function import shipping
from horovod_tune.messages import CheckpointPlace, Finished, Report, TrialRequest
from horovod_tune.spec.trial_spec import make_spec

NEEDS = {"gloo": "horovod", "torch": "torch", "plain": "torch", "torch_xla": "torch_xla"}
# torch_xla's CPU device is one.
RANKS = {"gloo": 2, "torch": 2, "plain": 2, "torch_xla": 1}


class Workers:
    """One worker group of a kind; `begin` starts a trial on it, `events` runs it to its end."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        *,
        size: int | None = None,
        timeout_s: float = 60.0,
        stall_timeout_s: float = 1800.0,
    ) -> None:
        self.kind, self.size = kind, size or RANKS[kind]
        spec = make_spec(
            num_slots=self.size,
            use_tpu=kind not in ("gloo", "torch"),
            backend={"torch": "torch", "gloo": "horovod"}.get(kind),
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
        )
        self._placement_group = ray.util.placement_group([{"CPU": self.size}])
        assert self._placement_group.wait(60)
        where: dict[str, Any] = {"node_id": ray.get_runtime_context().get_node_id()}
        launcher: Any
        if kind == "plain":
            import plain_processes

            # A worker of Ray's cannot import what is next to a test.
            ray.cloudpickle.register_pickle_by_value(plain_processes)
            launcher = plain_processes.PlainLauncher(spec, self._placement_group, **where)
        else:
            launcher = make_launcher(spec, self._placement_group, **where)
        self.launcher = launcher
        self.group = WorkerGroup(launcher, Limits(timeout_s))
        self.folder = folder
        self._numbers = itertools.count(1)

    def request(
        self, function: Any, config: dict[str, Any], start: CheckpointPlace | None = None
    ) -> TrialRequest:
        """Return the next trial's request; ``function`` is the reference to what ranks unpickle."""
        number = next(self._numbers)
        directory = str(self.folder / f"trial_{number}")
        return TrialRequest(
            trial_id=f"{number:05}",
            trial_name=f"trial_{number}",
            trial_dir=directory,
            working_dir=directory,
            experiment_name="experiment",
            config=cloudpickle.dumps(config),
            function=function,
            checkpoint=start,
        )

    def begin(
        self, train: Callable[..., Any], *, start: CheckpointPlace | None = None, **config: Any
    ) -> Path:
        """Begin a trial; returns its working directory, where the function writes what the test looks at."""
        request = self.request(ray.put(shipping.dumps(train)), config, start)
        self.group.begin(request)
        return Path(request.working_dir)

    def events(self) -> list[Report | Finished]:
        found = []
        while True:
            event = self.group.next_event()
            found.append(event)
            if isinstance(event, Finished):
                return found

    def run(self, train: Callable[[dict[str, Any]], Any], **arguments: Any) -> tuple[Path, list[Any]]:
        directory = self.begin(train, **arguments)
        events = self.events()
        assert self.group.end_trial()
        return directory, events

    def close(self) -> None:
        self.group.close()
        ray.util.remove_placement_group(self._placement_group)


def skip_unless_installed(kind: str) -> None:
    if importlib.util.find_spec(NEEDS[kind]) is None:
        pytest.skip(f"{NEEDS[kind]} is not installed")
