"""A node that Ray drains as preempted: known before it is gone, and no failure of its trials."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from sessions import drain_node

from horovod_tune.ray_compat import HostPreempted, is_preempted

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_the_error_travels() -> None:
    error = cloudpickle.loads(cloudpickle.dumps(HostPreempted("rank 1 on n2 was preempted")))
    assert str(error) == "rank 1 on n2 was preempted"
    assert error.preempted


def test_a_lost_node_that_was_drained_is_preempted_and_tune_does_not_count_it(tmp_path: Path) -> None:
    import ray
    from ray import tune
    from ray.cluster_utils import Cluster
    from ray.exceptions import RayActorError

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    spot = cluster.add_node(num_cpus=1, resources={"spot": 1}, node_ip_address="127.0.0.2")
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        (node,) = (node["NodeID"] for node in ray.nodes() if node["Resources"].get("spot"))

        @ray.remote(num_cpus=0, resources={"spot": 1})
        class Rank:
            def answer(self) -> int:
                return 1

        rank = Rank.remote()
        assert ray.get(rank.answer.remote(), timeout=60) == 1
        assert not is_preempted([node]) and not is_preempted([])
        drain_node(cluster.address, node)
        # Known before the machine is gone.
        assert is_preempted([node])
        cluster.remove_node(spot, allow_graceful=False)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                ray.get(rank.answer.remote(), timeout=60)
            except RayActorError as error:
                if error.preempted:
                    break
            time.sleep(0.2)
        else:
            pytest.fail("Ray does not call the lost actor preempted")
        assert is_preempted([node]), ray.nodes()

        count = tmp_path / "count"
        count.write_text("0")

        class ThreeTimesTakenAway(tune.Trainable):
            def step(self) -> dict[str, Any]:
                times = int(count.read_text())
                if times < 3:
                    count.write_text(str(times + 1))
                    raise HostPreempted("rank 1 on n2 was preempted")
                return {"loss": 1.0, "done": True}

            def save_checkpoint(self, directory: str) -> dict[str, Any]:
                return {}

            def load_checkpoint(self, checkpoint: Any) -> None:
                pass

        results = tune.Tuner(
            ThreeTimesTakenAway,
            run_config=tune.RunConfig(
                storage_path=str(tmp_path), verbose=0, failure_config=tune.FailureConfig(max_failures=0)
            ),
        ).fit()
        assert (results.num_errors, results[0].metrics["loss"]) == (0, 1.0)
    finally:
        ray.shutdown()
        cluster.shutdown()
