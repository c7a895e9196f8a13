"""examples/large_batch_digits.py: a search over batch, rate, warm-up and optimiser, of 2-rank trials."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.processes]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.usefixtures("ray_session")
@pytest.mark.timeout(600)
def test_a_search_over_batch_rate_warm_up_and_optimiser(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    modules = [importlib.import_module(name) for name in ("digits_mlp", "large_batch_digits")]
    for module in modules:
        # The trials' processes were started by pytest and cannot import examples.
        cloudpickle.register_pickle_by_value(module)
    try:
        analysis = modules[1].main(num_samples=3, epochs=4, storage_path=str(tmp_path))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    assert [trial.status for trial in analysis.trials] == ["TERMINATED"] * 3
    for trial in analysis.trials:
        reports = [json.loads(line) for line in Path(trial.path, "result.json").read_text().splitlines()]
        assert [report["epoch"] for report in reports] == [1, 2, 3, 4]
        last = reports[-1]
        assert last["noise_scale_low"] <= last["noise_scale"] <= last["noise_scale_high"]
        assert last["noise_scale"] > 0 and math.isclose(last["lr"], 0, abs_tol=1e-9)
        assert trial.checkpoint is not None
