"""Looks at every machine of a Ray cluster once, in parallel, before a trial runs on more than one of them.

before_trials.py      Preflight: the callback of a search; runs in the driver
check.py              check(): asks the machines and judges; runs in the driver
look.py               runs on each machine: what it has, and whom it reaches
judge.py              what is wrong, machine by machine, with the cure (pure)
preflight_report.py   PreflightReport: the table
preflight_command.py  the doctor's option --address
"""

from horovod_tune.preflight.check import check
from horovod_tune.preflight.judge import MachineLook, Problem, judge
from horovod_tune.preflight.preflight_report import PreflightReport

__all__ = ["MachineLook", "PreflightReport", "Problem", "check", "judge"]
