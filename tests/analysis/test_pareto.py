"""Several metrics at once, and limits: against definitions, random points and real experiments."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from made_experiments import changed, made_experiment, reporting, written

from horovod_tune.analysis import Analysis, write_report
from horovod_tune.analysis.report import render
from horovod_tune.analysis.results import MetricUnknown
from horovod_tune.scoring import Limit, hypervolume, kept, non_dominated, parse_limit

AIMS = {"accuracy": "max", "latency_ms": "min"}


def by_definition(values, modes):
    signs = [1 if mode == "min" else -1 for mode in modes]
    costs = [[sign * value for sign, value in zip(signs, row, strict=True)] for row in values]

    def beats(one, other):
        pairs = list(zip(one, other, strict=True))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    return [not any(beats(other, row) for other in costs) for row in costs]


@pytest.mark.parametrize("seed", range(8))
def test_the_front_is_what_nothing_dominates(seed):
    rng = np.random.default_rng(seed)
    metrics = rng.integers(1, 5)
    modes = [str(mode) for mode in rng.choice(["min", "max"], metrics)]
    values = rng.integers(0, 8, (60, metrics)).astype(float)  # with ties and equal points
    assert non_dominated(values, modes).tolist() == by_definition(values.tolist(), modes)


def test_rows_that_are_not_finite_are_never_on_the_front():
    values = np.array([[np.nan, 0.0], [-np.inf, 0.0], [1.0, 1.0]])
    assert non_dominated(values, ["min", "min"]).tolist() == [False, False, True]
    assert non_dominated(np.empty((0, 2)), ["min", "min"]).tolist() == []


@pytest.mark.parametrize("metrics", [1, 2, 3, 4])
def test_hypervolume_is_the_part_of_space_that_is_dominated(metrics):
    rng = np.random.default_rng(metrics)
    values = rng.random((12, metrics))
    modes = ["min", "max", "min", "max"][:metrics]
    corner = [1.0 if mode == "min" else 0.0 for mode in modes]
    signs = np.array([1.0 if mode == "min" else -1.0 for mode in modes])
    samples = rng.random((200_000, metrics))
    inside = np.zeros(len(samples), dtype=bool)
    for row in values:
        inside |= (samples * signs >= row * signs).all(axis=1)
    assert hypervolume(values, corner, modes) == pytest.approx(inside.mean(), abs=0.006)


def with_latency(trials: int = 40, *limits: str, scope: str = "last") -> Analysis:
    """A made experiment whose reports have a latency too: the wider the net, the slower."""
    made = made_experiment(trials)
    rng = random.Random(1)
    changed = []
    for trial in made.trials:
        latency = trial.config["net"]["width"] / 8 + rng.random()
        rows = tuple(row | {"latency_ms": latency} for row in trial.rows)
        changed.append(replace(trial, rows=rows, last_result=rows[-1]))
    record = replace(made.record, trials=tuple(changed))
    within = [parse_limit(limit) for limit in limits]
    return Analysis(record, made.folder, metric="accuracy", mode="max", scope=scope, limits=within)


def test_the_front_of_an_experiment_names_trials_values_and_configurations():
    analysis = with_latency()
    front = analysis.pareto_front(AIMS)
    table = front.dataframe()
    assert 2 <= len(table) < 40
    assert table["accuracy"].is_monotonic_decreasing and table["latency_ms"].is_monotonic_decreasing
    assert table["trial_id"][0] == analysis.best_trial.trial_id, "the best of the first metric"
    lasts = [(t.rows[-1]["accuracy"], t.rows[-1]["latency_ms"]) for t in analysis.trials]
    expected = by_definition(lasts, ["max", "min"])
    assert set(table["trial_id"]) == {
        t.trial_id for t, kept in zip(analysis.trials, expected, strict=True) if kept
    }
    assert {"config/lr", "config/net/width", "training_iteration"} <= set(table)
    larger = front.hypervolume({"accuracy": -1.0, "latency_ms": 100.0})
    assert 0 < front.hypervolume() < larger


def test_with_scope_all_every_report_counts():
    analysis = with_latency()
    every = Analysis(analysis.record, analysis.folder, metric="accuracy", mode="max", scope="all")
    front = every.pareto_front(AIMS)
    assert len(front.points) == sum(len(trial.rows) for trial in analysis.trials)
    corner = {"accuracy": 0.0, "latency_ms": 100.0}
    assert front.hypervolume(corner) >= analysis.pareto_front(AIMS).hypervolume(corner)


def test_with_scope_all_a_report_without_the_metrics_is_no_result():
    told = [{"acc": 0.9, "lat": 10}, {"loss": 1}, {"acc": 0.95}, {"ram": 5}, {"lat": 20}, {"loss": 2}]
    for limits, results in (((), 3), (("ram < 9",), 2)):
        analysis = reporting(told, metric="acc", mode="max", scope="all", limits=limits)
        assert len(analysis.pareto_front({"acc": "max", "lat": "min"}).points) == results


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"accuracy": "max"}, "metrics must name at least two"),
        (["accuracy", "loss"], r"metrics must name at least two.* got \['accuracy', 'loss'\]"),
        ({"accuracy": "max", "loss": "low"}, "the mode of 'loss' must be"),
        (
            {"accuracy": "max", "size": "min"},
            "no trial reported a number named 'size'; reported: loss",
        ),
    ],
)
def test_a_front_of_missing_metrics_is_refused(metrics, message):
    with pytest.raises(ValueError, match=message):
        with_latency(5).pareto_front(metrics)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (3, r"reference must have the keys \['accuracy', 'latency_ms'\], got 3"),
        ({"accuracy": 0.5}, r"must have the keys .*, got \{'accuracy': 0.5\}"),
        ({"accuracy": np.nan, "latency_ms": 9}, r"reference\['accuracy'\] must be a finite number, got nan"),
        ({"accuracy": 0, "latency_ms": "9"}, r"reference\['latency_ms'\] must be a finite number, got '9'"),
    ],
)
def test_a_reference_without_a_number_for_each_metric_is_refused(reference, message):
    with pytest.raises(ValueError, match=message):
        with_latency(5).pareto_front(AIMS).hypervolume(reference)


def test_a_limit_is_read_as_it_is_written():
    assert parse_limit("valid/latency<20") == Limit("valid/latency", "<", 20.0)
    assert parse_limit(" a b >= -1e-3 ") == Limit("a b", ">=", -0.001)
    for text in ("memory_bytes <= 16777216", "loss < 0.1", "steps >= -1e+22"):
        assert str(parse_limit(text)) == text
    for text in ("latency", "latency <= fast", "<= 3", "a <= nan", "a == 3", ""):
        with pytest.raises(ValueError, match='a limit is written like "latency_ms <= 20"'):
            parse_limit(text)


def test_a_limit_is_met_from_the_first_report_that_has_its_metric():
    rows = [{"loss": 1}, {"loss": 2, "ms": 30}, {"loss": 3}, {"ms": float("nan")}, {"ms": 10}]
    assert kept(rows, [parse_limit("ms <= 20")]) == [False, False, False, False, True]
    assert kept(rows, []) == [True] * 5


@pytest.mark.parametrize("scope", ["last", "all"])
def test_the_best_meets_the_limits(scope):
    free = with_latency()
    best = free.best_result["latency_ms"]
    bound = best - 1e-9
    analysis = with_latency(40, f"latency_ms <= {bound!r}", scope=scope)
    allowed = [
        row["accuracy"]
        for trial in free.trials
        for row in (trial.rows if scope == "all" else trial.rows[-1:])
        if row["latency_ms"] <= bound and row["accuracy"] == row["accuracy"]
    ]
    assert analysis.best_value == max(allowed)
    assert analysis.best_result["latency_ms"] <= bound
    assert all(analysis.pareto_front(AIMS).points[:, 1] <= bound)


def test_limits_that_no_result_meets_or_no_trial_reported_are_named():
    nothing = with_latency(5, "latency_ms < 0")
    assert nothing.best_number is None
    with pytest.raises(ValueError, match="within latency_ms < 0"):
        _ = nothing.best_trial
    unknown = with_latency(5, "size < 3")
    assert unknown.best_number is None
    assert unknown.is_scored and unknown.dataframe()["accuracy"].notna().any()
    assert "no trial reported a number named 'size'" in unknown.no_best_reason
    for best in (lambda: unknown.best_trial, lambda: unknown.pareto_front(AIMS)):
        with pytest.raises(MetricUnknown, match="'size'"):
            best()
    several = Analysis(replace(unknown.record, front=AIMS), unknown.folder, metric=None, mode=None)
    several.limits = unknown.limits
    assert "No best trial" in render(several), "a running search may not have measured it yet"


@pytest.mark.slow
def test_the_report_has_a_section_on_several_metrics(tmp_path):
    text = render(with_latency(), pareto=AIMS)
    assert (
        "Several metrics at once" in text and "accuracy against latency_ms" in text and "hypervolume" in text
    )
    assert "Several metrics at once" not in render(with_latency())
    three = render(with_latency(), pareto=AIMS | {"loss": "min"})
    assert "accuracy against" not in three and "accuracy (higher)" in three
    evil = "<script>alert(1)</script>"
    made = with_latency(12)
    trials = tuple(
        replace(t, trial_id=evil + t.trial_id, rows=tuple(r | {evil: r["loss"]} for r in t.rows))
        for t in made.trials
    )
    hostile = changed(made, metric="accuracy", mode="max", trials=trials)
    assert evil not in render(hostile, pareto={"accuracy": "max", evil: "min"})
    write_report(made, tmp_path / "page.html", pareto=AIMS)


@pytest.mark.long
def test_the_commands_take_limits_and_several_metrics(tmp_path, capsys):
    from test_terminal import run

    home = written(with_latency(), tmp_path)
    more = ("--mode", "max", "--limit", "latency_ms <= 12")
    assert run("show", home, *more) == 0
    said = " ".join(capsys.readouterr().out.split())
    best = with_latency(40, "latency_ms <= 12").best_trial
    assert "trials that meet latency_ms <= 12" in said and best.trial_id in said
    page = tmp_path / "page.html"
    assert run("report", home, *more, "--pareto", "accuracy=max,latency_ms=min", "-o", page) == 0
    assert "Several metrics at once" in page.read_text()
    assert run("report", home, *more, "--pareto", "accuracy=max,size=min", "-o", page) == 2
    assert "no trial reported a number named 'size'" in capsys.readouterr().err
    (state,) = home.glob("experiment_state-*.json")
    state.write_text(state.read_text().replace('"_metric"', '"_none"'))
    assert run("report", home, "--pareto", "accuracy=max,latency_ms=min", "-o", page) == 0, (
        "it needs no metric"
    )
    for aims in ("accuracy", "loss=min,loss=max,accuracy=max"):
        with pytest.raises(SystemExit):
            run("report", home, "--pareto", aims)
    assert run("export", home, "--csv", page, "--parquet", page) == 2
    assert "--parquet FILE, or both to different files" in capsys.readouterr().err
    assert run("show", home, "--metric", "") == 1


def test_the_front_can_be_drawn():
    from horovod_tune.analysis import plots

    analysis = with_latency()
    figure = plots.pareto_front(analysis, AIMS)
    front = analysis.pareto_front(AIMS)
    assert len(figure.data[-1].x) == int(front.on_front.sum())
    assert figure.layout.xaxis.title.text == "accuracy (higher is better)"
    with pytest.raises(ValueError, match="metrics must name exactly two metrics, got 3"):
        plots.pareto_front(analysis, AIMS | {"loss": "min"})
    with pytest.raises(ValueError, match=r"metrics must name at least two metrics, .* got 'loss'"):
        plots.pareto_front(analysis, "loss")


def test_an_experiment_shows_itself_in_a_notebook():
    text = with_latency()._repr_html_()
    assert "best accuracy 0." in text and "curve" in text and "config = " in text
    assert "30 more trials" in text and "<script" not in text
    evil = "<img src=x onerror=alert(1)>"
    made = made_experiment(3)
    trials = tuple(replace(t, trial_id=evil, config={evil: evil + str(t.number)}) for t in made.trials)
    for metric in ("loss", None):
        record = replace(made.record, trials=trials, metric=metric)
        hostile = Analysis(record, made.folder, metric=metric, mode="min")
        assert evil not in hostile._repr_html_()
    assert "does not record its" in hostile._repr_html_()


def test_the_error_for_a_search_of_several_metrics_names_pareto_front():
    analysis = with_latency(5)
    record = replace(analysis.record, metric=None, mode=None, front=AIMS)
    several = Analysis(record, analysis.folder, metric=None, mode=None)
    with pytest.raises(ValueError, match=r"\(accuracy and latency_ms; see pareto_front\(\)\)"):
        several.best_config  # noqa: B018
