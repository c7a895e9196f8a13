"""What a search has written about itself in JSON: our metadata file, and the state of `BayesOptSearch`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from horovod_tune.analysis.limits import Limit, parse_limit
from horovod_tune.analysis.reader.plain_values import mapping, number_or_none, read_json, text_or_none
from horovod_tune.analysis.reader.records import (
    TRAINING_ITERATION,
    Domain,
    PredictedCurve,
    Predictions,
    Resources,
    RungTimes,
)

_KINDS = ("float", "integer", "categorical", "other")


@dataclass
class Metadata:
    """What is known of a search; what is not written stays None and is shown as not known."""

    metric: str | None = None
    mode: str | None = None
    num_samples: int | None = None
    time_budget_s: float | None = None
    searcher: str | None = None
    scheduler: str | None = None
    rungs: RungTimes | None = None
    domains: dict[str, Domain] | None = None
    constants: dict[str, Any] = field(default_factory=dict)
    resources: Resources | None = None
    limits: tuple[Limit, ...] = ()
    front: dict[str, str] = field(default_factory=dict)
    predictions: Predictions | None = None

    def add(self, other: Metadata) -> None:
        """Take over what is not known yet."""
        for name, value in vars(other).items():
            if not getattr(self, name) and value:
                setattr(self, name, value)


def run_metadata(written: Mapping[str, Any]) -> Metadata:
    """Return what the driver wrote when the search started (`horovod_tune_run-*.json`)."""
    samples = written.get("num_samples")
    domains = {str(name): _domain(mapping(one)) for name, one in mapping(written.get("space")).items()}
    bundles = [_amounts(bundle) for bundle in _list(written.get("resources"))]
    return Metadata(
        metric=text_or_none(written.get("metric")),
        mode=text_or_none(written.get("mode")),
        num_samples=samples if isinstance(samples, int) and 0 < samples < 2**31 else None,
        time_budget_s=number_or_none(written.get("time_budget_s")),
        searcher=text_or_none(written.get("searcher")),
        scheduler=text_or_none(written.get("scheduler")),
        rungs=_rung_times(written.get("time_attr"), written.get("rungs")),
        domains=domains or None,
        constants=mapping(written.get("constants")),
        resources=Resources(tuple(bundles)) if bundles else None,
    )


def searcher_metadata(data: bytes) -> Metadata:
    """Return what `BayesOptSearch` saved: metric, limits, front and predictions.

    Raises `ValueError` for anything else; the states of Tune's own searchers are pickles, which are not read.
    """
    state = mapping(read_json(data)[0])
    metric, mode = text_or_none(state.get("metric")), text_or_none(state.get("mode"))
    try:
        limits = tuple(parse_limit(str(text)) for text in state.get("limits") or ())
    except (TypeError, ValueError) as error:
        raise ValueError(f"its limits: {error}") from error
    return Metadata(
        metric=metric,
        mode=mode,
        searcher=text_or_none(str(state.get("format", "")).rsplit(".", 1)[-1]) or None,
        limits=limits,
        front=_front(state.get("metric"), state.get("mode")),
        predictions=_predictions(metric, state.get("predictions")),
    )


def _domain(written: dict[str, Any]) -> Domain:
    kind = written.get("kind")
    return Domain(
        kind if kind in _KINDS else "other",
        text_or_none(written.get("text")) or "",
        lower=number_or_none(written.get("lower")),
        upper=number_or_none(written.get("upper")),
        log=written.get("log") is True,
        categories=tuple(_list(written.get("categories"))),
    )


def _amounts(bundle: Any) -> dict[str, float]:
    numbers = {str(name)[:300]: number_or_none(amount) for name, amount in mapping(bundle).items()}
    return {name: amount for name, amount in numbers.items() if amount is not None}


def _rung_times(time_attr: Any, values: Any) -> RungTimes | None:
    """Return the times in a list, each once, smallest first; None if there are none."""
    numbers = map(number_or_none, _list(values))
    times = tuple(sorted({each for each in numbers if each is not None and 0 < each < 2**53}))
    return RungTimes(text_or_none(time_attr) or TRAINING_ITERATION, times) if times else None


def _predictions(metric: str | None, saved: Any) -> Predictions | None:
    """Return what a saved search expects of its trials, without curves that are malformed."""
    time_attr = text_or_none(mapping(saved).get("time_attr"))
    if metric is None or time_attr is None:
        return None
    curves = {}
    for entry in map(mapping, _list(mapping(saved).get("curves"))):
        trial_id = entry.get("trial_id")
        axes = [_finite(entry.get(name)) for name in ("times", "middle", "low", "high")]
        if isinstance(trial_id, str) and axes[0] and len(set(map(len, axes))) == 1:
            curves[trial_id] = PredictedCurve(*axes)
    return Predictions(metric, time_attr, curves) if curves else None


def _finite(values: Any) -> tuple[float, ...]:
    """Return the numbers of a list; none if one of them is not finite."""
    numbers = [number_or_none(value) for value in _list(values)]
    found = tuple(number for number in numbers if number is not None and math.isfinite(number))
    return found if len(found) == len(numbers) else ()


def _front(metrics: Any, modes: Any) -> dict[str, str]:
    """Return the modes of the metrics of a search for several of them; empty for any other."""
    if not (isinstance(metrics, list) and isinstance(modes, list) and len(metrics) == len(modes)):
        return {}
    if not all(isinstance(name, str) for name in metrics) or set(map(str, modes)) - {"min", "max"}:
        return {}
    return dict(zip(metrics, modes, strict=True))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
