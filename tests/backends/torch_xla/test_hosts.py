"""Several ranks and hosts, which torch_xla's CPU device does not give: plain processes below the same code.

Two simulated nodes with two ranks each; torch.distributed's Gloo joins them.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import plain_processes
import pytest
import ray
from plain_processes import PlainLauncher
from processes import last_results, rank_processes, see_them_gone, template_processes
from ray import tune
from ray.cluster_utils import Cluster
from sessions import simulated_nodes

import horovod_tune
from horovod_tune.coordinator.policy import Limits
from horovod_tune.coordinator.worker_group import WorkerGroup
from horovod_tune.function.shipping import ShippedFunction
from horovod_tune.spec.placement import Placement
from horovod_tune.spec.trial_spec import make_spec
from horovod_tune.trainable import DistributedTrainable

pytestmark = [pytest.mark.slow, pytest.mark.processes]

for module in (sys.modules[__name__], plain_processes):
    cloudpickle.register_pickle_by_value(module)
    ray.cloudpickle.register_pickle_by_value(module)  # Ray has a copy of its own

SLICE = {"ray.io/tpu-pod-type": "v4-16"}


@pytest.fixture(scope="module")
def ray_session() -> Iterator[Cluster]:
    """A head without CPUs, and two TPU slices of two hosts each, as far as Ray can tell."""
    hosts = []
    for name in ("slice-a", "slice-b"):
        for worker in (0, 1):
            resources = {"TPU": 4, name: 1, **({"TPU-v4-16-head": 1} if worker == 0 else {})}
            labels = {**SLICE, "ray.io/tpu-slice-name": name, "ray.io/tpu-worker-id": str(worker)}
            hosts.append({"num_cpus": 4, "resources": resources, "labels": labels})
    with simulated_nodes(*hosts) as cluster:
        yield cluster


def by_cpus(spec: Any) -> Placement:
    """Ask for the hosts by their CPUs."""
    strategy = "STRICT_SPREAD" if spec.num_hosts > 1 else "PACK"
    return Placement(({"CPU": float(spec.num_slots)},) * spec.num_hosts, strategy)


@pytest.fixture
def run(tune_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run trials of a function as DistributedTrainableCreator makes them, in all but runtime and slots."""
    monkeypatch.setattr(horovod_tune.trainable, "placement_of", by_cpus)
    # As for one machine: no preflight, which would miss torch_xla on these hosts.
    monkeypatch.setattr(
        "horovod_tune.run_settings.placement_of", lambda spec: Placement(({"CPU": 1.0},), "PACK")
    )

    def run_trials(func: Callable[..., Any], num_hosts: int = 2, num_slots: int = 2, **arguments: Any) -> Any:
        body = {
            "_spec": make_spec(use_tpu=True, num_hosts=num_hosts, num_slots=num_slots),
            "_shipped": ShippedFunction(func, uuid.uuid4().hex),
        }
        return tune_run(type("trial", (OnPlainProcesses,), body), reuse_actors=True, **arguments)

    return run_trials


class OnPlainProcesses(DistributedTrainable):
    """A TPU trial on plain processes."""


def set_up_on_plain_processes(self: Any, config: dict[str, Any]) -> None:
    def make_group(spec: Any, node_id: str) -> WorkerGroup:
        group = ray.util.get_current_placement_group()
        return WorkerGroup(PlainLauncher(spec, group, node_id=node_id), Limits(spec.timeout_s))

    horovod_tune.trainable.make_group = make_group  # in the coordinator's process
    DistributedTrainable.setup(self, config)


# Not in the class's body, where it would be taken for tune.with_parameters.
OnPlainProcesses.setup = set_up_on_plain_processes  # type: ignore[method-assign]


def train(config: dict[str, Any]) -> None:
    """Average over all ranks, as an xm.all_reduce would, at every step."""
    import tempfile

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, step, value = dist.get_rank(), 0, 0.0
    checkpoint = horovod_tune.get_checkpoint()
    if checkpoint is not None:
        step, value = torch.load(Path(checkpoint.path, "state.pt"))
    starts = [None] * dist.get_world_size()
    dist.all_gather_object(starts, (step, os.environ["LOCAL_RANK"], os.getpid()))
    while step < config["steps"]:
        total = torch.tensor([float(rank) * config["lr"]])
        dist.all_reduce(total)
        value, step = value + total.item(), step + 1
        if rank == config.get("dies") and step == 3 and not Path(config["marker"]).exists():
            Path(config["marker"]).touch()
            os.kill(os.getpid(), signal.SIGSEGV)
        with tempfile.TemporaryDirectory() as directory:
            torch.save((step, value), Path(directory, "state.pt"))
            horovod_tune.report(
                value=value,
                step=step,
                rank=rank,
                starts=[start for start, _, _ in starts],
                local_ranks=[local for _, local, _ in starts],
                pids=[pid for _, _, pid in starts],
                checkpoint=directory,
            )
    dist.destroy_process_group()


def test_ranks_of_two_hosts_are_one_world_and_rank_0_reports(run: Callable[..., Any]) -> None:
    analysis = run(
        train,
        config={"lr": tune.grid_search([0.5, 1.0]), "steps": 2},
        metric="value",
        mode="max",
        max_concurrent_trials=1,
    )
    assert analysis.best_config["lr"] == 1.0
    for result in last_results(analysis):
        assert (result["rank"], result["training_iteration"]) == (0, 2)
        assert result["value"] == 2 * result["config"]["lr"] * (0 + 1 + 2 + 3)
        assert result["local_ranks"] == ["0", "1", "0", "1"]
    pids = [pid for result in last_results(analysis) for pid in result["pids"]]
    assert len(set(pids)) == 2 * 4, "each trial has processes of its own"


def test_a_segmentation_fault_on_one_host_is_named_and_every_rank_continues_from_the_checkpoint(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    analysis = run(
        train,
        config={"lr": 1.0, "steps": 4, "dies": 3, "marker": str(tmp_path / "died")},
        max_failures=1,
    )
    (trial,) = analysis.trials
    assert (trial.last_result["step"], trial.last_result["value"]) == (4, 4 * 6.0)
    # Rank 0 may or may not have reported step 3 by then.
    assert trial.last_result["starts"] in ([2] * 4, [3] * 4)
    text = Path(trial.error_file).read_text()
    assert "rank 3 of 4 on" in text and "died" in text
    assert "SIGSEGV (segmentation fault)" in text and "lack of memory" in text
    assert "Fatal Python error: Segmentation fault" in text, "with the stack of the process"


def test_two_trials_on_slices_have_a_whole_slice_each(
    ray_session: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two placement groups as Tune makes them at once: each trial's hosts are of one slice."""
    from horovod_tune.backends.torch_xla import xla_launcher
    from horovod_tune.tpu import reservation

    spec = make_spec(use_tpu=True, tpu_type="v4-16", num_cpus_per_slot=0.5)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    bundles = xla_launcher.placement(spec).bundles
    assert bundles == ({"CPU": 2.0, "TPU": 4.0, "TPU-v4-16-head": 1.0},)
    asked = [ray.util.placement_group([dict(each) for each in bundles]) for _ in range(2)]
    assert all(group.wait(60) for group in asked)
    here = ray.get_runtime_context().get_node_id()
    launchers = [PlainLauncher(spec, group, node_id=here) for group in asked]
    groups = [WorkerGroup(launcher, Limits(60.0)) for launcher in launchers]
    slice_of = {host.node_id: host.slice_name for host in reservation.tpu_hosts()}
    try:
        actors = [launcher.create() for launcher in launchers]
        landed = [ray.get([each.describe.remote() for each in mine], timeout=60) for mine in actors]
        slices = [{slice_of[fact.node_id] for fact in facts} for facts in landed]
        assert sorted(slices, key=str) == [{"slice-a"}, {"slice-b"}]
        assert all(len({fact.node_id for fact in facts}) == 2 for facts in landed)
        assert all(len(fact.tpu_ids) == 4 for facts in landed for fact in facts)
    finally:
        for group, launcher, mine in zip(groups, launchers, actors, strict=True):
            group.close()
            for actor in mine:
                ray.kill(actor)
            launcher.close()
        for each in asked:
            ray.util.remove_placement_group(each)
    see_them_gone([*template_processes(), *rank_processes()])
