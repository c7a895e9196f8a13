"""The summary of a run as text, for the HTML report and for the terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from horovod_tune.analysis.printable import counted, duration, moment, text_of
from horovod_tune.analysis.reader.plain_values import mapping
from horovod_tune.analysis.reader.records import TrialRecord
from horovod_tune.analysis.results import Results
from horovod_tune.analysis.trial_details import hosts_of, ranks_of

NOT_KNOWN = "not recorded"


def usage(analysis: Results) -> tuple[float, float, int]:
    """Return the CPU and GPU seconds that trials reserved, and the number of trials for which they are known.

    A trial's resources count for its start-up and its training.
    """
    held = (analysis.spans["end"] - analysis.spans["begin"]).groupby(analysis.spans["trial"]).sum()
    timed = [(seconds, analysis.trials[number]) for number, seconds in held.items()]
    timed = [(seconds, trial) for seconds, trial in timed if trial.resources and trial.end_time is not None]
    cpu, gpu = (
        sum(seconds * bundle.get(kind, 0.0) for seconds, trial in timed for bundle in trial.resources)
        for kind in ("CPU", "GPU")
    )
    return cpu, gpu, len(timed)


def wall_text(analysis: Results) -> str | None:
    """Return the time from start to last activity, without the gaps between sessions; None if unknown."""
    begin, sessions = analysis.record.start_time, len(analysis.record.sessions)
    ends = [trial.end_time for trial in analysis.trials if trial.end_time is not None]
    if begin is None or not ends:
        return None
    last = max(ends)
    gaps = sum(min(end, last) - min(start, last) for start, end in analysis.session_gaps)
    return duration(last - begin - gaps) + (f" in {sessions} sessions" if sessions > 1 else "")


def statuses(analysis: Results) -> str:
    """Return how many trials have each status, most common first."""
    counts = Counter(trial.shown_status for trial in analysis.trials).most_common()
    return ", ".join(f"{count:,} {status}" for status, count in counts)


def run_summary(analysis: Results) -> list[tuple[str, str]]:
    """Return (name, text) pairs that describe the run, including what was not recorded."""
    record, trials = analysis.record, analysis.trials
    budget = f" (budget: {duration(record.time_budget_s)})" if record.time_budget_s else ""
    comparison = comparison_text(analysis) if analysis.mode else f"mode {NOT_KNOWN}"
    search = ""
    if len(record.runs) > 1 and record.run is not None:
        number = record.runs.index(record.run) + 1
        search = f" (search {number} of {len(record.runs)} in this folder, {record.run})"
    facts = {
        "Experiment": record.path + search,
        "State": state_text(analysis),
        "Metric": f"{analysis.metric}, {comparison}" if analysis.metric else "",
        "Trials": trials_text(analysis),
        "Searcher": record.searcher,
        "Scheduler": record.scheduler,
        "Ranks per trial": _tally(str(ranks_of(trial) or "") for trial in trials),
        "Resources per trial": _tally(map(_resources_text, trials)),
        "Machines": _machines_text(analysis),
        "Started": moment(record.start_time) if record.start_time else "",
        "Wall time": (wall_text(analysis) or NOT_KNOWN) + budget,
        "Reserved time": _usage_text(analysis),
        "Versions": _joined(record.metadata.get("versions")),
        "Cluster": _joined(record.metadata.get("cluster")),
    }
    return [(name, text or NOT_KNOWN) for name, text in facts.items()]


def state_text(analysis: Results) -> str:
    last = analysis.record.last_write
    if analysis.state == "finished" or last is None:
        return analysis.state
    return f"{analysis.state} (last written {duration(max(0.0, time.time() - last))} ago)"


def comparison_text(analysis: Results) -> str:
    """Describe how trials are compared."""
    compared = "last value" if analysis.scope == "last" else "best value"
    word = "lower" if analysis.mode == "min" else "higher"
    within = f" that meet {' and '.join(map(str, analysis.limits))}" if analysis.limits else ""
    return f"{word} is better; trials{within} are compared by their {compared}"


def trials_text(analysis: Results) -> str:
    counts = statuses(analysis)
    asked = analysis.record.num_samples
    more = f" of {asked}" if asked and asked > len(analysis.trials) else ""
    return f"{len(analysis.trials):,}{more} ({counts})" if counts else "0"


def _resources_text(trial: TrialRecord) -> str:
    amounts = [", ".join(f"{amount:g} {name}" for name, amount in each.items()) for each in trial.resources]
    return " + ".join(filter(None, amounts)) or ("none" if trial.resources else "")


def _tally(texts: Iterable[str]) -> str:
    """Return the most common of the trials' texts, each with its number of trials unless all are equal."""
    counts = Counter(filter(None, texts))
    common = [(text, counted(number, "trial")) for text, number in counts.most_common(8)]
    return "; ".join(text if len(counts) == 1 else f"{text} ({trials})" for text, trials in common)


def _machines_text(analysis: Results) -> str:
    names: Counter[str] = Counter()
    for trial in analysis.trials:
        names.update(filter(None, hosts_of(trial) or [str((trial.last_result or {}).get("hostname") or "")]))
    listed = ", ".join(name for name, _ in names.most_common(8))
    return listed + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _usage_text(analysis: Results) -> str:
    cpu, gpu, timed = usage(analysis)
    among = len(analysis.trials)
    partly = "" if timed == among else f" ({timed} of {counted(among, 'trial')} counted)"
    return f"CPU: {duration(cpu)}, {f'GPU: {duration(gpu)}' if gpu else 'no GPU'}{partly}" if timed else ""


def _joined(pairs: Any) -> str:
    return ", ".join(f"{name} {text_of(value)}" for name, value in mapping(pairs).items())
