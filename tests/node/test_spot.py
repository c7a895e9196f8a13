"""A machine that its cloud takes away: noticed, told to Ray, and no failure of the trial."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from horovod_tune.node import spot_watch
from horovod_tune.ray_compat import drain_as_preempted, is_preempted
from horovod_tune.ray_compat.preemption import HostPreempted

pytestmark = pytest.mark.processes


class Metadata(BaseHTTPRequestHandler):
    """The metadata services of both clouds, as their documentation describes them."""

    taken = False

    def do_PUT(self) -> None:
        assert self.path == "/latest/api/token"
        self._answer(200 if self.headers["X-aws-ec2-metadata-token-ttl-seconds"] else 400, "session")

    def do_GET(self) -> None:
        if self.path == "/latest/meta-data/spot/instance-action":
            if self.headers["X-aws-ec2-metadata-token"] != "session":
                self._answer(401, "")
            elif self.taken:
                self._answer(200, '{"action": "terminate", "time": "2026-11-20T12:02:00Z"}')
            else:
                self._answer(404, "")
        elif self.path == "/computeMetadata/v1/instance/preempted":
            google = self.headers["Metadata-Flavor"] == "Google"
            self._answer(200 if google else 403, "TRUE" if self.taken else "FALSE")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    Metadata.taken = False
    server.shutdown()
    server.server_close()


def test_aws_gives_two_minutes_notice(metadata: str) -> None:
    noon = 1795176000.0  # 2026-11-20T12:00:00Z
    assert spot_watch.aws_notice(metadata, now=noon) is None
    Metadata.taken = True
    assert spot_watch.aws_notice(metadata, now=noon) == spot_watch.Notice(120.0)
    assert spot_watch.aws_notice(metadata, now=noon + 500) == spot_watch.Notice(0.0)


def test_google_gives_half_a_minutes_notice(metadata: str) -> None:
    assert spot_watch.google_notice(metadata) is None
    Metadata.taken = True
    assert spot_watch.google_notice(metadata) == spot_watch.Notice(30.0)


def test_a_watch_that_never_reaches_the_cloud_ends() -> None:
    looks = []

    def look() -> None:
        looks.append(1)
        raise ConnectionRefusedError("nobody there")

    with pytest.raises(OSError, match="nobody there"):
        spot_watch.watch(look, poll_s=0.0)
    assert len(looks) == spot_watch.NOT_A_CLOUD_AFTER


def test_a_watch_outlives_a_metadata_service_that_stumbles() -> None:
    answers: list[Any] = [None, *[OSError("stumbled")] * 9, spot_watch.Notice(7.0)]

    def look() -> spot_watch.Notice | None:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    assert spot_watch.watch(look, poll_s=0.0) == spot_watch.Notice(7.0)


def test_the_error_travels() -> None:
    error = cloudpickle.loads(cloudpickle.dumps(HostPreempted("rank 1 on n2 was pre-empted")))
    assert str(error) == "rank 1 on n2 was pre-empted"
    assert error.preempted


def test_a_notice_makes_a_lost_node_preempted_and_tune_does_not_count_it(tmp_path: Path) -> None:
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
        assert drain_as_preempted(cluster.address, "127.0.0.2", in_s=60.0) == [node]
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
            pytest.fail("Ray does not call the lost actor pre-empted")
        assert is_preempted([node]), ray.nodes()
        with pytest.raises(RuntimeError, match=r"no alive node .* has the address 10\.9\.9\.9"):
            drain_as_preempted(cluster.address, "10.9.9.9", in_s=1.0)

        count = tmp_path / "count"
        count.write_text("0")

        class ThreeTimesTakenAway(tune.Trainable):
            def step(self) -> dict[str, Any]:
                times = int(count.read_text())
                if times < 3:
                    count.write_text(str(times + 1))
                    raise HostPreempted("rank 1 on n2 was pre-empted")
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
