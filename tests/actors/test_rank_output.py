"""What a training actor reads of its rank's output: new text, its end, and the stall inspector's messages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod_tune.actors import rank_output
from horovod_tune.actors.rank_output import STALL_LINES, RankOutput, missing_ranks
from horovod_tune.actors.rank_process import describe_exit, last_lines, oom_kills

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


@pytest.fixture(autouse=True)
def nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_output, "_print", lambda data, label: None)


@pytest.fixture
def output() -> Iterator[RankOutput]:
    made = RankOutput()
    yield made
    os.close(made.write_end)
    made.close()


def write(output: RankOutput, text: str, *, at_once: int = 1 << 16) -> None:
    """Print ``text`` as a rank does; the pipe is read after every ``at_once`` bytes."""
    data = text.encode()
    for start in range(0, len(data), at_once):
        os.write(output.write_end, data[start : start + at_once])
        output.drain()


def test_what_is_new_is_taken_once(output: RankOutput) -> None:
    write(output, "first\n: colon\n")
    assert output.take() == b"first\n: colon\n"
    assert output.take() == b""
    write(output, "second, without a line end")
    assert output.take() == b"second, without a line end"
    assert output.tail() == b"first\n: colon\nsecond, without a line end"


def test_horovods_stack_of_a_lost_connection_is_in_the_log_only(
    output: RankOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[bytes] = []
    monkeypatch.setattr(rank_output, "_print", lambda data, label: shown.append(data))
    place = "[2026-11-28 21:24:01. 98966: E horovod/common/operations.cc:705] [0]: Horovod background loop"
    lost = f"{place} uncaught exception: [third_party/gloo/gloo/transport/tcp/pair.cc:596] Read error\n"
    other = f"{place} uncaught exception: [third_party/gloo/gloo/context.cc:43] size mismatch\n"
    write(output, f"before\n{lost}{other}after\n")
    assert b"".join(shown).decode() == f"before\n{other}after\n"
    assert lost.encode() in output.take()


def test_long_output_keeps_its_beginning_and_its_end(
    output: RankOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_output.log_files, "TAKE_BYTES", 1000)
    text = "".join(f"line {number}\n" for number in range(10_000))
    write(output, text)
    first, _marker, last = output.take().decode().partition("[horovod_tune: ")
    missing, _, last = last.partition(" bytes of this log are left out here]\n")
    assert first.startswith("line 0\nline 1\n") and last.endswith("line 9998\nline 9999\n")
    assert last.startswith("line ") and len(first) + len(last) <= 1000
    assert len(first) + len(last) + int(missing) == len(text), "all shortenings together"
    assert output.take() == b""


def test_of_output_without_a_line_end_a_bounded_part_is_kept(output: RankOutput) -> None:
    write(output, "x" * (40 << 20))
    assert len(output.tail()) == rank_output.TAIL_BYTES
    assert len(output.take()) <= rank_output.log_files.TAKE_BYTES + 100
    write(output, "y" * 100 + "\n" + END)
    assert output.stall_report() == END.rstrip("\n")


def test_the_output_ends_when_the_last_process_that_could_print_has_ended() -> None:
    output = RankOutput()
    os.write(output.write_end, b"last words")
    os.close(output.write_end)
    output.drain()
    assert not output.is_open and output.take() == b"last words"
    output.close()
    output.drain()


def test_the_end_of_a_stall_is_found_behind_its_warnings(output: RankOutput) -> None:
    """At the default of 1800 s Horovod has warned 29 times before."""
    assert output.stall_report() == ""
    for minute in range(1, 30):
        write(output, WARNING.format(minute=minute) + "something of the script's own\n")
    assert output.stall_report() == WARNING.format(minute=29).rstrip("\n")
    write(output, "1: chatter\n" * 300_000)  # 3 MB
    write(output, END)
    write(output, "Traceback\n" * 300_000)
    assert output.stall_report() == END.rstrip("\n")


@pytest.mark.parametrize("at_once", [1, 7, 64, 200])
def test_a_message_that_arrives_in_pieces_is_whole(output: RankOutput, at_once: int) -> None:
    write(output, "of the script\n" + WARNING.format(minute=1) + "in between\n" + END, at_once=at_once)
    assert output.stall_report() == END.rstrip("\n")
    assert output.awaited_ranks() == {1: "allreduce.x"}
    assert output.awaited_ranks() == {}


def test_a_message_behind_the_end_of_a_line_that_is_being_printed_is_found(output: RankOutput) -> None:
    write(output, "epoch 1: 10% " * 1000 + WARNING.format(minute=1))
    assert output.awaited_ranks() == {1: "allreduce.x, allreduce.y"}
    assert len(output.stall_report().splitlines()) == 3


def test_a_stall_of_many_ranks_is_described_in_few_lines(output: RankOutput) -> None:
    header, missing, _rank, last = END.splitlines()
    lines = [header, missing, *(f"{number}!: [allreduce.x]" for number in range(500)), last, "more"]
    write(output, "\n".join(lines))
    found = output.stall_report().splitlines()
    assert found[:3] == [header, missing, "0!: [allreduce.x]"] and found[-1] == last
    assert len(found) == STALL_LINES


def test_a_long_list_of_collectives_is_cut(output: RankOutput) -> None:
    names = ", ".join(f"allreduce.gradient.{number}" for number in range(1000))
    write(output, WARNING.format(minute=1).replace("allreduce.x", names))
    assert max(map(len, output.stall_report().splitlines()[1:])) == rank_output.LINE_LENGTH


def test_the_ranks_that_a_collective_waits_for_are_those_of_new_messages(output: RankOutput) -> None:
    write(output, "0: [chatter]\n" + WARNING.format(minute=1) + "0: chatter\n")
    assert output.awaited_ranks() == {1: "allreduce.x, allreduce.y"}
    assert output.awaited_ranks() == {}, "of one message only once"
    write(output, END)
    assert output.awaited_ranks() == {1: "allreduce.x"}
    write(output, END)
    output.forget_stalls()
    assert output.awaited_ranks() == {} and output.stall_report() == "", "that was in another world"


def test_ranks_of_a_message_whose_first_line_alone_has_arrived_are_not_missed(output: RankOutput) -> None:
    """Horovod writes the beginning of the line, with the file's name, before the rest."""
    header, *rest = WARNING.format(minute=1).partition("] ")
    write(output, header)
    assert output.awaited_ranks() == {}
    write(output, "".join(rest))
    assert output.awaited_ranks() == {1: "allreduce.x, allreduce.y"}


def test_only_lines_in_the_inspectors_format_name_ranks() -> None:
    lines = ["Missing ranks:", "3: [a, b]", "10!: [c]", "4: []", "5: chatter", "x: [d]", "6: [e] and more"]
    assert missing_ranks(lines) == {3: "a, b", 10: "c", 4: ""}


@pytest.mark.parametrize(
    ("status", "before", "after", "text"),
    [
        (0, 0, 0, "it exited with status 0"),
        (3, 0, 1, "it exited with status 3"),
        (None, 0, 1, "it ended in an unknown way"),
        (-15, 0, 1, "it was ended by SIGTERM"),
        (-11, 0, 0, "it was ended by SIGSEGV (segmentation fault)"),
        (-40, 0, 0, "it was ended by signal 40"),
        (-9, 2, 3, "it was ended by SIGKILL: memory ran out (oom_kill of its cgroup rose from 2 to 3)"),
        (-9, 2, 2, "it was ended by SIGKILL, which another process sent: memory did not run out"),
        (-9, None, 1, "it was ended by SIGKILL: memory ran out (see `dmesg`), or another process sent it"),
        (-9, 1, None, "it was ended by SIGKILL: memory ran out (see `dmesg`), or another process sent it"),
    ],
)
def test_the_end_of_a_process_is_described_with_what_the_kernel_counts(
    status: int | None, before: int | None, after: int | None, text: str
) -> None:
    assert describe_exit(status, before, after) == text


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"/proc/self/cgroup": "0::/a", "/sys/fs/cgroup/a/memory.events": "max 7\noom_kill 3"}, 3),
        # In a container, /sys/fs/cgroup is its own.
        ({"/proc/self/cgroup": "0::/../a", "/sys/fs/cgroup/memory.events": "oom_kill 2"}, 2),
        (
            {
                "/proc/self/cgroup": "5:cpu,cpuacct:/c\n4:memory:/m\n0::/",
                "/sys/fs/cgroup/memory/m/memory.oom_control": "under_oom 0\noom_kill 1",
            },
            1,
        ),
        # Linux before 4.13 does not count.
        (
            {
                "/proc/self/cgroup": "4:memory:/m",
                "/sys/fs/cgroup/memory/m/memory.oom_control": "oom_kill_disable 0\nunder_oom 0",
            },
            None,
        ),
        ({"/proc/self/cgroup": "0::/a"}, None),
        ({}, None),
    ],
)
def test_the_kernels_count_of_a_cgroup_is_found(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], count: int | None
) -> None:
    def read_text(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert oom_kills() == count


def test_the_last_lines_are_few_and_without_native_stacks() -> None:
    numbered = "".join(f"line {number}\n\n" for number in range(100))
    printed = numbered + "z" * 2000 + "\n    @ 0x7f  (unknown)\n"
    first, *others = last_lines(printed.encode()).splitlines()
    assert first == "its last output was" and len(others) == 20
    assert others[0] == "  line 81" and others[-1] == "  " + "z" * 500
    assert last_lines(b"\n \n") == ""
