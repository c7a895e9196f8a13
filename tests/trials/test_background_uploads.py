"""Checkpoints on their way to a bucket while the ranks of real trials train on."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import cloudpickle
import pyarrow.fs
import pytest
import ray.cloudpickle
from fsspec.implementations.local import LocalFileSystem
from ray import tune

from horovod_tune import DistributedTrainableCreator, get_checkpoint, report

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.usefixtures("ray_session")]
for pickles in (cloudpickle, ray.cloudpickle):  # the function is pickled by one, the storage by the other
    pickles.register_pickle_by_value(sys.modules[__name__])
PATIENCE_S = 60.0


class SlowBucket(pyarrow.fs.FSSpecHandler):
    """Takes a checkpoint when its gate is there, and refuses it if that says so."""

    def __init__(self, gates):
        super().__init__(LocalFileSystem(auto_mkdir=True))
        self.gates = gates

    def open_output_stream(self, path, metadata):
        if "/checkpoint_" in path:
            gate, end = gate_of(Path(path).parent.name, self.gates), time.monotonic() + PATIENCE_S
            while not gate.exists():
                assert time.monotonic() < end, f"no {gate}"
                time.sleep(0.02)
            if gate.read_text() == "refused":
                raise OSError(28, "the bucket is full")
        return super().open_output_stream(path, metadata)


def gate_of(checkpoint, gates):
    return Path(gates, checkpoint)


def counting(config):
    """Count up to config["until"], a checkpoint a step, which is let into the bucket after its report."""
    import horovod.torch as hvd

    hvd.init()
    start = get_checkpoint()
    count = int(Path(start.path, "count").read_text()) if start else 0
    began_with = count
    while count < config["until"]:
        count += 1
        newest = get_checkpoint()
        seen = int(Path(newest.path, "count").read_text()) if newest else 0
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "count").write_text(str(count))
            if hvd.rank() == 0 and count == config.get("opens_by_itself"):
                threading.Timer(2.0, gate_of(f"checkpoint_{count - 1:06d}", config["gates"]).touch).start()
            report({"count": count, "seen": seen, "began_with": began_with}, checkpoint=folder)
        if hvd.rank() == 0:
            stored = list(Path(config["bucket"]).rglob(f"checkpoint_{count - 1:06d}/count"))
            Path(config["gates"], f"went on after {count}").write_text(str(len(stored)))
            gate = gate_of(f"checkpoint_{count - 1:06d}", config["gates"])
            coming = gate.with_suffix(".coming")
            coming.write_text("refused" if count == config.get("refused") else "")
            coming.rename(gate)
        if count == config.get("dies_after") and not began_with:
            hvd.barrier()
            os._exit(3)


@pytest.fixture
def search(tmp_path):
    gates, bucket = tmp_path / "gates", tmp_path / "bucket"
    gates.mkdir()
    bucket.mkdir()

    def run(config, **settings):
        filesystem = pyarrow.fs.PyFileSystem(SlowBucket(str(gates)))
        (result,) = tune.Tuner(
            DistributedTrainableCreator(counting, num_slots=2, background_uploads=True),
            param_space={**config, "gates": str(gates), "bucket": str(bucket)},
            run_config=tune.RunConfig(
                storage_filesystem=filesystem, storage_path=f"{bucket}/results", verbose=0, **settings
            ),
        ).fit()
        return result, gates

    return run


def counts_in(result):
    return [int(Path(checkpoint.path, "count").read_text()) for checkpoint, _ in result.best_checkpoints]


def test_ranks_train_on_and_every_checkpoint_arrives_with_its_own_report(search):
    result, gates = search({"until": 4})
    assert result.error is None
    assert [(gates / f"went on after {count}").read_text() for count in (1, 2, 3, 4)] == ["0"] * 4
    assert sorted(counts_in(result)) == [1, 2, 3, 4]
    assert {m["count"]: m["training_iteration"] for _, m in result.best_checkpoints} == {
        count: count for count in (1, 2, 3, 4)
    }
    assert int(Path(result.checkpoint.path, "count").read_text()) == 4, "the last one is waited for"
    # A rank finds the newest that is stored, which is not yet the one of the report before.
    assert list(result.metrics_dataframe["seen"]) == [0, 0, 1, 2]


def test_a_trial_that_fails_goes_on_from_one_that_has_arrived(search):
    result, _ = search({"until": 5, "dies_after": 3}, failure_config=tune.FailureConfig(max_failures=1))
    assert result.error is None and result.metrics["count"] == 5
    assert result.metrics["began_with"] == 2
    assert int(Path(result.checkpoint.path, "count").read_text()) == 5


def test_the_last_checkpoint_of_a_trial_that_is_stopped_is_waited_for(search):
    result, gates = search({"until": 9, "opens_by_itself": 3}, stop={"count": 3})
    assert sorted(counts_in(result)) == [1, 2, 3] and result.metrics["count"] == 3
    assert not (gates / "went on after 3").exists()


def test_a_bucket_that_refuses_a_checkpoint_fails_the_trial(search):
    result, _ = search({"until": 5, "refused": 2})
    assert "the bucket is full" in str(result.error)
    assert sorted(counts_in(result)) == [1]
