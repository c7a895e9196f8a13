"""Experiments made of arithmetic: any number of trials, with all that a search can bring, in a second."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyarrow import fs as pafs

from horovod_tune.analysis import Analysis, analyze
from horovod_tune.analysis.reader.folders import Folder
from horovod_tune.analysis.reader.records import Domain, ExperimentRecord, TrialRecord
from horovod_tune.scoring import parse_limit

START = 1_790_000_000.0
SPACE = {
    "lr": Domain("float", "loguniform(0.0001, 1)", log=True),
    "momentum": Domain("float", "uniform(0, 0.99)"),
    "batch_size": Domain("categorical", "choice([16, 32, 64, 128])"),
    "net/act": Domain("categorical", "choice(['relu', 'tanh', 'gelu'])"),
    "net/width": Domain("integer", "randint(8, 256)"),
}
_TRACEBACK = """Failure # 1 (occurred at 2026-11-20_12-00-00)
ray::DistributedTrainable.train() (pid=1, ip=10.0.0.1)
  File "train.py", line 17, in train
    loss.backward()
horovod_tune.errors.TrainingFailed: rank 1 on {host} failed: CUDA out of memory <b>now</b>
"""


def made_trial(
    number: int, rng: random.Random, start: float, ranks: int = 2, asha: bool = True
) -> TrialRecord:
    config: dict[str, Any] = {
        "lr": 10 ** rng.uniform(-4, 0),
        "momentum": rng.uniform(0, 0.99),
        "batch_size": rng.choice([16, 32, 64, 128]),
        "net": {"act": rng.choice(["relu", "tanh", "gelu"]), "width": rng.randrange(8, 256)},
    }
    skill = (
        0.12 * (math.log10(config["lr"]) + 1.7) ** 2
        + {"relu": 0.05, "tanh": 0.15, "gelu": 0.0}[config["net"]["act"]]
    )
    skill += 0.1 * abs(config["momentum"] - 0.9) + rng.uniform(0, 0.03)
    diverges = config["lr"] > 0.7
    fails = rng.random() < 0.03
    goal = 27
    if asha:
        goal = 1 if skill > 0.45 else 3 if skill > 0.25 else 9 if skill > 0.16 else 27
    goal = min(goal, 2) if fails else goal
    trial_id = f"abcd1_{number:05d}"
    step_s, start_s = 4.0 + 40.0 / config["batch_size"], 2.5 if number < 4 else 0.2
    host = f"node-{number % 2}"
    rows = []
    for iteration in range(1, goal + 1):
        loss = skill + math.exp(-iteration / 4) + rng.uniform(-0.02, 0.02)
        if diverges:
            loss = math.nan if iteration > 2 else 60.0 * loss
        rows.append(
            {
                "loss": loss,
                "accuracy": max(0.0, 1 - loss / 2),
                "done": iteration == goal and not fails,
                "training_iteration": iteration,
                "trial_id": trial_id,
                "timestamp": int(start + iteration * step_s),
                "time_this_iter_s": step_s,
                "time_total_s": iteration * step_s,
                "hostname": host,
                "node_ip": "10.0.0.1",
                "pid": 1,
                "world_size": ranks,
                "hosts": f"{host}:{ranks}",
                "start_s": start_s,
                "config": config,
            }
        )
    return TrialRecord(
        trial_id=trial_id,
        number=number,
        name=f"train_{trial_id}",
        config=config,
        status="ERROR" if fails else "TERMINATED",
        directory=f"/made/train_{trial_id}",
        start_time=start,
        end_time=start + goal * step_s,
        last_result=rows[-1],
        rows=tuple(rows),
        num_failures=int(fails),
        error=_TRACEBACK.format(host=host) if fails else None,
        resources=({}, {"CPU": float(ranks), "GPU": float(ranks)}),
    )


def made_experiment(
    trials: int, *, seed: int = 0, at_once: int = 4, asha: bool = True, name: str = "made"
) -> Analysis:
    """An experiment in memory whose trials run `at_once` side by side."""
    rng = random.Random(seed)
    free = [START + 5.0] * at_once
    made = []
    for number in range(trials):
        slot = min(range(at_once), key=lambda i: free[i])
        trial = made_trial(number, rng, free[slot] + (2.6 if number < at_once else 0.3), asha=asha)
        free[slot] = trial.end_time or 0.0
        made.append(trial)
    record = ExperimentRecord(
        name=name,
        path=f"/made/{name}",
        run="2026-11-20_12-00-00",
        runs=("2026-11-20_12-00-00",),
        trials=tuple(made),
        metric="loss",
        mode="min",
        start_time=START,
        last_write=max(free),
        num_samples=trials,
        domains=SPACE,
        searcher="BayesOptSearch, at most 4 at a time",
        scheduler="AsyncHyperBandScheduler(max_t=27, reduction_factor=3)" if asha else "first in, first out",
    )
    return Analysis(record, Folder(pafs.LocalFileSystem(), "/made", "/made"), metric="loss", mode="min")


def reporting(*trials: Sequence[dict[str, Any]], limits: Sequence[str] = (), **chosen: Any) -> Analysis:
    """An experiment whose trials have these reports, compared as chosen (metric, mode, scope)."""
    made, known = made_experiment(len(trials)), []
    for trial, told in zip(made.trials, trials, strict=True):
        rows = tuple(
            {"training_iteration": number, "timestamp": START, **row} for number, row in enumerate(told, 1)
        )
        known.append(replace(trial, rows=rows, last_result=rows[-1] if rows else None))
    within = [parse_limit(limit) for limit in limits]
    return Analysis(replace(made.record, trials=tuple(known)), made.folder, limits=within, **chosen)


def losing_ranks(why: str) -> Analysis:
    """An experiment of two elastic trials; the second lost ranks twice, for this reason."""
    changes = [{"loss": 1.0, "world_changes": n, "world_change": why if n else ""} for n in (0, 1, 1, 2)]
    return reporting(
        [{"loss": 2.0, "world_changes": 0, "world_change": ""}], changes, metric="loss", mode="min"
    )


def changed(analysis: Analysis, *, metric: str | None = "loss", mode: str = "min", **fields: Any) -> Analysis:
    """The experiment with other fields of its record."""
    return Analysis(replace(analysis.record, **fields), analysis.folder, metric=metric, mode=mode)


def read(home: Path) -> Analysis:
    return analyze(home, metric="loss", mode="min")


def edit_state(home: Path, number: int, trial: dict[str, Any] | None = None, **run: Any) -> None:
    """Change a trial's two parts in the state file of a written experiment."""
    (state,) = home.glob("experiment_state-*.json")
    whole = json.loads(state.read_text())
    parts = zip(whole["trial_data"][number], (trial or {}, run), strict=True)
    whole["trial_data"][number] = [json.dumps(json.loads(part) | change) for part, change in parts]
    state.write_text(json.dumps(whole))


def written(analysis: Analysis, folder: Path) -> Path:
    """The experiment as files, in the layout that Tune 2.60 writes."""
    home = folder / analysis.name
    pairs = []
    for trial in analysis.trials:
        place = home / Path(trial.directory).name
        place.mkdir(parents=True)
        (place / "params.json").write_text(json.dumps(trial.config))
        os.utime(place / "params.json", (trial.start_time or START,) * 2)  # as old as the trial's start
        (place / "result.json").write_text("".join(json.dumps(row) + "\n" for row in trial.rows))
        if trial.error:
            (place / "error.txt").write_text(trial.error)
        state = {
            "trainable_name": "train",
            "trial_id": trial.trial_id,
            "config": trial.config,
            "status": trial.status,
            "relative_logdir": place.name,
            "experiment_tag": f"{trial.number}_x",
            "custom_trial_name": None,
        } | ({} if trial.stop is None else {"stopping_criterion": trial.stop})
        run = {
            "start_time": trial.start_time,
            "last_result": trial.last_result,
            "last_result_time": trial.end_time,
            "num_failures": trial.num_failures,
            "error_filename": "error.txt" if trial.error else None,
        }
        pairs.append([json.dumps(state), json.dumps(run)])
    runner = {
        "_metric": analysis.metric,
        "_start_time": analysis.record.start_time,
        "_total_time": 1.0,
        "_iteration": 1,
    }
    whole = {"trial_data": pairs, "runner_data": runner, "stats": {}}
    (home / "experiment_state-2026-11-20_12-00-00.json").write_text(json.dumps(whole))
    return home
