"""Where people type `horovod-tune launch`: a lab's laptop."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from lab import REPOSITORY, Lab, wait_until

# What a cluster's start may take on a machine that is busy elsewhere.
START_S = 480.0


class Laptop:
    """Where people type."""

    def __init__(self, lab: Lab, logs: Path) -> None:
        self.lab, self._logs = lab, logs
        lab.run("laptop", f"cp -r {REPOSITORY}/tests/cluster/jobs/launched ~/project", timeout_s=60)

    def types(self, command: str, *, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
        return self.lab.run("laptop", f"cd ~/project; {command}", timeout_s=timeout_s, check=False)

    def starts(self, command: str, name: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = self._logs / f"{name}.log"
        line = f"cd ~/project; exec horovod-tune {command}"
        return self.lab.start("laptop", ["bash", "-lc", line], log), log

    def signals(self, pattern: str, number: signal.Signals) -> None:
        self.lab.run("laptop", ["pkill", f"-{int(number)}", "-f", pattern], timeout_s=30)


def wait_for(log: Path, text: str, process: subprocess.Popen[bytes], *, timeout_s: float = START_S) -> None:
    def there() -> bool:
        assert text in log.read_text() or process.poll() is None, log.read_text()[-6000:]
        return text in log.read_text()

    try:
        wait_until(there, timeout_s=timeout_s, what=repr(text))
    except AssertionError as late:
        raise AssertionError(f"{late}\n{log.read_text()[-6000:]}") from late
