"""What Tune writes down only in pickles: the space, the searcher, the scheduler, a trial's resources.

With `tune_files.py` the only place that knows Tune's private formats; checked against Ray 2.60.0. Nothing is
unpickled: see `inert_pickle.py`. What is not found stays None and is shown as not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from horovod_tune.analysis.reader.inert_pickle import Inert, UnreadablePickle, look
from horovod_tune.analysis.reader.records import Domain, Resources

_SAMPLE = "ray.tune.search.sample:"


@dataclass
class TunerFacts:
    """What `tuner.pkl` and the searcher's state say of an experiment."""

    metric: str | None = None
    mode: str | None = None
    num_samples: int | None = None
    time_budget_s: float | None = None
    searcher: str | None = None
    scheduler: str | None = None
    rungs: tuple[int, ...] = ()
    domains: dict[str, Domain] | None = None
    constants: dict[str, Any] = field(default_factory=dict)

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
    facts = TunerFacts(
        metric=_text(config.get("metric")),
        mode=_text(config.get("mode")),
        time_budget_s=_number(config.get("time_budget_s")),
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
        facts.metric, facts.mode = _text(whole.get("_metric")), _text(whole.get("_mode"))
        total = whole.get("_total_samples", whole.get("total_samples"))
        if isinstance(total, int) and 0 < total < 2**31:
            facts.num_samples = total
        facts.searcher = next((key[5:] for key in whole if isinstance(key, str) and key[:5] == "name:"), None)
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
        state = json.loads(data)
    except ValueError as error:
        raise UnreadablePickle(f"neither a pickle nor JSON: {error}") from error
    name = str(state.get("format", "")).rsplit(".", 1)[-1]
    return TunerFacts(_text(state.get("metric")), _text(state.get("mode")), searcher=name or None)


def resources_of(hex_blob: Any) -> Resources | None:
    """A trial's placement group from the state's hexadecimal pickle; None where it says nothing."""
    if not isinstance(hex_blob, str):
        return None
    try:
        factory = look(bytes.fromhex(hex_blob))
    except ValueError:
        return None
    bundles = factory.get("_bundles") if isinstance(factory, Inert) else None
    if not isinstance(bundles, list):
        return None
    return Resources(tuple({str(k): float(v) for k, v in b.items()} for b in bundles if isinstance(b, dict)))


def checkpoints_of(blob: str) -> list[tuple[str, dict[str, Any]]]:
    """The (folder's name, metrics) of each checkpoint that a trial's manager keeps, oldest first."""
    try:
        manager = look(bytes.fromhex(blob))
    except ValueError:
        return []
    kept = manager.get("_checkpoint_results", []) if isinstance(manager, Inert) else []
    found = []
    for result in kept or []:
        checkpoint = result.get("checkpoint") if isinstance(result, Inert) else None
        path = checkpoint.get("path") if isinstance(checkpoint, Inert) else None
        if isinstance(path, str):
            metrics = result.get("metrics")
            found.append((path.rstrip("/").rsplit("/", 1)[-1], metrics if isinstance(metrics, dict) else {}))
    return found


def plain(value: Any) -> Any:
    """Turn whatever a state file holds into plain data: objects become text such as `<torch.optim:Adam>`."""
    if isinstance(value, dict) and value.get("_type") == "CLOUDPICKLE_FALLBACK":
        try:
            return plain(look(bytes.fromhex(value.get("value", ""))))
        except ValueError:
            return "<not readable>"
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, (Inert, type)):
        return f"<{_name_of(value)}>"
    return value


def _name_of(value: Any) -> str:
    name = str(getattr(value, "name", value))
    if "_make_function" in name or "_make_skeleton_class" in name:
        return "function" if "function" in name else "class"
    return name.replace(":", ".")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _describe_searcher(searcher: Any) -> str | None:
    """The searcher's class; a limiter around it is named with its bound."""
    if isinstance(searcher, str):
        return searcher
    if not isinstance(searcher, Inert):
        return None
    inner = searcher.get("searcher")
    if isinstance(inner, Inert):
        bound = searcher.get("max_concurrent")
        return f"{inner.short_name}, at most {bound} at a time" if bound else inner.short_name
    return searcher.short_name


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
        return scheduler
    if not isinstance(scheduler, Inert):
        return None
    settings = {}
    for private, public in _SCHEDULER_SETTINGS.items():
        value = scheduler.get(private)
        if isinstance(value, (int, float, str)) and value != "training_iteration":
            settings[public] = value
    inside = ", ".join(f"{name}={value}" for name, value in settings.items())
    return f"{scheduler.short_name}({inside})" if inside else scheduler.short_name


def _rungs(scheduler: Any) -> tuple[int, ...]:
    """ASHA's milestones, from its brackets as they were when the experiment began."""
    if not isinstance(scheduler, Inert) or scheduler.get("_time_attr") != "training_iteration":
        return ()
    found: set[int] = set()
    for bracket in scheduler.get("_brackets") or []:
        for rung in bracket.get("_rungs") or [] if isinstance(bracket, Inert) else []:
            if isinstance(rung, tuple) and rung and isinstance(rung[0], (int, float)):
                found.add(int(rung[0]))
    return tuple(sorted(found))


def _configs(value: Any) -> Iterator[dict[str, Any]]:
    """Every dictionary named `config` within, without following anything twice."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop(0)
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

    def visit(path: str, value: Any) -> None:
        if (
            isinstance(value, dict)
            and set(value) == {"grid_search"}
            and isinstance(value["grid_search"], list)
        ):
            values = tuple(plain(value["grid_search"]))
            domains[path] = Domain("categorical", f"grid_search({list(values)!r})", categories=values)
        elif isinstance(value, dict):
            for key, inner in value.items():
                visit(f"{path}/{key}" if path else str(key), inner)
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                visit(f"{path}/{index}", inner)
        elif isinstance(value, Inert) and value.name.startswith(_SAMPLE):
            domains[path] = _domain(value)
        else:
            constants[path] = plain(value)

    visit("", config)
    return domains, constants


def _domain(value: Inert) -> Domain:
    sampler, step = value.get("sampler"), None
    if isinstance(sampler, Inert) and sampler.short_name == "Quantized":
        step = sampler.get("q")
        sampler = sampler.get("sampler")
    log = isinstance(sampler, Inert) and "LogUniform" in sampler.short_name
    normal = isinstance(sampler, Inert) and "Normal" in sampler.short_name
    if value.short_name == "Categorical":
        values = tuple(plain(value.get("categories") or []))
        return Domain("categorical", f"choice({list(values)!r})", categories=values)
    if value.short_name not in ("Float", "Integer"):
        return Domain("other", "sample_from(…)")
    integer = value.short_name == "Integer"
    lower, upper = _number(value.get("lower")), _number(value.get("upper"))
    if normal and isinstance(sampler, Inert):
        return Domain("float", f"randn({sampler.get('mean')}, {sampler.get('sd')})")
    name = ("q" if step else "") + ("lograndint" if log else "randint") if integer else ""
    name = name or ("q" if step else "") + ("loguniform" if log else "uniform")
    ends = [f"{end:g}" for end in (lower, upper) if end is not None] + ([f"{step:g}"] if step else [])
    return Domain(
        "integer" if integer else "float", f"{name}({', '.join(ends)})", lower=lower, upper=upper, log=log
    )
