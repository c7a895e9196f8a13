"""Measures what `background_uploads=True` saves a trial whose storage takes its time for each checkpoint.

    python -m benchmarks.background_uploads [--epochs 8] [--epoch-s 1] [--upload-s 1] [--rounds 3]

One trial of 2 ranks sleeps for `--epoch-s` and reports a checkpoint of 10 MB, for which the storage takes
`--upload-s`. Prints the seconds from the first report to the end of the search with and without it, in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray
from fsspec.implementations.local import LocalFileSystem
from ray import tune

from horovod_tune import DistributedTrainableCreator

CHECKPOINT_BYTES = 10_000_000


def train(config: dict[str, Any]) -> None:
    import horovod.torch as hvd

    from horovod_tune import report

    hvd.init()
    for epoch in range(config["epochs"]):
        time.sleep(config["epoch_s"])
        with tempfile.TemporaryDirectory() as folder:
            if hvd.rank() == 0:
                Path(folder, "weights").write_bytes(os.urandom(CHECKPOINT_BYTES))
            report({"epoch": epoch, "at": time.time()}, checkpoint=folder)


def seconds(arguments: argparse.Namespace, background: bool) -> float:
    """Run the trial; return the seconds from its first report to the end of the search."""

    class SlowStorage(pyarrow.fs.FSSpecHandler):
        upload_s = arguments.upload_s

        def open_output_stream(self, path: str, metadata: Any) -> Any:
            if path.endswith("/weights"):
                time.sleep(self.upload_s)
            return super().open_output_stream(path, metadata)

    with tempfile.TemporaryDirectory() as folder:
        results = tune.Tuner(
            DistributedTrainableCreator(train, num_slots=2, background_uploads=background),
            param_space={"epochs": arguments.epochs, "epoch_s": arguments.epoch_s},
            run_config=tune.RunConfig(
                storage_filesystem=pyarrow.fs.PyFileSystem(SlowStorage(LocalFileSystem(auto_mkdir=True))),
                storage_path=f"{folder}/results",
                verbose=0,
            ),
        ).fit()
        ended = time.time()
        (result,) = results
        if result.error is not None:
            raise result.error
        assert len(list(Path(folder).rglob("weights"))) == arguments.epochs, "a checkpoint has not arrived"
        frame = result.metrics_dataframe
        assert frame is not None
        return ended - float(frame["at"].iloc[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--epoch-s", type=float, default=1.0)
    parser.add_argument("--upload-s", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ray.init("local", num_cpus=2, log_to_driver=False, include_dashboard=False)
    ratios = []
    for _ in range(arguments.rounds):
        waits, goes_on = seconds(arguments, False), seconds(arguments, True)
        ratios.append(goes_on / waits)
        print(f"report() waits: {waits:.1f} s; in the background: {goes_on:.1f} s", flush=True)
    print(f"{statistics.median(ratios):.2f} of the time ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
