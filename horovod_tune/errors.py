"""Exceptions raised by horovod_tune; each also derives from the matching builtin."""

from __future__ import annotations


class HorovodTuneError(Exception):
    """Base class of all errors that this package raises."""


class SpecError(HorovodTuneError, ValueError):
    """An argument is invalid; the message has its name, bound and value."""


class TrainingFunctionError(HorovodTuneError, TypeError):
    """The training function cannot be called as ``func(config)``."""


class SerializationError(HorovodTuneError, ValueError):
    """The training function or its config cannot be pickled, or is too large; names the variable."""


class OutsideTune(HorovodTuneError, RuntimeError):
    """A search was started without Tune, or several times by a launcher."""


class NotInTraining(HorovodTuneError, RuntimeError):
    """``report()`` or ``get_checkpoint()`` was called outside a training function that a trial runs."""


class NotSynchronised(HorovodTuneError, RuntimeError):
    """The ranks' models differ, or would differ; names the parameter, or the missing line."""


class NotInitialized(HorovodTuneError, RuntimeError):
    """A training function called ``commit()`` or ``get_state()`` before ``hvd.init()``."""


class MetricsError(HorovodTuneError, TypeError):
    """A reported metric or checkpoint cannot be sent to Tune; names it and the reason."""


class MetricNotReported(HorovodTuneError, ValueError):
    """The search's metric is not among those that trials report; names these."""


class BackendMissing(HorovodTuneError, RuntimeError):
    """Horovod (or torch_xla) is not installed, or built without what a trial needs; names the command."""


class UnsupportedRay(HorovodTuneError, ImportError):
    """This release of Ray lacks a private API that trials require; names it."""


class ResourcesUnavailable(HorovodTuneError, RuntimeError):
    """This cluster can never hold the trial; names the request and the resources."""


class PreflightFailed(HorovodTuneError, RuntimeError):
    """A machine cannot take part in a trial on several machines; names it, the reason and the cure."""


class NotElastic(HorovodTuneError, RuntimeError):
    """The world of a trial of fixed size is broken, and its function waits for the next one."""


class StartFailed(HorovodTuneError, RuntimeError):
    """The training actors of a trial did not start; names the phase and the ranks."""

    # The trial's slots whose actors died, or did not answer in time.
    lost_slots: tuple[int, ...] = ()


class TrainingFailed(HorovodTuneError, RuntimeError):
    """A rank raised, died or stopped responding; names the rank and its host, with its own traceback."""

    # The ids of the Ray nodes of ranks that died or stopped responding.
    lost_nodes: tuple[str, ...] = ()
