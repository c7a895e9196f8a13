"""Runs in each rank: the session behind `report()`, `get_checkpoint()` and their namesakes in ray.tune.

Step 1 of 5 of a report's path: `Session.report()` passes it to `actors/training_actor.py` or
`backends/torch_xla/host_actor.py`, and waits until Tune has decided.
"""

from __future__ import annotations

import numbers
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from horovod_tune.errors import (
    HorovodTuneError,
    MetricsError,
    NotElastic,
    NotInTraining,
    NotSynchronised,
    encodable,
)
from horovod_tune.messages import (
    CheckpointPlace,
    FailureKind,
    LongWait,
    NeedsWorld,
    RankInfo,
    Report,
    TrialRequest,
)
from horovod_tune.session.reported_values import checkpoint_path, merge_metrics, plain_metrics

if TYPE_CHECKING:
    import torch
    from ray.tune import Checkpoint

# The file in a checkpoint that was made from a commit of an elastic trial, see
# `committed_state.CommittedState.dump`.
COMMIT_FILE = "horovod_tune_commit.pkl"
# Set to RANK:PID while a rank's training function runs, for the processes that the function starts.
RANK_VARIABLE = "HOROVOD_TUNE_RANK"
# How long a rank waits in `report` before it says so: rank 0 may never report as often.
LONG_WAIT_S = 5.0


class StopTraining(BaseException):
    """Unwinds the training function of a stopped trial; `except Exception` does not catch it."""


class WorldBroken(Exception):
    """The rank's world is broken or changing, and can no longer be used."""


class Session:
    """One rank's side of one trial.

    Args:
        send: carries rank 0's reports, and every rank's `NeedsWorld`, to the coordinator.
        fetch: turns a CheckpointPlace into a ``ray.tune.Checkpoint`` that this rank can read.
        gpu, device: those of `TrialWorld`.
        committed: the rank's `committed_state.CommittedState`; None in a TPU trial.
        world_error: makes the error that `report` raises in a broken world.
        describe_failure: returns the kind of the function's failure, and text to add to its traceback.
        before_first_report: called before rank 0's first report.
    """

    def __init__(
        self,
        request: TrialRequest,
        rank_info: RankInfo,
        *,
        send: Callable[[Report | NeedsWorld | LongWait], None],
        fetch: Callable[[CheckpointPlace], Checkpoint],
        gpu: int | None = None,
        device: str = "cpu",
        committed: Any = None,
        world_error: Callable[[str], BaseException] = WorldBroken,
        describe_failure: Callable[[BaseException], tuple[FailureKind, str]] = (
            lambda error: (FailureKind.RAISED, "")
        ),
        before_first_report: Callable[[], None] = lambda: None,
    ) -> None:
        self.request = request
        self.rank_info = rank_info
        self.pid = os.getpid()
        self.gpu, self.device, self.committed = gpu, device, committed
        self.world_error, self.describe_failure = world_error, describe_failure
        self._send, self._fetch, self._before_first_report = send, fetch, before_first_report
        # Where the newest checkpoint is stored, and the checkpoint once it has been fetched.
        self._place = request.checkpoint
        self._checkpoint: Checkpoint | None = None
        # The checkpoints of rank 0's reports that this rank, which may lag behind, has not reached yet.
        self._stored: dict[int, CheckpointPlace] = {}
        # The number of this rank's last report.
        self.reports = request.reports
        self._released = float(request.reports)
        self._stopped = False
        # True if this rank has called `report` in this trial.
        self.has_reported = False
        self.world_number = request.world_number
        self._world_is_broken = False
        # True if a collective failed without raising: the function may have used its invalid result.
        self.failed_unnoticed = False
        # The objects of `with_parameters`, once the function has asked for them.
        self.parameters: dict[str, Any] = {}
        self._condition = threading.Condition()

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
        """On rank 0, send the metrics; every rank then waits until Tune decides that the trial continues."""
        refuse_in_child_process("report()", self)  # a fork has a copy of this session
        plain = plain_metrics(metrics)
        # Only rank 0's is stored: another host may not have the directory.
        path = checkpoint_path(checkpoint) if self.rank_info.rank == 0 else None
        if self._world_is_broken:
            raise self.world_error("report() was called in a world that has lost a rank")
        if self.rank_info.rank == 0 and not self.has_reported:
            self._before_first_report()
        self.reports += 1
        self.has_reported = True
        if self.rank_info.rank == 0:
            self._send(Report(self.reports, plain, path))
        with self._condition:
            if not self._condition.wait_for(self._report_is_over, LONG_WAIT_S) and self.rank_info.rank:
                self._send(LongWait(self.rank_info.rank, self.reports))
            # No timeout here: the coordinator releases every rank when the trial ends in any way, and
            # this process dies with the coordinator.
            self._condition.wait_for(self._report_is_over)
            if self._stopped:
                raise StopTraining
            if self._released < self.reports:
                raise self.world_error("the world has changed while report() was waiting")
            self._use_stored()

    def _report_is_over(self) -> bool:
        return self._stopped or self._world_is_broken or self._released >= self.reports

    def _use_stored(self) -> None:
        """Make the newest checkpoint the one that is stored with the newest report up to `reports`.

        Not a later one: a rank that lags behind rank 0 must not get a newer one than rank 0 had at the same
        report.
        """
        due = [report for report in self._stored if report <= self.reports]
        if due:
            self._place, self._checkpoint = self._stored[max(due)], None
        for report in due:
            del self._stored[report]

    @property
    def trial_has_reported(self) -> bool:
        """True if the trial has made a report, on this or another rank, since this rank joined it."""
        with self._condition:
            return self.has_reported or self._released > self.request.reports

    def acknowledge(self, index: float, checkpoint: CheckpointPlace | None = None) -> None:
        """Release reports up to ``index``; ``checkpoint`` is where the newest checkpoint is stored."""
        with self._condition:
            self._released = max(self._released, index)
            if checkpoint is not None and (self._place is None or checkpoint.report > self._place.report):
                self._stored[checkpoint.report] = checkpoint
            self._condition.notify_all()

    def break_world(self, *, was_unnoticed: bool = False) -> None:
        """Make a pending report raise `world_error`, since a rank of this world is lost.

        ``was_unnoticed`` means that a collective failed on this rank without an error.
        """
        with self._condition:
            self._world_is_broken = True
            self.failed_unnoticed |= was_unnoticed  # kept if the coordinator breaks the world too
            self._condition.notify_all()

    def wait_for_world(self, error: str = "", stalled: str = "") -> None:
        """Leave this rank's world and wait until it has joined the next one.

        ``error`` and ``stalled`` are those of `NeedsWorld`.

        Raises:
            NotElastic: the trial has a fixed size.
        """
        if not self.request.is_elastic:
            raise NotElastic(
                "a rank was lost, and this trial is not elastic: pass min_workers= to "
                "DistributedTrainableCreator to let the other ranks continue"
            )
        with self._condition:
            self._world_is_broken = True
            left = self.world_number
        self._send(NeedsWorld(self.rank_info.rank, encodable(error), encodable(stalled)))
        with self._condition:
            # No timeout here either: the coordinator forms the next world in time, or kills this process.
            self._condition.wait_for(lambda: self._stopped or self.world_number > left)
            if self._stopped:
                raise StopTraining

    def join_world(self, rank_info: RankInfo, *, number: int, reports: int, resources: bytes) -> None:
        """Join the next world of the trial, which has made ``reports`` reports so far."""
        self.request = replace(self.request, resources=resources)
        with self._condition:
            self.rank_info, self.world_number = rank_info, number
            self.reports, self._released = reports, max(self._released, float(reports))
            self._world_is_broken = self.failed_unnoticed = False
            self._checkpoint = None  # its copy was released when this rank left its world
            self._use_stored()
            self._condition.notify_all()

    def stop(self) -> None:
        """Make the current report, or else the next one, unwind the training function."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def get_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint of the trial, or None if there is none."""
        refuse_in_child_process("get_checkpoint()", self)
        checkpoint = self._newest_checkpoint()
        # One that was made from a commit is for `get_state`.
        return None if checkpoint is None or _has_commit(checkpoint) else checkpoint

    def stored_commit(self) -> bytes | None:
        """Return what the trial committed before it was restarted; None if its checkpoint has no commit."""
        checkpoint = self._newest_checkpoint()
        if checkpoint is None or not _has_commit(checkpoint):
            return None
        files: Any = checkpoint.filesystem
        with files.open_input_stream(f"{checkpoint.path}/{COMMIT_FILE}") as stream:
            return bytes(stream.read())

    def _newest_checkpoint(self) -> Checkpoint | None:
        if self._place is not None and self._checkpoint is None:
            self._checkpoint = self._fetch(self._place)
        return self._checkpoint


def _has_commit(checkpoint: Any) -> bool:
    """Return True if the checkpoint, which may be in a bucket, was made from a commit."""
    return bool(checkpoint.filesystem.get_file_info(f"{checkpoint.path}/{COMMIT_FILE}").is_file)


# The sessions of this process, the newest last: on TPU v2 and v3, a process runs two ranks.
_active: list[Session] = []
_of_thread = threading.local()


def activate(session: Session | None) -> None:
    """Set the session that `report()` uses in this thread; None ends the thread's session."""
    ended: Session | None = getattr(_of_thread, "session", None)
    if ended in _active:
        _active.remove(ended)
    _of_thread.session = session
    if session is not None:
        _active.append(session)
    if _active:
        os.environ[RANK_VARIABLE] = f"{_active[-1].rank_info.rank}:{os.getpid()}"
    else:
        os.environ.pop(RANK_VARIABLE, None)


def current() -> Session | None:
    """Return this thread's session, or else the newest one: training functions may start threads."""
    own: Session | None = getattr(_of_thread, "session", None)
    return own or (_active[-1] if _active else None)


def report(
    metrics: Mapping[str, Any] | None = None,
    *,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    **keywords: Any,
) -> None:
    """Report to Tune from the training function, on every rank or on rank 0 only: Tune gets rank 0's metrics.

    Returns when Tune has decided that the trial continues. If a scheduler stops the trial, this call unwinds
    the training function.

    Args:
        metrics: a dict of names to values; more can be passed as keywords. NumPy scalars and tensors of
            one element become Python numbers.
        checkpoint: a directory on rank 0's host, as a path or a ``ray.tune.Checkpoint``. It is copied
            to the trial's storage with these metrics; the directory may be deleted once this returns.

    Raises:
        NotInTraining: called outside a trial's training function, or in a process that the function started.
        MetricsError: a value cannot be sent, or the checkpoint is not a directory.
        HorovodInternalError: a rank was lost, or the trial's ranks change. Do not catch it: the trial
            handles it. With ``backend="torch"``, the error is a `WorldBroken`.

    Example:
        >>> report({"loss": 0.25})
        Traceback (most recent call last):
        ...
        horovod_tune.errors.NotInTraining: report() works only inside a training function that a trial runs
    """
    require_session("report()").report(merge_metrics(metrics, keywords), checkpoint)


def get_checkpoint() -> Checkpoint | None:
    """Return the trial's newest checkpoint, or else the one that it was restored from.

    None if there is none, or if it holds what an elastic trial has committed, which `get_state` returns.
    Ranks that have made the same number of reports get the same checkpoint, on any host.

    Raises:
        NotInTraining: called outside a trial's training function, or in a process that the function started.
    """
    return require_session("get_checkpoint()").get_checkpoint()


@dataclass(frozen=True)
class TrialWorld:
    """A rank's world, as `get_world` returns it.

    Attributes:
        rank: this rank's number, like `hvd.rank()`.
        size: the number of ranks, like `hvd.size()`.
        changes: how often the world has changed since the trial last started; 0 if its size is fixed.
        gpu: the rank's own GPU, for `torch.cuda.set_device`; None without ``use_gpu``.
        device: the rank's own device, for `torch.device`: ``"cpu"``, ``"cuda:0"``, ``"tpu"`` (TorchTPU) or
            ``"xla"`` (torch_xla).
    """

    rank: int
    size: int
    changes: int
    gpu: int | None
    device: str = "cpu"

    def check_synchronised(self, model: torch.nn.Module) -> None:
        """Raise `NotSynchronised` unless all ranks have the same parameters; every rank must call this.

        It finds a forgotten `hvd.broadcast_parameters` or `hvd.DistributedOptimizer`. It computes the
        checksums of all parameters, on the CPU, and gathers only these, eight bytes each. Buffers (the
        running mean of batch normalization) are not compared: they differ under Horovod.

        Raises:
            NotSynchronised: the message names the first parameter that differs from rank 0's, and the ranks.
            HorovodTuneError: the ranks do not use Horovod.
        """
        import zlib

        if "horovod.torch" not in sys.modules:
            raise HorovodTuneError(
                "check_synchronised() is for Horovod; models in DistributedDataParallel need no such check"
            )
        import horovod.torch as hvd
        import torch

        named = dict(model.named_parameters())
        raw = (each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in named.values())
        digests = torch.tensor([[zlib.crc32(each.numpy().data) for each in raw]], dtype=torch.int64)
        gathered = hvd.allgather(digests, name="horovod_tune.check_synchronised")
        for column, name in enumerate(named):
            ranks = (gathered[:, column] != gathered[0, column]).nonzero().flatten().tolist()
            if ranks:
                raise NotSynchronised(
                    f"parameter {name!r} of the model differs between rank 0 and rank(s) "
                    f"{', '.join(map(str, ranks))}: each rank trains its own model. Call "
                    "hvd.broadcast_parameters(model.state_dict(), root_rank=0) once the model is made, and "
                    "wrap the optimizer: hvd.DistributedOptimizer(optimizer, "
                    "named_parameters=model.named_parameters())"
                )


def get_world() -> TrialWorld:
    """Return this rank's current world. Not a collective; may be called before `hvd.init()`.

    Raises:
        NotInTraining: called outside a training function that a trial runs.
    """
    live = require_session("get_world()")
    with live._condition:  # another thread joins the next world
        numbers = live.rank_info.rank, live.rank_info.size, live.world_number
        return TrialWorld(*numbers, live.gpu, live.device)


def refuse_in_child_process(caller: str, own: Session | None = None) -> None:
    """Raise NotInTraining if a training function, that of ``own`` if given, started this process."""
    started_by = f"{own.rank_info.rank}:{own.pid}" if own else os.environ.get(RANK_VARIABLE, "")
    rank, _, pid = started_by.partition(":")
    if pid and int(pid) != os.getpid():
        raise NotInTraining(
            f"{caller} was called in process {os.getpid()}, which the training function of rank {rank} "
            f"(process {pid}) started. Only the function itself can report. It runs in every rank already: "
            "one process per slot, or per TPU chip. If a launcher (torch_xla.launch, xmp.spawn, "
            "notebook_launcher, mp.spawn) started this process, pass the function that it launches to "
            "DistributedTrainableCreator, without the launcher. Otherwise, return the process's results to "
            "the training function, and report them there."
        )


def require_session(caller: str) -> Session:
    """Return `current`'s session; raise NotInTraining if there is none."""
    live = current()
    if live is not None:
        return live
    refuse_in_child_process(caller)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns if there is no trial
        tune = sys.modules.get("ray.tune")
        if tune is not None and tune.get_context().get_trial_id() is not None:
            raise NotInTraining(
                f"{caller} was called in a function that Tune runs by itself, with no ranks. Give Tune "
                "DistributedTrainableCreator(train, num_slots=...) instead of train"
            )
    raise NotInTraining(f"{caller} works only inside a training function that a trial runs")


def handle_output(session: Session, output: Any) -> None:
    """Report what a training function returned or yielded, unless it is None, False or an empty dict."""
    if output is None or output is False:
        return
    if isinstance(output, Mapping):
        if output:
            session.report(output)
    elif isinstance(output, numbers.Number):
        session.report({"_metric": output})
    else:
        raise MetricsError(
            "a training function may return or yield a number or a dict of metrics, got "
            f"{type(output).__name__}"
        )
