"""An experiment that is started a second time continues where it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from horovod_tune import resume_or_start
from horovod_tune.analysis import analyze
from horovod_tune.run_settings import ExperimentMetadata


def started(run_config: tune.RunConfig, ran: Path, *, fail: bool) -> tune.ResultGrid:
    def train(config: dict[str, Any]) -> None:
        with ran.open("a") as lines:
            lines.write(f"{config['x']}\n")
        if fail and config["x"] == 2:
            raise RuntimeError("the node went away")
        tune.report({"loss": config["x"]})

    return resume_or_start(
        train,
        param_space={"x": tune.grid_search([1, 2])},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=run_config,
    ).fit()


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The host and port of an S3 of this machine's own."""
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0)
    with pytest.MonkeyPatch.context() as environment:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            environment.setenv(name, "a")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        server.start()
        host, port = server.get_host_and_port()
        boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="bucket")
        yield f"{host}:{port}"
        server.stop()


@pytest.mark.parametrize(
    "place",
    [
        "file://{folder}/results",
        pytest.param("s3://bucket/1?endpoint_override=http://{bucket}", marks=pytest.mark.slow),
    ],
)
def test_the_second_start_runs_only_what_had_not_ended(
    ray_session: Any, tmp_path: Path, request: pytest.FixtureRequest, place: str
) -> None:
    bucket = request.getfixturevalue("bucket") if "{bucket}" in place else ""
    place = place.format(folder=tmp_path, bucket=bucket)
    ran = tmp_path / "ran"
    for fail in (True, False, False):  # the third time there is nothing left to run
        callback = ExperimentMetadata({"metric": "loss", "mode": "min"})
        results = started(tune.RunConfig("my search", place, callbacks=[callback], verbose=0), ran, fail=fail)
        assert results.num_errors == fail
        # Tune has copied the driver's folder for the last time when callbacks are called at the end.
        if not bucket:
            analysis = analyze(f"{place}/my search")
            assert analysis.state == "finished" and analysis.record.metadata["ended"] is True
    assert sorted(result.metrics["loss"] for result in results) == [1, 2]
    assert results.get_best_result().config == {"x": 1}
    assert sorted(ran.read_text().split()) == ["1", "2", "2"]


@pytest.mark.parametrize("number", [1, 3])
def test_another_number_of_samples_of_a_finished_search_is_a_warning(
    ray_session: Any, tmp_path: Path, caplog: Any, number: int
) -> None:
    for samples in (1, number):
        caplog.clear()
        results = resume_or_start(
            lambda config: {"loss": 1.0},
            param_space={"x": tune.uniform(0, 1)},
            tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=samples),
            run_config=tune.RunConfig("mine", str(tmp_path), verbose=0),
        ).fit()
        assert len(results) == 1
    said = [each.getMessage() for each in caplog.records if "is not used" in each.getMessage()]
    assert [each.split(":")[0] for each in said] == (["num_samples=3 is not used"] if number == 3 else [])


def test_an_experiment_without_a_name_and_a_misspelt_argument_are_refused(monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match=r"run_config\.name must be set, got None"):
        resume_or_start(lambda config: None, run_config=tune.RunConfig())
    # Also when the search continues.
    monkeypatch.setattr(tune.Tuner, "can_restore", lambda *args, **options: True)
    monkeypatch.setattr(tune.Tuner, "restore", lambda *args, **options: "continued")
    with pytest.raises(TypeError, match="param_spaces"):
        resume_or_start(print, run_config=tune.RunConfig("mine"), param_spaces={})  # type: ignore[call-arg]


def test_results_that_cannot_be_continued_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    here = tune.RunConfig(name="mine", storage_path=str(tmp_path))
    # A start that was killed before its first trial has left nothing to lose.
    assert resume_or_start(lambda config: None, run_config=here)
    state = tmp_path / "mine" / "experiment_state-2026-01-01_00-00-00.json"
    state.write_text('{"trial_data": [')  # its copy was cut
    with pytest.raises(
        ValueError, match=r"experiment_state-2026.* cannot be continued: that file is damaged"
    ):
        resume_or_start(lambda config: None, run_config=here)
    state.write_text("{}")
    (tmp_path / "mine" / "tuner.pkl").unlink()
    with pytest.raises(ValueError, match=r"experiment_state-2026.* cannot be continued: the file tuner\.pkl"):
        resume_or_start(lambda config: None, run_config=here)
    state.unlink()
    (tmp_path / "mine" / "train_1").mkdir()
    (tmp_path / "mine" / "train_1" / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"train_1/result\.json.* cannot be continued: the file tuner\.pkl"):
        resume_or_start(lambda config: None, run_config=here)
