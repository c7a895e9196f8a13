"""Schedules as functions of time: the learning rate as a fraction of its peak.

Time is a float in the unit of the lengths: epochs, or optimiser steps in a `LargeBatchLR` with
`steps_per_epoch=1`. Each schedule is a frozen dataclass, so that it can be compared, printed and pickled.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from horovod_tune import bounds

Schedule = Callable[[float], float]


@dataclass(frozen=True)
class Constant:
    """1 at all times.

    >>> Constant()(7)
    1.0
    """

    def __call__(self, time: float) -> float:
        return 1.0


@dataclass(frozen=True)
class MultiStep:
    r"""Multiplied by `gamma` at each milestone: :math:`\gamma^{|\{m \le t\}|}`.

    >>> decay = MultiStep([30, 60, 80], gamma=0.5)
    >>> [decay(time) for time in (0, 29.9, 30, 60, 99)]
    [1.0, 1.0, 0.5, 0.25, 0.125]
    """

    milestones: Sequence[float]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", bounds.increasing("milestones", self.milestones))
        bounds.number("gamma", self.gamma, more_than=0)

    def __call__(self, time: float) -> float:
        return float(self.gamma ** bisect_right(self.milestones, time))


@dataclass(frozen=True)
class Polynomial:
    r"""From 1 to `end` in `length`: :math:`e + (1-e)(1-t/T)^p`, then `end` (LARS: p = 2, LAMB: p = 1).

    >>> decay = Polynomial(10, power=2)
    >>> [decay(time) for time in (0, 5, 10, 11)]
    [1.0, 0.25, 0.0, 0.0]
    """

    length: float
    power: float = 1.0
    end: float = 0.0

    def __post_init__(self) -> None:
        bounds.number("length", self.length, more_than=0)
        bounds.number("power", self.power, more_than=0)
        bounds.number("end", self.end, at_least=0)

    def __call__(self, time: float) -> float:
        left = 1 - min(time / self.length, 1.0)
        return self.end + (1 - self.end) * left**self.power


@dataclass(frozen=True)
class Cosine:
    r"""From 1 to `end` in `length`: :math:`e + (1-e)(1+\cos(\pi t/T))/2`, then `end`.

    (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5, without restarts.)

    >>> [round(Cosine(90)(time), 12) for time in (0, 30, 45, 90)]
    [1.0, 0.75, 0.5, 0.0]
    """

    length: float
    end: float = 0.0

    def __post_init__(self) -> None:
        bounds.number("length", self.length, more_than=0)
        bounds.number("end", self.end, at_least=0)

    def __call__(self, time: float) -> float:
        return self.end + (1 - self.end) * _half_cosine(min(time / self.length, 1.0))


@dataclass(frozen=True)
class OneCycle:
    r"""Up from `start` to 1 in the first `rise` of the `length`, then down to `end`, both along cosines.

    (Smith and Topin 2018, arXiv:1708.07120; the defaults are those of `torch.optim.lr_scheduler.OneCycleLR`.
    It needs no `Warmup`.)

    >>> cycle = OneCycle(10, rise=0.5, start=0.2, end=0.0)
    >>> [round(cycle(time), 12) for time in (0, 2.5, 5, 7.5, 10)]
    [0.2, 0.6, 1.0, 0.5, 0.0]
    """

    length: float
    rise: float = 0.3
    start: float = 1 / 25
    end: float = 1 / 25e4

    def __post_init__(self) -> None:
        bounds.number("length", self.length, more_than=0)
        bounds.number("rise", self.rise, at_least=0, less_than=1)
        bounds.number("start", self.start, at_least=0, at_most=1)
        bounds.number("end", self.end, at_least=0, at_most=1)

    def __call__(self, time: float) -> float:
        done, rise = min(time / self.length, 1.0), self.rise
        if done < rise:
            return self.start + (1 - self.start) * (1 - _half_cosine(done / rise))
        return self.end + (1 - self.end) * _half_cosine((done - rise) / (1 - rise))


@dataclass(frozen=True)
class InverseSqrt:
    r""":math:`\sqrt{\tau/(\tau+t)}` (Vaswani et al. 2017, arXiv:1706.03762, eq. 3, after its warm-up of τ).

    >>> InverseSqrt(4)(0), InverseSqrt(4)(12)
    (1.0, 0.5)
    """

    timescale: float

    def __post_init__(self) -> None:
        bounds.number("timescale", self.timescale, more_than=0)

    def __call__(self, time: float) -> float:
        return math.sqrt(self.timescale / (self.timescale + time))


@dataclass(frozen=True)
class Warmup:
    r"""Linearly from `start` to the peak in `length`, then another schedule (Goyal et al. 2017, section 2.2).

    .. math:: f(t) = s + (1-s)\,t/L \text{ for } t < L, \text{ then } f_{then}(t-L)

    Args:
        length: Length of the warm-up; 0 for none, fractions of an epoch are fine.
        then: The schedule afterwards. Its time starts when the warm-up ends.
        start: The fraction of the peak rate in the first step. Goyal et al. start at the base rate, which is
            ``start=1 / scaling_factor(...)``.
        overlap: If True, `then` (with its milestones) counts time from the start of training, and its value
            is multiplied by the ramp during the warm-up.

    >>> schedule = Warmup(4, then=Cosine(10), start=0.5)
    >>> [round(schedule(time), 12) for time in (0, 2, 4, 9, 14)]
    [0.5, 0.75, 1.0, 0.5, 0.0]
    >>> [Warmup(4, MultiStep([6]), overlap=True)(time) for time in (2, 5)]
    [0.5, 1.0]
    """

    length: float
    then: Schedule = field(default_factory=Constant)
    start: float = 0.0
    overlap: bool = False

    def __post_init__(self) -> None:
        bounds.number("length", self.length, at_least=0)
        bounds.number("start", self.start, at_least=0)
        if not callable(self.then):
            got = repr(self.then)
            raise bounds.HyperparameterError(f"then must be a schedule, such as Cosine(10), got {got}")

    def __call__(self, time: float) -> float:
        ramp = self.start + (1 - self.start) * (time / self.length) if time < self.length else 1.0
        if self.overlap:
            return ramp * self.then(time)
        return ramp if time < self.length else self.then(time - self.length)


def _half_cosine(done: float) -> float:
    """Return the half cosine from 1 at 0 to 0 at 1."""
    return (1 + math.cos(math.pi * done)) / 2
