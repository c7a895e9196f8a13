"""A configuration as text that can be pasted into a program or a file."""

from __future__ import annotations

import math
import pprint
from typing import Any


def python_text(config: dict[str, Any]) -> str:
    """A configuration as a Python statement that can be run.

    >>> print(python_text({"lr": 0.1, "clip": float("inf")}))
    config = {'lr': 0.1, 'clip': float('inf')}
    """
    prefix = "config = "
    text = pprint.pformat(_Odd.wrap(config), sort_dicts=False, width=68)
    return prefix + text.replace("\n", "\n" + " " * len(prefix))


class _Odd:
    """A float that has no literal in Python."""

    def __init__(self, value: float):
        self.value = value

    def __repr__(self) -> str:
        return f"float('{self.value}')"

    @classmethod
    def wrap(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cls.wrap(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [cls.wrap(inner) for inner in value]
        return cls(value) if isinstance(value, float) and not math.isfinite(value) else value


def yaml_text(config: dict[str, Any]) -> str:
    """A configuration as YAML."""
    import yaml

    return str(yaml.safe_dump(config, sort_keys=False, default_flow_style=False, allow_unicode=True)).rstrip()
