"""A search whose processes are killed and stopped at random, and the account of what became of every trial.

    python tests/soak/soak.py fixed --seconds 600 --seed 1
    python tests/soak/soak.py elastic --seconds 600

Every rank checks what it gets back: a checkpoint's or a committed state's checksum, and that all ranks start
at the same epoch. New trials start until the time is up. At the end each trial must have all of its epochs,
or more failures than it may have, and no process, socket or half-written file of the search may be left.
Prints a summary as JSON; exits 1 where something does not add up.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

MARK = "HOROVOD_TUNE_SOAK"
MAX_FAILURES = 3
EXIT_TIMEOUT_S = 60.0


def checksum(epoch: int, content: bytes) -> str:
    return hashlib.sha256(content + str(epoch).encode()).hexdigest()


def note_process(config: dict[str, Any]) -> None:
    Path(config["folder"], f"rank_{os.getpid()}").touch()


def train_fixed(config: dict[str, Any]) -> None:
    """Train with a checkpoint of 1 MB an epoch."""
    import horovod.torch as hvd
    import torch

    from horovod_tune import get_checkpoint, report

    note_process(config)
    hvd.init()
    epoch = 0
    checkpoint = get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            facts = json.loads(Path(directory, "facts.json").read_text())
            content = Path(directory, "content").read_bytes()
        assert facts["checksum"] == checksum(facts["epoch"], content), "a broken checkpoint"
        epoch = facts["epoch"]
    assert len(set(hvd.allgather_object(epoch))) == 1, "ranks start apart"
    while epoch < config["epochs"]:
        epoch += 1
        total = hvd.allreduce(torch.full((64,), 1.0 + hvd.rank()), op=hvd.Sum)
        assert (total == hvd.size() * (hvd.size() + 1) / 2).all()
        time.sleep(config["epoch_s"])
        with tempfile.TemporaryDirectory() as directory:
            if hvd.rank() == 0:
                content = os.urandom(1 << 20)
                Path(directory, "content").write_bytes(content)
                facts = {"epoch": epoch, "checksum": checksum(epoch, content)}
                Path(directory, "facts.json").write_text(json.dumps(facts))
            report({"epoch": epoch, "loss": 1.0 / epoch}, checkpoint=directory if hvd.rank() == 0 else None)


def train_elastic(config: dict[str, Any]) -> None:
    """Sum the epochs' numbers in a state of 1 MB that is committed every epoch."""
    import horovod.torch as hvd
    import torch

    from horovod_tune import commit, get_state, report

    note_process(config)
    hvd.init()
    state = get_state() or {"epoch": 0, "sum": 0.0, "content": b"", "checksum": checksum(0, b"")}
    assert state["checksum"] == checksum(state["epoch"], state["content"]), "a broken state"
    while state["epoch"] < config["epochs"]:
        epoch = state["epoch"] + 1
        mean = hvd.allreduce(torch.full((64,), float(epoch), dtype=torch.float64))
        assert (mean == epoch).all()
        time.sleep(config["epoch_s"])
        content = epoch.to_bytes(4, "big") * (1 << 18)
        total = state["sum"] + mean[0].item()
        state = {"epoch": epoch, "sum": total, "content": content, "checksum": checksum(epoch, content)}
        report({"epoch": epoch, "sum": total, "loss": 1.0 / epoch})
        commit(state)


class Harm:
    """Kills and stops processes of a search at random moments, after they have made some progress."""

    def __init__(
        self, folder: Path, *, seed: int, every_s: float, seconds: float, coordinators: bool
    ) -> None:
        self.done: collections.Counter[str] = collections.Counter()
        self.coordinator_pids: set[int] = set()
        self._folder, self._random = folder, random.Random(seed)
        self._every_s, self._seconds, self._coordinators = every_s, seconds, coordinators
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        ends = time.monotonic() + self._seconds
        while time.monotonic() < ends and not self._over.wait(self._random.expovariate(1 / self._every_s)):
            kind = "coordinator" if self._coordinators and self._random.random() < 0.3 else "rank"
            pids = self.coordinator_pids if kind == "coordinator" else self._rank_pids()
            alive = sorted(pid for pid in pids if is_of_this_soak(pid))
            if not alive:
                continue
            pid = self._random.choice(alive)
            if self._random.random() < 0.75:
                self._signal(pid, signal.SIGKILL, f"{kind} killed")
            else:
                self._signal(pid, signal.SIGSTOP, f"{kind} stopped for some seconds")
                self._over.wait(self._random.uniform(1, 5))
                self._signal(pid, signal.SIGCONT, "")

    def _rank_pids(self) -> set[int]:
        return {int(path.name[5:]) for path in self._folder.glob("rank_*")}

    def _signal(self, pid: int, number: signal.Signals, what: str) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        if what:
            self.done[what] += 1


def is_of_this_soak(pid: int) -> bool:
    """Return True if a process carries this soak's mark: pids are used again."""
    try:
        return f"{MARK}={os.environ[MARK]}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def processes_left() -> list[str]:
    """Return the command lines of this soak's processes, this one left out."""
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and is_of_this_soak(int(entry.name)):
            left.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120])
    return left


def problems_of(trial: Any, rows: list[dict[str, Any]], *, kind: str, epochs: int) -> list[str]:
    """Return what does not add up in one trial. Pure but for the attributes of ``trial``."""
    name, found = trial.trial_id, []
    if trial.status == "TERMINATED":
        if {row["epoch"] for row in rows} != set(range(1, epochs + 1)) or rows[-1]["epoch"] != epochs:
            found.append(f"{name} ended without all of its epochs: {[row['epoch'] for row in rows]}")
    elif trial.status != "ERROR" or trial.num_failures <= MAX_FAILURES:
        found.append(f"{name} is {trial.status} after {trial.num_failures} failure(s)")
    for before, row in itertools.pairwise(rows):
        if row["epoch"] > before["epoch"] + 1:
            found.append(f"{name} lost the epochs between {before['epoch']} and {row['epoch']}")
        if kind == "fixed" and row["epoch"] < before["epoch"]:
            found.append(f"{name} repeats more than one epoch: {row['epoch']} after {before['epoch']}")
    if kind == "elastic" and any(row["sum"] != sum(range(row["epoch"] + 1)) for row in rows):
        found.append(f"{name} has another sum than an undisturbed trial")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["fixed", "elastic"])
    parser.add_argument("--trials", type=int, default=10_000, help="the most trials")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--epoch-s", type=float, default=0.3, help="seconds that an epoch sleeps")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long harm and new trials continue")
    parser.add_argument("--every-s", type=float, default=5.0, help="mean time between two harms")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ[MARK] = uuid.uuid4().hex
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        summary = soak(arguments, Path(folder))
    ends = time.monotonic() + EXIT_TIMEOUT_S
    while (left := processes_left()) and time.monotonic() < ends:
        time.sleep(0.5)
    summary["problems"] += [f"a process is left: {line}" for line in left]
    print(json.dumps(summary, indent=1))
    return 1 if summary["problems"] else 0


def soak(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the search, and return the summary."""
    import ray
    from ray import tune
    from ray.tune.search import Searcher

    from horovod_tune import DistributedTrainableCreator

    is_elastic = arguments.kind == "elastic"
    harm = Harm(
        folder,
        seed=arguments.seed,
        every_s=arguments.every_s,
        seconds=arguments.seconds,
        coordinators=not is_elastic,
    )

    class Coordinators(tune.Callback):
        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **_: Any) -> None:
            # Nothing is harmed before the first report: a machine that starts slowly is no fault.
            if not harm.coordinator_pids:
                harm.start()
            harm.coordinator_pids.add(result["pid"])

    class UntilTimeIsUp(Searcher):
        """Random configurations; none any more when the time is up."""

        def set_search_properties(self, metric: Any, mode: Any, config: dict[str, Any], **_: Any) -> bool:
            self._config, self._random = config, random.Random(arguments.seed)
            return True

        def suggest(self, trial_id: str) -> Any:
            if time.monotonic() - began > arguments.seconds:
                return Searcher.FINISHED
            return {**self._config, "x": self._random.random()}

        def on_trial_complete(self, *_: Any, **__: Any) -> None: ...

    sizes = {"num_slots": 3, "min_workers": 1} if is_elastic else {"num_slots": 2}
    trainable = DistributedTrainableCreator(train_elastic if is_elastic else train_fixed, **sizes)
    ray.init("local", num_cpus=6 if is_elastic else 4, include_dashboard=False, log_to_driver=False)
    began = time.monotonic()
    try:
        analysis = tune.run(
            trainable,
            config={
                "folder": str(folder),
                "epochs": arguments.epochs,
                "epoch_s": arguments.epoch_s,
            },
            search_alg=UntilTimeIsUp(),
            metric="loss",
            mode="min",
            num_samples=arguments.trials,
            max_failures=MAX_FAILURES,
            storage_path=str(folder / "results"),
            name="soak",
            callbacks=[Coordinators()],
            verbose=0,
            raise_on_failed_trial=False,
        )
        folders = {trial.trial_id: Path(trial.path) for trial in analysis.trials}
    finally:
        harm.stop()
        ray.shutdown()
    problems, repeated = [], 0
    for trial in analysis.trials:
        path = folders[trial.trial_id] / "result.json"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        problems += problems_of(trial, rows, kind=arguments.kind, epochs=arguments.epochs)
        repeated += sum(row["epoch"] <= before["epoch"] for before, row in itertools.pairwise(rows))
    problems += [f"{path} is left" for path in folder.rglob("*.part")]
    summary = {
        "kind": arguments.kind,
        "seconds": round(time.monotonic() - began),
        "trials": dict(collections.Counter(trial.status for trial in analysis.trials)),
        "failures": sum(trial.num_failures for trial in analysis.trials),
        "harmed": dict(harm.done),
        "epochs repeated": repeated,
        "problems": problems,
    }
    return summary


if __name__ == "__main__":
    sys.exit(main())
