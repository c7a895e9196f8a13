"""How much each hyperparameter matters: permutation importance on a random forest, both scikit-learn's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_tune.analysis.results import Analysis, cached
from horovod_tune.analysis.varying_parameters import Parameter, varying_parameters
from horovod_tune.errors import HorovodTuneError

METHOD = "permutation importance on a random forest (scikit-learn), out of fold"
MIN_TRIALS = 10
_MAX_TRIALS = 1000  # more are sampled: the order of importances no longer changes, the time does
_TREES, _FOLDS, _REPEATS, _SEED = 50, 5, 3, 0


@dataclass(frozen=True)
class Importances:
    """What permuting each hyperparameter costs the model, largest first.

    `drop` and `spread` have one entry per name: the mean loss of R² on trials that the model has not seen,
    and its standard deviation over folds and repeats. `r2` is the model's R² there: near or below 0 the
    hyperparameters do not explain the metric, and the importances mean nothing. `trials` is how many
    were used.
    """

    names: tuple[str, ...]
    drop: tuple[float, ...]
    spread: tuple[float, ...]
    r2: float
    trials: int


class TooFewTrials(HorovodTuneError, ValueError):
    """There is nothing to learn importances from."""


@cached
def importances(analysis: Analysis) -> Importances:
    """Return each hyperparameter's permutation importance for the metric.

    A random forest learns the trials' rank by the metric (so that one trial that diverged does not decide)
    from the hyperparameters; five times a fifth of the trials is held back, and a hyperparameter's
    importance is the drop of R² on them when its values are shuffled (Breiman, Random Forests, 2001).
    Raises `TooFewTrials` with fewer than 10 trials that have a value, or with nothing that varies.
    """
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance
    from sklearn.metrics import r2_score
    from sklearn.model_selection import KFold

    parameters, features, target = design(analysis)
    rows = len(target)
    if rows < MIN_TRIALS or not parameters:
        raise TooFewTrials(
            f"importances need at least {MIN_TRIALS} trials with a value and a hyperparameter that varies; "
            f"there are {rows} and {len(parameters)}"
        )
    rng = np.random.default_rng(_SEED)
    if rows > _MAX_TRIALS:
        picked = np.sort(rng.choice(rows, _MAX_TRIALS, replace=False))
        features, target = features[picked], target[picked]
    ranks = np.argsort(np.argsort(target, kind="stable"), kind="stable").astype(float)
    drops, predicted = [], np.empty_like(ranks)
    for train, held in KFold(_FOLDS, shuffle=True, random_state=_SEED).split(features):
        forest = RandomForestRegressor(_TREES, min_samples_leaf=2, random_state=_SEED, n_jobs=1)
        forest.fit(features[train], ranks[train])
        predicted[held] = forest.predict(features[held])
        how = {"n_repeats": _REPEATS, "random_state": _SEED, "scoring": "r2"}
        drops.append(permutation_importance(forest, features[held], ranks[held], **how).importances)
    every = np.concatenate(drops, axis=1)
    mean, spread = every.mean(axis=1), every.std(axis=1)
    order = np.argsort(-mean, kind="stable")
    return Importances(
        names=tuple(parameters[i].name for i in order),
        drop=tuple(float(mean[i]) for i in order),
        spread=tuple(float(spread[i]) for i in order),
        r2=float(r2_score(ranks, predicted)),
        trials=len(ranks),
    )


def design(analysis: Analysis) -> tuple[list[Parameter], np.ndarray, np.ndarray]:
    """Return the varying parameters, their positions (trials, parameters) and the metric (trials,).

    Only trials with a finite value are in it; a parameter that a trial lacks counts as below all others.
    """
    parameters = varying_parameters(analysis)
    values = analysis.values
    columns = []
    for parameter in parameters:
        column = parameter.positions.copy()
        known = column[np.isfinite(column)]
        column[~np.isfinite(column)] = (known.min() if len(known) else 0.0) - 1.0
        columns.append(column)
    finite = np.isfinite(values)
    features = np.stack(columns, axis=1)[finite] if columns else np.empty((int(finite.sum()), 0))
    return parameters, features, values[finite]
