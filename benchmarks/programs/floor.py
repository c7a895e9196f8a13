"""The floor: a plain Tune class with actor reuse and no workers at all."""

from __future__ import annotations

import time
from typing import Any

from ray import tune

from benchmarks.programs import trials


class Plain(tune.Trainable):
    def setup(self, config: dict[str, Any]) -> None:
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.settings, self.steps = new_config, 0
        return True

    def step(self) -> dict[str, Any]:
        time.sleep(self.settings["step_s"])
        self.steps += 1
        return {"x": self.settings["x"], "done": self.steps == trials.REPORTS}


if __name__ == "__main__":
    options = trials.arguments(__doc__, trials=40)
    trials.start_ray()
    trials.publish(trials.search(Plain, options.kind, options.trials, reuse_actors=True))
