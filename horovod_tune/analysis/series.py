"""The numbers behind the plots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.trial_details import hosts_of, ranks_of


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Return the indices of at most `most` points of a curve: its ends, and equal stretches' extremes."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    kept = {0, count - 1}
    for stretch in np.array_split(np.arange(1, count - 1), max(1, (most - 2) // 2)):
        inside = values[stretch]
        if np.isfinite(inside).any():
            kept.update((int(stretch[np.nanargmin(inside)]), int(stretch[np.nanargmax(inside)])))
        else:
            kept.add(int(stretch[0]))
    return np.array(sorted(kept))


def best_so_far(analysis: Analysis, against: str = "time") -> tuple[np.ndarray, np.ndarray]:
    """Return steps (x, best value up to x): x is seconds since the start, or the number of trials.

    Against "time", every report that meets the limits counts; against "trials", each trial's best value. Only
    the points at which the best changes, and the last point, are returned.
    """
    _, mode = analysis.require_metric()
    if against == "trials":
        values = analysis.scores["best"].to_numpy()
        xs = np.arange(1.0, len(values) + 1)
    elif against == "time":
        reports = analysis.reports
        reports = reports[reports["allowed"] & np.isfinite(reports["time"])]
        reports = reports.sort_values("time", kind="stable")
        values = reports["value"].to_numpy()
        xs = reports["time"].to_numpy() - (analysis.record.start_time or 0.0)
    else:
        raise ValueError(f'against must be "time" or "trials", got {against!r}')
    sign = 1.0 if mode == "min" else -1.0
    best = np.minimum.accumulate(np.where(np.isfinite(values), sign * values, np.inf))
    steps = np.flatnonzero(best < np.append(np.inf, best)[:-1])
    if len(steps) and xs[-1] > xs[steps[-1]]:
        steps = np.append(steps, len(xs) - 1)
    return xs[steps], sign * best[steps]


@dataclass(frozen=True)
class Timeline:
    """A chart of which trials ran when.

    `rows` names each row, which has room for one rank or trial; `unit` is the axis label. `bars` has a row
    for each period in which a trial held one, earliest first: trial, row, rank (None if not known), and, in
    seconds since the experiment's start, begin (of the start-up), trained (when training began) and end.
    """

    bars: pd.DataFrame
    rows: tuple[str, ...]
    unit: str


def timeline(analysis: Analysis) -> Timeline:
    """Return when each trial held which rows; a row is reused as soon as the period has ended."""
    zero, now = analysis.record.start_time or 0.0, analysis.record.last_write or 0.0
    spans, times = analysis.spans.copy(), ["begin", "trained", "end"]
    running = spans["trial"].map(lambda trial: analysis.trials[trial].status == "RUNNING").astype(bool)
    newest = ~spans["trial"].duplicated(keep="last") & (
        spans["end"] >= max(analysis.record.sessions, default=0.0)
    )
    spans["end"] = spans["end"].mask(running & newest, spans["end"].clip(lower=now))
    spans[times] -= zero
    ordered = spans.sort_values([*times, "trial"])[[*times, "trial"]]
    free: dict[str, list[float]] = {}
    bars = []
    for begin, trained, end, index in ordered.itertuples(index=False, name=None):
        hosts, ranks = hosts_of(analysis.trials[index]), ranks_of(analysis.trials[index])
        # Ranks take the free rows of their host.
        for rank, host in enumerate(sorted(hosts, key=hosts.index) if hosts else [""] * (ranks or 1)):
            slots = free.setdefault(host, [])
            slot = next((s for s, ends in enumerate(slots) if ends <= begin + 1e-3), len(slots))
            slots[slot : slot + 1] = [end]
            bars.append((index, (host, slot), rank if ranks else None, begin, trained, end))
    places = [(host, slot) for host in sorted(free) for slot in range(len(free[host]))]
    table = pd.DataFrame(bars, columns=["trial", "row", "rank", "begin", "trained", "end"])
    table["row"] = table["row"].map({place: row for row, place in enumerate(places)})
    names = tuple(f"{host} {slot}" if host else str(slot + 1) for host, slot in places)
    known = any(ranks_of(trial) for trial in analysis.trials)
    unit = "hosts' slots" if any(free) and "" not in free else "ranks" if known else "trials at once"
    return Timeline(table, names, unit)


def robust_limits(values: np.ndarray, mode: str) -> tuple[float, float, int]:
    """Return axis limits for the metric, and how many finite values (or, if none is, values) lie outside.

    The good end is always shown. Values more than three interquartile ranges beyond the worse quartile (those
    of diverged trials) are left out if they are at most a tenth of all and would flatten the rest.
    """
    sign = 1.0 if mode == "min" else -1.0
    costs = sign * values[np.isfinite(values)]
    if not len(costs):
        return 0.0, 1.0, len(values)
    first, third = np.quantile(costs, [0.25, 0.75])
    reach = 3 * float(third - first)
    kept = costs[costs <= third + reach]
    if not 0 < 2 * reach < costs.max() - third or len(costs) - len(kept) > 0.1 * len(costs):
        kept = costs
    low, high = sorted((sign * float(kept.min()), sign * float(kept.max())))
    pad = 0.04 * (high - low) or abs(high) * 0.05 or 0.5
    return low - pad, high + pad, len(costs) - len(kept)
