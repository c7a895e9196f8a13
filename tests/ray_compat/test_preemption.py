"""A node that Ray drains as preempted: known before it is gone, and no failure of its trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from processes import eventually
from sessions import drain_node, simulated_nodes

from horovod_tune.ray_compat.queries import HostPreempted, is_preempted

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_the_error_travels() -> None:
    error = cloudpickle.loads(cloudpickle.dumps(HostPreempted("rank 1 on n2 was preempted")))
    assert str(error) == "rank 1 on n2 was preempted"
    assert error.preempted


def test_a_lost_node_that_was_drained_is_preempted_and_tune_does_not_count_it(tmp_path: Path) -> None:
    import ray
    from ray import tune

    with simulated_nodes({"num_cpus": 1}) as cluster:
        spot = cluster.add_node(num_cpus=0, resources={"spot": 1})
        cluster.wait_for_nodes(timeout=60)
        (node,) = (node["NodeID"] for node in ray.nodes() if node["Resources"].get("spot"))
        assert not is_preempted([node]) and not is_preempted([])
        drain_node(cluster.address, node)
        assert is_preempted([node]), "known before the machine is gone"
        cluster.remove_node(spot, allow_graceful=False)
        eventually(lambda: node not in {each["NodeID"] for each in ray.nodes() if each["Alive"]}, within_s=60)
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
