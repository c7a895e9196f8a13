"""What Tune writes down only in pickles: the space, the searcher, the scheduler, a trial's resources.

With `tune_files.py` the only place that knows Tune's private formats; checked against Ray 2.60.0. Nothing is
unpickled: see `inert_pickle.py`. What is not found stays None and is shown as not known.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from horovod_tune.analysis.limits import Limit, parse_limit
from horovod_tune.analysis.reader.inert_pickle import Inert, UnreadablePickle, look
from horovod_tune.analysis.reader.plain_values import (
    DEEPEST,
    mapping,
    number_or_none,
    plain,
    read_json,
    text_or_none,
)
from horovod_tune.analysis.reader.records import (
    TRAINING_ITERATION,
    Domain,
    PredictedCurve,
    Predictions,
    Resources,
    RungTimes,
)

_SAMPLE = "ray.tune.search.sample:"
_ANONYMOUS = "_metric"  # what Tune writes for a metric that nobody gave
_MOST_PARAMETERS = 5_000


@dataclass
class TunerFacts:
    """What `tuner.pkl` and the searcher's state say of an experiment."""

    metric: str | None = None
    mode: str | None = None
    num_samples: int | None = None
    time_budget_s: float | None = None
    searcher: str | None = None
    scheduler: str | None = None
    rungs: RungTimes | None = None
    domains: dict[str, Domain] | None = None
    constants: dict[str, Any] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    front: dict[str, str] = field(default_factory=dict)
    predictions: Predictions | None = None

    def add(self, other: TunerFacts) -> None:
        """Take over what is not known yet."""
        for name, value in vars(other).items():
            if not getattr(self, name) and value:
                setattr(self, name, value)


def tuner_facts(data: bytes) -> TunerFacts:
    """Read `tuner.pkl`. Raises `UnreadablePickle`."""
    whole = look(data)
    config = whole.get("_tune_config") if isinstance(whole, dict) else None
    if not isinstance(config, Inert):
        raise UnreadablePickle("no _tune_config in it")
    scheduler, searcher = config.get("scheduler"), config.get("search_alg")
    metric, mode = text_or_none(config.get("metric")), text_or_none(config.get("mode"))
    if metric is None and isinstance(scheduler, Inert):  # ASHAScheduler(metric="loss", mode="min")
        metric, mode = text_or_none(scheduler.get("_metric")), text_or_none(scheduler.get("_mode"))
        metric = None if metric == _ANONYMOUS else metric
    facts = TunerFacts(
        metric=metric,
        mode=mode,
        time_budget_s=number_or_none(config.get("time_budget_s")),
        searcher=_describe_searcher(searcher) if searcher is not None else "random and grid (Tune's own)",
        scheduler=_describe_scheduler(scheduler) if scheduler is not None else "first in, first out",
        rungs=_rungs(scheduler),
    )
    samples = config.get("num_samples")
    if isinstance(samples, int) and samples > 0:
        facts.num_samples = samples
    return facts


def searcher_facts(data: bytes) -> TunerFacts:
    """Read a searcher's state (`basic-variant-state-*`, `search_gen_state-*`, `searcher-state-*`).

    These are pickles, whatever their names end in; only our own searcher writes JSON.
    """
    if data[:1] == b"{":
        return _own_searcher(data)
    whole = look(data)
    facts = TunerFacts()
    if isinstance(whole, dict):
        facts.metric, facts.mode = text_or_none(whole.get("_metric")), text_or_none(whole.get("_mode"))
        total = whole.get("_total_samples", whole.get("total_samples"))
        if isinstance(total, int) and 0 < total < 2**31:
            facts.num_samples = total
        names = [key[5:] for key in whole if isinstance(key, str) and key[:5] == "name:"]
        facts.searcher = text_or_none(names[0]) if names else None
        if facts.searcher == "ConcurrencyLimiter":
            facts.searcher = None  # the searcher within has a state of its own
    for config in _configs(whole):
        domains, constants = _split_space(config)
        if domains:
            facts.domains, facts.constants = domains, constants
            break
    return facts


def _own_searcher(data: bytes) -> TunerFacts:
    try:
        state = mapping(read_json(data)[0])
    except ValueError as error:
        raise UnreadablePickle(f"neither a pickle nor JSON: {error}") from error
    name = str(state.get("format", "")).rsplit(".", 1)[-1]
    metric, mode = text_or_none(state.get("metric")), text_or_none(state.get("mode"))
    try:
        limits = tuple(parse_limit(str(text)) for text in state.get("limits") or ())
    except (TypeError, ValueError) as error:
        raise UnreadablePickle(f"its limits: {error}") from error
    front = _front(state.get("metric"), state.get("mode"))
    predictions = _predictions(metric, state.get("predictions"))
    return TunerFacts(
        metric, mode, searcher=text_or_none(name) or None, limits=limits, front=front, predictions=predictions
    )


def _predictions(metric: str | None, saved: Any) -> Predictions | None:
    """Return what a saved search expects of its trials, without those curves that are none."""
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
    """The numbers of a list; none where one of them is not finite."""
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


def resources_of(hex_blob: Any) -> Resources | None:
    """A trial's placement group from the state's hexadecimal pickle; None where it says nothing."""
    return _resources(hex_blob) if isinstance(hex_blob, str) else None


@lru_cache(maxsize=256)  # the same for nearly every trial
def _resources(hex_blob: str) -> Resources | None:
    try:
        factory = look(bytes.fromhex(hex_blob))
    except ValueError:
        return None
    bundles = factory.get("_bundles") if isinstance(factory, Inert) else None
    if not isinstance(bundles, list):
        return None
    read = []
    for bundle in bundles:
        amounts = {text_or_none(name): number_or_none(n) for name, n in mapping(bundle).items()}
        read.append({name: n for name, n in amounts.items() if name is not None and n is not None})
    return Resources(tuple(read))


def checkpoints_of(blob: str) -> list[tuple[str, dict[str, Any]]]:
    """The (folder's name, metrics) of each checkpoint that a trial's manager keeps, oldest first."""
    try:
        manager = look(bytes.fromhex(blob))
    except ValueError:
        return []
    found = []
    for result in _list(manager.get("_checkpoint_results") if isinstance(manager, Inert) else None):
        checkpoint = result.get("checkpoint") if isinstance(result, Inert) else None
        path = checkpoint.get("path") if isinstance(checkpoint, Inert) else None
        if isinstance(path, str):
            metrics = result.get("metrics")
            found.append((path.rstrip("/").rsplit("/", 1)[-1], metrics if isinstance(metrics, dict) else {}))
    return found


def _describe_searcher(searcher: Any) -> str | None:
    """The searcher's class; a limiter around it is named with its bound."""
    if isinstance(searcher, str):
        return text_or_none(searcher)
    if not isinstance(searcher, Inert):
        return None
    inner = searcher.get("searcher")
    if isinstance(inner, Inert):
        bound = number_or_none(searcher.get("max_concurrent"))
        name = text_or_none(inner.short_name)
        return f"{name}, at most {bound:g} at a time" if bound else name
    return text_or_none(searcher.short_name)


_SCHEDULER_SETTINGS = {
    "_max_t": "max_t",
    "_max_t_attr": "max_t",
    "_reduction_factor": "reduction_factor",
    "_eta": "reduction_factor",
    "_perturbation_interval": "perturbation_interval",
    "_grace_period": "grace_period",
    "_time_attr": "time_attr",
}


def _describe_scheduler(scheduler: Any) -> str | None:
    if isinstance(scheduler, str):
        return text_or_none(scheduler)
    if not isinstance(scheduler, Inert):
        return None
    settings = {}
    for private, public in _SCHEDULER_SETTINGS.items():
        value = scheduler.get(private)
        value = text_or_none(value) if isinstance(value, str) else number_or_none(value)
        if value is not None and value != "training_iteration":
            settings[public] = f"{value:g}" if isinstance(value, float) else value
    inside = ", ".join(f"{name}={value}" for name, value in settings.items())
    name = text_or_none(scheduler.short_name)
    return f"{name}({inside})" if inside else name


def _rungs(scheduler: Any) -> RungTimes | None:
    """ASHA's milestones, from its brackets as they were when the experiment began, or PromotingASHA's."""
    if not isinstance(scheduler, Inert):
        return None
    own = scheduler.get("_rungs")
    levels = _list(own.get("levels") if isinstance(own, Inert) else None)
    for bracket in _list(scheduler.get("_brackets")):
        rungs = _list(bracket.get("_rungs") if isinstance(bracket, Inert) else None)
        levels = [*levels, *(rung[0] for rung in rungs if isinstance(rung, tuple) and rung)]
    return rung_times(scheduler.get("_time_attr"), levels)


def rung_times(time_attr: Any, values: Any) -> RungTimes | None:
    """Return the numbers of a list that are times, each once, smallest first; None where there are none.

    Whoever wrote no `time_attr` meant the iteration.
    """
    numbers = map(number_or_none, _list(values))
    times = tuple(sorted({each for each in numbers if each is not None and 0 < each < 2**53}))
    return RungTimes(text_or_none(time_attr) or TRAINING_ITERATION, times) if times else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _configs(value: Any) -> Iterator[dict[str, Any]]:
    """Every dictionary named `config` within, without following anything twice."""
    seen: set[int] = set()
    pending = deque([value])
    while pending:
        item = pending.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            if isinstance(item.get("config"), dict):
                yield item["config"]
            if isinstance(item.get("_space"), dict):
                yield item["_space"]
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
        elif isinstance(item, Inert):
            pending.extend([item.state, item.args, item.items])


def _split_space(config: dict[str, Any]) -> tuple[dict[str, Domain], dict[str, Any]]:
    """The domains of a space by flat name (`net/width`), and what is constant in it."""
    domains: dict[str, Domain] = {}
    constants: dict[str, Any] = {}

    def visit(path: str, value: Any, depth: int = 0) -> None:
        if depth > DEEPEST or len(domains) + len(constants) >= _MOST_PARAMETERS:
            raise UnreadablePickle("its space is too deep or too large")
        if (
            isinstance(value, dict)
            and set(value) == {"grid_search"}
            and isinstance(value["grid_search"], list)
        ):
            values = tuple(plain(value["grid_search"]))
            domains[path] = Domain("categorical", f"grid_search({list(values)!r})", categories=values)
        elif isinstance(value, dict):
            for key, inner in value.items():
                name = text_or_none(key) if isinstance(key, str) else str(plain(key))
                visit(f"{path}/{name}" if path else str(name), inner, depth + 1)
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                visit(f"{path}/{index}", inner, depth + 1)
        elif isinstance(value, Inert) and value.name.startswith(_SAMPLE):
            domains[path] = _domain(value)
        else:
            constants[path] = plain(value)

    visit("", config)
    return domains, constants


def _domain(value: Inert) -> Domain:
    sampler, step = value.get("sampler"), None
    if isinstance(sampler, Inert) and sampler.short_name == "Quantized":
        step = number_or_none(sampler.get("q"))
        sampler = sampler.get("sampler")
    log = isinstance(sampler, Inert) and "LogUniform" in sampler.short_name
    normal = isinstance(sampler, Inert) and "Normal" in sampler.short_name
    if value.short_name == "Categorical":
        values = tuple(plain(_list(value.get("categories"))))
        return Domain("categorical", f"choice({list(values)!r})", categories=values)
    if value.short_name not in ("Float", "Integer"):
        return Domain("other", "sample_from(…)")
    integer = value.short_name == "Integer"
    lower, upper = number_or_none(value.get("lower")), number_or_none(value.get("upper"))
    if normal and isinstance(sampler, Inert):
        mean, spread = number_or_none(sampler.get("mean")), number_or_none(sampler.get("sd"))
        return Domain("float", f"randn({mean}, {spread})")
    name = ("q" if step else "") + ("lograndint" if log else "randint") if integer else ""
    name = name or ("q" if step else "") + ("loguniform" if log else "uniform")
    ends = [f"{end:g}" for end in (lower, upper) if end is not None] + ([f"{step:g}"] if step else [])
    return Domain(
        "integer" if integer else "float", f"{name}({', '.join(ends)})", lower=lower, upper=upper, log=log
    )
