"""A TPU v2 or v3 has two ranks in a process, each in a thread: the end of one does not affect the other."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from processes import run_python
from ray import tune

import horovod_tune
from horovod_tune.errors import NotInTraining
from horovod_tune.function.with_parameters import pack_values, provided
from horovod_tune.messages import Finished, RankInfo, Report, TrialRequest
from horovod_tune.rank.training import Training
from horovod_tune.session import session
from horovod_tune.session.session import Session

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Rank:
    """One of two ranks in this process, whose reports are released at once."""

    def __init__(self, rank: int, function: Any, place: Path, packed: str | None) -> None:
        self.messages: list[Any] = []
        packed_function, config = cloudpickle.dumps(function), cloudpickle.dumps({})
        request = TrialRequest(
            *("id", "name", str(place), str(place), "experiment", config, packed_function), parameters=packed
        )
        self.session = Session(
            request, RankInfo(rank, 2, rank, 2, 0, 1), send=self.take, fetch=lambda place: place
        )
        self.training = Training(self.session, host="here", send=self.take, load=lambda: None)
        self.thread = threading.Thread(target=self.training.run, daemon=True)

    def take(self, message: Any) -> None:
        self.messages.append(message)
        if isinstance(message, Report):
            self.session.acknowledge(message.index)


class Shared:
    """Synchronises the ranks, which reach it through `sys`, since functions are pickled by value."""

    def __init__(self) -> None:
        self.both_began = threading.Barrier(2, timeout=60)
        self.ranks: list[Rank] = []

    def begin(self) -> int:
        """Return the caller's rank when both ranks have begun; on rank 1 when rank 0 has ended, too."""
        self.both_began.wait()
        rank = session.current().rank_info.rank  # type: ignore[union-attr]
        if rank == 1:
            self.ranks[0].thread.join(60)
        return rank


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Shared:
    monkeypatch.setenv("RAY_CHDIR_TO_TRIAL_DIR", "0")
    made = Shared()
    monkeypatch.setattr(sys, "two_ranks", made, raising=False)
    return made


def run_two(shared: Shared, function: Any, place: Path, packed: str | None = None) -> list[Rank]:
    """Run ``function`` on both ranks until they have ended."""
    shared.ranks = [Rank(rank, function, place, packed) for rank in (0, 1)]
    for each in shared.ranks:
        each.thread.start()
    for each in shared.ranks:
        each.thread.join(60)
        assert not each.thread.is_alive()
    return shared.ranks


def test_the_second_rank_still_reports_when_the_first_has_ended(shared: Shared, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        rank = sys.two_ranks.begin()  # type: ignore[attr-defined]
        live = session.current()
        live.acknowledge(2)
        horovod_tune.report(rank=rank)
        tune.report({"rank": rank})
        assert (live.rank_info.rank, live.reports) == (rank, 2)
        assert tune.get_context().get_world_rank() == rank
        assert rank == 0 or os.environ["HOROVOD_TUNE_RANK"] == f"1:{os.getpid()}"

    first, second = run_two(shared, train, tmp_path)
    assert first.messages == [Report(1, {"rank": 0}, None), Report(2, {"rank": 0}, None), Finished(0)]
    assert second.messages == [Finished(1)]
    assert "HOROVOD_TUNE_RANK" not in os.environ
    with pytest.raises(NotInTraining):
        horovod_tune.report(rank=2)
    assert tune.get_context().get_trial_id() is None, "both trials have ended for Tune, too"


def test_the_second_rank_keeps_its_parameters_when_the_first_has_ended(
    shared: Shared, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    packed.write_bytes(pack_values({"data": {"seen": []}}))

    def train(config: dict[str, Any], data: dict[str, Any]) -> None:
        data["seen"].append(sys.two_ranks.begin())  # type: ignore[attr-defined]
        assert provided()["data"] == {"seen": [session.current().rank_info.rank]}

    bound = horovod_tune.with_parameters(train, data={"seen": []})
    for each in run_two(shared, bound, tmp_path, str(packed)):
        assert each.messages == [Finished(each.session.rank_info.rank)]
        with pytest.raises(NotInTraining, match="were not sent with the function"):
            provided()


@pytest.mark.processes
def test_what_is_imported_before_the_first_trial_or_by_two_ranks_at_once_has_our_changes() -> None:
    code = """if True:
        import threading, time
        from horovod_tune.ray_compat import tune_session

        def slowly(module):
            time.sleep(0.5)
            module.setup_mlflow = "ours"

        tune_session._set_up_mlflow_once = slowly
        tune_session.prepare_rank_process()
        from ray.tune import report  # as a module does that a trial's config needs

        found = []
        def rank():
            from ray.air.integrations.mlflow import setup_mlflow
            found.append(setup_mlflow)

        ranks = [threading.Thread(target=rank) for _ in range(20)]
        for each in ranks:
            each.start()
            time.sleep(0.05)
        for each in ranks:
            each.join()
        print(report.__code__.co_name, set(found))
    """
    assert run_python("-c", code).stdout.split() == ["replacement", "{'ours'}"]
