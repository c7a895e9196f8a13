"""A trial's storage: on this host, on the driver's own disk elsewhere, and in a cloud."""

from __future__ import annotations

from pathlib import Path

import pyarrow.fs
import pytest
import ray.tune
from ray.train._internal.storage import StorageContext

from horovod_tune.coordinator.trial_storage import TrialStorage
from horovod_tune.files import directories, log_files
from horovod_tune.ray_compat import queries
from horovod_tune.transfer import node_transfer
from horovod_tune.transfer.host_copies import HostCopies


class OtherDisk:
    """A node whose disk is a folder of the test's: every path that it gets is below that."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, []

    def __call__(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def call(self, function, *arguments):
        self.calls.append(function.__name__)
        paths = (str, Path)
        return function(
            *(type(each)(self(str(each))) if isinstance(each, paths) else each for each in arguments)
        )


@pytest.fixture
def other_disk(tmp_path, monkeypatch):
    disk = OtherDisk(tmp_path / "disk of the driver")
    monkeypatch.setattr(node_transfer, "_with_actor", lambda node, timeout_s, work: work(disk.call))
    monkeypatch.setattr(queries, "driver_node_id", lambda: "driver")
    return disk


def make_storage(tmp_path, node="coordinator", **storage):
    """A storage of Tune's own; the first checkpoint is number 0."""
    context = StorageContext(
        storage_path="results" if storage else str(tmp_path / "results"),
        experiment_dir_name="experiment",
        trial_dir_name="trial",
        **storage,
    )
    storage = TrialStorage(context, node)
    storage._copies = HostCopies(tmp_path / "copies")
    return storage, Path(context.trial_fs_path)


@pytest.fixture
def made(tmp_path):
    """A checkpoint as a training function made it."""
    directory = tmp_path / "made"
    (directory / "sub").mkdir(parents=True)
    (directory / "sub" / "weights").write_text("w")
    (directory / "link").symlink_to("sub")
    return str(directory)


def test_checkpoints_on_this_host_are_numbered_and_replace_what_a_kill_left(tmp_path, made, monkeypatch):
    monkeypatch.setattr(queries, "driver_node_id", lambda: "driver")
    storage, trial = make_storage(tmp_path, node="driver")
    left = trial / "checkpoint_000007.part"
    left.mkdir(parents=True)
    for number in range(2):
        metrics = {"loss": 1.0}
        checkpoint, place = storage.persist(made, metrics)
        assert metrics["checkpoint_dir_name"] == f"checkpoint_{number:06d}"
        assert checkpoint.path == place.path == str(trial / metrics["checkpoint_dir_name"])
        assert place.node_id == "driver"
        assert Path(place.path, "link", "weights").read_text() == "w"
    assert sorted(each.name for each in trial.iterdir()) == ["checkpoint_000000", "checkpoint_000001"]
    assert storage.fetch(checkpoint).path == checkpoint.path


def test_checkpoints_reach_the_disk_of_the_driver_and_come_back_as_one_copy(tmp_path, made, other_disk):
    storage, trial = make_storage(tmp_path)
    there = other_disk(str(trial))
    (there / "checkpoint_000007.5f.part").mkdir(parents=True)
    checkpoint, place = storage.persist(made, {})
    assert place.node_id == "driver" and not trial.exists()
    assert [each.name for each in there.iterdir()] == ["checkpoint_000000"]
    assert (there / "checkpoint_000000" / "link" / "weights").read_text() == "w"

    storage.persist(made, {})
    assert other_disk.calls.count("remove_parts") == 1, "what a kill left is looked for once per trial"

    here = storage.fetch(ray.tune.Checkpoint.from_directory(checkpoint.path))
    assert Path(here.path, "link", "weights").read_text() == "w"
    assert Path(here.path).parent == tmp_path / "copies"
    again, _ = make_storage(tmp_path)
    reads = other_disk.calls.count("read")
    assert again.fetch(checkpoint).path == here.path
    assert other_disk.calls.count("read") == reads, "it is here already"
    storage.close()
    assert Path(here.path).exists()
    again.close()
    assert list((tmp_path / "copies").iterdir()) == []


def test_a_trial_that_continues_frees_what_its_kill_left_before_its_first_checkpoint(
    tmp_path, made, other_disk
):
    storage, trial = make_storage(tmp_path)
    checkpoint, _ = storage.persist(made, {})
    (other_disk(str(trial)) / "checkpoint_000001.5f.part").mkdir()
    restarted, _ = make_storage(tmp_path)
    restarted.fetch(checkpoint)
    assert [each.name for each in other_disk(str(trial)).iterdir()] == ["checkpoint_000000"]


def test_another_checkpoint_at_the_same_place_is_another_copy(tmp_path, made, other_disk):
    """A trial that starts again may write its checkpoint 3 again."""
    storage, _ = make_storage(tmp_path)
    checkpoint, _ = storage.persist(made, {})
    assert Path(storage.fetch(checkpoint).path, "sub", "weights").read_text() == "w"
    Path(made, "sub", "weights").write_text("new")
    restarted, _ = make_storage(tmp_path)
    checkpoint, _ = restarted.persist(made, {})
    assert Path(restarted.fetch(checkpoint).path, "sub", "weights").read_text() == "new"


def test_a_full_disk_of_the_driver_is_an_error_and_no_part_is_left(tmp_path, made, other_disk, monkeypatch):
    storage, trial = make_storage(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directories, "write", full)
    with pytest.raises(OSError, match="No space left"):
        storage.persist(made, {})
    assert list(other_disk(str(trial)).iterdir()) == []


def test_logs_reach_the_disk_of_the_driver_piece_by_piece(tmp_path, other_disk):
    for attempt in range(2):
        storage, trial = make_storage(tmp_path)
        storage.append_log(1, b"attempt %d\n" % attempt)
        storage.publish_logs()
        storage.publish_logs(at_end=True)
    assert (other_disk(str(trial)) / "rank_1.log").read_bytes() == b"attempt 0\nattempt 1\n"
    assert other_disk.calls.count("append") == 2, "what is there is not sent again"


def test_logs_of_a_cloud_are_uploaded_when_they_have_grown_by_a_quarter(tmp_path):
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    cloud = pyarrow.fs.SubTreeFileSystem(str(bucket), pyarrow.fs.LocalFileSystem())
    logs, trial = make_storage(tmp_path, storage_filesystem=cloud)
    stored = bucket / trial / "rank_0.log"
    logs.append_log(0, b"x" * 100)
    logs.publish_logs()
    assert stored.read_bytes() == b"x" * 100
    logs.append_log(0, b"y" * 10)
    logs.publish_logs()
    assert stored.stat().st_size == 100
    logs.append_log(0, b"z" * 20)
    logs.publish_logs()
    assert stored.stat().st_size == 130
    logs.append_log(0, b"!")
    logs.publish_logs(at_end=True)
    assert stored.read_bytes() == b"x" * 100 + b"y" * 10 + b"z" * 20 + b"!"

    restarted, _ = make_storage(tmp_path, storage_filesystem=cloud)
    restarted.append_log(0, b" again")
    restarted.append_log(1, (b"w" * 99 + b"\n") * (log_files.LOG_BYTES // 50))
    restarted.publish_logs(at_end=True)
    assert stored.read_bytes().endswith(b"! again") and stored.stat().st_size == 137
    assert (bucket / trial / "rank_1.log").stat().st_size <= log_files.LOG_BYTES
