"""What a launch keeps on the head of a cluster: one folder a job, under ``~/.horovod-tune/jobs``.

``job.json`` is what was submitted, ``work/`` the working directory, ``experiments.jsonl`` where the script's
experiments are (one line each), ``state.json`` what the watch last saw of the job, ``fetched`` says that the
results are on the machine that launched it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Of this package on every machine of a cluster.
HOME = Path("~/.horovod-tune")

# Names the file that the script's process adds its experiments to.
EXPERIMENTS_VARIABLE = "HOROVOD_TUNE_EXPERIMENTS"


@dataclass(frozen=True)
class JobState:
    """What Ray says of a job."""

    # Ray's word: PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED; or LOST when Ray has gone with it.
    status: str
    exit_code: int | None = None
    # Seconds since 1970.
    ended_at_s: float | None = None
    message: str = ""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.status not in ("PENDING", "RUNNING")


class JobFiles:
    """The folder of one job on the head."""

    def __init__(self, job: str, home: Path | None = None) -> None:
        self.job = job
        self.folder = (home or HOME.expanduser()) / "jobs" / job

    @property
    def work(self) -> Path:
        """The working directory that was shipped."""
        return self.folder / "work"

    @property
    def experiments(self) -> Path:
        """One JSON line for each experiment that the script started."""
        return self.folder / "experiments.jsonl"

    @property
    def fetched(self) -> Path:
        """Present once the results have been fetched and checked."""
        return self.folder / "fetched"

    def submission(self) -> dict[str, Any]:
        """Return what was submitted.

        Raises:
            FileNotFoundError: there is no such job here.
        """
        return dict(json.loads((self.folder / "job.json").read_text()))

    def note(self, state: JobState) -> None:
        """Keep what is known of the job for the time when Ray has ended."""
        coming = self.folder / f".state.{os.getpid()}"
        coming.write_text(json.dumps(asdict(state)))
        os.replace(coming, self.folder / "state.json")

    def noted(self) -> JobState | None:
        """Return what was last kept, or None."""
        try:
            return JobState(**json.loads((self.folder / "state.json").read_text()))
        except FileNotFoundError:
            return None


def all_jobs(home: Path | None = None) -> list[JobFiles]:
    """Return every job that was submitted on this machine, in the order of their names."""
    folder = (home or HOME.expanduser()) / "jobs"
    return [JobFiles(path.parent.name, home) for path in sorted(folder.glob("*/job.json"))]
