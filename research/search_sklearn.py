"""Searches on real trainings: scikit-learn's models on its own data sets, in the spaces of a known suite.

    python research/search_sklearn.py run --methods horovod_tune random     # rows for search_sklearn.csv
    python research/search_sklearn.py report                                # the table

The models and the ranges of their hyperparameters are those of Bayesmark, on which the Black-Box
Optimization Challenge of NeurIPS 2020 was held (Turner et al., 2021), so that the authors of this search did
not choose where the optimum is; ranges that are logistic there are linear here. The loss is that of
three-fold cross-validation, always with the same folds and random numbers. 4 trials are in flight; methods
are those of `search_quality.py`. The report's unit is the distance from random search's median loss after 10
trials to the best loss that any method has found.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from ray import tune
from result_rows import ResultRows
from search_problems import Config, Problem, TrialFailed
from search_quality import METHODS, search

RESULTS = Path(__file__).parent / "results" / "search_sklearn.csv"
MARKS = (10, 20, 40)
FIELDS = ["method", "problem", "seed", *(f"loss_{mark}" for mark in MARKS), "note"]
#: Model, data set and loss.
PROBLEMS = {
    "tree_breast": ("tree", "breast_cancer", "log loss"),
    "tree_diabetes": ("tree", "diabetes", "squared error"),
    "forest_wine": ("forest", "wine", "log loss"),
    "forest_diabetes": ("forest", "diabetes", "absolute error"),
    "adam_wine": ("adam", "wine", "log loss"),
    "adam_breast": ("adam", "breast_cancer", "log loss"),
    "adam_diabetes": ("adam", "diabetes", "squared error"),
    "sgd_wine": ("sgd", "wine", "log loss"),
    "sgd_breast": ("sgd", "breast_cancer", "error"),
    "svm_breast": ("svm", "breast_cancer", "error"),
    "svm_diabetes": ("svm", "diabetes", "absolute error"),
    "boosting_wine": ("boosting", "wine", "log loss"),
}
_SCORES = {
    "log loss": "neg_log_loss",
    "error": "accuracy",
    "squared error": "neg_mean_squared_error",
    "absolute error": "neg_mean_absolute_error",
}


def space(model: str) -> Config:
    """Return the ranges of Bayesmark; integers include their upper ends there."""
    leaves = {
        "max_depth": tune.randint(1, 16),
        "min_samples_split": tune.uniform(0.01, 0.99),
        "min_samples_leaf": tune.uniform(0.01, 0.49),
        "min_weight_fraction_leaf": tune.uniform(0.01, 0.49),
        "max_features": tune.uniform(0.01, 0.99),
        "min_impurity_decrease": tune.uniform(0.0, 0.5),
    }
    network = {
        "hidden_layer_sizes": tune.randint(50, 201),
        "alpha": tune.loguniform(1e-5, 1e1),
        "batch_size": tune.randint(10, 251),
        "learning_rate_init": tune.loguniform(1e-5, 1e-1),
        "tol": tune.loguniform(1e-5, 1e-1),
        "validation_fraction": tune.uniform(0.1, 0.9),
    }
    adam = {
        "beta_1": tune.uniform(0.5, 0.99),
        "beta_2": tune.uniform(0.9, 1 - 1e-6),
        "epsilon": tune.loguniform(1e-9, 1e-6),
    }
    return {
        "tree": leaves,
        "forest": leaves,
        "adam": network | adam,
        "sgd": network | {"power_t": tune.uniform(0.1, 0.9), "momentum": tune.uniform(0.001, 0.999)},
        "svm": {
            "C": tune.loguniform(1.0, 1e3),
            "gamma": tune.loguniform(1e-4, 1e-3),
            "tol": tune.loguniform(1e-5, 1e-1),
        },
        "boosting": {"n_estimators": tune.randint(10, 101), "learning_rate": tune.loguniform(1e-4, 1e1)},
    }[model]


@cache
def _data(name: str) -> tuple[np.ndarray, np.ndarray]:
    from sklearn import datasets

    return getattr(datasets, f"load_{name}")(return_X_y=True)


def _model(name: str, is_classifier: bool) -> Any:
    from sklearn import ensemble, neural_network, svm, tree

    kind = "Classifier" if is_classifier else "Regressor"
    if name == "svm":
        return svm.SVC() if is_classifier else svm.SVR()
    if name in ("adam", "sgd"):
        network = getattr(neural_network, f"MLP{kind}")(solver=name, early_stopping=True, random_state=0)
        return network if name == "adam" else network.set_params(learning_rate="invscaling")
    if name == "forest":
        return getattr(ensemble, f"RandomForest{kind}")(n_estimators=10, random_state=0)
    module, title = (tree, "DecisionTree") if name == "tree" else (ensemble, "AdaBoost")
    return getattr(module, title + kind)(random_state=0)


def problem(name: str) -> Problem:
    from sklearn.model_selection import cross_val_score

    model, data, loss = PROBLEMS[name]

    def value(config: Config) -> float:
        points, answers = _data(data)
        try:
            scores = cross_val_score(
                _model(model, data != "diabetes").set_params(**config),
                points,
                answers,
                scoring=_SCORES[loss],
                cv=3,
                error_score="raise",
            )
        except ValueError as error:
            raise TrialFailed(str(error)) from error
        if not np.all(np.isfinite(scores)):
            raise TrialFailed("the loss is not finite")
        return float(1.0 - scores.mean()) if loss == "error" else float(-scores.mean())

    return Problem(name, f"{model} on {data}", lambda: space(model), value, optimum=0.0)


def run(methods: list[str], seeds: int, output: Path) -> None:
    rows = ResultRows(output, FIELDS, keys=3)
    for seed in range(seeds):
        for method in methods:
            for name in PROBLEMS:
                if rows.has(method, name, seed):
                    continue
                found = search(problem(name), METHODS[method], seed, nested=method == "horovod_tune")
                losses = {f"loss_{mark}": f"{found[f'regret_{mark}']:.6g}" for mark in MARKS}
                rows.add({"method": method, "problem": name, "seed": seed, **losses, "note": ""})


def report(output: Path) -> None:
    """Print medians over the seeds, and the means of these over the problems."""
    import pandas as pd

    rows = pd.read_csv(output).rename(columns={f"loss_{mark}": mark for mark in MARKS})
    rows = rows.melt(["method", "problem", "seed"], list(MARKS), "after")
    best = rows.groupby("problem")["value"].min()
    random = rows[(rows["method"] == "random") & (rows["after"] == MARKS[0])]
    usual = random.groupby("problem")["value"].median()
    rows["regret"] = (rows["value"] - rows["problem"].map(best)) / rows["problem"].map(usual - best)
    table = rows.groupby(["problem", "after", "method"], sort=False)["regret"].median().unstack()
    print(table.round(3).to_string())
    print(table.groupby("after").mean().round(3).to_string())


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--methods", nargs="+", default=["horovod_tune", "random"], choices=METHODS)
    runner.add_argument("--seeds", type=int, default=11)
    for command in (runner, commands.add_parser("report")):
        command.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.methods, arguments.seeds, arguments.output)
    else:
        report(arguments.output)


if __name__ == "__main__":
    main()
