"""The rungs of successive halving with promotions: which trials wait, and which one continues."""

from __future__ import annotations


class Rungs:
    """Asynchronous successive halving after Li et al. (2020): trials wait, and the best continue later.

    A trial waits at each rung that it reaches. It continues once it is among the best ``1 / factor`` of all
    trials that have reached that rung, including those that came later.

    Args:
        levels: the times of the rungs, increasing, without the end of a training.
        factor: the ratio of trials that reach a rung to trials that continue from it.

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
        # The index of the last rung that each trial has reached; -1 for none.
        self._at: dict[str, int] = {}
        self.waiting: set[str] = set()

    def reach(self, trial: str, time: float, value: float) -> bool:
        """Record a report of a trial that does not wait; return True if it now waits at a rung."""
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
        """Return the index of the last rung that a trial has reached."""
        return self._at[trial]

    def rank(self, trial: str) -> tuple[int, int]:
        """Return a trial's place (from 1) at its last rung, and how many trials have reached that rung."""
        values = self.values[self._at[trial]]
        return 1 + sum(value > values[trial] for value in values.values()), len(values)

    def is_good(self, trial: str) -> bool:
        """Return True if a trial is among the best at the rung where it waits; the best one always is."""
        place, of = self.rank(trial)
        return place <= max(of / self._factor, 1)

    def next(self) -> str | None:
        """Promote and return the next trial to continue, from the highest rung possible, or None."""
        for values, trials in self._furthest_first():
            best = sorted(values, key=lambda trial: values[trial], reverse=True)
            for trial in best[: int(len(values) / self._factor + 1e-9)]:
                if trial in trials:
                    self.waiting.remove(trial)
                    return trial
        return None

    def best_waiting(self) -> str:
        """Promote and return the best trial at the highest rung where any waits; at least one must wait."""
        values, trials = next((values, trials) for values, trials in self._furthest_first() if trials)
        best = max(trials, key=lambda trial: values[trial])
        self.waiting.remove(best)
        return best

    def _furthest_first(self) -> list[tuple[dict[str, float], list[str]]]:
        """Return each rung's values and its waiting trials in order of arrival, the highest rung first."""
        return [
            (values, [trial for trial in values if trial in self.waiting and self._at[trial] == rung])
            for rung, values in reversed(list(enumerate(self.values)))
        ]
