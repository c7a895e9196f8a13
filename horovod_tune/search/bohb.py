"""Ray's TuneBOHB for ConfigSpace 1.x and NumPy 2. Checked with Ray 2.60 and hpbandster 0.7.4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from ray.tune.search import bohb

from horovod_tune.search.space.search_space import seeded


class TuneBOHB(bohb.TuneBOHB):
    """BOHB's model as a searcher, for use with Ray's `HyperBandForBOHB`; arguments as in Ray's class.

    Four things differ. Configurations hold Python's own numbers and strings; those of ConfigSpace 1.x are
    NumPy's (`np.str_`, `np.int64`) and fail type checks and JSON. A report whose metric is missing or not a
    finite number counts as infinitely bad instead of ending the search. A trial that this
    search did not suggest, such as one that Tune restarted, is ignored. With a `seed`, the same results lead
    to the same suggestions: hpbandster draws from NumPy's global generator, which is seeded for each
    suggestion and restored after it.
    """

    _suggestions = 0

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        if self._seed is None:
            suggestion = super().suggest(trial_id)
        else:
            words = np.random.SeedSequence([self._seed, self._suggestions])
            with seeded(int(words.generate_state(1)[0])):
                suggestion = super().suggest(trial_id)
        self._suggestions += suggestion is not None
        return suggestion if suggestion is None else _plain(suggestion)

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        if trial_id not in self.trial_to_params:
            return
        value = result.get(self.metric, math.nan)
        if not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
            result = {**result, self.metric: math.inf if self.mode == "min" else -math.inf}
        super().on_trial_result(trial_id, dict(result))

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        if trial_id in self.trial_to_params:
            super().on_trial_complete(trial_id, result, error)


def _plain(value: Any) -> Any:
    """Return nested dictionaries and lists with Python's scalars instead of NumPy's."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value.item() if isinstance(value, np.generic) else value
