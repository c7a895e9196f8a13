"""Looks at every machine of a Ray cluster once, in parallel, before a trial runs on more than one of them.

look.py       runs on each machine: what it has, and whom it reaches
judge.py      what is wrong, machine by machine, with the cure (pure)
report.py     PreflightReport: the table
check.py      check(): asks the machines and judges; runs in the driver
"""

from horovod_tune.preflight.check import check
from horovod_tune.preflight.judge import MachineLook, Problem, judge
from horovod_tune.preflight.preflight_report import PreflightReport

__all__ = ["MachineLook", "PreflightReport", "Problem", "check", "judge"]
