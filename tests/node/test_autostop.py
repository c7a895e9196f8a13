"""The watch on the head: no bill for nothing, and nothing ended that is wanted."""

from __future__ import annotations

import pytest

from horovod_tune.node import autostop
from horovod_tune.node.autostop import Situation, end_commands, reason_to_end
from horovod_tune.node.job_files import JobFiles, JobState, all_jobs

HOUR_S = 3600.0
RUNNING = JobState("RUNNING")
OVER = JobState("FAILED", exit_code=1, ended_at_s=10 * HOUR_S)


def seen(now_h: float, *states: JobState, fetched: bool = False, ray_gone_s: float = 0.0) -> Situation:
    return Situation(now_h * HOUR_S, 0.0, states, fetched, ray_gone_s)


@pytest.mark.parametrize(
    ("situation", "reason"),
    [
        (seen(500, RUNNING), None),
        (seen(500, OVER, RUNNING), None),
        (seen(0.5), None),
        (seen(1.1), "no job came in 66 min"),
        (seen(21.9, OVER), None),
        (seen(22.1, OVER), "its results were not fetched"),
        (seen(10.1, OVER, fetched=True), None),
        (seen(10.2, OVER, fetched=True), "its results were fetched"),
        # Ray has died under a running job: somebody may look, but not for ever.
        (seen(5, RUNNING, ray_gone_s=HOUR_S), None),
        (seen(20, RUNNING, ray_gone_s=13 * HOUR_S), "its results were not fetched"),
    ],
)
def test_the_cluster_ends_when_nobody_needs_it(situation: Situation, reason: str | None) -> None:
    said = reason_to_end(situation, grace_s=12 * HOUR_S)
    assert (said is None) == (reason is None) and (reason or "") in (said or "")


def test_it_stays_where_asked_to() -> None:
    assert reason_to_end(seen(9999, OVER), grace_s=0.0) is None
    assert reason_to_end(seen(9999), grace_s=0.0) is None
    kept_up = {"grace_s": 12 * HOUR_S, "fetched_grace_s": 12 * HOUR_S}
    assert reason_to_end(seen(21, OVER, fetched=True), **kept_up) is None


def test_workers_end_before_the_head() -> None:
    for cloud in ("aws", "gcp"):
        workers, head = end_commands(cloud)
        assert workers[:2] == ["ray", "down"] and "--workers-only" in workers
        assert "shutdown" in head or "--delete-this-instance" in head
    assert end_commands("local")[0] == ["ray", "stop"]  # machines that are somebody's own are not shut down


def test_what_ray_said_last_is_kept_for_when_it_has_ended(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pathlib import Path
    from types import SimpleNamespace

    from horovod_tune.node import head_job

    home = Path(str(tmp_path))
    files = JobFiles("mine", home)
    files.folder.mkdir(parents=True)
    (files.folder / "job.json").write_text("{}")
    details = SimpleNamespace(status="SUCCEEDED", driver_exit_code=0, end_time=5000, message="")
    monkeypatch.setattr(autostop, "all_jobs", lambda: all_jobs(home))
    monkeypatch.setattr(autostop, "list_of_jobs", lambda: {"mine": details})
    situation = autostop.look(0.0, 0.0)
    assert situation.states == (JobState("SUCCEEDED", 0, 5.0),) and not situation.all_fetched

    def gone() -> dict[str, object]:
        raise ConnectionError("Ray has ended")

    monkeypatch.setattr(head_job, "list_of_jobs", gone)
    assert head_job.state_of(files) == JobState("SUCCEEDED", 0, 5.0)
    files.note(RUNNING)
    with pytest.raises(ConnectionError):
        head_job.state_of(files)
