"""The report in a real headless Chromium, driven through ChromeDriver: what a person would do and see.

Skipped if Chromium or ChromeDriver is missing (in Debian the packages chromium and chromium-driver). With
REPORT_SCREENSHOTS=FOLDER the screenshots are kept there.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_experiments import made_experiment
from test_report_page import EVIL, evil_experiment

from horovod_tune.analysis import analyze, write_report

_PATIENCE_S = 180.0
_DRAWN = (
    "document.readyState === 'complete' && "
    "[...document.querySelectorAll('.plotly-graph-div')].every((p) => p.querySelector('.plot-container'))"
)


def _missing() -> str | None:
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"the report was NOT tested in a browser: {program} is not installed"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "the report was NOT tested in a browser: selenium is not installed (pip install selenium)"
    return None


_WHY = _missing()
if _WHY:
    warnings.warn(_WHY, stacklevel=1)
pytestmark = [pytest.mark.processes, pytest.mark.skipif(_WHY is not None, reason=_WHY or "")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    quiet = "--no-first-run --disable-background-networking --disable-component-update --disable-sync"
    for flag in (
        *f"--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic {quiet}".split(),
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_page_load_timeout(_PATIENCE_S)
    driver.set_script_timeout(_PATIENCE_S)
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Callable[..., Any]:
    from selenium.webdriver.support.wait import WebDriverWait

    def open_report(analysis: Any, width: int = 1280, dark: bool = False) -> Any:
        page = write_report(analysis, tmp_path / "report.html")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        scheme.append({"name": "prefers-reduced-motion", "value": "reduce"})  # no scrolling under a click
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get_log("browser")
        browser.get(page.as_uri())
        WebDriverWait(browser, _PATIENCE_S).until(lambda page: page.execute_script(f"return {_DRAWN}"))
        return browser

    return open_report


def drawn(browser: Any) -> list[int]:
    """How many marks each figure has: lines, points, bars."""
    return browser.execute_script("""
        return [...document.querySelectorAll('.plotly-graph-div')].map(
          (p) => p.querySelectorAll('.trace path, .annotation').length);""")


def complaints(browser: Any) -> list[str]:
    return [
        entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
    ]


def keep_screenshot(browser: Any, name: str) -> bytes:
    picture = browser.get_screenshot_as_png()
    if os.environ.get("REPORT_SCREENSHOTS"):
        folder = Path(os.environ["REPORT_SCREENSHOTS"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.png").write_bytes(picture)
    return picture


@pytest.mark.parametrize("width", [pytest.param(400, marks=pytest.mark.slow), 1000, 1400])
def test_the_mode_bar_covers_neither_a_legend_nor_a_point(opened, width):
    covered = opened(made_experiment(24), width=width).execute_script("""
        const over = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
        const found = [];
        for (const figure of document.querySelectorAll('.plotly-graph-div')) {
          const bar = figure.querySelector('.modebar').getBoundingClientRect();
          for (const part of figure.querySelectorAll('.legend, .cartesianlayer .plot path'))
            if (over(bar, part.getBoundingClientRect())) found.push(figure.id, part.outerHTML.slice(0, 80));
        }
        return found;""")
    assert covered == []


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(1280, False, id="wide, light"),
        pytest.param(390, True, id="narrow, dark", marks=pytest.mark.slow),
    ],
)
def test_every_chart_is_drawn_and_nothing_overflows_or_is_fetched(opened, width, dark):
    browser = opened(made_experiment(10), width=width, dark=dark)
    marks = drawn(browser)
    assert len(marks) >= 12 and all(marks), marks
    across = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert across[0] <= across[1], "the page does not scroll sideways"
    assert complaints(browser) == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 28)" if dark else "rgb(246, 247, 249)")
    assert len(keep_screenshot(browser, f"{width}-{'dark' if dark else 'light'}")) > 10_000


def column(browser: Any, place: int) -> list[str]:
    rows = "[...document.querySelectorAll('#table tbody tr')]"
    return browser.execute_script(f"return {rows}.map((r) => r.cells[arguments[0]].textContent)", place)


def test_the_table_sorts_by_numbers_and_text_with_missing_values_last(opened):
    analysis = made_experiment(120)
    browser = opened(analysis)
    assert column(browser, 0)[0] == analysis.best_trial.trial_id, "the best first"
    heads = browser.find_elements("css selector", "#table th button")
    names = [head.text.split(" ")[0] for head in heads]
    for turn in (1, -1):
        browser.execute_script("arguments[0].click()", heads[names.index("lr")])
        rates = [float(text) for text in column(browser, names.index("lr"))]
        assert rates == sorted(rates, reverse=turn < 0) and len(rates) == 120
    browser.execute_script("arguments[0].click()", heads[names.index("error")])
    errors = column(browser, names.index("error"))
    assert errors == sorted(filter(None, errors)) + [""] * errors.count("")
    assert heads[names.index("error")].find_element("xpath", "..").get_attribute("aria-sort") == "ascending"


def test_hostile_names_and_values_are_text(opened):
    browser = opened(evil_experiment())
    assert browser.title.startswith(EVIL[:20])
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    heads = browser.execute_script(
        "return [...document.querySelectorAll('#table th')].map((h) => h.textContent)"
    )
    assert EVIL in heads
    assert complaints(browser) == []


@pytest.mark.parametrize("name", ["asha", "failing", "diverging", "distributed", "pbt", "no_metric"])
def test_reports_of_real_experiments_open_without_complaint(opened, experiments, name):
    given = {"metric": "loss", "mode": "min"} if name == "failing" else {}
    browser = opened(analyze(experiments / name, **given))
    assert complaints(browser) == []
    keep_screenshot(browser, name)
