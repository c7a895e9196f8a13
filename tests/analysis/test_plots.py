"""Every picture draws what it says, with three trials, with a thousand, and with nothing to draw."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_experiments import made_experiment

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from horovod_tune.analysis import analyze, plots  # noqa: E402
from horovod_tune.analysis.plots.style import OKABE_ITO, colours  # noqa: E402
from horovod_tune.analysis.results import Analysis  # noqa: E402

ONE_AXES = (
    "learning_curves",
    "best_so_far",
    "parallel_coordinates",
    "importance",
    "rungs",
    "timeline",
    "interaction",
)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def drawn(ax: Axes) -> np.ndarray:
    ax.figure.canvas.draw()
    return np.asarray(ax.figure.canvas.buffer_rgba())


@pytest.mark.parametrize("name", ONE_AXES)
@pytest.mark.parametrize("trials", [3, 1000])
def test_each_picture_is_one_line_and_returns_its_axes(name, trials):
    ax = getattr(plots, name)(made_experiment(trials))
    assert isinstance(ax, Axes)
    assert drawn(ax)[..., :3].std() > 1, "something is drawn"


@pytest.mark.parametrize("name", ONE_AXES)
def test_each_picture_goes_where_it_is_told(name):
    ax = plt.subplots()[1]
    assert getattr(plots, name)(made_experiment(12), ax=ax) is ax


def test_learning_curves_draw_every_trial_once():
    few, many = made_experiment(5), made_experiment(60)
    ax = plots.learning_curves(few)
    assert len(ax.lines) == 5
    assert [line.get_color() for line in ax.lines] == list(OKABE_ITO[:5])
    ax = plots.learning_curves(many, against="time")
    singles = sum(len(trial.rows) == 1 for trial in many.trials)
    lines, dots = ax.collections[0], ax.collections[1]
    assert len(lines.get_segments()) + len(dots.get_offsets()) + 1 == 60, "the best is a line of its own"
    assert len(dots.get_offsets()) == singles
    assert ax.get_xlabel().startswith("wall-clock time")
    with pytest.raises(ValueError, match='against must be "iteration" or "time"'):
        plots.learning_curves(few, against="epoch")


def test_a_restarted_trial_is_drawn_from_its_new_start(experiments):
    analysis = analyze(experiments / "failing")
    assert len(plots.learning_curves(analysis).lines) == 3, "one trial, and another's two attempts"


def test_searchers_are_compared_on_one_picture():
    one, two = made_experiment(20, name="ours"), made_experiment(20, seed=5, name="random")
    ax = plots.best_so_far([one, two], against="trials")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["ours", "random"]
    seeds = [made_experiment(20, seed=seed) for seed in range(3)]
    ax = plots.best_so_far({"random": seeds, "ours": one}, against="trials")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["random (median)", "ours"]
    other = Analysis(two.record, two.folder, metric="accuracy", mode="max")
    with pytest.raises(ValueError, match="one metric and mode"):
        plots.best_so_far([one, other])


def test_one_hyperparameter_has_its_scale():
    analysis = made_experiment(30)
    ax = plots.parameter(analysis, "lr")
    assert "0.01" in [text.get_text() for text in ax.get_xticklabels()]
    ax = plots.parameter(analysis, "net/act")
    assert [text.get_text() for text in ax.get_xticklabels()] == ["gelu", "relu", "tanh"]
    assert len(plots.parameters(analysis)) == 5
    with pytest.raises(
        ValueError, match="no hyperparameter 'nope' varies among the trials; those that do: lr"
    ):
        plots.parameter(analysis, "nope")


def test_an_interaction_takes_the_two_that_matter_most():
    ax = plots.interaction(made_experiment(150))
    assert ax.get_xlabel() == "lr"
    assert ax.get_title(loc="left").startswith("lr and ")
    ax = plots.interaction(made_experiment(30), "momentum", "net/act")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("momentum", "net/act")


def test_the_importances_name_their_method_and_warn_of_a_poor_model():
    text = " ".join(t.get_text() for t in plots.importance(made_experiment(200)).texts)
    assert "permutation importance on a random forest (scikit-learn)" in text
    poor = " ".join(t.get_text() for t in plots.importance(made_experiment(10)).texts)
    assert "too low to trust" in poor
    few = " ".join(t.get_text() for t in plots.importance(made_experiment(4)).texts)
    assert "at least 10 trials" in few


def test_start_up_is_drawn_as_such():
    labels = [t.get_text() for t in plots.timeline(made_experiment(20)).get_legend().get_texts()]
    assert labels[:3] == ["training", "starting up", "best trial"]


def test_start_up_that_is_not_known_is_not_drawn(experiments):
    ax = plots.timeline(analyze(experiments / "random"))
    assert "starting up" not in [t.get_text() for t in ax.get_legend().get_texts()]
    assert any("not known" in text.get_text() for text in ax.texts)


@pytest.mark.parametrize("name", ["learning_curves", "best_so_far", "parallel_coordinates", "rungs"])
def test_without_values_a_picture_says_so(name):
    analysis = made_experiment(2)
    trials = tuple(
        replace(t, rows=({"loss": float("nan"), "training_iteration": 1},), last_result=None)
        for t in analysis.trials
    )
    blank = Analysis(replace(analysis.record, trials=trials), analysis.folder, metric="loss", mode="min")
    assert isinstance(getattr(plots, name)(blank), Axes)


def test_real_experiments_of_every_kind_can_be_drawn(experiments):
    for name in ("asha", "diverging", "distributed", "pbt"):
        analysis = analyze(experiments / name)
        for picture in (
            "learning_curves",
            "best_so_far",
            "parallel_coordinates",
            "importance",
            "rungs",
            "timeline",
        ):
            drawn(getattr(plots, picture)(analysis))
        plt.close("all")


def luminance(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def dichromat(colour: str) -> np.ndarray:
    """What a deuteranope sees (Machado, Oliveira and Fernandes, 2009, severity 1), in linear RGB."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = np.array(
        [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    )
    return np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]) @ linear


def test_colours_of_a_few_trials_differ_for_a_colour_blind_person():
    seen = [dichromat(colour) for colour in OKABE_ITO]
    apart = min(np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i])
    assert apart > 0.1
    assert max(map(luminance, OKABE_ITO)) < 0.7, "readable on white"
    assert len(colours(1000)) == 1000
