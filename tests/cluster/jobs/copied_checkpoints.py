"""A trial whose rank is killed far from rank 0; all continue from a checkpoint that their hosts cannot read.

Prints as JSON what the ranks found, and what was left on each host afterwards.
"""

import hashlib
import json
import os
import signal
import socket
import tempfile
import time
from pathlib import Path

import ray
from ray import tune
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovod_tune import DistributedTrainableCreator, get_checkpoint, report

SIZE = 24 << 20


def write_checkpoint(folder: Path) -> str:
    """Fill a folder as training libraries do: a large file, and a link to the newest of its directories."""
    (folder / "epoch_7").mkdir(parents=True)
    content = os.urandom(SIZE)
    (folder / "epoch_7" / "weights").write_bytes(content)
    (folder / "newest").symlink_to("epoch_7", target_is_directory=True)
    return hashlib.sha256(content).hexdigest()


def train(config):
    import horovod.torch as hvd

    hvd.init()
    checkpoint = get_checkpoint()
    if checkpoint is None:
        with tempfile.TemporaryDirectory() as directory:
            checksum = write_checkpoint(Path(directory)) if hvd.rank() == 0 else ""
            report({"checksum": checksum}, checkpoint=directory)
        if hvd.rank() == hvd.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()
    with checkpoint.as_directory() as directory:
        # Both ways to the file: a directory that was a link is one in a copy.
        sums = {
            hashlib.sha256(Path(directory, name, "weights").read_bytes()).hexdigest()
            for name in ("epoch_7", "newest")
        }
        copies = Path(directory).parent
        hvd.barrier()  # now all of a host's ranks hold theirs
        there = sorted(each.name for each in copies.iterdir() if each.is_dir())
        own = sorted(each.name for each in Path.cwd().iterdir())
        mine = (socket.gethostname(), directory, sorted(sums), there, own)
        report({"seen": hvd.allgather_object(mine), "checksum": ""})


def left_here():
    """Runs on each host: the paths of copies, and parts of copies, on its own disk."""
    roots = [Path("/tmp"), Path.home(), Path("/root/project")]
    found = {path for root in roots for path in root.rglob("*.part")}
    return sorted(map(str, found | set(Path("/tmp/ray").rglob("horovod_tune_*/checkpoints/*"))))


def on_every_node(function):
    nodes = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    refs = {}
    for node, host in nodes.items():
        where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        refs[host] = ray.remote(num_cpus=0)(function).options(scheduling_strategy=where).remote()
    return {host: ray.get(ref, timeout=120) for host, ref in refs.items()}


ray.init(address="auto", log_to_driver=False)
Path("/root/project").mkdir()
os.chdir("/root/project")
analysis = tune.run(
    DistributedTrainableCreator(train, num_hosts=2, num_slots=2), name="copied", max_failures=1, verbose=0
)
result = analysis.trials[0].last_result
checksum = hashlib.sha256(Path(analysis.trials[0].checkpoint.path, "newest", "weights").read_bytes())

deadline = time.monotonic() + 60  # parts go, and processes end, a moment later
while any((left := on_every_node(left_here)).values()) and time.monotonic() < deadline:
    time.sleep(1)
error = Path(analysis.trials[0].path, "error.txt").read_text()
told = {
    "seen": result["seen"],
    "checksum": checksum.hexdigest(),
    "left": left,
    "error": error,
}
print("TOLD", json.dumps(told), flush=True)
