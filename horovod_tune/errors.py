"""Exceptions raised by horovod_tune; each also derives from the matching builtin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# The line of an error before the last lines that a process printed.
LAST_OUTPUT = "its last output was"


class HorovodTuneError(Exception):
    """Base class of this package's exceptions. Wrong arguments may also raise ValueError or TypeError."""


class SpecError(HorovodTuneError, ValueError):
    """An argument is invalid; the message has its name, bound and value."""


class TrainingFunctionError(HorovodTuneError, TypeError):
    """The training function, or an object bound to it, is not one that a trial can run."""


class SerializationError(HorovodTuneError, ValueError):
    """The training function or its config cannot be pickled, or is too large. The message names the part."""


class OutsideTune(HorovodTuneError, RuntimeError):
    """A trial was started without Tune, or a search was started once per rank by a launcher."""


class NotInTraining(HorovodTuneError, RuntimeError):
    """``report()``, ``get_checkpoint()`` or the like was called outside a trial's training function."""


class NotSynchronised(HorovodTuneError, RuntimeError):
    """The ranks' models differ, or would differ. The message names the parameter, or the missing call."""


class NotInitialized(HorovodTuneError, RuntimeError):
    """``commit()`` or ``get_state()`` was called before ``hvd.init()`` or ``dist.init_process_group()``."""


class MetricsError(HorovodTuneError, TypeError):
    """A reported metric or checkpoint cannot be sent to Tune. The message names it and the reason."""


class MetricNotReported(HorovodTuneError, ValueError):
    """The search's metric is not among those that trials report, which the message lists."""


class BackendMissing(HorovodTuneError, RuntimeError):
    """Horovod, torch or torch_xla is missing or unsuitable. The message has the command that installs it."""


class UnsupportedRay(HorovodTuneError, ImportError):
    """This release of Ray lacks a private API that trials require. The message names it."""


class ResourcesUnavailable(HorovodTuneError, RuntimeError):
    """The cluster can never provide what a trial requests. The message has the request and the resources."""


class PreflightFailed(HorovodTuneError, RuntimeError):
    """A machine cannot take part in a trial. The message has its name, the reason and the cure."""


class NotElastic(HorovodTuneError, RuntimeError):
    """The ranks of a trial lost their connection, and the trial is not elastic."""


class StartFailed(HorovodTuneError, RuntimeError):
    """The training actors of a trial did not start. The message names the phase and the ranks."""


class TrainingFailed(HorovodTuneError, RuntimeError):
    """A rank raised, died or stopped responding. The message has the rank, its host and its traceback."""

    # The ids of the Ray nodes of the ranks that died or stopped responding.
    lost_nodes: tuple[str, ...] = ()


# Maximum characters of one piece of a traceback, such as an exception's message, and of a whole traceback.
MAX_TEXT = 50_000
MAX_TRACEBACK = 200_000


def shorten(text: str, limit: int) -> str:
    """Return a text, or only its two ends if it is longer than ``limit`` characters.

    >>> shorten("the start " + "x" * 1000 + " the end", 20).splitlines()
    ['the start ', '[... 998 characters left out ...]', 'xx the end']
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def traceback_text(pieces: Sequence[str]) -> str:
    """Join the pieces of a traceback; shorten each piece, and the whole."""
    return shorten("".join(shorten(piece, MAX_TEXT) for piece in pieces), MAX_TRACEBACK)


def exception_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the chain of its causes and contexts, each once (``raise e from e`` is a cycle)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def encodable(text: str) -> str:
    r"""Return a text with its lone surrogates escaped.

    Python produces them for file names that are not UTF-8. Ray ends a process that raises an error
    with one in its text; msgpack rejects such text.

    >>> encodable("caf\udce9.txt, é")
    'caf\\udce9.txt, é'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def death_text(error: BaseException) -> str:
    r"""Return Ray's description of an actor's death, without the lines that only identify the actor.

    >>> death_text(RuntimeError("The actor died.\n\tclass_name: A\n\tpid: 7"))
    'The actor died. pid: 7'
    """
    lines = [line.strip() for line in str(error).splitlines()]
    naming = ("class_name", "actor_id", "namespace")
    return " ".join(line for line in lines if line and not line.startswith(naming))
