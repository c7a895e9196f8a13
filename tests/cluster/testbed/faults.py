"""Faults between the hosts of a trial, and what the trial must make of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lab import Lab
from steady import Training

# The rendezvous, Gloo and our channels take ports that the kernel chooses.
CHOSEN_PORTS = "32768:60999"
LOST = "rank 1 of 2 on {host}"
# The coordinator is with rank 0: where that host is lost, no process is left to name the rank.
LOST_FIRST = "The actor died because its node has died"
Action = Callable[[Training, str], object]


@dataclass(frozen=True)
class Fault:
    """What happens to the host of a rank, and what the trial must make of it."""

    name: str
    inject: Action
    rank: int = 1
    # After how many seconds it is over; None: when the trial has come to terms with it.
    lasts_s: float | None = None
    # What the error must say; None: the trial continues with its ranks.
    error: str | None = None
    # Continuing is right as well: it lasts about as long as Ray waits for a machine.
    may_go_on: bool = False
    # A rank is killed under the fault: a new world has to be started there.
    new_start: bool = False
    # The trial continues without the host, whose Ray has to be started again.
    loses_host: bool = False


def heal(lab: Lab) -> None:
    """Undo on every host what can be undone."""
    for host in lab.hosts:
        lab.heal(host)
        lab.run(host, ["sh", "-c", f"{NAMES_AGAIN}; kill -CONT -1"], timeout_s=30, check=False)
        if host != "n1":
            lab.skew_clock(host, 0)


def on_host(command: str) -> Action:
    return lambda training, host: training.lab.run(host, ["sh", "-c", command], timeout_s=30)


def on_workers(command: str) -> Action:
    def inject(training: Training, _: str) -> None:
        for host in training.lab.hosts[1:]:
            training.lab.run(host, ["sh", "-c", command], timeout_s=30)

    return inject


def cut(training: Training, host: str) -> None:
    training.lab.cut(host)


def drop(training: Training, host: str) -> None:
    training.lab.cut(host, "drop")


def signal_rank(name: str) -> Action:
    def inject(training: Training, host: str) -> None:
        process = training.processes[training.hosts.index(host)]
        training.lab.run(host, ["kill", f"-{name}", str(process)], timeout_s=30)

    return inject


kill_rank = signal_rank("KILL")


def clock(seconds: int) -> Action:
    return lambda training, host: training.lab.skew_clock(host, seconds)


FOR_NAMES = "for file in hosts resolv.conf; do"
NO_NAMES = (
    f"{FOR_NAMES} cat /etc/$file > /run/$file.kept; done;"
    "echo 127.0.0.1 localhost > /etc/hosts; echo nameserver 10.77.0.250 > /etc/resolv.conf"
)
NAMES_AGAIN = (
    f"{FOR_NAMES} [ ! -e /run/$file.kept ] || cat /run/$file.kept > /etc/$file; done; rm -f /run/*.kept"
)
LOSS = "iptables -I INPUT -i eth0 -m statistic --mode random --probability 0.01 -j DROP"
FIREWALL = f"iptables -I INPUT -i eth0 -p tcp --syn --dport {CHOSEN_PORTS} -j DROP"
STOP_RAYLET = on_host("pkill -STOP -x raylet")
FAULTS = (
    Fault("rank killed", kill_rank, error=LOST + " died"),
    Fault("link down 3 s", cut, lasts_s=3),
    Fault("link down 12 s", cut, lasts_s=12),
    Fault("link down 20 s", cut, lasts_s=20, error=LOST, may_go_on=True, loses_host=True),
    Fault("link down, rank 0", cut, rank=0, error=LOST_FIRST, loses_host=True),
    Fault("packets dropped", drop, error=LOST, loses_host=True),
    Fault("1 % loss 20 s", on_workers(LOSS), lasts_s=20),
    Fault("link of the head down 10 s", lambda training, _: training.lab.cut("n1"), lasts_s=10),
    Fault("rank stopped 5 s", signal_rank("STOP"), lasts_s=5),
    Fault("rank stopped", signal_rank("STOP"), error=LOST + " stopped responding"),
    Fault("raylet stopped 8 s", STOP_RAYLET, lasts_s=8),
    Fault("raylet stopped", STOP_RAYLET, error=LOST, loses_host=True),
    Fault("raylet killed", on_host("pkill -KILL -x raylet"), error=LOST, loses_host=True),
    Fault("clock an hour ahead", clock(3600), new_start=True),
    Fault("clock an hour behind", clock(-3600), new_start=True),
    Fault("no names", on_workers(NO_NAMES), new_start=True),
    Fault("firewall", on_workers(FIREWALL), new_start=True, error="rank|timeout"),
    Fault("power off", lambda training, host: training.lab.power_off(host), error=LOST, loses_host=True),
)
