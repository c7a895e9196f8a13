"""Copies of directories, whole or not there; and what is kept of a log that grows too long."""

from __future__ import annotations

import os
import random
import re

import pytest

from horovod_tune.errors import MetricsError
from horovod_tune.files import directories, log_files


def contents(root):
    """Return every path below ``root``, with the bytes of files; links are followed."""
    found = {}
    for folder, folders, files in os.walk(root, followlinks=True):
        for name in folders:
            found[os.path.relpath(os.path.join(folder, name), root)] = None
        for name in files:
            with open(os.path.join(folder, name), "rb") as file:
                found[os.path.relpath(os.path.join(folder, name), root)] = file.read()
    return found


@pytest.fixture
def source(tmp_path):
    """A checkpoint with links to files and directories in it and outside of it."""
    outside, source = tmp_path / "blobs", tmp_path / "source"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "weights").write_bytes(b"w" * 100)
    (source / "empty").mkdir(parents=True)
    (source / "here").write_bytes(b"here")
    (source / "file link").symlink_to(outside / "deep" / "weights")
    (source / "directory link").symlink_to(outside, target_is_directory=True)
    (source / "inner link").symlink_to("empty")
    (source / "executable").write_text("#!/bin/sh")
    (source / "executable").chmod(0o755)
    return source


def copied_in_chunks(source, target, chunk_bytes):
    """What two hosts do, without Ray between them."""
    found = directories.entries(source)
    directories.make(target, found)
    chunks = list(directories.pieces(found, chunk_bytes))
    random.Random(7).shuffle(chunks)  # an actor's calls come in no order
    for chunk in chunks:
        assert sum(piece.length for piece in chunk) <= chunk_bytes
        directories.write(target, chunk, directories.read(source, chunk))


@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 1 << 20, None])
def test_a_copy_has_what_the_original_has_and_what_its_links_point_to(source, tmp_path, chunk_bytes):
    target = str(tmp_path / "storage" / "checkpoint_000001")
    if chunk_bytes is None:
        directories.copy(str(source), target)
    else:
        copied_in_chunks(str(source), target, chunk_bytes)
    assert contents(target) == contents(source)
    assert contents(target)["directory link/deep/weights"] == b"w" * 100
    assert not any(os.path.islink(os.path.join(target, path)) for path in contents(target))
    assert os.access(os.path.join(target, "executable"), os.X_OK)
    assert os.listdir(os.path.dirname(target)) == ["checkpoint_000001"]


def test_random_trees_arrive_whole(tmp_path):
    for seed in range(20):
        dice = random.Random(seed)
        source, target = tmp_path / f"s{seed}", tmp_path / f"t{seed}"
        folders = [source]
        source.mkdir()
        for number in range(dice.randrange(30)):
            path = dice.choice(folders) / dice.choice([f"{number}", f"ü {number}", f".{number}\n"])
            if dice.random() < 0.4:
                path.mkdir()
                folders.append(path)
            else:
                path.write_bytes(dice.randbytes(dice.choice([0, 1, 63, 64, 65, 1000])))
        copied_in_chunks(str(source), str(target), 64)
        assert contents(target) == contents(source)


@pytest.mark.parametrize("chunk_bytes", [100, None])
def test_a_link_to_nothing_stays_one(source, tmp_path, chunk_bytes):
    (source / "empty" / "dangling").symlink_to("/no/where")
    (source / "loop").symlink_to("loop")
    target = tmp_path / "storage" / "checkpoint_000001"
    if chunk_bytes is None:
        directories.copy(str(source), str(target))
    else:
        copied_in_chunks(str(source), str(target), chunk_bytes)
    assert os.readlink(target / "empty" / "dangling") == "/no/where"
    assert os.readlink(target / "loop") == "loop"
    assert (target / "here").read_bytes() == b"here"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda source: (source / "empty" / "up").symlink_to(source), "a directory that contains it"),
        (
            lambda source: os.mkfifo(source / "empty" / "p"),
            "contains 'empty/p', which is .* files and directories",
        ),
    ],
)
def test_what_cannot_be_copied_is_named_and_leaves_nothing(source, tmp_path, spoil, said):
    spoil(source)
    target = tmp_path / "checkpoint_000001"
    with pytest.raises(MetricsError, match=said):
        directories.copy(str(source), str(target))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["blobs", "source"]


def test_a_disk_that_is_full_in_mid_copy_keeps_no_part_of_it(source, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directories.shutil, "copy2", full)
    with pytest.raises(OSError, match="No space left"):
        directories.copy(str(source), str(tmp_path / "checkpoint_000001"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["blobs", "source"]


def test_a_directory_that_holds_the_storage_is_refused(tmp_path):
    with pytest.raises(MetricsError, match="contains the trial's storage"):
        directories.copy(str(tmp_path), str(tmp_path / "storage" / "checkpoint_000001"))
    assert list(tmp_path.iterdir()) == []


def test_a_copy_takes_the_place_of_an_earlier_one(source, tmp_path):
    target = tmp_path / "checkpoint_000001"
    target.mkdir()
    (target / "stale").touch()
    directories.copy(str(source), str(target))
    assert contents(target) == contents(source)


def test_a_file_that_shrinks_meanwhile_is_an_error(source):
    found = directories.entries(str(source))
    (source / "here").write_bytes(b"")
    with pytest.raises(OSError, match="here was changed while it was copied"):
        for chunk in directories.pieces(found, 10):
            directories.read(str(source), chunk)


def test_calls_that_end_after_a_copy_was_discarded_leave_nothing(source, tmp_path):
    found = directories.entries(str(source))
    part, target = str(tmp_path / "new.part"), tmp_path / "new"

    def listed_slowly():  # the copy times out while `make` runs
        yield found[0]
        directories.discard(part)
        yield from found[1:]

    with pytest.raises(FileNotFoundError):
        directories.make(part, listed_slowly())
    chunk = next(directories.pieces(found, 10))
    with pytest.raises(FileNotFoundError):
        directories.write(part, chunk, directories.read(str(source), chunk))
    with pytest.raises(FileNotFoundError):
        directories.put_in_place(part, str(target))
    assert not list(tmp_path.glob("new*"))


def test_what_killed_copies_left_is_removed_and_nothing_else(tmp_path):
    for name in ("checkpoint_000000", "checkpoint_000001.part", "checkpoint_000002.5f3a.part", "mine.part"):
        (tmp_path / name / "sub").mkdir(parents=True)
    directories.remove_parts(str(tmp_path))
    directories.remove_parts(str(tmp_path / "absent"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint_000000", "mine.part"]


MARKER = re.compile(rb"\[horovod_tune: (\d+) bytes of this log are left out here\]\n")


def test_a_log_that_fits_is_kept_whole(tmp_path):
    path = tmp_path / "new" / "rank_0.log"
    for number in range(10):
        log_files.append(path, b"line %d\n" % number, limit=80)
    assert path.read_bytes() == b"".join(b"line %d\n" % number for number in range(10))


def test_a_long_log_keeps_its_beginning_and_its_end_and_says_how_much_is_missing(tmp_path):
    """Pieces of any size, lines of any length, many cuts: what is there and what is missing add up."""
    for seed in range(60):
        dice = random.Random(seed)
        path = tmp_path / f"{seed}.log"
        limit, written = dice.choice([8_000, 20_000]), b""
        for _ in range(dice.randrange(2, 90)):
            piece = b"".join(
                b"%d %s\n" % (dice.getrandbits(30), b"x" * dice.choice([0, 3, 40, 900]))
                for _ in range(dice.randrange(0, 40))
            )
            written += piece
            log_files.append(path, piece, limit=limit)
            kept = path.read_bytes()
            assert len(kept) <= limit
            if len(written) <= limit:
                assert kept == written
                continue
            (count,) = MARKER.findall(kept)
            head, _, tail = MARKER.split(kept)
            assert written.startswith(head) and written.endswith(tail)
            assert len(head) + int(count) + len(tail) == len(written)
            assert min(len(head), len(tail)) >= limit // 4 - 920, "a quarter each, but for a line that is cut"


def test_one_endless_line_is_cut_too(tmp_path):
    path = tmp_path / "rank_0.log"
    for _ in range(50):
        log_files.append(path, b"." * 100, limit=1000)
    log_files.append(path, b"the end", limit=1000)
    kept = path.read_bytes()
    assert len(kept) <= 1000 and kept.startswith(b"....") and kept.endswith(b"the end")
    assert len(MARKER.findall(kept)) == 1
