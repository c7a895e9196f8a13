"""What `cluster/slurm.sbatch` does near the time limit, with stand-ins for Slurm, Ray and Python."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from processes import stand_in

SBATCH = Path(__file__).resolve().parents[2] / "cluster" / "slurm.sbatch"
WAIT_S = 240.0

SRUN = """
trap 'exit 0' TERM
while :; do sleep 0.1; done
"""
SCONTROL = """
case "$1 $2" in "show hostnames") echo n1;; esac
echo "scontrol $*" >> "$NOTES"
"""
PYTHON = """
case "$*" in
  *secrets*) echo token ;;
  "- n1"*) echo 127.0.0.1 20000 20001 ;;
  "- "*) [ "$MOMENT" != starting ] || { echo starts >> "$NOTES"; exec sleep 600; } ;;
  *announce_end*) echo announced >> "$NOTES"; exit "$ANNOUNCES" ;;
  *) trap 'echo stopped >> "$NOTES"; exit 0' USR1
     echo runs >> "$NOTES"
     while :; do sleep 0.05; done ;;
esac
"""


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON, "ray": "", "horovod-tune": ""}
    for name, text in programs.items():
        stand_in(folder, name, text)
    return folder


@pytest.mark.parametrize(
    ("announces", "resumes", "moment"),
    [
        (True, True, "training"),
        (False, True, "training"),
        (True, False, "training"),
        (True, True, "starting"),
        pytest.param(True, True, "between two commands", marks=pytest.mark.slow),
    ],
)
def test_trials_save_before_the_search_is_stopped_and_the_job_is_requeued(
    tmp_path: Path, commands: Path, announces: bool, resumes: bool, moment: str
) -> None:
    notes = tmp_path / "notes"
    (tmp_path / "tune.py").write_text("tuner = resume_or_start()" if resumes else "tuner = Tuner()")
    environment = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "NOTES": str(notes),
        "ANNOUNCES": "0" if announces else "1",
        "MOMENT": moment,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "SAVE_S": "0.2",
        "STOP_TIMEOUT_S": "60",
    }
    # With a pause before each command of the script the signal comes before it waits.
    pauses = "PS4='$(sleep 0.1)'; set -x;" if moment == "between two commands" else ""
    command = ["bash", "-c", f'{pauses} source "$0" "$@"', str(SBATCH), "python", "tune.py"]
    job = subprocess.Popen(command, env=environment, cwd=tmp_path, start_new_session=True)
    try:
        end = time.monotonic() + WAIT_S
        began = "starts" if moment == "starting" else "runs"
        while not notes.exists() or began not in notes.read_text():
            assert job.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=WAIT_S) == (0 if resumes else 143)
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait(timeout=WAIT_S)
    said = [line for line in notes.read_text().splitlines() if not line.startswith("scontrol")]
    assert said == (["starts"] if moment == "starting" else ["runs", "announced", "stopped"])
    assert ("scontrol requeue 7" in notes.read_text()) == resumes
