"""Tells from what was seen on each machine what stands in the way of a trial across them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from horovod_tune.doctor import NodeInfo, diagnose
from horovod_tune.doctor.diagnose import INSTALL, is_loopback

# Clocks further apart than this make time stamps, and Tune's resumes, hard to read.
CLOCK_TOLERANCE_S = 5.0


@dataclass(frozen=True)
class MachineLook:
    """What was seen of one machine of the cluster."""

    # Its host name, with the address where two have the same.
    label: str
    # The address that Ray knows it by.
    address: str
    # None where the look failed.
    facts: NodeInfo | None = None
    # Why the look failed.
    failure: str | None = None
    failed_imports: dict[str, str] = field(default_factory=dict)
    # Seconds that these took, or were given without coming to an end.
    slow_imports: dict[str, float] = field(default_factory=dict)
    # The one that the ranks' collectives will take, with its address.
    interface: str | None = None
    interface_address: str | None = None
    interface_failure: str | None = None
    # How far its clock is ahead of the driver's; known to within `clock_error_s`.
    clock_ahead_s: float | None = None
    clock_error_s: float = 0.0
    # The machines that took no connection from this one, and why.
    unreached: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, with the machine that it is wrong on."""

    node: str
    problem: str
    cure: str
    # A trial across these machines cannot run with a problem; with a warning it can.
    level: Literal["problem", "warning"] = "problem"


def judge(looks: Sequence[MachineLook], *, use_tpu: bool = False) -> tuple[Problem, ...]:
    """Return what is wrong with the machines, those without which nothing runs first.

    The first machine is the driver's: in a draw, the version that it has is the right one.
    """
    seen = [look for look in looks if look.facts is not None]
    found = [
        *(_failed(look) for look in looks if look.facts is None),
        *(problem for look in seen for problem in _of_one_machine(look, use_tpu=use_tpu)),
        *_of_versions(seen, use_tpu=use_tpu),
        *_of_reach(seen),
    ]
    return tuple(sorted(found, key=lambda problem: problem.level != "problem"))


def _failed(look: MachineLook) -> Problem:
    why = look.failure or "it gave no answer"
    if "No module named 'horovod_tune'" in why:
        return Problem(
            look.label, "horovod_tune is not installed there.", "Install it there as on the others."
        )
    return Problem(
        look.label,
        f"It could not be looked at: {why}",
        f"Look at Ray's log on {look.label}, and whether the machine is up: `ray status`.",
    )


def _of_one_machine(look: MachineLook, *, use_tpu: bool) -> Iterator[Problem]:
    assert look.facts is not None
    for finding in diagnose(look.facts):
        if use_tpu and finding.subject in ("horovod", "host name"):
            continue
        level = finding.level
        if finding.subject == "host name" and not use_tpu:
            # On one machine a loopback address does; across machines nobody reaches it.
            level = "problem"
        yield Problem(look.label, finding.what, finding.cure, level)
    addresses = look.facts.host_addresses
    patched = look.facts.horovod is not None and look.facts.horovod.patch_level is not None
    if patched and addresses and is_loopback(addresses[0]) and not use_tpu:
        yield Problem(
            look.label,
            f"Its name resolves to {addresses[0]} there. Horovod takes {look.interface} all the same, being "
            "patched; other programs may not.",
            f"Put {look.address} into its line in /etc/hosts",
            "warning",
        )
    for module, why in look.failed_imports.items():
        yield Problem(
            look.label,
            f"The training function needs {module}, which cannot be imported there: {why}",
            f"Install it on {look.label}, or ship it: ray.init(runtime_env={{'py_modules': [...]}})",
        )
    for module, seconds in look.slow_imports.items():
        yield Problem(
            look.label,
            f"The training function needs {module}, whose import took {seconds:.0f} s there or more: slow, "
            "not broken.",
            "Keep the environment on that machine's own disk, or give ranks longer to start: timeout_s=…",
            "warning",
        )
    if ":" in look.address and not use_tpu:
        yield Problem(
            look.label,
            f"Ray knows it by {look.address}; Horovod's rendezvous and Gloo speak IPv4 only.",
            "Start Ray there with --node-ip-address and an IPv4 address. Hosts without one cannot take part.",
        )
    elif look.interface_failure is not None:
        yield Problem(
            look.label, look.interface_failure, "Name an interface that each machine has: nics=[...]"
        )
    elif look.interface_address is not None and is_loopback(look.interface_address):
        yield Problem(
            look.label,
            f"Ray knows it by {look.interface_address}, which no other machine reaches.",
            "Start Ray there with --node-ip-address and the address of its network interface.",
        )
    ahead = look.clock_ahead_s
    if ahead is not None and abs(ahead) > CLOCK_TOLERANCE_S + look.clock_error_s:
        direction = "ahead of" if ahead > 0 else "behind"
        yield Problem(
            look.label,
            f"Its clock is {abs(ahead):.0f} s {direction} the driver's.",
            f"Set it by the network: timedatectl set-ntp true on {look.label}",
            "warning",
        )


def _of_versions(looks: Sequence[MachineLook], *, use_tpu: bool) -> Iterator[Problem]:
    compared: list[tuple[str, Callable[[NodeInfo], str | None], str]] = [
        ("Python", lambda facts: ".".join(facts.python.split(".")[:2]), "Use the same environment on all"),
        (
            "torch",
            lambda facts: facts.torch.version.split("+")[0] if facts.torch else None,
            "pip install torch=={0} there, then " + INSTALL,
        ),
        ("horovod_tune", lambda facts: facts.packages.get("horovod_tune"), "Install {0} there"),
    ]
    if use_tpu:
        compared.append(
            ("torch_xla", lambda facts: facts.packages.get("torch_xla"), "pip install torch_xla=={0} there")
        )
    else:
        compared.append(("Horovod", lambda facts: facts.horovod.version if facts.horovod else None, INSTALL))
    for name, version_of, cure in compared:
        versions = {look.label: version_of(look.facts) for look in looks if look.facts}
        known = [version for version in versions.values() if version is not None]
        if len(set(known)) < 2:
            continue  # What is missing altogether, the doctor says.
        counts = Counter(known)  # most_common keeps the driver's first where it draws
        usual = counts.most_common(1)[0][0]
        elsewhere = " ".join(label for label, version in versions.items() if version == usual)
        for label, version in versions.items():
            if version not in (None, usual):
                yield Problem(
                    label,
                    f"It has {name} {version}; {elsewhere} have {usual}.",
                    cure.format(usual) + ".",
                )


def _of_reach(looks: Sequence[MachineLook]) -> Iterator[Problem]:
    """Name the machine that nobody reaches once, and every other pair by itself."""
    addresses = {look.label: look.interface_address for look in looks}
    blamed = set()
    for look in looks:
        askers = [other for other in looks if other.label != look.label and look.interface_address]
        refused = [other for other in askers if look.label in other.unreached]
        if refused and len(refused) == len(askers):
            blamed.add(look.label)
            yield Problem(
                look.label,
                f"No other machine reaches it at {look.interface_address} ({look.interface}): "
                f"{refused[0].unreached[look.label]}.",
                "Open all TCP ports between the machines (Gloo takes any), "
                "or name another interface: nics=[...]",
            )
    for look in looks:
        for peer, why in look.unreached.items():
            if peer in blamed or look.label in blamed:
                continue
            yield Problem(
                peer,
                f"It cannot be reached from {look.label} at {addresses[peer]}: {why}.",
                f"Open all TCP ports between {look.label} and {peer}, or name another interface: nics=[...]",
            )
