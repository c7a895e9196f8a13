"""What is measured: which programs take turns, and the target of each ratio of their figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

# The figures of each way, one dict per round.
Figures = dict[str, list[dict[str, float]]]


@dataclass(frozen=True)
class Claim:
    """The ``figure`` of one way divided by that of another is at most, or at least, a bound."""

    text: str
    figure: str
    ours: str
    other: str
    at_most: float | None = None
    at_least: float | None = None

    def is_reached(self, ratio: float) -> bool:
        if self.at_most is not None:
            return ratio <= self.at_most
        assert self.at_least is not None
        return ratio >= self.at_least

    @property
    def target(self) -> str:
        return f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"


@dataclass(frozen=True)
class Bound:
    """A figure of one way that should be at most ``at_most`` in itself."""

    text: str
    figure: str
    way: str
    at_most: float


@dataclass(frozen=True)
class Part:
    """One question. ``ways`` are the programs (module and arguments) that take turns, once per round."""

    question: str
    unit: str
    figure: str
    ways: Mapping[str, str]
    claims: tuple[Claim, ...] = ()
    bounds: tuple[Bound, ...] = ()
    lower_is_better: bool = True
    runs: int | None = None


def judge(part: Part, figures: Figures) -> list[str]:
    """Return a line per claim and bound: its value, its target and whether that was reached."""
    lines = []
    for claim in part.claims:
        if claim.ours not in figures or claim.other not in figures:
            continue
        ratios = [
            ours[claim.figure] / other[claim.figure]
            for ours, other in zip(figures[claim.ours], figures[claim.other], strict=True)
        ]
        ratio = statistics.median(ratios)
        verdict = "reached" if claim.is_reached(ratio) else "NOT reached"
        spread = f"{min(ratios):.3g} to {max(ratios):.3g}"
        lines.append(f"{claim.text}: {ratio:.3g} ({spread}), to be {claim.target}: {verdict}")
    for bound in part.bounds:
        values = [each[bound.figure] for each in figures[bound.way]]
        value = statistics.median(values)
        verdict = "reached" if value <= bound.at_most else "NOT reached"
        spread = f"{min(values):.3g} to {max(values):.3g}"
        lines.append(f"{bound.text}: {value:.3g} ({spread}), to be at most {bound.at_most:g}: {verdict}")
    return lines


FLOOR, OURS = "plain Tune class (floor)", "horovod_tune"
EXECUTOR, RUN, TRAIN = "RayExecutor per trial", "horovodrun per trial", "Ray Train V2 per trial"
OURS_TORCH, TORCHRUN = "horovod_tune, backend torch", "torchrun per trial"
MONARCH = "Monarch (no search)"  # left out unless it is installed: pip install torchmonarch==0.7
FIXED, HOROVODS = "restart from its checkpoint", "horovodrun --min-np"

PARTS = {
    "turnaround": Part(
        "One short trial after another (2 ranks, 3 reports): seconds from one trial's end to the next one's",
        "s",
        "trial_s",
        {
            FLOOR: "floor turnaround --trials 40",
            OURS: "ours turnaround --trials 40",
            EXECUTOR: "ray_executor turnaround --trials 3",
            RUN: "horovodrun_trial turnaround --trials 3",
            OURS_TORCH: "ours turnaround --trials 40 --backend torch",
            TORCHRUN: "horovodrun_trial turnaround --trials 3 --backend torch",
            TRAIN: "ray_train turnaround --trials 3",
        },
        claims=(
            Claim("40 trials, the first included, against the floor", "trial_mean_s", OURS, FLOOR, at_most=2),
            Claim("RayExecutor against ours", "trial_s", EXECUTOR, OURS, at_least=40),
            Claim("Ray Train V2 against ours", "trial_s", TRAIN, OURS, at_least=130),
            Claim("Ray Train V2 against ours with torch", "trial_s", TRAIN, OURS_TORCH, at_least=50),
            Claim("torch against Horovod", "trial_s", OURS_TORCH, OURS, at_most=2),
            Claim("a trial after the first against the floor's", "trial_s", OURS, FLOOR, at_most=2),
        ),
    ),
    "concurrent": Part(
        "16 trials of 3 x 0.7 s, four at a time: ideal time / wall time, the first start included",
        "of the ideal",
        "efficiency",
        {
            FLOOR: "floor concurrent --trials 16",
            OURS: "ours concurrent --trials 16",
            EXECUTOR: "ray_executor concurrent --trials 16",
        },
        claims=(Claim("ours against the floor", "efficiency", OURS, FLOOR, at_least=0.8),),
        lower_is_better=False,
    ),
    "first_trial": Part(
        "The first trial: seconds until its last report, from tune.run or from the start of horovodrun",
        "s",
        "first_trial_s",
        {
            "horovodrun": "first_trial horovodrun",
            OURS: "first_trial ours",
            "torchrun": "first_trial torchrun",
            OURS_TORCH: "first_trial ours_torch",
            **({MONARCH: "monarch"} if find_spec("monarch") else {}),
        },
        claims=(
            Claim("ours against horovodrun", "first_trial_s", OURS, "horovodrun", at_most=1),
            Claim("ours with torch against Monarch", "first_trial_s", OURS_TORCH, MONARCH, at_most=1),
        ),
    ),
    **{
        f"world_{size}": Part(
            f"hvd.init() of {size} ranks on one machine: seconds",
            "s",
            "init_s",
            {"horovodrun": f"world horovodrun {size}", OURS: f"world ours {size}"},
            claims=(Claim("ours against horovodrun", "init_s", OURS, "horovodrun", at_most=1),),
            bounds=(
                Bound("in a first trial", "init_s", OURS, at_most=bound),
                Bound("in the trial after it", "second_init_s", OURS, at_most=bound),
            ),
        )
        for size, bound in ((8, 0.7), (16, 2.0))
    },
    "training": Part(
        "Training itself: steps per second, 2 ranks, one thread each",
        "steps/s",
        "steps_per_s",
        {
            "horovodrun": "training horovodrun",
            OURS: "training ours",
            "horovodrun, our malloc settings": "training horovodrun_allocator",
            "torchrun": "training torchrun",
            OURS_TORCH: "training ours_torch",
        },
        claims=(
            Claim("ours against horovodrun", "steps_per_s", OURS, "horovodrun", at_least=0.98),
            Claim("ours against torchrun", "steps_per_s", OURS_TORCH, "torchrun", at_least=0.98),
        ),
        lower_is_better=False,
    ),
    "reports": Part(
        "Reports per second that reach Tune",
        "reports/s",
        "reports_per_s",
        {
            "plain Tune function": "reports plain",
            "horovod_tune, 2 ranks": "reports ours --ranks 2",
            "horovod_tune, 16 ranks": "reports ours --ranks 16",
        },
        claims=(
            Claim("2 ranks", "reports_per_s", "horovod_tune, 2 ranks", "plain Tune function", at_least=0.5),
            Claim(
                "16 ranks", "reports_per_s", "horovod_tune, 16 ranks", "plain Tune function", at_least=0.25
            ),
        ),
        lower_is_better=False,
    ),
    "exploit": Part(
        "An exploit in PBT, 10 MB of checkpoint: seconds from the decision to the first report after it",
        "s",
        "exploit_s",
        {OURS: "exploit"},
        bounds=(Bound("seconds from the decision to the next report", "exploit_s", OURS, at_most=1),),
    ),
    "resize": Part(
        "A trial resized from 2 to 4 ranks, 10 MB of state: seconds from the decision to the next report",
        "s",
        "resize_s",
        {OURS: "resize elastic", FIXED: "resize fixed"},
        bounds=(Bound("seconds from the decision to the next report", "resize_s", OURS, at_most=3),),
    ),
    "loss": Part(
        "One of 3 ranks is killed, 10 MB of state: seconds from its death to the next step",
        "s",
        "loss_s",
        {OURS: "loss elastic", FIXED: "loss fixed", HOROVODS: "horovodrun_loss"},
        claims=(
            Claim("against a restart", "loss_s", OURS, FIXED, at_most=0.5),
            Claim("against horovodrun --min-np", "loss_s", OURS, HOROVODS, at_most=0.5),
        ),
        bounds=(Bound("seconds from a rank's death to the next step", "loss_s", OURS, at_most=3),),
    ),
    "checkpoint": Part(
        "A checkpoint of 1 GB to local storage: time / time of a plain copy",
        "of a copy",
        "save_to_copy",
        {OURS: "checkpoint"},
        bounds=(
            Bound("time against a plain copy", "save_to_copy", OURS, at_most=1.5),
            Bound("MB that any rank grew by", "grown_mb", OURS, at_most=100),
        ),
    ),
    "accumulation": Part(
        "500 trials: growth of what outlives a trial, for every 100 trials after the first 20",
        "MB",
        "memory_mb_per_100_trials",
        {OURS: "accumulation --trials 500"},
        bounds=(
            Bound("processes (coordinator, 2 training actors, template)", "processes", OURS, at_most=4),
            Bound("processes of ranks for every 100 trials", "ranks_per_100_trials", OURS, at_most=0.1),
            Bound("MB of memory for every 100 trials", "memory_mb_per_100_trials", OURS, at_most=1),
            Bound("threads for every 100 trials", "threads_per_100_trials", OURS, at_most=0.1),
            Bound("open files for every 100 trials", "files_per_100_trials", OURS, at_most=0.1),
            Bound("listening ports for every 100 trials", "ports_per_100_trials", OURS, at_most=0.1),
            Bound("MB of shared memory for every 100 trials", "shared_memory_mb_per_100_trials", OURS, 1),
        ),
        runs=1,
    ),
}
