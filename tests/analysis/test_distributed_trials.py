"""Real distributed trials (2 Horovod ranks each) in the analysis and in Tune's TensorBoard logger."""

from __future__ import annotations

import io
import socket
from pathlib import Path

import pytest

from horovod_tune import DistributedTrainableCreator
from horovod_tune.analysis import ProgressCallback, analyze
from horovod_tune.analysis.plots.scheduling import timeline_bars

pytestmark = pytest.mark.usefixtures("ray_session")


def scalars(trial_folder: Path) -> dict[str, list[float]]:
    """Each tag's values in what Tune's TensorBoard logger wrote."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("tensorboardX", reason="Tune's TensorBoard logger needs it")
    found = reader.EventAccumulator(str(trial_folder))
    found.Reload()
    return {tag: [each.value for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.slow
def test_a_distributed_trials_ranks_start_and_metrics_arrive_everywhere(tune_run, tmp_path):
    def train(config):
        import horovod.torch as hvd

        from horovod_tune import report

        hvd.init()
        for step in range(3):
            own = {"hosts": 3} if step == 1 else {}
            report(loss=config["lr"] / (step + 1), rank=hvd.rank(), **own)

    from ray import tune

    said = io.StringIO()
    result = tune_run(
        DistributedTrainableCreator(train, num_slots=2),
        config={"lr": tune.grid_search([0.4, 0.1])},
        metric="loss",
        mode="min",
        reuse_actors=True,
        callbacks=[ProgressCallback(stream=said)],
    )
    assert analyze(tmp_path / "experiment").mode == "min", "tune.run itself records no mode"
    for analysis in (analyze(result), analyze(tmp_path / "experiment")):
        assert analysis.best_config == result.best_config == {"lr": 0.1}
        table = analysis.dataframe()
        assert table["ranks"].tolist() == [2, 2]
        assert table["hosts"].tolist() == [[socket.gethostname()] * 2] * 2
        here = f"{socket.gethostname()}:2"
        assert analysis.history()["hosts"].tolist() == [here, 3, here] * 2, "a metric of one's own wins"
        assert (table["start_s"] > 0).all()
        bars, rows, unit = timeline_bars(analysis)
        assert {row.rpartition(" ")[0] for row in rows} == {socket.gethostname()}
        assert unit == "hosts' slots"
        assert len(bars) == 4, "two ranks per trial"
        assert bars["begin"].lt(bars["trained"]).all(), "the start-up is known"
    for trial in result.trials:
        assert scalars(Path(trial.path))["ray/tune/loss"][:3] == pytest.approx(
            [trial.config["lr"], trial.config["lr"] / 2, trial.config["lr"] / 3]
        )
        assert scalars(Path(trial.path))["ray/tune/world_size"][0] == 2.0
    assert "search ended: 2 of 2 trials ended" in said.getvalue()
