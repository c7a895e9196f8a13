"""The doctor's table: a row per part of a machine, or per node of a cluster, and the findings below."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from horovod_tune.doctor.findings import Finding, Node, can_run_trials
from horovod_tune.doctor.node_info import NodeInfo

WIDTH = 100
MARKS = {"problem": "!!", "warning": " !"}


@dataclass(frozen=True)
class Report:
    """The examined nodes and their problems; `str()` is the table."""

    nodes: tuple[Node, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """True if a trial across these nodes can run, warnings or not."""
        return can_run_trials(self.findings)

    def __str__(self) -> str:
        marks = {finding.node: MARKS[finding.level] for finding in reversed(self.findings)}
        rows = [("", "node", "collectives", "torch", "horovod")]
        for node in self.nodes:
            info = node.info
            address = node.interface_address or node.address
            collectives = f"{node.interface or '?'} {address}" if info else node.address
            torch = info.torch.version if info and info.torch else ""
            horovod = info.horovod.version if info and info.horovod else ""
            rows.append((marks.get(node.label, "ok"), node.label, collectives, torch, horovod))
        return table(rows, self.findings)


def table(rows: Sequence[Sequence[str]], findings: Sequence[Finding]) -> str:
    """Return aligned rows, then the problems with their cures."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for finding in findings:
        who = f"{finding.level.capitalize()}: " + (f"{finding.node}: " if finding.node else "")
        lines += ["", *_wrap(finding.what, who), *_wrap(finding.cure, "  Cure: ")]
    return "\n".join(lines)


def machine_table(info: NodeInfo, findings: Sequence[Finding]) -> str:
    """Return the table of one machine."""
    marks = {finding.subject: MARKS[finding.level] for finding in reversed(findings)}
    rows = {
        "host": info.host,
        "Python": f"{info.python}  {info.executable}",
        "torch": _torch(info),
        **{name: version or "not installed" for name, version in info.packages.items() if name != "torch"},
        "horovod": _horovod(info),
        "interfaces": "; ".join(f"{name} {' '.join(own)}" for name, own in info.interfaces.items()),
    }
    return table([(marks.get(subject, "ok"), subject, text) for subject, text in rows.items()], findings)


def _torch(info: NodeInfo) -> str:
    if info.torch is None:
        return "not installed"
    built = f"built for {f'CUDA {info.torch.cuda}' if info.torch.cuda else 'the CPU'}"
    gpus = info.torch.gpus
    return f"{info.torch.version}  {built}; {f'{len(gpus)} x {gpus[0]}' if gpus else 'no GPU in use'}"


def _horovod(info: NodeInfo) -> str:
    if (horovod := info.horovod) is None:
        return "not installed"
    torch = horovod.torch_version
    built = f"compiled for torch {torch}" if torch else "compiled without torch"
    operations = "on CPU and GPU (NCCL)" if horovod.nccl else "on the CPU"
    works = f"with{'' if horovod.gloo else 'out'} Gloo; operations {operations}"
    return f"{horovod.version}  {built}; {'broken' if horovod.error else works}"


def _wrap(text: str, first: str) -> list[str]:
    # Commands and paths, which will be copied, are not broken in the middle of a word.
    wrapper = textwrap.TextWrapper(WIDTH, break_on_hyphens=False, break_long_words=False)
    wrapper.initial_indent, wrapper.subsequent_indent = first, " " * len(first)
    return wrapper.wrap(text)
