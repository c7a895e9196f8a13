"""The adapter to `lcbench_clock.py` of peers that request a trial up to an epoch and receive its error.

Trials pause at the end of each budget, and continue from there if the peer requests a larger one.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from lcbench_clock import Config, Decision, Report


class AskTell(Protocol):
    def ask(self) -> tuple[Hashable, Config, int]:
        """Return a trial, new or paused, its configuration and the epoch up to which it must train."""

    def tell(self, trial: Hashable, error: float) -> None:
        """Record the error at the requested epoch."""


class BudgetSearch:
    """Turns a peer's ask and tell into the suggestions and reports of `lcbench_clock.Search`."""

    def __init__(self, peer: AskTell) -> None:
        self._peer = peer
        self._until: dict[Hashable, int] = {}

    def suggest(self) -> tuple[Hashable, Config]:
        trial, config, epochs = self._peer.ask()
        self._until[trial] = epochs
        return trial, config

    def report(self, report: Report) -> Decision:
        if report.epoch < self._until[report.trial]:
            return Decision.CONTINUE
        self._peer.tell(report.trial, report.error)
        return Decision.PAUSE
