"""Every plot, with three trials, with a thousand, and with nothing to draw."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from made_experiments import changed, made_experiment

go = pytest.importorskip("plotly.graph_objects")

from horovod_tune.analysis import analyze, plots  # noqa: E402
from horovod_tune.analysis.plots.style import OKABE_ITO, hover_texts  # noqa: E402
from horovod_tune.analysis.results import Analysis  # noqa: E402
from horovod_tune.analysis.scoring import parse_limit  # noqa: E402

ONE_FIGURE = (
    "learning_curves",
    "best_so_far",
    "parallel_coordinates",
    "importance",
    "timeline",
    "parameters",
)


def names(figure) -> list[str]:
    return [trace.name for trace in figure.data if trace.name]


def said(figure) -> str:
    texts = [note.text for note in figure.layout.annotations]
    return " ".join(filter(None, [figure.layout.title.text, figure.layout.title.subtitle.text, *texts]))


@pytest.mark.long
@pytest.mark.parametrize("name", ONE_FIGURE)
@pytest.mark.parametrize("trials", [3, 1000])
def test_each_plot_is_one_call_and_returns_a_figure(name, trials):
    figure = getattr(plots, name)(made_experiment(trials))
    assert isinstance(figure, go.Figure)
    assert figure.data or "at least 10 trials" in said(figure)
    assert len(figure.to_json()) > 1000


def test_learning_curves_draw_every_trial_once():
    few, many = made_experiment(5), made_experiment(60)
    figure = plots.learning_curves(few)
    assert [trace.line.color for trace in figure.data] == list(OKABE_ITO[:5])
    best = few.trials.index(few.best_trial)
    assert list(figure.data[best].y) == [row["loss"] for row in few.best_trial.rows]
    figure = plots.learning_curves(many, against="time")
    drawn = [text for trace in figure.data for text in trace.text]
    assert set(drawn) == {trial.trial_id for trial in many.trials}
    gaps = sum(int(np.isnan(trace.y).sum()) for trace in figure.data)
    diverged = sum(bool(np.isnan(row["loss"])) for trial in many.trials for row in trial.rows)
    assert gaps == 60 - len(figure.data) + diverged, "a gap between two trials"
    assert [trace.name for trace in figure.data if trace.showlegend][-2:] == ["best 10 %", "best"]
    assert figure.data[-1].text[0] == many.best_trial.trial_id, "the best one is drawn over the others"
    assert figure.layout.xaxis.title.text.startswith("wall-clock time")
    with pytest.raises(ValueError, match='against must be "iteration" or "time"'):
        plots.learning_curves(few, against="epoch")


def test_a_hyperparameter_that_a_trial_lacks_is_not_in_its_hover_text():
    one, two = made_experiment(2).trials
    trials = (replace(one, config={"net": "a", "momentum": 0.5}), replace(two, config={"net": None}))
    first, second = (
        text.split("<br>")[1:] for text in hover_texts(changed(made_experiment(2), trials=trials))
    )
    assert (first, second) == (["net = a", "momentum = 0.5"], ["net = None"])


def test_the_curve_of_a_restarted_trial_has_a_gap(experiments):
    figure = plots.learning_curves(analyze(experiments / "failing", metric="loss", mode="min"))
    assert sum(int(np.isnan(trace.y).sum()) for trace in figure.data) == 1, "one trial has two attempts"


def test_searchers_are_compared_in_one_plot():
    one, two = made_experiment(20, name="ours"), made_experiment(20, seed=5, name="random")
    assert names(plots.best_so_far([one, two], against="trials")) == ["ours", "random"]
    seeds = [made_experiment(20, seed=seed) for seed in range(3)]
    figure = plots.best_so_far({"random": seeds, "ours": one}, against="trials")
    assert names(figure) == ["random (median)", "ours"]
    other = Analysis(two.record, two.folder, metric="accuracy", mode="max")
    with pytest.raises(ValueError, match="the same metric and mode"):
        plots.best_so_far([one, other])


def test_one_hyperparameter_has_its_scale():
    analysis = made_experiment(30)
    assert plots.parameter(analysis, "lr").layout.xaxis.type == "log"
    assert plots.parameter(analysis, "net/act").layout.xaxis.ticktext == ("gelu", "relu", "tanh")
    axes = {axis for trace in plots.parameters(analysis).data for axis in [trace.xaxis]}
    assert len(axes) == 5
    with pytest.raises(
        ValueError, match="no hyperparameter 'nope' varies among the trials; those that do: lr"
    ):
        plots.parameter(analysis, "nope")


@pytest.mark.parametrize(("scope", "best"), [("all", 0.1), ("last", 0.5)])
def test_a_value_is_drawn_at_the_configuration_that_reached_it(scope, best):
    """PopulationBasedTraining changes a trial's configuration."""
    made = made_experiment(2)
    told = [{"loss": 0.1, "config": {"lr": 0.1}}, {"loss": 0.8, "config": {"lr": 0.5}}]
    changing = replace(made.trials[0], rows=tuple(told), config={"lr": 0.5})
    other = replace(made.trials[1], rows=({"loss": 0.9},), config={"lr": 0.3})
    record = replace(made.record, trials=(changing, other))
    analysis = Analysis(record, made.folder, metric="loss", mode="min", scope=scope)
    star = plots.parameter(analysis, "lr").data[-1]
    assert (star.x[0], star.y[0]) == (analysis.best_config["lr"], analysis.best_value)
    assert star.x[0] == pytest.approx(best)


@pytest.mark.parametrize("name", ["parameters", "parallel_coordinates"])
def test_the_values_outside_the_axis_are_counted(name):
    made = made_experiment(40, asha=False)
    far = replace(made.trials[0], rows=({"loss": 1e9, "training_iteration": 1},))
    figure = getattr(plots, name)(changed(made, trials=(far, *made.trials[1:])))
    assert re.search(r"\d of \d+ values are outside the axis", said(figure))


def test_parallel_coordinates_have_every_trial_in_one_group():
    analysis = made_experiment(200)
    figure = plots.parallel_coordinates(analysis)
    told = [text for trace in figure.data if trace.name != "best" for text in set(trace.text)]
    finite = np.flatnonzero(np.isfinite(analysis.values))
    assert len(told) == len(finite) == len(set(told))
    assert names(figure) == ["the rest", "to 50 %", "to 25 %", "best 10 %", "best"]


def test_trials_outside_the_limits_are_in_the_last_group():
    made = made_experiment(40)
    limits = [parse_limit(f"loss > {made.best_value}")]
    figure = plots.parallel_coordinates(
        Analysis(made.record, made.folder, metric="loss", mode="min", limits=limits)
    )
    (last,) = [trace for trace in figure.data if trace.name == "the rest"]
    assert any(text.startswith(made.best_trial.trial_id) for text in last.text)


@pytest.mark.long
def test_the_importances_find_what_matters_and_name_their_method():
    figure = plots.importance(made_experiment(200))
    names, (bars,) = figure.layout.yaxis.ticktext, figure.data
    assert names[0] == "lr" and bars.x[0] > 0.5 and bars.x[names.index("net/width")] < 0.05
    assert "permutation importance on a random forest (scikit-learn)" in said(figure)
    assert float(re.search(r"held-out trials: ([\d.]+)$", said(figure))[1]) > 0.8
    assert figure == plots.importance(made_experiment(200)), "the same each time"
    assert (
        "at least 10 trials with a value (there are 4) and a hyperparameter that varies (there are 5)"
        in said(plots.importance(made_experiment(4)))
    )


@pytest.mark.long
def test_importances_of_noise_are_called_meaningless():
    made = made_experiment(60, asha=False)
    noise = np.random.default_rng(0).normal(size=60)
    trials = tuple(
        replace(t, rows=({"loss": float(each), "training_iteration": 1},))
        for t, each in zip(made.trials, noise, strict=True)
    )
    blank = changed(made, trials=trials)
    assert "too low to trust" in said(plots.importance(blank))


def test_start_up_is_drawn_as_such():
    figure = plots.timeline(made_experiment(20))
    assert [trace.name for trace in figure.data if trace.showlegend] == [
        "training",
        "best trial",
        "starting up",
    ]


def test_start_up_that_is_not_known_is_not_drawn(experiments):
    figure = plots.timeline(analyze(experiments / "random"))
    assert "starting up" not in names(figure)
    assert "not recorded" in said(figure)


@pytest.mark.parametrize("name", ["learning_curves", "best_so_far", "parallel_coordinates"])
def test_a_plot_without_values_has_a_text_instead(name):
    analysis = made_experiment(2)
    trials = tuple(
        replace(t, rows=({"loss": float("nan"), "training_iteration": 1},), last_result=None)
        for t in analysis.trials
    )
    blank = changed(analysis, trials=trials)
    assert isinstance(getattr(plots, name)(blank), go.Figure)


def test_names_are_shown_as_they_are():
    made = made_experiment(3)
    trials = tuple(
        replace(t, trial_id=f"<b>{t.number}</b>", config={"<i>a</i>%{x}": n})
        for n, t in enumerate(made.trials)
    )
    hostile = changed(made, trials=trials)
    figure = plots.parameter(hostile, "<i>a</i>%{x}")
    assert figure.layout.title.text == "&lt;i&gt;a&lt;/i&gt;%\u200b{x}"
    assert figure.data[0].text[0].startswith("&lt;b&gt;0&lt;/b&gt;")
