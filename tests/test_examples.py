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
from processes import run_python

EXAMPLES = Path(__file__).parents[1] / "examples"

# Generous: two Horovod worlds at a time on a machine that other work may be sharing.
pytestmark = [pytest.mark.example, pytest.mark.timeout(900)]

# Imported by others, and run by none.
SHARED = {"digits_mlp.py"}
# Run by these.
ELSEWHERE = {
    "bayesopt_digits.py": "../Makefile",
    "first_search.ipynb": "test_notebook.py",
    "transformers_tpu.py": "xla/test_example.py",
}
# Run as a user types it; the others' `main` is called below, with settings of the test's.
SCRIPTS = {"horovod_simple.py": [], "transformers_horovod.py": ["--samples=1", "--epochs=1"]}
CALLED = {
    "asha_digits.py",
    "bohb_digits.py",
    "ddp_digits.py",
    "elastic_digits.py",
    "grid_random_digits.py",
    "hyperopt_asha_digits.py",
    "large_batch_digits.py",
    "median_stopping_digits.py",
    "noise_scale_digits.py",
    "pb2_digits.py",
    "pbt_digits.py",
    "promoting_asha_digits.py",
}


def test_every_example_is_run() -> None:
    there = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert there == SHARED | CALLED | set(SCRIPTS) | set(ELSEWHERE)


@pytest.mark.parametrize("name", sorted(CALLED | set(SCRIPTS) | set(ELSEWHERE) - {"first_search.ipynb"}))
def test_every_example_takes_an_address(name: str) -> None:
    source = (EXAMPLES / name).read_text()
    assert "    connect_to_ray(" in source or '"--address"' in source
    assert 'ray.init("local")' not in source


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


def test_every_example_is_named_by_its_test() -> None:
    source = Path(__file__).read_text()
    assert not [name for name in CALLED if f'"{name.removesuffix(".py")}"' not in source]
    for name, test in ELSEWHERE.items():
        assert name.split(".")[0] in Path(__file__).parent.joinpath(test).read_text()


@pytest.mark.parametrize(
    "name", ["transformers_horovod.py", pytest.param("horovod_simple.py", marks=pytest.mark.contract)]
)
def test_a_script_runs_to_its_end(ray_session: Any, name: str, tmp_path: Path) -> None:
    ran = run_python(
        str(EXAMPLES / name),
        *SCRIPTS[name],
        # The guide's example sleeps 36 s in its 18 trials: two at a time on this Ray's 4 CPUs.
        f"--address={ray_session.get_runtime_context().gcs_address}",
        cwd=tmp_path,
        # Its results go below its home, where the Ray's token is not.
        env={
            "RAY_AUTH_TOKEN_PATH": str(Path.home() / ".ray" / "auth_token"),
            **os.environ,
            "HOME": str(tmp_path),
        },
        timeout_s=600,
    )
    assert "best evaluation loss" in ran.stdout or ran.stdout.rstrip().endswith("}")
    assert list(tmp_path.glob("ray_results/*/*/result.json"))


@pytest.fixture
def example(monkeypatch: Any, ray_session: Any) -> Iterator[Any]:
    """Import an example as a script next to its siblings would be."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    loaded = []

    def load(name: str) -> Any:
        for module in (importlib.import_module("digits_mlp"), importlib.import_module(name)):
            # The trials' processes were started by pytest and cannot import examples.
            cloudpickle.register_pickle_by_value(module)
            loaded.append(module)
        return loaded[-1]

    yield load
    for module in loaded:
        cloudpickle.unregister_pickle_by_value(module)
        sys.modules.pop(module.__name__, None)


def reports_of(trial: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(trial.path, "result.json").read_text().splitlines()]


def epochs_of(trial: Any) -> list[int]:
    return [report["epoch"] for report in reports_of(trial)]


def assert_all_trained(analysis: Any) -> None:
    assert {trial.status for trial in analysis.trials} == {"TERMINATED"}, [t.status for t in analysis.trials]


def test_grid_and_random_search(example: Any, tmp_path: Path) -> None:
    analysis = example("grid_random_digits").main(num_samples=1, epochs=2, storage_path=str(tmp_path))
    assert_all_trained(analysis)
    configs = [trial.config for trial in analysis.trials]
    assert sorted(config["batch_size"] for config in configs) == [32, 128]
    assert all(config["momentum"] == (0.9 if config["lr"] < 0.1 else 0.5) for config in configs)
    assert len({config["lr"] for config in configs}) > 1
    assert all(epochs_of(trial) == [1, 2] for trial in analysis.trials)


def test_a_random_search_of_torch_distributed_functions(example: Any, tmp_path: Path) -> None:
    # Learning rates of 0.2 and 0.08; below 0.02 two epochs teach little.
    np.random.seed(10)
    analysis = example("ddp_digits").main(num_samples=2, epochs=2, storage_path=str(tmp_path))
    assert_all_trained(analysis)
    assert all(epochs_of(trial) == [1, 2] for trial in analysis.trials)
    assert max(reports_of(trial)[-1]["accuracy"] for trial in analysis.trials) > 0.3


def test_asha_starts_with_the_given_point_and_stops_the_worse_ones(example: Any, tmp_path: Path) -> None:
    # The given learning rate, 0.1, and then 0.01, 0.1 and 0.02: the last is worse than half of the others.
    np.random.seed(9)
    analysis = example("asha_digits").main(num_samples=4, storage_path=str(tmp_path))
    assert_all_trained(analysis)
    first = analysis.trials[0].config
    assert (first["lr"], first["batch_size"]) == (0.1, 128)
    lengths = [len(epochs_of(trial)) for trial in analysis.trials]
    assert min(lengths) >= 2 and max(lengths) == 10, "the grace period, and a survivor"
    assert min(lengths) < 10, "a trial was stopped"


def test_asha_ends_when_its_time_is_up(example: Any, tmp_path: Path) -> None:
    analysis = example("asha_digits").main(num_samples=10_000, time_budget_s=5, storage_path=str(tmp_path))
    assert 0 < len(analysis.trials) < 10_000


def test_promoting_asha_pauses_trials_and_trains_the_best_to_the_end(example: Any, tmp_path: Path) -> None:
    analysis = example("promoting_asha_digits").main(num_samples=6, storage_path=str(tmp_path))
    assert_all_trained(analysis)
    histories = [epochs_of(trial) for trial in analysis.trials]
    assert all(history == list(range(1, len(history) + 1)) for history in histories)
    lengths = sorted(map(len, histories))
    assert set(lengths) <= {2, 6, 18} and lengths[0] == 2 and lengths[-1] == 18


def test_hyperopt_with_asha_and_a_time_budget(example: Any, tmp_path: Path) -> None:
    pytest.importorskip("hyperopt", reason="pip install 'horovod_tune[hyperopt]'")
    main = example("hyperopt_asha_digits").main
    # It ends after two trials; that the budget ends a search is seen above, at less cost.
    analysis = main(time_budget_s=600, num_samples=2, storage_path=str(tmp_path))
    assert_all_trained(analysis)
    assert all(5 <= trial.config["max_epochs"] <= 10 for trial in analysis.trials)
    assert all(0 < len(epochs_of(trial)) <= trial.config["max_epochs"] for trial in analysis.trials)


@pytest.mark.parametrize(
    ("use_tune_space", "max_t"), [(False, 9), (True, 3)], ids=["ConfigSpace", "Tune space"]
)
def test_bohb_pauses_trials_and_resumes_them_from_their_checkpoints(
    example: Any, tmp_path: Path, use_tune_space: bool, max_t: int
) -> None:
    pytest.importorskip("hpbandster", reason="pip install 'horovod_tune[bohb]'")
    analysis = example("bohb_digits").main(
        num_samples=max_t, max_t=max_t, use_tune_space=use_tune_space, storage_path=str(tmp_path)
    )
    assert_all_trained(analysis)
    histories = [epochs_of(trial) for trial in analysis.trials]
    # Paused trials lose their ranks; each continues with the epoch after its checkpoint's, none twice.
    assert all(history == list(range(1, len(history) + 1)) for history in histories)
    assert len({len(history) for history in histories}) > 1, "some were given a larger budget than others"
    for trial in analysis.trials:
        assert type(trial.config["batch_size"]) is int and trial.config["batch_size"] in (16, 32, 64, 128)


@pytest.mark.parametrize("name", ["pbt_digits", "pb2_digits"])
def test_population_based_training_clones_the_strong(
    example: Any, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    caplog.set_level("DEBUG", logger="ray.tune.schedulers.pbt")
    analysis = example(name).main(population=3, epochs=3, storage_path=str(tmp_path))
    assert_all_trained(analysis)
    experiment = Path(analysis.experiment_path)
    log = experiment / "pbt_global.txt"
    perturbs = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" perturbs")]
    # Once it was not there, on a busy machine: the scheduler's own words show whether no trial was cloned or
    # the file was not stored.
    assert log.exists(), (perturbs[-1:], sorted(experiment.iterdir()), caplog.text)
    clonings = [json.loads(line) for line in log.read_text().splitlines()]
    assert clonings, "no trial was cloned"
    for target, source, *_ in clonings:
        assert target != source
    # A clone continues at its donor's epoch: all have trained to the end, with the donors' weights.
    assert {epochs_of(trial)[-1] for trial in analysis.trials} == {3}
    exploited = {trial.trial_id for trial in analysis.trials if len(set(_rates(trial))) > 1}
    assert exploited, "no trial continued with another learning rate"


def _rates(trial: Any) -> list[float]:
    return [report["config"]["lr"] for report in reports_of(trial)]


def test_median_stopping_stops_those_below_the_median(example: Any, tmp_path: Path) -> None:
    # Learning rates of 0.3, 0.7, 0.3, 0.01 and 0.0009.
    np.random.seed(8)
    analysis = example("median_stopping_digits").main(num_samples=5, epochs=4, storage_path=str(tmp_path))
    assert_all_trained(analysis)
    lengths = [len(epochs_of(trial)) for trial in analysis.trials]
    assert min(lengths) >= 2 and max(lengths) == 4 and min(lengths) < 4


def test_an_elastic_trial_shrinks_and_grows(example: Any, tmp_path: Path) -> None:
    analysis = example("elastic_digits").main(storage_path=str(tmp_path))
    assert_all_trained(analysis)
    sizes = [report["world_size"] for report in reports_of(analysis.trials[0])]
    assert sizes[0] == 3 and 2 in sizes, "a rank was killed, and the trial continued without it"


def test_a_search_over_batch_rate_warm_up_and_optimiser(example: Any, tmp_path: Path) -> None:
    main = example("large_batch_digits").main
    analysis = main(num_samples=3, epochs=4, storage_path=str(tmp_path))
    assert_all_trained(analysis)
    for trial in analysis.trials:
        assert [report["epoch"] for report in reports_of(trial)] == [1, 2, 3, 4]
        last = reports_of(trial)[-1]
        assert last["noise_scale"] > 0 and abs(last["lr"]) < 1e-9
        assert last["noise_scale_low"] <= last["noise_scale"] <= last["noise_scale_high"]
        assert trial.checkpoint is not None


def test_the_best_trial_takes_the_slots_of_those_that_asha_ends(example: Any, tmp_path: Path) -> None:
    analysis = example("noise_scale_digits").main(storage_path=str(tmp_path))
    assert_all_trained(analysis)
    sizes = {
        trial.trial_id: [report["world_size"] for report in reports_of(trial)] for trial in analysis.trials
    }
    best = sizes.pop(analysis.best_trial.trial_id)
    assert best[0] == 1 and best[-1] == 4 and best == sorted(best)
    assert all(max(other) < 4 for other in sizes.values())
