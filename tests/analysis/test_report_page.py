"""The report as text: what is on it, that nothing of the user's is markup, that it loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml
from made_experiments import made_experiment

from horovod_tune.analysis import analyze, write_report
from horovod_tune.analysis.report import render
from horovod_tune.analysis.report.page import python_text, yaml_text
from horovod_tune.analysis.report.payload import as_script_json, number, payload, thinned
from horovod_tune.analysis.report.run_facts import facts, usage
from horovod_tune.analysis.results import Analysis

EVIL = (
    '</script><script>document.title="owned"</script><img src=x onerror=alert(1)> & "quoted" \u2028 {{data}}'
)


class Page(HTMLParser):
    """The elements and texts of a page, and what is in its two scripts."""

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
    record = replace(
        made.record, trials=hostile, name=EVIL, searcher=EVIL, constants={EVIL: EVIL}, domains=None
    )
    return Analysis(record, made.folder, metric="loss", mode="min")


def test_the_answer_comes_first_and_can_be_copied():
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


def test_configurations_with_odd_floats_and_text_survive_copying():
    config = {"a": float("inf"), "b": [float("-inf"), {"c": 'it\'s "x"\n'}], "d": None, "e": True, "f": 1e-30}
    namespace: dict[str, object] = {}
    exec(python_text(config), namespace)
    assert namespace["config"] == config
    assert yaml.safe_load(yaml_text(config)) == config
    exec(python_text({"n": float("nan")}), namespace)
    assert math.isnan(namespace["config"]["n"])  # type: ignore[index]


def test_nothing_of_the_users_is_markup():
    page = Page(render(evil_experiment()))
    assert [tag for tag, _ in page.tags].count("script") == 2, "the data and the script, nothing else"
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert any(EVIL in text for text in page.texts), "it is there, as text"
    assert "{{" not in render(made_experiment(3))


def test_the_data_survive_the_escaping():
    page = Page(render(evil_experiment()))
    data = json.loads(page.scripts[0])
    assert data["name"] == EVIL
    assert data["params"][0]["name"] == EVIL
    assert json.loads(as_script_json({"a": EVIL})) == {"a": EVIL}
    assert "<" not in as_script_json(EVIL)


def test_the_page_loads_nothing_and_runs_no_script_but_its_own():
    text = render(made_experiment(12))
    page = Page(text)
    for tag, attributes in page.tags:
        assert not attributes.get("src"), tag
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert not (attributes.get("href") or "#").startswith(("http", "//"))
    assert not re.search(r"url\(|@import", text)
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy is not None and policy.startswith("default-src 'none'")
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_failures_are_grouped_with_their_tracebacks(experiments):
    text = render(analyze(experiments / "failing"))
    failures = text[text.index('id="failures"') : text.index('id="facts"')]
    assert "RuntimeError: the &lt;script&gt;alert(1)&lt;/script&gt; of &lt;script&gt;" in failures
    assert "tune_experiments.py" in failures
    many = render(made_experiment(400))
    counted = re.findall(r'class="count">(\d+) trials', many)
    assert sum(map(int, counted)) == len(made_experiment(400).errors())


def test_facts_say_what_is_known_and_what_is_not(experiments):
    known = dict(facts(analyze(experiments / "distributed")))
    assert known["Ranks of a trial"] == "2"
    assert known["Resources of a trial"] == "2 CPU"
    assert known["Machines"] == "one"
    assert known["Versions"] == "not written down"
    plain = dict(facts(analyze(experiments / "asha")))
    assert plain["Ranks of a trial"] == "not written down"
    assert plain["Scheduler"].startswith("AsyncHyperBandScheduler(")
    assert plain["Trials"] == "9 (9 terminated)"


def test_hours_are_resources_times_time():
    made = made_experiment(20)
    spent = sum(trial.end_time - trial.start_time for trial in made.trials) / 3600
    assert usage(made).gpu == pytest.approx(2 * spent)
    blank = replace(made.record, trials=tuple(replace(t, resources=None) for t in made.trials))
    assert usage(Analysis(blank, made.folder, metric="loss", mode="min")).cpu is None


def test_what_could_not_be_read_is_on_the_page(experiments, tmp_path):
    from made_experiments import written

    home = written(made_experiment(3), tmp_path)
    (home / "train_abcd1_00001" / "result.json").write_text('{"loss": 1')
    text = render(analyze(home, mode="min"))
    assert "could not be read whole" in text
    assert "half-written report" in text


def test_an_experiment_without_a_metric_still_has_a_page(experiments):
    text = render(analyze(experiments / "no_metric"))
    assert "does not say its metric and mode" in text
    data = payload(analyze(experiments / "no_metric"))
    assert data["metric"] is None
    assert len(data["trials"]["id"]) == 1


def test_five_thousand_trials_make_a_page_of_a_few_megabytes():
    text = render(made_experiment(5000))
    assert len(text) < 6e6
    data = json.loads(Page(text).scripts[0])
    assert sum(len(curve[0]) for curve in data["curves"]) <= 120_000
    assert data["thinned"] == 24


def test_thinning_keeps_the_ends_and_the_extremes():
    values = np.sin(np.linspace(0, 20, 5000))
    values[3210] = 7.0
    values[100] = np.nan
    kept = thinned(values, 50)
    assert len(kept) <= 50
    assert kept[0] == 0 and kept[-1] == 4999 and 3210 in kept
    assert list(thinned(values[:10], 50)) == list(range(10))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), None),
        (float("inf"), None),
        (None, None),
        (True, 1),
        (1 / 3, 0.333333),
        (2.0, 2),
        (2**70, 1.18059e21),
    ],
)
def test_numbers_on_the_page_are_finite_or_nothing(value, shown):
    found = number(value)
    assert found == shown or found == pytest.approx(shown)


def test_write_report_returns_its_path(tmp_path):
    place = write_report(made_experiment(3), tmp_path / "r.html")
    assert place.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_noise_scale_that_large_batch_reports_is_drawn_like_any_metric():
    """As long as the gradient cannot be told from noise it is infinite."""
    made = made_experiment(3, asha=False)
    scales = [math.inf, math.inf, *(30.0 * number for number in range(1, 26))]
    told = [
        tuple({**row, "noise_scale": each} for row, each in zip(trial.rows, scales, strict=False))
        for trial in made.trials
    ]
    trials = tuple(replace(trial, rows=rows) for trial, rows in zip(made.trials, told, strict=True))
    noise = Analysis(replace(made.record, trials=trials), made.folder, metric="noise_scale", mode="max")
    found = payload(noise)
    assert found["metric"] == "noise_scale"
    for curve, trial in zip(found["curves"], trials, strict=True):
        assert [each for each in curve[-1] if each is not None] == scales[2 : len(trial.rows)]
