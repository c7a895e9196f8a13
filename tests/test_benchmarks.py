"""The programs behind the figures of docs/benchmarks.md on searches and large batches run, in small."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.large_batch import __main__ as large_batch_program
from benchmarks.search import __main__ as search_program
from benchmarks.search import curves
from benchmarks.search.options import OPTIONS, drawn
from benchmarks.search.searchers import SEARCHERS, RandomSearch
from horovod_tune.search.space.search_space import SearchSpace


def run_search(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["search", *map(str, arguments)])
    # It would also silence the tests that follow.
    monkeypatch.setattr(search_program.logging, "disable", lambda level: None)
    search_program.main()


@pytest.mark.parametrize(
    ("command", "problem"), [("functions", "branin"), ("moved", "corner"), ("options", "inner")]
)
def test_a_search_benchmark_measures_what_its_file_lacks(
    command: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (command, "--problems", problem, "--methods", "random", "--folder", tmp_path, "--seeds")
    for seeds in (1, 2, 2):
        run_search(monkeypatch, *arguments, seeds)
    with (tmp_path / f"search_{command}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["0", "1"]
    assert all(0 <= float(row["regret_40"]) <= float(row["regret_10"]) for row in rows)


@pytest.mark.parametrize("kind", OPTIONS)
def test_only_the_right_options_come_near_the_least_loss(kind: str) -> None:
    for seed in range(3):
        problem, draw = drawn(kind, seed), RandomSearch(seed)
        draw.set_search_properties("loss", "min", problem.space)
        space = SearchSpace(problem.space)
        configs = [draw.suggest("") for _ in range(3000)]
        # The peers' flat parameters give configurations of the space.
        assert all(space.point(config) for config in configs[:50])
        losses = np.array([problem.true_value(config) for config in configs])
        right = np.array([problem.is_right(config) for config in configs])
        assert losses.min() >= 0 and losses[right].min() < 0.06
        # `same` has no wrong option.
        assert kind == "same" or losses[~right].min() >= 0.039


@pytest.mark.parametrize("method", ["optuna_tpe", "horovod_tune"])
def test_a_searcher_gets_options_with_parameters_of_their_own(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_program, "EVALUATIONS", 8)
    monkeypatch.setattr(search_program, "MARKS", (4, 8))
    *regrets, first, last = search_program.search(drawn("models", 0), SEARCHERS[method](0), 0)
    assert min(regrets) >= 0 and {first, last} <= {0.0, 1.0}


def test_the_report_prints_and_draws_the_measured_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in search_program.RESULTS.glob("search_*.csv"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    run_search(monkeypatch, "report", "--folder", tmp_path)
    printed = capsys.readouterr().out
    assert "mobster_promotion" in printed and "options: six, models, two, same" in printed
    assert (tmp_path / "search_quality.png").stat().st_size > 10_000


def test_an_unknown_function_of_the_search_benchmark_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_search(monkeypatch, "functions", "--problems", "brainin")
    assert "brainin is not one of branin" in capsys.readouterr().err


@pytest.mark.parametrize("method", curves.METHODS)
def test_searches_over_curves_end_with_a_regret_per_budget(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "TRAININGS", (1, 2))
    errors = np.linspace(20.0, 10.0, curves.EPOCHS)
    task = SimpleNamespace(
        best_error=10.0, curve=lambda config: (errors + 5 * config["momentum"], 1 + config["max_dropout"])
    )
    regrets = curves.simulate(task, curves.METHODS[method](0))  # type: ignore[arg-type]
    assert len(regrets) == 2 and 0 < regrets[1] <= regrets[0] < 20


def test_the_large_batch_benchmark_trains_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("digits", "spirals"):
        problem = getattr(large_batch_program, name)()
        small = dataclasses.replace(problem, trained_on=256, base_batch_size=64, epochs=4, target=0.3)
        monkeypatch.setattr(large_batch_program, name, lambda small=small: small)
    monkeypatch.setattr(large_batch_program, "FACTORS", (1, 4))
    monkeypatch.setattr(sys, "argv", ["large_batch", "--seeds", "0", "--folder", str(tmp_path)])
    large_batch_program.main()
    results = json.loads((tmp_path / "large_batch.json").read_text())
    assert set(results) == {"digits", "spirals"}
    assert results["digits"]["growing"]["doubled at fixed epochs, rate kept"][0]["batch"] == 2048
    assert (tmp_path / "large_batch.png").stat().st_size > 10_000
