"""The numbers that the page's charts and table draw, as compact plain data."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from horovod_tune.analysis import series
from horovod_tune.analysis.expectations import expectations, standings
from horovod_tune.analysis.importance import best_or_last
from horovod_tune.analysis.reader.tune_fields import iteration_of
from horovod_tune.analysis.report.run_facts import duration
from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.scoring import Score
from horovod_tune.analysis.trial_facts import error_line, ranks_of
from horovod_tune.analysis.varying_parameters import Parameter, text_of, varying_parameters

_POINTS = 120_000  # of all curves together: what a browser draws without a pause
_FEWEST, _MOST = 8, 400


def payload(analysis: Analysis) -> dict[str, Any]:
    """Return what the page's script needs, with None for what is not finite."""
    scored = analysis.has_best
    found: dict[str, Any] = {
        "name": analysis.name,
        "metric": analysis.metric if scored else None,
        "mode": analysis.mode,
        "scope": analysis.scope,
        "best": analysis.trials.index(analysis.best_trial) if scored else None,
        "trials": _trials(analysis, scored),
        "params": [_parameter(one) for one in varying_parameters(analysis)],
        "timeline": _timeline(analysis),
    }
    if scored:
        _, mode = analysis.require_metric()
        drawn = series.curves(analysis)
        values = np.array([best_or_last(analysis, index) for index in range(len(analysis.trials))])
        every = np.concatenate([curve.values for curve in drawn] or [np.empty(0)])
        found["value"] = _numbers(values)
        found["value_limits"] = series.robust_limits(values[np.isfinite(values)], mode)
        found["curve_limits"] = series.robust_limits(every, mode)
        most = int(np.clip(_POINTS // max(1, len(drawn)), _FEWEST, _MOST))
        found["curves"] = [_curve(curve, most) for curve in drawn]
        found["thinned"] = most if any(len(curve.values) > most for curve in drawn) else None
        found["best_time"] = [_numbers(axis) for axis in series.best_so_far(analysis, "time")]
        found["best_trials"] = [_numbers(axis) for axis in series.best_so_far(analysis, "trials")]
        found["rungs"] = _rungs(analysis)
        found |= _unfinished(analysis)
    return found


def as_script_json(data: Any) -> str:
    """Return JSON that may stand in a script element: no text in it can end the element or begin another.

    >>> as_script_json("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def number(value: Any) -> float | int | None:
    """A finite number with six significant digits, or None."""
    if value is None or isinstance(value, str):
        return None
    if isinstance(value, (bool, int)) and abs(value) < 2**53:
        return int(value)
    value = float(value)
    if not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e9 else short


def _numbers(values: Any) -> list[float | int | None]:
    return [number(value) for value in np.asarray(values, dtype=float).tolist()]


def _trials(analysis: Analysis, scored: bool) -> dict[str, list[Any]]:
    trials = analysis.trials
    nothing = Score()
    scores = analysis.scores if scored else [nothing] * len(trials)
    zero = series.start_time(analysis)
    spans = [
        t.end_time - t.start_time if t.start_time is not None and t.end_time is not None else None
        for t in trials
    ]
    return {
        "id": [t.trial_id for t in trials],
        "status": [t.status for t in trials],
        "last": [number(s.last) for s in scores],
        "best": [number(s.best) for s in scores],
        "best_iteration": [s.best_iteration for s in scores],
        "iterations": [max((iteration_of(row) or 0 for row in t.rows), default=0) for t in trials],
        "start": [number(t.start_time - zero) if t.start_time is not None else None for t in trials],
        "duration": [number(span) for span in spans],
        "duration_text": [duration(span) if span is not None else "" for span in spans],
        "ranks": [ranks_of(t) for t in trials],
        "error": [(error_line(t.error) or "")[:300] for t in trials],
    }


def _parameter(one: Parameter) -> dict[str, Any]:
    numeric = one.kind == "numeric"
    low, high = one.limits()
    ranks = {text: rank for rank, text in enumerate(one.categories)}
    return {
        "name": one.name,
        "kind": one.kind,
        "log": one.log,
        "integer": one.integer,
        "categories": [text[:80] for text in one.categories],
        "domain": one.domain.text[:200] if one.domain else None,
        "limits": [low, high],
        "values": [number(v) if numeric else (None if v is None else ranks[text_of(v)]) for v in one.values],
    }


def _curve(curve: series.Curve, most: int) -> list[list[Any]]:
    keep = thinned(curve.values, most)
    return [_numbers(axis[keep]) for axis in (curve.iterations, curve.elapsed_s, curve.values)]


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Return the indices of at most so many points that show a curve's shape.

    The first, the last, and of equally long stretches between them the lowest and the highest value.
    """
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


def _timeline(analysis: Analysis) -> dict[str, Any]:
    found = series.timeline(analysis)
    bars = [[b.trial, b.row, number(b.begin), number(b.trained), number(b.end)] for b in found.bars]
    return {"bars": bars, "rows": list(found.rows), "unit": found.unit}


def _unfinished(analysis: Analysis) -> dict[str, list[Any]]:
    """What is expected of each trial that was not trained to the end, and what is said of it."""
    expected, stands = expectations(analysis), standings(analysis)
    curves, said = [], []
    for trial in range(len(analysis.trials)):
        one, stand = expected.get(trial), stands.get(trial)
        curves.append(one and [_numbers(axis) for axis in (one.iterations, one.middle, one.low, one.high)])
        texts = [stand.text] if stand else []
        said.append([*texts, f"expected: {one.text}"] if one else texts)
    return {"expected": curves, "said": said}


def _rungs(analysis: Analysis) -> dict[str, Any]:
    steps = [
        {
            "iteration": rung.iteration,
            "trials": list(rung.trials),
            "values": _numbers(rung.values),
            "fates": list(rung.fates),
        }
        for rung in series.rungs(analysis)
    ]
    return {"known": bool(analysis.record.rungs), "steps": steps}
