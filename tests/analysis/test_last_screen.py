"""The last screen of a search, for made-up trials."""

from __future__ import annotations

import shlex
from types import SimpleNamespace
from typing import Any

from pyarrow import fs as pafs

from horovod_tune.analysis.last_screen import last_screen
from horovod_tune.analysis.search_progress import Progress


def trial(
    name: str, config: dict[str, Any], *searched: str, error: str | None = None, loss: float | None = None
) -> Any:
    storage = SimpleNamespace(
        trial_fs_path=f"/results/{name}",
        experiment_fs_path="/results",
        experiment_driver_staging_path="/none",
        storage_filesystem=pafs.LocalFileSystem(),
    )
    return SimpleNamespace(
        trial_id=name,
        config=config,
        evaluated_params=dict.fromkeys(searched),
        status="ERROR" if error else "TERMINATED",
        error_file=error,
        last_result=None if loss is None else {"loss": loss},
        metric_analysis={},
        storage=storage,
    )


def search(mode: str | None, **values: list[float]) -> Progress:
    progress = Progress(metric="loss" if mode else None, mode=mode)
    for name, losses in values.items():
        for at, loss in enumerate(losses):
            progress.reported(name, {"loss": loss}, float(at))
    return progress


def test_the_best_trial_is_the_one_with_the_best_last_value_as_in_tune() -> None:
    progress = search("min", a=[3.0, 2.0], b=[1.0, 5.0])
    config = {"opt": {"lr": [0.1, 0.2]}, "epochs": 2}
    trials = [trial("a", config, "opt/lr/1", loss=2.0), trial("b", {}, loss=5.0)]
    text = last_screen(trials, progress)
    assert "best trial   a, loss 2 at its last report\n" in text
    assert "(the best loss in any report was 1, from b)" in text
    assert "best config  {'opt': {'lr': [0.1, 0.2]}, 'epochs': 2}" in text, "all of it, as one can paste it"


def test_a_config_with_a_lot_of_data_does_not_fill_the_screen() -> None:
    data = trial("a", {"files": list(range(10_000))}, "files", loss=1.0)
    progress = search("min", a=[1.0])
    assert len(last_screen([data], progress)) < 1000
    data.stopping_criterion = {}
    assert len(progress.started(data, 0.0).settings) < 200


def test_names_that_are_no_paths_of_the_configuration_are_no_reason_to_fail() -> None:
    """Keys with slashes, keys that are no strings, a configuration that PBT took from another trial."""
    for config, name in (({"opt/lr": 0.1}, "opt/lr"), ({"w": {1: 0.5}}, "w/1"), ({"opt": {}}, "opt/m")):
        text = last_screen([trial("a", config, name, loss=1.0)], search("min", a=[1.0]))
        assert f"best config  {config!r}\n" in text


def test_without_a_metric_the_commands_show_how_to_pass_one() -> None:
    text = last_screen([trial("a", {}, loss=1.0)], search(None, a=[1.0]))
    assert text.startswith('best trial   not known: write metric="NAME" and mode="min" or "max"\n')
    assert "horovod-tune show /results --metric NAME --mode min|max" in text
    one, other = trial("a", {}, loss=1.0), trial("b", {}, loss=2.0)
    one.metric_analysis = {"world_size": {"last": 2}, "done": {"last": False}, "my loss": {"last": 1.0}}
    text = last_screen([one, other], search(None, a=[1.0]))
    assert text.startswith('best trial   not known: write metric="my loss" and mode="min" or "max"\n')
    assert "horovod-tune show /results --metric 'my loss' --mode min|max" in text
    other.metric_analysis = {"acc": {"last": 0.5}}
    assert "(reported: my loss, acc)" in last_screen([one, other], search(None, a=[1.0]))


def test_an_interrupted_search_shows_how_to_continue_it(tmp_path: Any) -> None:
    one = trial("a", {}, loss=1.0)
    one.storage.experiment_fs_path = f"{tmp_path}/it's mine"
    progress = search("min", a=[1.0])
    progress.trials["a"].state = "done"
    assert "to continue" not in last_screen([one], progress)
    progress.trials["a"].state = "interrupted"
    by_run = f"tune.run(trainable, name={chr(34)}it's mine{chr(34)}, storage_path='{tmp_path}', resume=True)"
    assert f"to continue  {by_run}\n" in last_screen([one], progress)
    (tmp_path / "it's mine").mkdir()
    (tmp_path / "it's mine" / "tuner.pkl").touch()
    restored = f'tune.Tuner.restore("{tmp_path}/it\'s mine", trainable).fit()'
    assert f"to continue  {restored}\n" in last_screen([one], progress)


def test_failures_come_first_and_are_bounded(tmp_path: Any) -> None:
    error = tmp_path / "error.txt"
    head = "Failure # 1\nhorovod_tune.errors.TrainingFailed: rank 1 of 2 on h failed:\n"
    error.write_text(f"{head}  File x\nValueError: two\n")
    trials = [trial(f"t{index}", {}, error=str(error)) for index in range(7)]
    trials.insert(1, trial("gone", {}, error=str(tmp_path / "none")))
    lines = last_screen(trials, search("max")).splitlines()
    assert lines[0] == "t0 failed: rank 1 of 2 on h failed: ValueError: two"
    assert lines[1] == "gone failed: its error file cannot be read" and lines[5] == "and 3 more failed"
    assert lines[6].strip() == "(in full: /results/t0/error.txt)"
    assert lines[7] == "best trial   none: no trial has reported a finite loss"
    assert lines[8] == "results      /results"


def test_a_search_whose_values_are_all_nan_has_no_best() -> None:
    text = last_screen([trial("a", {}, loss=float("nan"))], search("min", a=[float("nan")]))
    (line,) = [line for line in text.splitlines() if "best" in line]
    assert line.split(maxsplit=2)[2] == "none: no trial has reported a finite loss"


def test_the_commands_name_the_storage_as_a_shell_and_analyze_take_it() -> None:
    one = trial("a", {}, loss=1.0, error="gone")
    one.storage.experiment_fs_path = "/my results/it's"
    text = last_screen([one], search("min", a=[1.0]))
    assert shlex.split(text.split("see more")[1].splitlines()[0])[2] == "/my results/it's"
    one.storage.storage_filesystem = pafs.FileSystem.from_uri("mock:///x")[0]
    one.storage.experiment_fs_path, one.storage.trial_fs_path = "bucket/x/my name", "bucket/x/my name/a"
    text = last_screen([one], search("min", a=[1.0]))
    assert "horovod-tune show mock://bucket/x/my%20name\n" in text
    assert "(in full: mock://bucket/x/my%20name/a/error.txt)" in text
    assert "horovod_tune.analyze('mock://bucket/x/my%20name')" in text


def test_no_command_is_printed_for_a_filesystem_that_no_uri_reaches() -> None:
    one = trial("a", {}, loss=1.0)
    one.storage.storage_filesystem = pafs.SubTreeFileSystem("/data", pafs.LocalFileSystem())
    text = last_screen([one], search("min", a=[1.0]))
    assert "horovod-tune" not in text and "horovod_tune.analyze('/results', filesystem=…)" in text


def test_a_metric_keeps_its_value_until_it_is_reported_again(tmp_path: Any) -> None:
    """As in `analyze` and the searcher: only some reports may have an evaluation."""
    one, other = trial("a", {}, loss=1.0), trial("b", {}, loss=2.0)
    one.storage.experiment_driver_staging_path = str(tmp_path)
    for each, latency in ((one, 50.0), (other, 10.0)):
        each.metric_analysis = {"cost/ms": {"last": latency}}
    state = tmp_path / "searcher-state-2026.json"
    ours = '{"format": "horovod_tune.BayesOptSearch", '
    state.write_text(ours + '"limits": ["cost/ms <= 20"]}')
    assert "best trial   b, loss 2" in last_screen([one, other], search("min", a=[1.0], b=[2.0]))
    state.write_text(ours + '"metric": ["loss", "cost/ms"], "mode": ["min", "min"]}')
    assert "2 of 2 trials are on the Pareto front" in last_screen([one, other], search("min"))
    state.write_text(ours)  # `analyze` names the problem
    assert "best trial   a, loss 1" in last_screen([one, other], search("min", a=[1.0], b=[2.0]))
