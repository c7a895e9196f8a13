"""The messages that processes of one host send each other, and the check of a received one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovod_tune.channel.packing import MalformedMessage
from horovod_tune.messages import FailureKind

# By kind: the type of each field.
Schema = Mapping[str, Mapping[str, type | tuple[type, ...]]]

_NUMBER = (int, float)
_NO = type(None)

# A training actor sends only reports here; its other messages go through Ray.
REPORTS: Schema = {
    "report": {"run": int, "index": int, "metrics": dict, "checkpoint_path": (str, _NO)},
}
# What a rank on a TPU host sends its host actor.
RANK_MESSAGES: Schema = {
    **REPORTS,
    "alive": {"operations": int},
    "finished": {},
    "failed": {"failure_kind": int, "traceback": str},
    "fetch": {"path": str, "node_id": str, "target": (str, _NO)},
    "reset_done": {"problems": (list, tuple)},
    "stack": {"stack": str},
}
# What a training actor receives. `checkpoint` holds a `CheckpointPlace`'s path, node_id and report.
ACKS: Schema = {
    "acknowledge": {"run": int, "index": _NUMBER, "checkpoint": (tuple, _NO)},
}
# What a rank on a TPU host receives from the host actor that started it, whose pickles it may load.
HOST_MESSAGES: Schema = {
    "acknowledge": {"index": _NUMBER, "pickled_checkpoint": bytes},
    "begin": {"pickled_request": bytes, "world": list, "node_id": str, "copies": str},
    "stop": {},
    "fetched": {"fingerprint": (tuple, _NO), "error": str},
    "dump_stack": {},
    "reset": {"join_s": _NUMBER},
}
_FAILURES = {kind.value for kind in FailureKind}


def check(message: Any, schema: Schema) -> dict[str, Any]:
    """Return a message after checking it.

    Raises:
        MalformedMessage: it is of an unknown kind, lacks a field, has one too many, or one of the wrong type.

    >>> check({"kind": "alive", "operations": 3}, RANK_MESSAGES)
    {'kind': 'alive', 'operations': 3}
    """
    fields = schema.get(str(message.get("kind"))) if type(message) is dict else None
    if fields is None or set(message) - {"kind"} != set(fields):
        raise MalformedMessage(f"{message!r:.200} is not a message of a known kind, or has the wrong fields")
    for name, kinds in fields.items():
        # True is an int to Python, but not a number here.
        if not isinstance(message[name], kinds) or isinstance(message[name], bool):
            raise MalformedMessage(
                f"{message!r:.200} has a field of the wrong type: {name} is {message[name]!r:.80}"
            )
    if message["kind"] == "failed" and message["failure_kind"] not in _FAILURES:
        raise MalformedMessage(f"{message!r:.200} has an unknown failure_kind")
    return message
