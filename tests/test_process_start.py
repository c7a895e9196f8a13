"""A process is known by its pid and its start, even if the wall clock is set while it runs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from horovod_tune.coordinator.workers import end_processes
from horovod_tune.files.process_start import process_start


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="psutil has the boot time from /proc/stat on Linux")
@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_a_process_is_found_again_after_the_clock_was_set(
    process: subprocess.Popen[bytes], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, booted = process_start(process.pid), psutil.boot_time()
    # As the kernel does: the boot time that it reports is the wall clock less the time since the start.
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + seconds)
    assert psutil.Process(process.pid).create_time() - booted == pytest.approx(started + seconds)
    end_processes([(process.pid, started)])
    assert process.poll() is not None, "it was taken for another process"


def test_a_process_that_has_the_pid_of_an_earlier_one_is_not_killed(process: subprocess.Popen[bytes]) -> None:
    since_boot = time.time() - psutil.boot_time()
    assert since_boot - 60.0 < process_start(process.pid) < since_boot + 2.0
    end_processes([(process.pid, process_start(process.pid) - 60.0)])
    assert process.poll() is None
