"""Checks that the versions installed on a machine, or on each node of a Ray cluster, are compatible.

node_info.py   NodeInfo: what one machine has; collect_info() examines the machine it runs on
findings.py    diagnose(), diagnose_nodes(): what is wrong, with the cure (pure)
nodes.py       check(): examines every node of the cluster; NodeProbe is the actor that runs on each
preflight.py   Preflight: the callback that calls check() before a search's first trial across nodes
report.py      the table, and the findings below it
command.py     `horovod-tune doctor`
"""
# ruff: noqa: F401 - imported for the rest of the package

from horovod_tune.doctor.findings import Finding, Node, can_run_trials, diagnose, diagnose_nodes
from horovod_tune.doctor.node_info import NodeInfo, collect_info
from horovod_tune.doctor.nodes import check
from horovod_tune.doctor.report import Report
