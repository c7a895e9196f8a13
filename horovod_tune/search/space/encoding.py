"""A search space as JSON, so that a saved search can be restored before its space is passed."""

from __future__ import annotations

from typing import Any

from ray.tune.search.sample import Categorical, Domain, Float, Integer, LogUniform, Normal, Quantized


def encode(spec: Any) -> Any:
    """Return a space as JSON values.

    Raises:
        TypeError: For what JSON cannot express: functions, arrays, `tune.sample_from`.
    """
    if spec is None or isinstance(spec, (bool, str)) or type(spec) in (int, float):
        return spec
    if isinstance(spec, dict):
        return {"dict": [[encode(key), encode(value)] for key, value in spec.items()]}
    if isinstance(spec, (list, tuple)):
        return {type(spec).__name__: [encode(value) for value in spec]}
    if isinstance(spec, Categorical):
        return {"choice": [encode(value) for value in spec.categories]}
    if isinstance(spec, (Float, Integer)):
        sampler, step = spec.get_sampler(), None
        if isinstance(sampler, Quantized):
            sampler, step = sampler.get_sampler(), sampler.q
        if isinstance(sampler, Normal):
            return {"normal": [sampler.mean, sampler.sd, step]}
        kind = "float" if isinstance(spec, Float) else "integer"
        return {kind: [spec.lower, spec.upper, isinstance(sampler, LogUniform), step]}
    raise TypeError(f"{type(spec).__name__} has no JSON form")


def decode(encoded: Any) -> Any:
    """Return the space that `encode` encoded."""
    if not isinstance(encoded, dict):
        return encoded
    ((kind, parts),) = encoded.items()
    if kind == "dict":
        return {decode(key): decode(value) for key, value in parts}
    if kind in ("list", "tuple"):
        return [decode(part) for part in parts] if kind == "list" else tuple(decode(part) for part in parts)
    if kind == "choice":
        return Categorical([decode(part) for part in parts]).uniform()
    if kind == "normal":
        mean, deviation, step = parts
        return _quantized(Float(None, None).normal(mean, deviation), step)
    lower, upper, log, step = parts
    domain = Float(lower, upper) if kind == "float" else Integer(lower, upper)
    return _quantized(domain.loguniform() if log else domain.uniform(), step)


def _quantized(domain: Any, step: float | None) -> Domain:
    return domain if step is None else domain.quantized(step)
