"""Under a Ray whose private APIs have changed, searches run without our patches, and say so once."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
from processes import run_python

from horovod_tune import (
    compatibility,
    creator,  # noqa: F401 - imports all patches of Ray
)
from horovod_tune.backends.torch_distributed import process_groups  # noqa: F401 - it has a patch too

pytestmark = [pytest.mark.slow, pytest.mark.processes]

HERE = Path(__file__).resolve().parent


PATCHES = sorted(
    (each for each in gc.get_objects() if isinstance(each, compatibility.Patch)),
    key=lambda each: each.without,
)


def test_every_patch_of_ray_prevents_a_loss_of_its_own() -> None:
    assert len({each.without for each in PATCHES}) == len(PATCHES) > 15


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.parts[-1].partition(" ")[0])
def test_the_ray_and_the_torch_in_place_have_the_shapes(patch: compatibility.Patch) -> None:
    assert not any(map(compatibility.difference, patch.parts))


def test_a_search_runs_under_a_ray_in_which_everything_private_has_changed(tmp_path: Path) -> None:
    driver = run_python(
        HERE / "drivers" / "changed_ray.py",
        tmp_path,
        timeout_s=280,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    told = json.loads(driver.stdout.splitlines()[-1])
    assert told["statuses"] == ["TERMINATED"] * 2
    assert told["steps"] == [3, 3]
    assert told["failures"] == [1, 0]  # continued from its checkpoint after one
    assert told["best"] == {"start": 0}
    warned = [each for each in driver.stderr.splitlines() if "differs from what horovod_tune was" in each]
    for patch in PATCHES:
        if patch.without in told["changed"]:
            assert sum(patch.without in line for line in warned) == 1, (patch.without, warned)
    assert len(told["changed"]) >= 10
    assert len(warned) == len(told["changed"])


def test_keyword_reports_are_left_alone_where_tunes_report_has_changed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ray.tune.trainable import trainable_fn_utils

    from horovod_tune.ray_compat import tune_session

    def report(values: dict[str, Any]) -> None: ...

    monkeypatch.setattr(trainable_fn_utils, "report", report)
    monkeypatch.setattr(tune_session._REPORT, "_fits", None)
    tune_session._accept_keywords(trainable_fn_utils)
    tune_session._accept_keywords(trainable_fn_utils)
    assert trainable_fn_utils.report is report
    assert [record.getMessage().count("call horovod_tune.report") for record in caplog.records] == [1]
