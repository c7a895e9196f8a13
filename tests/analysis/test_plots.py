"""Every plot, with three trials, with a thousand, and with nothing to draw."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from made_experiments import changed, made_experiment

go = pytest.importorskip("plotly.graph_objects")

from horovod_tune.analysis import (  # noqa: E402
    Analysis,
    analyze,
    plots,
)
from horovod_tune.analysis.plots.style import OKABE_ITO, hover_texts, log_axis  # noqa: E402
from horovod_tune.scoring import parse_limit  # noqa: E402

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


def legend(figure) -> list[str]:
    return [trace.name for trace in figure.data if trace.name and trace.showlegend is not False]


def drawn(figure) -> list:
    """The traces that have points, and not only an entry in the legend."""
    return [trace for trace in figure.data if trace.text is not None]


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
    texts = [text for trace in drawn(figure) for text in trace.text]
    assert set(texts) == {trial.trial_id for trial in many.trials}
    gaps = sum(int(np.isnan(trace.y).sum()) for trace in drawn(figure))
    diverged = sum(bool(np.isnan(row["loss"])) for trial in many.trials for row in trial.rows)
    assert gaps == 60 - len(drawn(figure)) + diverged, "a gap between two trials"
    assert legend(figure)[-2:] == ["best 10 %", "best"]
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
    told = [text for trace in drawn(figure) if trace.name != "best" for text in set(trace.text)]
    finite = np.flatnonzero(np.isfinite(analysis.values))
    assert len(told) == len(finite) == len(set(told))
    assert legend(figure) == ["the rest", "to 50 %", "to 25 %", "best 10 %", "best"]


def test_axes_whose_long_names_begin_alike_are_told_apart_and_labels_have_room():
    made = made_experiment(12)
    trials = tuple(
        replace(each, config={f"optimizer/parameter_group_{n}": each.number * n + 1.0 for n in (1, 2)})
        for each in made.trials
    )
    axis = plots.parallel_coordinates(changed(made, trials=trials, domains={})).layout.xaxis
    assert axis.ticktext[:2] == ("…parameter_group_1", "…parameter_group_2") and axis.ticktext[2] == "loss"
    # Plotly leaves out a label that does not fit into the figure.
    assert axis.range == (-0.5, 2.5)


def test_trials_outside_the_limits_are_in_the_last_group():
    made = made_experiment(40)
    limits = [parse_limit(f"loss > {made.best_value}")]
    figure = plots.parallel_coordinates(
        Analysis(made.record, made.folder, metric="loss", mode="min", limits=limits)
    )
    (last,) = [trace for trace in drawn(figure) if trace.name == "the rest"]
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
    assert legend(figure) == ["training", "training, next trial", "best trial", "starting up"]


@pytest.mark.parametrize("name", ["learning_curves", "parallel_coordinates"])
def test_the_legend_has_full_colours_however_faint_the_lines_are(name):
    figure = getattr(plots, name)(made_experiment(1000))
    entries = [trace for trace in figure.data if trace.showlegend]
    assert len(entries) == 5 and all(trace.line.color.startswith("#") for trace in entries)
    faint = [trace for trace in drawn(figure) if trace.name == "the rest"]
    assert faint and all("0.15)" in trace.line.color for trace in faint)


def shifted(trials, by: float, times: float = 1.0) -> Analysis:
    """An experiment whose losses are moved by a large number."""
    made = made_experiment(trials, asha=False)
    moved = [
        replace(t, rows=tuple(row | {"loss": by + times * row["loss"]} for row in t.rows))
        for t in made.trials
    ]
    return changed(made, trials=tuple(moved))


@pytest.mark.parametrize("trials", [3, 12])
def test_values_near_a_large_number_are_drawn_as_they_are_and_told_apart(trials):
    analysis = shifted(trials, 1e8)
    figure = plots.learning_curves(analysis)
    values = [y for trace in figure.data for y in trace.y if y is not None and np.isfinite(y)]
    reported = analysis.reports["value"]
    assert set(values) == set(reported[np.isfinite(reported)])
    assert figure.layout.yaxis.tickformat == figure.layout.yaxis.hoverformat.replace("g", "~g")
    texts = {analysis.value_text(value) for value in analysis.values if np.isfinite(value)}
    assert len(texts) == np.isfinite(analysis.values).sum(), "as many digits as tell them apart"
    ends = [note.text for note in plots.parallel_coordinates(analysis).layout.annotations[-3:]]
    assert len(set(ends)) == 3 and all(text.startswith("100000000.") for text in ends)


def test_many_values_far_from_the_rest_get_a_logarithmic_axis_or_are_cut_if_some_are_negative():
    for share in (5, 3, 2):  # a fifth, a third, half of the trials
        made = shifted(60, 0.1)
        wild = [
            replace(t, rows=tuple(r | {"loss": 1e4 ** (1 + n % 3) * r["loss"]} for r in t.rows))
            for n, t in enumerate(made.trials)
            if n % share == 0
        ]
        kept = [t for n, t in enumerate(made.trials) if n % share]
        analysis = changed(made, trials=(*kept, *wild))
        axis = plots.learning_curves(analysis).layout.yaxis
        finite = analysis.reports["value"][np.isfinite(analysis.reports["value"])]
        assert axis.type == "log" and 10 ** axis.range[0] < finite.min() < finite.max() < 10 ** axis.range[1]
        lines = [trace for trace in plots.parallel_coordinates(analysis).data if trace.name == "best 10 %"]
        assert np.nanmax(lines[-1].y) <= 1.0
        negative = [replace(t, rows=tuple(r | {"loss": r["loss"] - 5} for r in t.rows)) for t in kept]
        figure = plots.learning_curves(changed(made, trials=(*negative, *wild)))
        assert figure.layout.yaxis.type is None and figure.layout.yaxis.range[1] < 100
        assert "values are outside the axis" in said(figure)


def test_losses_that_fall_by_decades_keep_a_linear_axis():
    curve = [{"loss": 10.0 ** -(step / 8), "training_iteration": step} for step in range(1, 17)]
    made = made_experiment(3)
    trials = tuple(
        replace(t, rows=tuple(row | {"loss": row["loss"] * 1.1} for row in curve)) for t in made.trials
    )
    assert plots.learning_curves(changed(made, trials=trials)).layout.yaxis.type is None


def test_a_logarithmic_axis_names_its_ticks_in_full():
    """Plotly writes the ticks between two decades as "2" and "5" in a smaller font."""
    axis = plots.parameter(made_experiment(30), "lr").layout.xaxis
    assert axis.ticktext == ("0.001", "0.01", "0.1")
    assert log_axis(-1.5, -0.3)["ticktext"] == ["0.05", "0.1", "0.2", "0.3", "0.5"]
    assert log_axis(-1.5, -1.0)["ticktext"] == ["0.04", "0.06", "0.08", "0.1"]
    assert "tickvals" not in log_axis(0.0, 0.01), "Plotly chooses them"
    assert len(log_axis(-30.0, 30.0)["ticktext"]) < 10


def test_start_ups_are_drawn_as_long_as_they_are():
    """Plotly draws an opaque bar at least a pixel wide: 2,000 start-ups cover the whole picture."""
    figure = plots.timeline(made_experiment(200))
    assert all(bar.marker.color.endswith("0.999)") for bar in figure.data)
    spans = [bar.x[0] for bar in figure.data if bar.name == "starting up"]
    assert spans[0] == pytest.approx(2.5 / 60)


def test_the_reports_from_which_on_a_trial_has_new_hyperparameters_are_marked():
    for trials in (3, 12):
        made = made_experiment(trials, asha=False)
        rows = [row | {"config": {"lr": 0.1 if n < 4 else 0.2}} for n, row in enumerate(made.trials[1].rows)]
        exploited = replace(made.trials[1], rows=tuple(rows))
        analysis = changed(made, trials=(made.trials[0], exploited, *made.trials[2:]))
        (marks,) = [t for t in plots.learning_curves(analysis).data if t.name == "new hyperparameters"]
        assert (list(marks.x), list(marks.y)) == ([5.0], [rows[4]["loss"]])
        assert "new hyperparameters" not in names(plots.learning_curves(made))


def test_the_plots_over_time_begin_at_the_same_zero_and_one_value_has_an_axis_around_it():
    one = made_experiment(1)
    figures = [plots.best_so_far(one), plots.learning_curves(one, "time"), plots.timeline(one)]
    assert {figure.layout.xaxis.rangemode for figure in figures} == {"tozero"}
    low, high = plots.best_so_far(one, "trials").layout.yaxis.range
    assert 0.9 * one.best_value < low < one.best_value < high < 1.1 * one.best_value
    assert said(plots.learning_curves(one)).startswith("Learning curves 1 trial ")
    curve = [{"loss": 10.0**-step, "training_iteration": step} for step in range(9)]
    axis = plots.best_so_far(
        changed(one, trials=(replace(one.trials[0], rows=tuple(curve)),)), "time"
    ).layout.yaxis
    assert axis.type is None, "the best values of a short search are no outliers"


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
