"""Says what is installed on a machine and whether it fits together: the package behind `horovod-tune doctor`.

facts.py      NodeFacts: what one machine has; travels between machines
gather.py     gather_facts(): looks at the machine it runs on
diagnose.py   diagnose(facts): what is wrong, with the cure (pure)
command.py    the command, and its one screen
"""

from horovod_tune.doctor.diagnose import Finding, can_run_trials, diagnose
from horovod_tune.doctor.gather import gather_facts
from horovod_tune.doctor.node_facts import HorovodFacts, NodeFacts, TorchFacts

__all__ = [
    "Finding",
    "HorovodFacts",
    "NodeFacts",
    "TorchFacts",
    "can_run_trials",
    "diagnose",
    "gather_facts",
]
