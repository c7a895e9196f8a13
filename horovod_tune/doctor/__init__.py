"""Checks what is installed on a machine and whether it fits together: `horovod-tune doctor`.

node_facts.py      NodeInfo: what one machine has; sent between machines
gather.py          gather_facts(): examines the machine it runs on
diagnose.py        diagnose(facts): what is wrong, with the cure (pure)
doctor_command.py  the command and its output
"""

from horovod_tune.doctor.diagnose import Finding, can_run_trials, diagnose
from horovod_tune.doctor.gather import gather_facts
from horovod_tune.doctor.node_facts import HorovodFacts, NodeInfo, TorchFacts

__all__ = [
    "Finding",
    "HorovodFacts",
    "NodeInfo",
    "TorchFacts",
    "can_run_trials",
    "diagnose",
    "gather_facts",
]
