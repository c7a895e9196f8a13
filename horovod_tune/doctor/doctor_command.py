"""`horovod-tune doctor`."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from collections.abc import Sequence

    from horovod_tune.doctor.diagnose import Finding
    from horovod_tune.doctor.node_facts import NodeInfo

GIB = 1024**3


def add_parsers(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `horovod-tune`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check what is installed here and whether it fits together",
        description="Checks what is installed here and whether it fits together, and names the cure for each "
        "problem. Exit status 1 when a trial could not run.",
    )
    parser.add_argument("--json", action="store_true", help="print the facts and findings as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    from horovod_tune.doctor import can_run_trials, diagnose, gather_facts

    facts = gather_facts()
    findings = diagnose(facts)
    sound = can_run_trials(findings)
    if arguments.json:
        said = {
            "can_run_trials": sound,
            "findings": [asdict(one) for one in findings],
            "facts": facts.as_json(),
        }
        print(json.dumps(said, indent=2))
    else:
        print(screen(facts, findings, sound))
    return 0 if sound else 1


def screen(facts: NodeInfo, findings: Sequence[Finding], sound: bool) -> str:
    """Return the one screen: a line for each subject, then what is wrong, then the verdict."""
    worst = {finding.subject: finding.level for finding in reversed(findings)}
    marks = {"problem": "!!", "warning": " !"}
    rows = lines(facts)
    width = max(len(subject) for subject, _ in rows)
    out = [f"{marks.get(worst.get(subject, ''), 'ok')}  {subject:{width}}  {text}" for subject, text in rows]
    for finding in findings:
        out += ["", *_wrap(finding.what, f"{finding.level.capitalize()}: "), *_wrap(finding.cure, "  Cure: ")]
    verdict = "A trial can run here." if sound else "A trial cannot run here."
    return "\n".join([*out, "", verdict])


def lines(facts: NodeInfo) -> list[tuple[str, str]]:
    """Return the lines of the screen: subject and text."""
    return [
        ("host", f"{facts.host}: {facts.system}, {facts.cpus} CPUs, {facts.memory / GIB:.1f} GiB memory"),
        ("Python", f"{facts.python}  {facts.executable}"),
        ("torch", _torch(facts)),
        *((name, version or "not installed") for name, version in facts.packages.items() if name != "torch"),
        ("horovod", _horovod(facts)),
        ("disk", f"{facts.temporary_free / GIB:.1f} GiB free in {facts.temporary_folder}"),
        ("shared memory", _shared_memory(facts)),
        ("open files", f"{facts.open_files} at most" if facts.open_files >= 0 else "no limit"),
        ("host name", f"resolves to {', '.join(facts.host_addresses) or 'nothing'}"),
        ("interfaces", "; ".join(f"{name} {' '.join(own)}" for name, own in facts.interfaces.items())),
    ]


def _torch(facts: NodeInfo) -> str:
    if facts.torch is None:
        return "not installed"
    built = f"built for CUDA {facts.torch.cuda}" if facts.torch.cuda else "built for the CPU"
    gpus = facts.torch.gpus
    return f"{facts.torch.version}  {built}; " + (f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU in use")


def _horovod(facts: NodeInfo) -> str:
    if (horovod := facts.horovod) is None:
        return "not installed"
    has = [name for name, there in (("Gloo", horovod.gloo), ("MPI", horovod.mpi)) if there]
    operations = "on CPU and GPU (NCCL)" if horovod.nccl else "on the CPU"
    built = (
        f"compiled for torch {horovod.built_for_torch}"
        if horovod.built_for_torch
        else "compiled without torch"
    )
    works = (
        f"controllers: {', '.join(has) or 'none'}; operations {operations}"
        if horovod.error is None
        else "broken"
    )
    return f"{horovod.version}  {built}; {works}"


def _shared_memory(facts: NodeInfo) -> str:
    if facts.shared_memory is None or facts.shared_memory_free is None:
        return "no /dev/shm"
    return f"{facts.shared_memory_free / GIB:.1f} of {facts.shared_memory / GIB:.1f} GiB free in /dev/shm"


def _wrap(text: str, first: str) -> list[str]:
    # A command is to be copied, so it is not broken in the middle of a word.
    return textwrap.wrap(
        text, 100, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False
    )
