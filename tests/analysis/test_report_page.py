"""The report as text: what is on it, that nothing of the user's is markup, that it loads nothing."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import yaml
from made_experiments import changed, losing_ranks, made_experiment

from horovod_tune.analysis import Analysis, analyze, plots
from horovod_tune.analysis.printable import python_text, yaml_text
from horovod_tune.analysis.report import render
from horovod_tune.analysis.run_summary import run_summary, usage

EVIL = (
    '</script><script>document.title="owned"</script><img src=x onerror=alert(1)> & "quoted" \u2028 {{data}}'
)


class Page(HTMLParser):
    """The elements and texts of a page, and its scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.cdata_elem == "script":  # the parser is inside one
            self.scripts[-1] += data
        else:
            self.texts.append(data)


def evil_experiment(trials: int = 12) -> Analysis:
    made = made_experiment(trials)
    hostile = tuple(
        replace(
            trial,
            config={EVIL: EVIL + str(number), "lr": trial.config["lr"]},
            error=f"Traceback\n{EVIL}" if number == 3 else trial.error,
            trial_id=f"{EVIL}_{number}",
        )
        for number, trial in enumerate(made.trials)
    )
    return changed(made, trials=hostile, name=EVIL, searcher=EVIL, constants={EVIL: EVIL}, domains={})


@pytest.mark.long
def test_the_answer_comes_first_and_can_be_copied_and_the_table_has_every_trial_best_first():
    analysis = made_experiment(30)
    text = render(analysis)
    best = analysis.best_config
    assert f"{analysis.best_value:.6g}" in text
    assert text.index('id="answer"') < text.index('id="progress"') < text.index('id="trials"')
    assert text.index('id="trials"') < text.index('id="failures"') < text.index('id="facts"')
    assert yaml.safe_load(yaml_text(best)) == best
    namespace: dict[str, object] = {}
    exec(python_text(best), namespace)
    assert namespace["config"] == best
    table = text[text.index("<table id=table") :]
    rows = table[: table.index("</table>")].split("<tr")[2:]
    assert len(rows) == 30
    assert "best-row" in rows[0] and analysis.best_trial.trial_id in rows[0]


@pytest.mark.long
def test_truth_values_sort_as_text_and_infinity_as_a_number():
    made = made_experiment(4)
    trials = tuple(
        replace(t, config={"flag": bool(t.number % 2), "clip": [1.5, math.inf, -math.inf, 2.5][t.number]})
        for t in made.trials
    )
    text = render(changed(made, trials=trials, domains={}))
    table = text[text.index("<table id=table") :]
    heads = re.findall(r"<th scope=col( class=n)? aria-sort=none><button type=button>(\w+)</button>", table)
    assert ("", "flag") in heads and (" class=n", "clip") in heads
    assert 'data-v="1e+308">inf' in table and 'data-v="-1e+308">-inf' in table


def test_configurations_with_odd_floats_and_text_survive_copying():
    config = {"a": float("inf"), "b": [float("-inf"), {"c": 'it\'s "x"\n'}], "d": None, "e": True, "f": 1e-30}
    namespace: dict[str, object] = {}
    exec(python_text(config), namespace)
    assert namespace["config"] == config
    assert yaml.safe_load(yaml_text(config)) == config
    exec(python_text({"n": float("nan")}), namespace)
    assert math.isnan(namespace["config"]["n"])  # type: ignore[index]


@pytest.mark.long
def test_nothing_of_the_users_is_markup():
    page = Page(render(evil_experiment()))
    figures = [attributes for tag, attributes in page.tags if attributes.get("class") == "plotly-graph-div"]
    assert len(page.scripts) == len(figures) + 2, "Plotly, one for each figure, and the table's"
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert any(EVIL in text for text in page.texts), "it is there, as text"
    assert "{{" not in "".join(Page(render(made_experiment(3))).texts)


@pytest.mark.long
def test_the_page_loads_nothing_and_runs_no_script_but_its_own():
    text = render(made_experiment(12))
    page = Page(text)
    for tag, attributes in page.tags:
        assert not attributes.get("src"), tag
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert not (attributes.get("href") or "#").startswith(("http", "//"))
    assert not re.search(r"url\(|@import", text[: text.index("<script")])
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy is not None and policy.startswith("default-src 'none'")
    digests = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts}
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == digests
    assert "unsafe-eval" not in policy and "http" not in policy


def test_failures_are_grouped_with_their_tracebacks(experiments):
    text = render(analyze(experiments / "failing"))
    failures = text[text.index('id="failures"') : text.index('id="facts"')]
    assert "RuntimeError: the &lt;script&gt;alert(1)&lt;/script&gt; of &lt;script&gt;" in failures
    assert "tune_experiments.py" in failures
    many = render(made_experiment(400))
    counted = re.findall(r'class="count">(\d+) trials', many)
    assert sum(map(int, counted)) == len(made_experiment(400).errors())


def test_the_summary_has_what_is_recorded_and_what_is_not(experiments):
    known = dict(run_summary(analyze(experiments / "distributed")))
    assert known["Ranks per trial"] == "2"
    assert known["Resources per trial"] == "2 CPU"
    assert known["Machines"] == "one"
    assert "horovod_tune" in known["Versions"] and "ray 2" in known["Versions"]
    plain = dict(run_summary(analyze(experiments / "asha")))
    assert plain["Ranks per trial"] == "not recorded"
    assert plain["Scheduler"].startswith("AsyncHyperBandScheduler(")
    assert plain["Trials"] == "9 (9 terminated)"


def test_hours_are_resources_times_time():
    made = made_experiment(20)
    spent = sum(trial.end_time - trial.start_time for trial in made.trials)
    assert usage(made)[1] == pytest.approx(2 * spent)
    assert usage(changed(made, trials=tuple(replace(t, resources=()) for t in made.trials))) == (0, 0, 0)


def test_ranks_that_an_elastic_trial_lost_are_on_the_page():
    why = "rank 1 on n1 died: process 7: it was ended by <SIGKILL>"
    analysis = losing_ranks(why)
    texts = Page(render(analysis)).texts
    at = texts.index("Changes of ranks")
    name = analysis.trials[1].trial_id
    assert texts[at + 1 : at + 5] == [f"{name}, at iteration 2", why, f"{name}, at iteration 4", why]
    assert "Changes of ranks" not in render(made_experiment(3))


def test_what_could_not_be_read_is_on_the_page(experiments, tmp_path):
    from made_experiments import written

    home = written(made_experiment(3), tmp_path)
    (home / "train_abcd1_00001" / "result.json").write_text('{"loss": 1')
    text = render(analyze(home, mode="min"))
    assert "could not be read completely" in text
    assert "half-written report" in text


def test_an_experiment_without_a_metric_still_has_a_page(experiments):
    text = render(analyze(experiments / "no_metric"))
    assert "does not record its metric and mode" in text
    assert "Which trial" in text, "what needs no metric is drawn"


@pytest.mark.long
def test_five_thousand_trials_make_a_page_of_twelve_megabytes_at_most():
    text = render(made_experiment(5000))
    assert len(text) < 12e6
    assert text.count("<tr") > 5000


@pytest.mark.long
def test_the_noise_scale_that_large_batch_reports_is_drawn_like_any_metric():
    """It is infinite while the gradient cannot be distinguished from noise."""
    made = made_experiment(3, asha=False)
    scales = [math.inf, math.inf, *(30.0 * number for number in range(1, 26))]
    told = [
        tuple({**row, "noise_scale": each} for row, each in zip(trial.rows, scales, strict=False))
        for trial in made.trials
    ]
    trials = tuple(replace(trial, rows=rows) for trial, rows in zip(made.trials, told, strict=True))
    noise = changed(made, metric="noise_scale", mode="max", trials=trials)
    figure = plots.learning_curves(noise)
    for trace, trial in zip(figure.data, trials, strict=True):
        assert [each for each in trace.y if math.isfinite(each)] == scales[2 : len(trial.rows)]
    assert "Learning curves" in render(noise)
