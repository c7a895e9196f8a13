"""examples/transformers_tpu.py, on torch_xla's CPU device."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from processes import run_python

for name in ("torch_xla", "transformers", "accelerate", "hyperopt"):
    pytest.importorskip(name)

EXAMPLES = Path(__file__).parents[3] / "examples"
# ln 256: the loss of an untrained model.
BYTES_AT_RANDOM = 5.545


def test_the_example_tunes_a_transformer_on_its_own_text(tmp_path: Path) -> None:
    run = (
        "import json, ray, transformers_tpu as example\n"
        'ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)\n'
        f"analysis = example.main(time_budget_s=240, num_samples=2, storage_path={str(tmp_path)!r})\n"
        "print('FOUND', json.dumps([analysis.best_config, analysis.best_result['eval_loss']]))\n"
    )
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "HF_HUB_OFFLINE": "1"}
    ran = run_python("-c", run, cwd=EXAMPLES, env=environment, timeout_s=280)
    (line,) = [each for each in ran.stdout.splitlines() if each.startswith("FOUND")]
    best, loss = json.loads(line.removeprefix("FOUND "))
    assert set(best) == {"learning_rate", "warmup_ratio", "num_train_epochs"}
    assert loss < BYTES_AT_RANDOM
    assert list(tmp_path.glob("transformers_tpu/*/checkpoint_*/model.safetensors"))
