"""Results of an earlier experiment, and their model: a start for a search whose space may have changed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from horovod_tune.scoring import known_values
from horovod_tune.search.gp.fitted_model import FittedModel
from horovod_tune.search.gp.kernels import FloatArray, with_context
from horovod_tune.search.history import Ending, Trial
from horovod_tune.search.space.domains import MISSING, SpaceError
from horovod_tune.search.space.search_space import SearchSpace


class EarlierModel:
    """A model of the earlier results, whose mean enters the new model with a learned weight (see `kernels`).

    `context` is the time at which learning curves are evaluated, if there are any.
    """

    def __init__(self, model: FittedModel, context: FloatArray) -> None:
        self.model, self.context, self._process = model, context, model.condition()

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the posterior mean less the constant mean, shape (points,); extra features are ignored."""
        parameters = self.model.features.shape[1] - len(self.context)
        predicted, _ = self._process.predict(with_context(features[:, :parameters], self.context))
        return predicted[:, 0] - self._process.mean


#: Each trial's configuration and reports, nested or with `/` in their names.
Rows = list[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]]


def fit_into(space: SearchSpace, rows: Rows, metric: str | None, time_attr: str) -> tuple[list[Trial], str]:
    """Return the rows that fit `space`, as trials, and a message that counts those that do not.

    A trial's value is the last that it reported, as for `analyze`: not every report has the metric.
    """
    used: list[Trial] = []
    reasons: Counter[str] = Counter()
    for config, reports in rows:
        *_, (value, time) = [(None, None), *known_values(reports, [metric or "", time_attr])]
        if value is None:
            reasons[f"no number {metric!r}"] += 1
            continue
        empty = {name for name, value in config.items() if value is MISSING}
        try:
            point = space.point(space.nested({k: v for k, v in config.items() if k not in empty}), empty)
        except SpaceError as error:
            reasons[str(error).split(", got ")[0]] += 1
            continue
        used.append(Trial(f"earlier-{len(used)}", point))
        used[-1].add_report(time, value)
        used[-1].end(value, error=False)
    message = f"{len(used)} of {len(rows)} earlier results are used"
    if failed := sum(trial.ending is Ending.FAILED for trial in used):
        message += f", {failed} of them as failures (NaN or infinity)"
    if reasons:
        message += "; left out: " + ", ".join(f"{n} ({reason})" for reason, n in reasons.most_common())
    return used, message


def read_previous(source: Any) -> Rows:
    """Read an experiment's directory, what `analyze` or Tune returned, or a DataFrame. Raises `OSError`."""
    import pandas as pd
    from ray.tune import ExperimentAnalysis, ResultGrid

    from horovod_tune.analysis import Analysis, analyze
    from horovod_tune.analysis.trial_details import config_at

    if isinstance(source, (str, os.PathLike, ResultGrid, ExperimentAnalysis)):
        source = analyze(source)
    if isinstance(source, Analysis):
        return [(config_at(trial), trial.reports) for trial in source.trials]
    if isinstance(source, pd.DataFrame):
        # A table has every column in every row. Where a trial lacks the parameter, or it is None, pandas
        # has NaN, NA, NaT or None, by the column's type.
        cells = source.astype(object).where(source.notna(), None).rename(columns=str)
        return [_row(row) for row in cells.to_dict("records")]
    raise TypeError(
        "analysis must be an experiment's directory, an Analysis, an ExperimentAnalysis, a ResultGrid or a "
        f"DataFrame, got {type(source).__name__}"
    )


def _row(metrics: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from horovod_tune.analysis.frames import metrics_in

    config = {k[len("config/") :]: v for k, v in metrics.items() if k.startswith("config/")}
    # In a user's own table, parameter names have no prefix.
    config, metrics = (config, metrics_in(metrics)) if config else (metrics, metrics)
    return {k: MISSING if v is None else v for k, v in config.items()}, [metrics]
