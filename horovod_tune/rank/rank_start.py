"""What a rank's process gets from the template that has forked it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RankStart:
    """What a rank's process begins with: its descriptors, and the backend, which has loaded its libraries."""

    control: int
    output: int
    channel: int
    backend: Any
