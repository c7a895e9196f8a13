"""What can go wrong, as the caller meets it; each is also the builtin kind that a reader would expect."""

from __future__ import annotations


class HorovodTuneError(Exception):
    """The base of every error that this package raises on purpose."""


class SpecError(HorovodTuneError, ValueError):
    """An argument of the factory names something that cannot be: says the name, the bound and the value."""


class TrainingFunctionError(HorovodTuneError, TypeError):
    """The training function cannot be called as ``func(config)``."""


class SerializationError(HorovodTuneError, ValueError):
    """The training function or its config cannot be pickled, or is too large: names the variable."""


class OutsideTune(HorovodTuneError, RuntimeError):
    """A search was started wrongly: without Tune, or several times by a launcher. Says how to start it."""


class NotInTraining(HorovodTuneError, RuntimeError):
    """``report()`` or ``get_checkpoint()`` was called outside a training function that a trial runs."""


class NotSynchronised(HorovodTuneError, RuntimeError):
    """The ranks' models differ, or would: says which parameter, or the line that is missing."""


class NotInitialized(HorovodTuneError, RuntimeError):
    """A training function called ``commit()`` or ``get_state()`` before ``hvd.init()``."""


class MetricsError(HorovodTuneError, TypeError):
    """A reported metric or checkpoint cannot be sent to Tune: says which one and why."""


class MetricNotReported(HorovodTuneError, ValueError):
    """The search's metric is not among those that trials report: names these."""


class BackendMissing(HorovodTuneError, RuntimeError):
    """Horovod (or torch_xla) is not there, or built without what a trial needs: says what to type."""


class UnsupportedRay(HorovodTuneError, ImportError):
    """This release of Ray lacks a part that trials cannot do without: says which."""


class ResourcesUnavailable(HorovodTuneError, RuntimeError):
    """No cluster like this one can ever hold the trial: says what it asks for and what there is."""


class PreflightFailed(HorovodTuneError, RuntimeError):
    """A machine of the cluster cannot take part in a trial on several: says which one, why, and the cure."""


class NotElastic(HorovodTuneError, RuntimeError):
    """The world of a trial of fixed size is broken, and its function waits for the next one."""


class StartFailed(HorovodTuneError, RuntimeError):
    """The training actors of a trial did not start: says in which phase, and which ranks."""

    # The trial's slots whose actors died, or did not answer in time.
    lost_slots: tuple[int, ...] = ()


class TrainingFailed(HorovodTuneError, RuntimeError):
    """A rank raised, died or stopped responding; names the rank and its host, with its own traceback."""

    # The ids of the Ray nodes of ranks that died or stopped responding.
    lost_nodes: tuple[str, ...] = ()
