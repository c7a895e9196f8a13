"""Tune's own TensorBoard logger keeps working with what distributed trials report."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from horovod_tune.analysis import analyze

event_pb2 = pytest.importorskip(
    "tensorboardX.proto.event_pb2", reason="Tune's TensorBoard logger needs tensorboardX"
)


def events(file: Path) -> list:
    """The events of a TensorBoard file: records of length, checksum, bytes, checksum."""
    data, found, place = file.read_bytes(), [], 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        found.append(event_pb2.Event.FromString(data[place + 12 : place + 12 + length]))
        place += 12 + length + 4
    return found


def scalars(trial_folder: Path) -> dict[str, list[float]]:
    """Each tag's values; the last report's file has the hyperparameters too."""
    seen: dict[str, list[float]] = {}
    for file in sorted(trial_folder.glob("events.out.tfevents.*")):
        for event in events(file):
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    seen.setdefault(value.tag, []).append(value.simple_value)
    return seen


def test_tensorboard_has_every_report_of_a_distributed_trial(experiments):
    analysis = analyze(experiments / "distributed")
    for trial in analysis.trials:
        seen = scalars(Path(trial.directory))
        assert seen["ray/tune/loss"][: len(trial.rows)] == pytest.approx([row["loss"] for row in trial.rows])
        assert seen["ray/tune/world_size"][0] == 2.0


def test_tensorboard_has_nested_metrics_of_a_function(experiments):
    analysis = analyze(experiments / "random")
    seen = scalars(Path(analysis.best_logdir))
    assert len(seen["ray/tune/deep/loss"]) >= 4
