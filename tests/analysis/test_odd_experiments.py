"""Whatever trials are configured with and report, everything can still be read, shown, drawn and exported."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from made_experiments import made_experiment, written
from test_report_page import Page

from horovod_tune.analysis import analyze
from horovod_tune.analysis.export import chosen_frame, write_csv, write_parquet
from horovod_tune.analysis.report import render

pytestmark = [pytest.mark.slow, pytest.mark.processes]

ODD_NAMES = (
    "a/b",
    "__proto__",
    "constructor",
    "",
    " ",
    "ключ",
    "{{data}}",
    "status",
    "start",
    "x" * 300,
    "0",
    "$x^{$",
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**63, -(2**70), 1e308, 5e-324, float("nan"), float("inf"), -float("inf")),
    *(
        "",
        "$x^{$",
        "ü" * 99,
        "<b>",
        "\u2028",
        [],
        [1, "a", None],
        [[1], [2]],
        {},
        {"deep": {"deeper": [1, {"x": 2}]}},
    ),
)
ODD_METRICS: tuple[Any, ...] = (
    *(1, -2.5, float("nan"), float("inf"), -float("inf"), None, "text", True, [1], {"a": 1}, 2**70, -(2**70)),
)


def odd_experiment(folder: Path, seed: int) -> Path:
    """Tune's files with configurations, reports and states drawn from everything that JSON can hold."""
    rng = random.Random(seed)
    home = written(made_experiment(14, seed=seed), folder)
    (state,) = home.glob("experiment_state-*.json")
    whole = json.loads(state.read_text())
    for pair in whole["trial_data"]:
        trial, run = json.loads(pair[0]), json.loads(pair[1])
        names = rng.sample(ODD_NAMES, rng.randrange(1, 6))
        trial["config"] = {name: rng.choice(ODD_VALUES) for name in names} | {"lr": rng.random()}
        trial["status"] = rng.choice(["TERMINATED", "ERROR", "RUNNING", "PENDING", "PAUSED"])
        for key in rng.sample(sorted(run), 2):
            run[key] = None
        result = home / trial["relative_logdir"] / "result.json"
        rows = [json.loads(line) for line in result.read_text().splitlines()]
        for row in rows:
            for key in rng.sample(sorted(row), 3):
                row[key] = rng.choice(ODD_METRICS)
            row["loss"] = rng.choice([rng.random(), rng.random(), rng.choice(ODD_METRICS)])
            row[rng.choice(ODD_NAMES)] = rng.choice(ODD_VALUES)
        result.write_text("".join(json.dumps(row) + "\n" for row in rows))
        pair[:] = [json.dumps(trial), json.dumps(run)]
    state.write_text(json.dumps(whole))
    return home


@pytest.mark.parametrize("seed", range(6))
def test_odd_values_survive_every_way_out(tmp_path, seed):
    analysis = analyze(
        odd_experiment(tmp_path, seed), metric="loss", mode=random.Random(seed).choice(["min", "max"])
    )
    assert analysis.problems == ()
    for what in ("trials", "history"):
        table = chosen_frame(analysis, what)
        write_csv(table, io.StringIO())
        write_parquet(table, tmp_path / "table.parquet")
    page = Page(render(analysis))
    assert [tag for tag, _ in page.tags].count("tr") > 14
    assert isinstance(analysis.trial_dataframes, dict)


@pytest.mark.parametrize("seed", range(3))
def test_odd_values_can_be_drawn_and_shown(tmp_path, seed):
    pytest.importorskip("rich")
    from horovod_tune.analysis import plots, terminal

    analysis = analyze(odd_experiment(tmp_path, seed), metric="loss", mode="min")
    terminal.console(file=io.StringIO(), width=120).print(terminal.view(analysis))
    for name in (
        "learning_curves",
        "best_so_far",
        "parallel_coordinates",
        "importance",
        "rungs",
        "timeline",
        "parameters",
    ):
        getattr(plots, name)(analysis).to_json()
