"""Checks that the versions installed on a machine, or on each node of a Ray cluster, are compatible.

node_info.py   NodeInfo: what one machine has; collect_info() examines the machine it runs on
findings.py    diagnose(), diagnose_nodes(): what is wrong, with the cure (pure)
nodes.py       check(): examines every node of the cluster; NodeProbe is the actor that runs on each
preflight.py   Preflight: the callback that calls check() before a search's first trial across nodes
report.py      the table, and the findings below it
command.py     `horovod-tune doctor`
"""

from importlib import import_module
from typing import Any

# Imported on first use: the command line needs only the standard library until it examines a machine.
_HOMES = {
    **dict.fromkeys(("Finding", "Node", "can_run_trials", "diagnose", "diagnose_nodes"), "findings"),
    **dict.fromkeys(("NodeInfo", "collect_info"), "node_info"),
    "Report": "report",
    "check": "nodes",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
