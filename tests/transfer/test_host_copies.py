"""Copies of checkpoints on a host: one for all its processes, removed when the last of them releases it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from horovod_tune.messages import CheckpointPlace
from horovod_tune.transfer.host_copies import HostCopies, open_checkpoint

HOLDER = """
import sys
from pathlib import Path
from horovod_tune.transfer.host_copies import HostCopies

def bring(path):
    with open(sys.argv[2], "a") as file:
        file.write("brought\\n")
    Path(path).mkdir()
    Path(path, "weights").write_text("w")

copy = HostCopies(Path(sys.argv[1])).hold("name", bring)
assert Path(copy.path, "weights").read_text() == "w"
print("held", flush=True)
sys.stdin.readline()
assert Path(copy.path, "weights").read_text() == "w"
copy.release()
print("released", flush=True)
"""


class Process:
    """A rank that holds the copy until the test makes it release it."""

    def __init__(self, folder, note):
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder), str(note)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def holds(self):
        return self._process.stdout.readline() == "held\n"

    def let_go(self):
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "released\n"
        assert self._process.wait(60) == 0

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60)


@pytest.fixture
def note(tmp_path):
    return tmp_path / "note"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "copies"


def make(path):
    Path(path).mkdir()
    Path(path, "weights").write_text("w")


@pytest.mark.long
def test_ranks_of_a_host_share_one_copy_which_the_last_removes(folder, note):
    ranks = [Process(folder, note) for _ in range(4)]
    assert all(rank.holds() for rank in ranks)
    assert note.read_text() == "brought\n"
    for rank in ranks[1:]:
        rank.let_go()
        assert (folder / "name" / "weights").exists()
    ranks[0].let_go()
    assert list(folder.iterdir()) == []


@pytest.mark.long
def test_a_copy_of_a_killed_rank_goes_with_the_next_one(folder, note):
    killed = Process(folder, note)
    assert killed.holds()
    killed.kill()
    assert (folder / "name").exists()
    other = HostCopies(folder).hold("other", make)
    assert sorted(each.name for each in folder.iterdir()) == ["other", "other.lock"]
    other.release()


@pytest.mark.long
def test_a_copy_that_is_held_elsewhere_survives_a_killed_rank(folder, note):
    killed, holder = Process(folder, note), Process(folder, note)
    assert killed.holds() and holder.holds()
    killed.kill()
    HostCopies(folder).remove_orphans()
    holder.let_go()
    assert list(folder.iterdir()) == []


def test_bringing_that_fails_leaves_nothing_and_is_tried_by_the_next(folder):
    copies = HostCopies(folder)

    def fail(path):
        Path(f"{path}.5f.part").mkdir()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        copies.hold("name", fail)
    copies.remove_orphans()
    assert list(folder.iterdir()) == []
    assert Path(copies.hold("name", make).path, "weights").exists()
    copies.release_all()
    assert list(folder.iterdir()) == []


def test_threads_that_hold_and_release_at_once_wait_for_no_other_and_leave_nothing(folder):
    copies = HostCopies(folder)
    with ThreadPoolExecutor(6) as pool:
        for _ in range(20):
            asked = [pool.submit(copies.hold, "name", make) for _ in range(6)]
            held = [each.result(timeout=30) for each in asked]
            list(pool.map(lambda copy: copy.release(), held))
            assert list(folder.iterdir()) == []


@pytest.mark.long
def test_a_checkpoint_object_holds_its_copy_and_a_fork_does_not_release_it(folder, tmp_path):
    copies = HostCopies(folder)
    (tmp_path / "original").mkdir()
    place = CheckpointPlace(str(tmp_path / "original"), node_id="another node")

    def ask(place, target=None):
        return make(target) if target else (1, 2)

    checkpoint = open_checkpoint(place, "this node", copies, ask=ask)
    child = os.fork()
    if not child:
        del checkpoint
        gc.collect()
        copies.release_all()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with checkpoint.as_directory() as directory:
        assert Path(directory, "weights").read_text() == "w"
    gone = weakref.ref(checkpoint)
    del checkpoint
    gc.collect()
    assert gone() is None and list(folder.iterdir()) == []
