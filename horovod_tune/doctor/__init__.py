"""Checks that the versions installed on a machine, or on each node of a Ray cluster, are compatible.

node_info.py   NodeInfo: what one machine has; collect_info() examines the machine it runs on
findings.py    diagnose(), diagnose_nodes(): what is wrong, with the cure (pure)
nodes.py       check(): examines every node of the cluster; NodeProbe is the actor that runs on each
preflight.py   Preflight: the callback that calls check() before a search's first trial across nodes
report.py      the table, and the findings below it
command.py     `horovod-tune doctor`
"""
