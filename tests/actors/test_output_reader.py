"""What a training actor reads of its own output: new text, and the stall inspector's last message."""

from __future__ import annotations

import sys

import pytest
import ray

from horovod_tune.actors.output_reader import STALL_LINES, OutputReader
from horovod_tune.rank.streams import unusable_streams

WARNING = (
    "[2026-11-21 10:{minute:02}:00.1: W horovod/common/stall_inspector.cc:107] One or more tensors were "
    "submitted to be reduced by subset of ranks and are waiting for more than 60 seconds. \n"
    "Missing ranks:\n"
    "1: [allreduce.x, allreduce.y]\n"
)
END = (
    "[2026-11-21 10:30:00.1: E horovod/common/stall_inspector.cc:105] One or more tensors were submitted. \n"
    "Missing ranks:\n"
    "1!: [allreduce.x]\n"
    'One or more rank (marked by "!") is stalled for longer than 1800 seconds. Will shutdown.\n'
)


@pytest.fixture
def streams(tmp_path):
    """stdout and stderr of a process, as Ray gives them."""
    out, err = tmp_path / "worker.out", tmp_path / "worker.err"
    out.write_text("of the trial before\n")
    err.write_text(WARNING.format(minute=0) + END)
    return out, err


def write(path, text):
    with path.open("a") as file:
        file.write(text)


def test_what_is_new_is_taken_once_without_rays_markers(streams):
    out, err = streams
    reader = OutputReader([str(out), str(err)])
    write(out, ":actor_name:TrainingActor\nfirst\n: colon\n")
    write(err, "warning\n")
    assert reader.take() == b"first\n: colon\nwarning\n"
    assert reader.take() == b""
    write(out, "forgotten\n")
    reader.mark()
    write(out, "second\n")
    assert reader.take() == b"second\n"


def test_files_that_ray_rotates_are_read_from_their_beginning_again(streams, monkeypatch):
    out, err = streams
    worker = ray._private.worker.global_worker
    monkeypatch.setattr(worker, "_out_filepath", str(out))
    monkeypatch.setattr(worker, "_err_filepath", str(err))
    monkeypatch.setenv("RAY_ROTATION_MAX_BYTES", "1000")
    reader = OutputReader()
    out.write_text("rotated\n")
    assert reader.take() == b"rotated\n"
    write(out, "and on\n")
    err.write_text(END)
    assert reader.take() == b"and on\n" + END.encode()
    assert reader.stall_report() == END.rstrip("\n")


def test_long_output_keeps_its_beginning_and_its_end(streams):
    out, err = streams
    reader = OutputReader([str(out), str(err)])
    lines = [f"line {number}\n" for number in range(10_000)]
    write(out, "".join(lines))
    write(err, "and stderr\n")
    text = reader.take(limit=1000).decode()
    first, _marker, last = text.partition("[horovod_tune: ")
    missing, _, last = last.partition(" bytes of this log are left out here]\n")
    assert first.startswith("line 0\nline 1\n") and last.endswith("line 9999\nand stderr\n")
    assert last.startswith("line ")
    kept = len(first) + len(last) - len("and stderr\n")
    assert 900 < kept <= 1000 and kept + int(missing) == len("".join(lines))
    assert reader.take() == b""


@pytest.mark.parametrize("end", ["close", "detach"])
def test_streams_that_the_function_has_closed_are_read_to_their_end(streams, monkeypatch, end):
    out, err = streams
    monkeypatch.setattr(sys, "stdout", out.open("a"))
    monkeypatch.setattr(sys, "stderr", err.open("a"))
    reader = OutputReader([str(out), str(err)])
    print("printed")
    assert unusable_streams() == []
    buffer = getattr(sys.stdout, end)()
    if buffer is not None:
        buffer.close()
    print("and on", file=sys.stderr)
    assert unusable_streams() == ["stdout"]
    assert reader.take() == b"printed\nand on\n"
    reader.mark()
    sys.stderr.close()


def test_the_end_of_a_stall_is_found_behind_its_warnings(streams):
    """At the default of 1800 s Horovod has warned 29 times before."""
    out, err = streams
    reader = OutputReader([str(out), str(err)])
    assert reader.stall_report() == "", "what is there is from the trial before"
    for minute in range(1, 30):
        write(err, WARNING.format(minute=minute) + "something of the script's own\n")
    assert reader.stall_report() == WARNING.format(minute=29).rstrip("\n")
    write(err, "1: chatter\n" * 300_000)  # 3 MB
    write(err, END)
    write(err, "Traceback\n" * 300_000)
    assert reader.stall_report() == END.rstrip("\n")


def test_a_stall_of_many_ranks_is_described_in_few_lines(streams):
    out, err = streams
    reader = OutputReader([str(out), str(err)])
    header, missing, _rank, last = END.splitlines()
    write(err, "\n".join([header, missing, *(f"{n}!: [allreduce.x]" for n in range(500)), last, "more"]))
    lines = reader.stall_report().splitlines()
    assert lines[:3] == [header, missing, "0!: [allreduce.x]"] and lines[-1] == last
    assert len(lines) == STALL_LINES


def test_the_ranks_that_a_collective_waits_for_are_those_of_messages_since_the_last_question(streams):
    out, err = streams
    reader = OutputReader([str(out), str(err)])
    write(err, WARNING.format(minute=1))
    assert reader.awaited_ranks() == {}, "what is there at the first question may be of any age"
    write(err, "0: [chatter]\n" + WARNING.format(minute=2) + "0: chatter\n")
    assert reader.awaited_ranks() == {1: "allreduce.x, allreduce.y"}
    assert reader.awaited_ranks() == {}
    write(err, END)
    assert reader.awaited_ranks() == {1: "allreduce.x"}
    reader.mark()
    write(err, END)
    assert reader.awaited_ranks() == {}
