"""Measures the seconds until each fault of docs/reliability.md is detected, or what it costs to survive it.

    python -m benchmarks.faults                 # all: about ten minutes; `disk` needs root
    python -m benchmarks.faults kill stall      # some

Prints one row of CSV for each fault: how its trial ended, the seconds from the fault until Tune detects it
and until rank 0's next report, and the error's first lines. Each is a trial of 2 ranks (an elastic one of 3)
whose rank 1 causes the fault in its third step. `driver` and `raylet` kill a search's driver and Ray's
daemon, and report the seconds until no process of theirs is left but Ray's own two agents.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

STEPS = 6
TIMEOUT_S = 10.0
PAUSE_S = 3.0
FIELDS = ("fault", "status", "s_to_error", "s_to_next_report", "error")

# The trainable's settings that are not the defaults; `harm` causes most faults.
FAULTS: dict[str, dict[str, Any]] = {
    "raise": {},
    "memory": {},
    "sys.exit": {},
    "exit": {},
    "segfault": {},
    "kill": {},
    "pause": {},
    "stop": {"timeout_s": TIMEOUT_S},
    "stall": {"stall_timeout_s": TIMEOUT_S},
    "stranger": {},
    "disk": {},
    "coordinator": {},
    "elastic kill": {"min_workers": 2},
    # A new rank takes longer than that to start.
    "too few ranks": {"min_workers": 3, "min_workers_timeout_s": 0.5},
}
OF_DRIVERS = {"driver": "the driver", "raylet": "Ray's daemon"}


def harm(fault: str) -> None:
    """Runs in a rank: cause the fault."""
    pid = os.getpid()
    match fault:
        case "raise":
            raise ValueError("the data is broken")
        case "memory":
            bytearray(1 << 60)
        case "sys.exit":
            sys.exit("no licence")
        case "exit":
            os._exit(3)
        case "segfault":
            import ctypes

            ctypes.string_at(0)
        case "kill" | "elastic kill" | "too few ranks":
            os.kill(pid, signal.SIGKILL)
        case "pause":
            subprocess.Popen(["sh", "-c", f"sleep {PAUSE_S}; kill -CONT {pid}"])
            os.kill(pid, signal.SIGSTOP)
        case "stop":
            os.kill(pid, signal.SIGSTOP)
        case "stall":
            while True:
                time.sleep(0.1)


def call_on_other_ranks() -> int:
    """Runs in a rank: connect unauthenticated to the other ranks' ports; return the number of connections."""
    import socket

    calls = 0
    for process in psutil.process_iter(["name"]):
        if process.pid == os.getpid() or process.info["name"] != "horovod_rank":
            continue
        with contextlib.suppress(psutil.Error, OSError):
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    with socket.create_connection(("127.0.0.1", each.laddr.port), timeout=5) as stranger:
                        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                        calls += 1
    return calls


def train(config: dict[str, Any]) -> None:
    import horovod.torch as hvd
    import torch

    from horovod_tune import commit, get_checkpoint, get_state, report

    folder, fault, is_elastic = Path(config["folder"]), config["fault"], config["is_elastic"]
    is_first_run = not (folder / "at").exists()
    if fault == "stranger" and os.environ["HOROVOD_RANK"] == "1":
        ends = time.monotonic() + 5  # rank 0 listens for this one
        while time.monotonic() < ends:
            call_on_other_ranks()
        (folder / "at").write_text(repr(time.time()))
    hvd.init()
    step = (get_state() or {"step": 0})["step"] if is_elastic else 0
    if (checkpoint := get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            step = int(Path(directory, "step").read_text())
    while step < STEPS:
        step += 1
        if step == 3 and is_first_run and hvd.rank() == 1 and not (folder / "at").exists():
            (folder / "at").write_text(repr(time.time()))
            harm(fault)
        hvd.allreduce(torch.ones(1), name="step")
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            if fault == "disk" and step == 3 and hvd.rank() == 0:
                Path(directory, "large").write_bytes(bytes(64 << 20))
            report({"step": step, "at": time.time()}, checkpoint=directory)
        if is_elastic:
            commit({"step": step})
        if fault == "coordinator" and step == 2 and is_first_run:
            time.sleep(5)  # in which the driver kills it


def measure(fault: str, folder: Path) -> dict[str, Any]:
    """Run one trial with one fault, in the current Ray session."""
    from ray import tune

    from horovod_tune import DistributedTrainableCreator

    class Watch(tune.Callback):
        """Records when Tune detects the failure; kills the coordinator if that is the fault."""

        failed_at = 0.0

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **_: Any) -> None:
            if fault == "coordinator" and result["step"] == 2 and not (folder / "at").exists():
                (folder / "at").write_text(repr(time.time()))
                os.kill(result["pid"], signal.SIGKILL)

        def on_trial_error(self, *_: Any, **__: Any) -> None:
            self.failed_at = self.failed_at or time.time()

        on_trial_recover = on_trial_error

    watch = Watch()
    is_elastic = "min_workers" in FAULTS[fault]
    storage = folder / "storage"
    storage.mkdir()
    if fault == "disk":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", storage], check=True)
    try:
        analysis = tune.run(
            DistributedTrainableCreator(train, num_slots=3 if is_elastic else 2, **FAULTS[fault]),
            config={"folder": str(folder), "fault": fault, "is_elastic": is_elastic},
            max_failures=1 if fault in ("kill", "coordinator") else 0,
            callbacks=[watch],
            storage_path=str(storage),
            verbose=0,
            raise_on_failed_trial=False,
        )
        (trial,) = analysis.trials
        at = float((folder / "at").read_text())
        return row_of(fault, trial.status, Path(trial.path), at, watch.failed_at)
    finally:
        if fault == "disk":
            subprocess.run(["umount", storage], check=True)


def row_of(fault: str, status: str, trial: Path, at: float, failed_at: float) -> dict[str, Any]:
    """Read a trial's folder; `at` and `failed_at`, in s since the epoch, are the fault and its detection."""
    error, results = trial / "error.txt", trial / "result.json"
    reports = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    after = [report["at"] - at for report in reports if report["at"] > at]
    row: dict[str, Any] = {"fault": fault, "status": status}
    if after:
        row["s_to_next_report"] = f"{after[0]:.1f}"
    if error.exists():
        row["s_to_error"] = f"{failed_at - at:.1f}"
        lines = [line.strip() for line in error.read_text().splitlines() if line.strip()]
        first = next((i for i, line in enumerate(lines) if "rank " in line or "coordinator" in line), 0)
        row["error"] = " | ".join(lines[first : first + 3])[:300]
    return row


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes of the Ray session whose files are in ``folder``, except its two agents."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        with contextlib.suppress(psutil.Error):
            is_ours = str(folder) in command or any(
                each.path.startswith(str(folder)) for each in process.open_files()
            )
            if is_ours and "Agent" not in command and process.pid != os.getpid():
                found.append(process)
    return found


def measure_driver(fault: str, folder: Path) -> dict[str, Any]:
    """Kill the driver of a search, or Ray's daemon, once a trial reports."""
    driver = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.faults", "--search-in", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ends = time.monotonic() + 120
        while not list(folder.rglob("result.json")) and time.monotonic() < ends:
            time.sleep(0.1)
        time.sleep(2)
        before = processes_of(folder)
        (raylet,) = [each for each in before if each.name() == "raylet"]
        (driver if fault == "driver" else raylet).kill()
        began = time.monotonic()
        while (left := processes_of(folder)) and time.monotonic() < began + 120:
            if driver.poll() is not None and left == [psutil.Process()]:
                break
            time.sleep(0.1)
        row: dict[str, Any] = {"fault": fault, "status": f"{len(before) - len(left)} of {len(before)} ended"}
        return {**row, "s_to_error": f"{time.monotonic() - began:.1f}", "error": f"driver: {driver.poll()}"}
    finally:
        driver.kill()
        driver.wait(timeout=30)
        for process in processes_of(folder):
            process.kill()


def search_without_end(folder: Path) -> None:
    """Run the search whose driver is killed."""
    import ray
    from ray import tune

    from horovod_tune import DistributedTrainableCreator

    def train(config: dict[str, Any]) -> None:
        import horovod.torch as hvd

        from horovod_tune import report

        hvd.init()
        while True:
            report(size=hvd.size())
            time.sleep(0.1)

    ray.init("local", num_cpus=2, include_dashboard=False, _temp_dir=str(folder))
    tune.run(DistributedTrainableCreator(train, num_slots=2), storage_path=str(folder / "results"))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    every = [*FAULTS, *OF_DRIVERS]
    parser.add_argument("faults", nargs="*", metavar="fault", help=f"one of {', '.join(every)}")
    parser.add_argument("--search-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.search_in:
        search_without_end(options.search_in)
        return
    if unknown := set(options.faults) - set(every):
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    import ray

    table = csv.DictWriter(sys.stdout, FIELDS, lineterminator="\n")
    table.writeheader()
    for fault in options.faults or every:
        # Short, because Ray keeps sockets in it, whose paths are limited to 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix="hf", dir="/tmp"))
        try:
            if fault in OF_DRIVERS:
                row = measure_driver(fault, folder)
            else:
                if not ray.is_initialized():
                    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
                row = measure(fault, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        table.writerow(row)
        sys.stdout.flush()
    ray.shutdown()


if __name__ == "__main__":
    main()
