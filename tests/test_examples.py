"""Every program in examples/, run with small settings: real searches of Horovod trials.

`make examples` runs these, `make test` only the guide's; `make demo` runs bayesopt_digits.py.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from processes import results_of, run_python

EXAMPLES = Path(__file__).parents[1] / "examples"

# Generous: two Horovod worlds at a time on a machine that other work may be sharing.
pytestmark = [pytest.mark.example, pytest.mark.timeout(900)]

# Imported by others, and run by none.
SHARED = {"digits_mlp"}
# Run by these.
ELSEWHERE = {
    "bayesopt_digits": "../Makefile",
    "first_search": "test_notebook.py",
    "transformers_tpu": "backends/torch_xla/test_example.py",
}
# Run as a user types it; the others' `main` is called below, with settings of the test's.
SCRIPTS = {
    "horovod_simple": [],
    "transformers_horovod": ["--samples=1", "--epochs=1"],
    "lightning_ddp": ["--samples=2", "--epochs=3"],
}
FILES = sorted(
    path for path in EXAMPLES.glob("*.*") if path.suffix in (".py", ".ipynb") and path.stem not in SHARED
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_example_is_run_and_takes_an_address(path: Path) -> None:
    test = Path(__file__).parent / ELSEWHERE.get(path.stem, Path(__file__).name)
    assert (path.stem if path.stem in ELSEWHERE else f'"{path.stem}"') in test.read_text()
    source = path.read_text()
    assert "    connect_to_ray(" in source or '"--address"' in source or path.suffix == ".ipynb"
    assert 'ray.init("local")' not in source or path.suffix == ".ipynb"


def test_an_address_reaches_ray_and_the_size_of_the_cluster_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    given: list[Any] = []
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(ray, "init", lambda address, num_cpus: given.append((address, num_cpus)))
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": False}, {"Alive": True}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 6.0})
    monkeypatch.setattr(sys, "argv", ["example.py", "--address", "auto"])
    importlib.import_module("digits_mlp").connect_to_ray(num_cpus=4)
    monkeypatch.setattr(sys, "argv", ["example.py"])
    importlib.import_module("digits_mlp").connect_to_ray(num_cpus=4)
    assert given == [("auto", None), ("local", 4)]
    assert "Ray at auto: 2 node(s), 6 CPUs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    ["transformers_horovod", "lightning_ddp", pytest.param("horovod_simple", marks=pytest.mark.contract)],
)
def test_a_script_runs_to_its_end(ray_session: Any, name: str, tmp_path: Path) -> None:
    ran = run_python(
        EXAMPLES / f"{name}.py",
        *SCRIPTS[name],
        # The guide's example sleeps 36 s in its 18 trials: two at a time on this Ray's 4 CPUs.
        f"--address={ray_session.get_runtime_context().gcs_address}",
        cwd=tmp_path,
        # Its results go below its home, where the Ray's token is not.
        env={"RAY_AUTH_TOKEN_PATH": f"{Path.home()}/.ray/auth_token", **os.environ, "HOME": str(tmp_path)},
        timeout_s=600,
    )
    assert "best evaluation loss" in ran.stdout or ran.stdout.rstrip().endswith("}")
    assert list(tmp_path.glob("ray_results/*/*/result.json"))


@pytest.fixture
def search(monkeypatch: Any, ray_session: Any, tmp_path: Path) -> Iterator[Any]:
    """Run an example's `main`; unless its time is cut, all trials must end well."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    loaded = []

    def run(name: str, *, is_cut: bool = False, **settings: Any) -> Any:
        for module in (importlib.import_module("digits_mlp"), importlib.import_module(name)):
            # The trials' processes were started by pytest and cannot import examples.
            cloudpickle.register_pickle_by_value(module)
            loaded.append(module)
        analysis = loaded[-1].main(storage_path=str(tmp_path), **settings)
        assert is_cut or {trial.status for trial in analysis.trials} == {"TERMINATED"}
        return analysis

    yield run
    for module in loaded:
        cloudpickle.unregister_pickle_by_value(module)
        sys.modules.pop(module.__name__, None)


def histories(analysis: Any, key: str = "epoch") -> list[list[Any]]:
    """Return what each trial has reported of ``key``."""
    return [[report[key] for report in results_of(trial)] for trial in analysis.trials]


def test_grid_and_random_search(search: Any) -> None:
    analysis = search("grid_random_digits", num_samples=1, epochs=2)
    configs = [trial.config for trial in analysis.trials]
    assert sorted(config["batch_size"] for config in configs) == [32, 128]
    assert all(config["momentum"] == (0.9 if config["lr"] < 0.1 else 0.5) for config in configs)
    assert len({config["lr"] for config in configs}) > 1
    assert histories(analysis) == [[1, 2]] * len(configs)


def test_a_random_search_of_torch_distributed_functions(search: Any) -> None:
    # Learning rates of 0.2 and 0.08; below 0.02 two epochs teach little.
    np.random.seed(10)
    analysis = search("ddp_digits", num_samples=2, epochs=2)
    assert histories(analysis) == [[1, 2]] * 2
    assert max(accuracies[-1] for accuracies in histories(analysis, "accuracy")) > 0.3


def test_asha_starts_with_the_given_point_and_stops_the_worse_ones(search: Any) -> None:
    # The given learning rate, 0.1, and then 0.01, 0.1 and 0.02: the last is worse than half of the others.
    np.random.seed(9)
    analysis = search("asha_digits", num_samples=4)
    first = analysis.trials[0].config
    assert (first["lr"], first["batch_size"]) == (0.1, 128)
    lengths = [len(each) for each in histories(analysis)]
    assert min(lengths) >= 2 and max(lengths) == 10, "the grace period, and a survivor"
    assert min(lengths) < 10, "a trial was stopped"


def test_asha_ends_when_its_time_is_up(search: Any) -> None:
    analysis = search("asha_digits", num_samples=10_000, time_budget_s=5, is_cut=True)
    assert 0 < len(analysis.trials) < 10_000


def test_promoting_asha_pauses_trials_and_trains_the_best_to_the_end(search: Any) -> None:
    found = histories(search("promoting_asha_digits", num_samples=6))
    assert all(history == list(range(1, len(history) + 1)) for history in found)
    lengths = sorted(map(len, found))
    assert set(lengths) <= {2, 6, 18} and lengths[0] == 2 and lengths[-1] == 18


def test_hyperopt_with_asha_and_a_time_budget(search: Any) -> None:
    pytest.importorskip("hyperopt", reason="pip install 'horovod_tune[hyperopt]'")
    # It ends after two trials; that the budget ends a search is seen above, at less cost.
    analysis = search("hyperopt_asha_digits", time_budget_s=600, num_samples=2)
    for trial, history in zip(analysis.trials, histories(analysis), strict=True):
        assert 5 <= trial.config["max_epochs"] <= 10 and 0 < len(history) <= trial.config["max_epochs"]


@pytest.mark.parametrize(
    ("use_tune_space", "max_t"), [(False, 9), (True, 3)], ids=["ConfigSpace", "Tune space"]
)
def test_bohb_pauses_trials_and_resumes_them_from_their_checkpoints(
    search: Any, use_tune_space: bool, max_t: int
) -> None:
    pytest.importorskip("hpbandster", reason="pip install 'horovod_tune[bohb]'")
    analysis = search("bohb_digits", num_samples=max_t, max_t=max_t, use_tune_space=use_tune_space)
    found = histories(analysis)
    # Paused trials lose their ranks; each continues with the epoch after its checkpoint's, none twice.
    assert all(history == list(range(1, len(history) + 1)) for history in found)
    assert len(set(map(len, found))) > 1, "some were given a larger budget than others"
    for trial in analysis.trials:
        assert type(trial.config["batch_size"]) is int and trial.config["batch_size"] in (16, 32, 64, 128)


@pytest.mark.parametrize("name", ["pbt_digits", "pb2_digits"])
def test_population_based_training_clones_the_strong(
    search: Any, name: str, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    caplog.set_level("DEBUG", logger="ray.tune.schedulers.pbt")
    analysis = search(name, population=3, epochs=3)
    experiment = Path(analysis.experiment_path)
    log = experiment / "pbt_global.txt"
    perturbs = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" perturbs")]
    # Once it was not there, on a busy machine: the scheduler's own words show whether no trial was cloned or
    # the file was not stored.
    assert log.exists(), (perturbs[-1:], sorted(experiment.iterdir()), caplog.text)
    clonings = [json.loads(line) for line in log.read_text().splitlines()]
    assert clonings, "no trial was cloned"
    assert all(target != source for target, source, *_ in clonings)
    # A clone continues at its donor's epoch: all have trained to the end, with the donors' weights.
    assert {history[-1] for history in histories(analysis)} == {3}
    rates = [{config["lr"] for config in configs} for configs in histories(analysis, "config")]
    assert max(map(len, rates)) > 1, "no trial continued with another learning rate"


def test_median_stopping_stops_those_below_the_median(search: Any) -> None:
    # Learning rates of 0.3, 0.7, 0.3, 0.01 and 0.0009.
    np.random.seed(8)
    lengths = [len(each) for each in histories(search("median_stopping_digits", num_samples=5, epochs=4))]
    assert min(lengths) >= 2 and max(lengths) == 4 and min(lengths) < 4


def test_an_elastic_trial_survives_a_killed_rank(search: Any) -> None:
    analysis = search("elastic_digits")
    (sizes,), (changes,) = histories(analysis, "world_size"), histories(analysis, "world_changes")
    assert sizes[0] == sizes[-1] == 3 and changes[-1] >= 1, "a rank was killed, and came back at once"


def test_a_search_over_batch_rate_warm_up_and_optimiser(search: Any) -> None:
    analysis = search("large_batch_digits", num_samples=3, epochs=4)
    assert histories(analysis) == [[1, 2, 3, 4]] * 3
    for trial in analysis.trials:
        last = results_of(trial)[-1]
        assert last["noise_scale"] > 0 and last["lr"] > 0
        assert last["noise_scale_low"] <= last["noise_scale"] <= last["noise_scale_high"]
        assert trial.checkpoint is not None


def test_the_best_trial_takes_the_slots_of_those_that_asha_ends(search: Any) -> None:
    analysis = search("noise_scale_digits")
    sizes = dict(zip(analysis.trials, histories(analysis, "world_size"), strict=True))
    best = sizes.pop(analysis.best_trial)
    assert best[0] == 1 and best[-1] == 4 and best == sorted(best)
    assert all(max(other) < 4 for other in sizes.values())
