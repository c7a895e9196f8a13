"""What a trial makes of the faults of `testbed/faults.py`: runs them and measures.

    python tests/cluster/host_faults.py [--timeout-s 30] [FAULT ...]

It takes four hosts as network namespaces, hence root and the Debian packages of `make test-hosts`. A trial of
two ranks trains on two of three workers while the faults come one after the other; `docs/reliability.md` has
what came out.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "testbed"))

from faults import FAULTS, Fault, heal, kill_rank
from lab import Lab, wait_until
from steady import RESTART_S, Training, steady_training

HOSTS = 4


def run(training: Training, fault: Fault) -> dict[str, Any]:
    """Do the fault to the trial, undo it, and return what came of it, in seconds from its beginning.

    Raises:
        AssertionError: the trial made something else of it.
    """
    lab, host = training.lab, training.hosts[fault.rank]
    told, counted, reports = len(training.errors()), training.counted_failures(), len(training.seen())
    began_s, error_s = time.time(), None
    fault.inject(training, host)
    try:
        if fault.lasts_s is not None:
            time.sleep(fault.lasts_s)  # how long it lasts is what is tested
            heal(lab)
        if fault.new_start:
            training.wait_for_progress()  # the world that is there does not mind
            kill_rank(training, training.hosts[1])
            training.wait_for_failure("rank 1 of 2 on .* died", after=told)
            told += 1
            began_s = time.time()
        if fault.error and (not fault.may_go_on or fails(training, told)):
            start_s = RESTART_S if fault.new_start else 0.0
            training.wait_for_failure(fault.error.format(host=host), after=told, more_s=start_s)
            error_s = round(time.time() - began_s, 1)
            if fault.new_start:
                heal(lab)
        lost = fault.loses_host and error_s is not None
        training.wait_for_progress(without=host if lost and not fault.may_go_on else None)
    finally:
        heal(lab)
    # A start that took longer than `timeout_s` on a busy machine is no answer to the fault.
    new = [error for error in training.errors()[told:] if fault.error or "StartFailed" not in error]
    assert fault.error or not new, f"{fault.name}: the trial failed\n{new}"
    if lost and host in lab.hosts and host not in training.hosts:
        lab.run(host, "ray stop --force", timeout_s=120)
        lab.start_ray_on(host)
    seen = training.seen()[reports - 1 :]
    silence_s, again_s = max(
        (later.time_s - earlier.time_s, later.time_s) for earlier, later in pairwise(seen)
    )
    error = re.search(fault.error.format(host=host), "\n".join(new)) if fault.error else None
    return {
        "fault": fault.name,
        "timeout_s": training.timeout_s,
        "error_s": error_s,
        # The longest time without a report, and when it ended.
        "silence_s": round(silence_s, 1),
        "on_again_s": round(again_s - began_s, 1),
        "counted_failures": training.counted_failures() - counted,
        # From where it is what was expected.
        "error": " ".join(error.string[error.start() :].split())[:300] if error else "",
    }


def fails(training: Training, told: int) -> bool:
    """Wait until the trial fails or continues; return True if it failed."""
    reports = len(training.seen())
    until = training.in_time_s
    wait_until(
        lambda: len(training.errors()) > told or len(training.seen()) > reports,
        timeout_s=until,
        what="the trial to fail or continue",
    )
    return len(training.errors()) > told


def main(arguments: list[str] | None = None) -> int:
    """Run the faults, and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(fault.name for fault in FAULTS))
    parser.add_argument("--timeout-s", type=float, default=30.0, help="of the trial (30)")
    options = parser.parse_args(arguments)
    if unknown := set(options.faults) - {fault.name for fault in FAULTS}:
        parser.error(f"no fault is called {sorted(unknown)[0]!r}")
    chosen = [fault for fault in FAULTS if not options.faults or fault.name in options.faults]
    missed = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        hosts(clocks=any(fault.new_start for fault in chosen)) as lab,
        steady_training(lab, Path(folder) / "driver.log", timeout_s=options.timeout_s) as training,
    ):
        for fault in chosen:
            try:
                print(run(training, fault), flush=True)
            except AssertionError as other:
                missed += 1
                print(f"{fault.name}: {other}", flush=True)
    return 1 if missed else 0


@contextmanager
def hosts(*, clocks: bool = False) -> Iterator[Lab]:
    """A head without CPUs and three workers, whose clocks can be set where that is wanted."""
    with Lab(HOSTS) as lab:
        for host in lab.hosts[1:] if clocks else []:
            lab.give_clock(host)
        lab.start_ray(head_cpus=0)
        yield lab


if __name__ == "__main__":
    raise SystemExit(main())
