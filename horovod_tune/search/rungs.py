"""The rungs of successive halving with promotions: which trials wait, and which one continues."""

from __future__ import annotations


class Rungs:
    """Asynchronous successive halving after Li et al. (2020): trials wait, and the best continue later.

    A trial waits at each rung that it reaches. It continues once it is among the best ``1 / factor`` of all
    that have reached that rung, those that came later included.

    Args:
        levels: the times of the rungs, growing; the end of a training is none of them.
        factor: how many times more trials reach a rung than continue from it.

    Example:
        >>> rungs = Rungs([2, 6], factor=2)
        >>> [rungs.reach("a", 2, 0.5), rungs.next()]
        [True, None]
        >>> [rungs.reach("b", 2, 0.4), rungs.next()]
        [True, 'a']
    """

    def __init__(self, levels: list[float], factor: float) -> None:
        self.levels, self._factor = levels, factor
        #: What trials reported at each rung, larger being better.
        self.values: list[dict[str, float]] = [{} for _ in levels]
        # The number of the rung that each trial is at or, if it does not wait, comes from; -1 for none.
        self._at: dict[str, int] = {}
        self.waiting: set[str] = set()

    def reach(self, trial: str, time: float, value: float) -> bool:
        """Record a report of a trial that does not wait; return True if the trial waits at it."""
        reached = sum(time >= level for level in self.levels) - 1
        before = self._at.setdefault(trial, -1)
        if reached <= before:
            return False
        for rung in range(before + 1, reached + 1):
            self.values[rung][trial] = value
        self._at[trial] = reached
        self.waiting.add(trial)
        return True

    def rung_of(self, trial: str) -> int:
        """Return the number of the rung that a trial has reached last."""
        return self._at[trial]

    def rank(self, trial: str) -> tuple[int, int]:
        """Return a trial's place at the rung that it has reached last, from 1, and how many have reached
        it."""
        values = self.values[self._at[trial]]
        return 1 + sum(value > values[trial] for value in values.values()), len(values)

    def is_good(self, trial: str) -> bool:
        """Return True if a trial is among the best at the rung where it waits; the first one there is."""
        place, of = self.rank(trial)
        return place <= max(of / self._factor, 1)

    def next(self) -> str | None:
        """Return and promote the next trial to continue, the one that has come furthest first."""
        for values, trials in self._furthest_first():
            best = sorted(values, key=lambda trial: values[trial], reverse=True)
            for trial in best[: int(len(values) / self._factor + 1e-9)]:
                if trial in trials:
                    self.waiting.remove(trial)
                    return trial
        return None

    def best_waiting(self) -> str:
        """Return and promote the best trial of those that have come furthest; at least one waits."""
        values, trials = next((values, trials) for values, trials in self._furthest_first() if trials)
        best = max(trials, key=lambda trial: values[trial])
        self.waiting.remove(best)
        return best

    def _furthest_first(self) -> list[tuple[dict[str, float], list[str]]]:
        """Return the values of each rung, and the trials that wait there in the order of their coming."""
        return [
            (values, [trial for trial in values if trial in self.waiting and self._at[trial] == rung])
            for rung, values in reversed(list(enumerate(self.values)))
        ]
