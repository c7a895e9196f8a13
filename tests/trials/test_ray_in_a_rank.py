"""Ray in a training function: a rank is a process of the cluster, and connects when it first uses Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import ray
from ray import tune
from ray.util.queue import Queue

from horovod_tune import DistributedTrainableCreator, report, with_parameters

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def make_counter() -> Any:
    """Return an actor class that adds up what ranks send; made here, so that it is sent by value."""

    @ray.remote(num_cpus=0)
    class Counter:
        def __init__(self) -> None:
            self.total = 0

        def add(self, value: int) -> int:
            self.total += value
            return self.total

    return Counter


def last_results(analysis: Any) -> list[dict[str, Any]]:
    errors = [Path(trial.error_file).read_text() for trial in analysis.trials if trial.error_file]
    assert not errors, "\n".join(errors)
    return [trial.last_result for trial in analysis.trials]


def test_references_and_actors_of_the_driver_work_in_ranks(tune_run: Callable[..., Any]) -> None:
    large = ray.put(numpy.ones(10_000_000))  # 80 MB
    in_config, in_parameters = ray.put("in config"), ray.put("in parameters")
    counter, sent = make_counter().remote(), Queue()
    named = make_counter().options(name="counter of the driver").remote()
    ray.get(named.add.remote(100))

    @ray.remote(num_cpus=0)
    def double(value: int) -> int:
        return 2 * value

    def train(config: dict[str, Any], reference: Any) -> None:
        import horovod.torch as hvd
        import psutil

        hvd.init()
        began_connected = ray.is_initialized()
        before = psutil.Process().memory_full_info().uss
        array = ray.get(large)
        total = float(array.sum())
        sent.put(f"rank {hvd.rank()}")
        ray.get(counter.add.remote(hvd.rank() + 1))
        own = ray.put([hvd.rank()])
        report(
            connected=began_connected,
            total=total,
            writeable=array.flags.writeable,
            copied_mb=(psutil.Process().memory_full_info().uss - before) / 1e6,
            of_config=ray.get(config["reference"]),
            of_parameters=ray.get(reference["of"]),
            named=ray.get(ray.get_actor("counter of the driver").add.remote(0)),
            tasks=ray.get([double.remote(each) for each in range(3)]),
            own=hvd.allgather_object(own.hex()),
            got=ray.get(own),
            namespace=ray.get_runtime_context().namespace,
        )

    bound = with_parameters(train, reference={"of": in_parameters})
    config = {"reference": in_config}
    (result,) = last_results(tune_run(DistributedTrainableCreator(bound, num_slots=2), config=config))
    assert result["connected"], "the references in the function need the connection before it is unpickled"
    assert result["total"] == 1e7 and not result["writeable"] and result["copied_mb"] < 70
    assert (result["of_config"], result["of_parameters"]) == ("in config", "in parameters")
    assert (result["named"], result["tasks"], result["got"]) == (100, [0, 2, 4], [0])
    assert len(set(result["own"])) == 2, "forks of one template do not make the same ids"
    assert result["namespace"] == ray.get_runtime_context().namespace
    assert sorted(sent.get(timeout=10) for _ in range(2)) == ["rank 0", "rank 1"]
    assert ray.get(counter.add.remote(0)) == 3
    ray.kill(named)


def test_a_function_without_ray_starts_nothing_of_it(tune_run: Callable[..., Any]) -> None:
    def train(config: dict[str, Any]) -> None:
        import threading

        import psutil

        process = psutil.Process()
        report(
            connected=ray.is_initialized(),
            threads=[each.name for each in threading.enumerate() if "ray" in each.name.lower()],
            peers=[str(each.raddr) for each in process.net_connections("tcp") if each.raddr],
            children=len(process.children()),
        )

    (result,) = last_results(tune_run(DistributedTrainableCreator(train, num_slots=1)))
    assert not result["connected"]
    assert (result["threads"], result["peers"], result["children"]) == ([], [], 0)


def test_init_in_the_function_joins_the_cluster(tune_run: Callable[..., Any]) -> None:
    @ray.remote(num_cpus=0)
    def variable() -> str | None:
        import os

        return os.environ.get("OF_THE_RANK")

    def train(config: dict[str, Any]) -> None:
        ray.init(ignore_reinit_error=True, **config["arguments"])
        report(
            address=ray.get_runtime_context().gcs_address,
            nodes=len(ray.nodes()),
            variable=ray.get(variable.remote()),
            namespace=ray.get_runtime_context().namespace,
        )

    arguments = [{}, {"address": "auto"}, {"runtime_env": {"env_vars": {"OF_THE_RANK": "seen"}}}]
    trainable = DistributedTrainableCreator(train, num_slots=1)
    results = last_results(tune_run(trainable, config={"arguments": tune.grid_search(arguments)}))
    assert {each["address"] for each in results} == {ray.get_runtime_context().gcs_address}
    assert [each["nodes"] for each in results] == [1, 1, 1]
    assert [each["variable"] for each in results] == [None, None, "seen"]
    assert {each["namespace"] for each in results} == {ray.get_runtime_context().namespace}


def test_data_sets_are_read_in_a_rank(tune_run: Callable[..., Any]) -> None:
    def train(config: dict[str, Any]) -> None:
        import ray.data

        report(count=ray.data.range(10).count())

    (result,) = last_results(tune_run(DistributedTrainableCreator(train, num_slots=1)))
    assert result["count"] == 10


def test_what_a_rank_has_started_in_ray_ends_with_it(tune_run: Callable[..., Any]) -> None:
    counter = make_counter()

    def train(config: dict[str, Any]) -> None:
        import os

        actor = counter.options(name="of a rank").remote()
        report(added=ray.get(actor.add.remote(1)), process=os.getpid())

    trainable = DistributedTrainableCreator(train, num_slots=1)
    results = last_results(tune_run(trainable, num_samples=2, max_concurrent_trials=1))
    assert [each["added"] for each in results] == [1, 1], "the name is free again"
    assert results[0]["process"] != results[1]["process"]
