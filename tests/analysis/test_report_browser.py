"""The report in a real headless Chromium, driven through ChromeDriver: what a person would do and see.

Skipped, and said so, where Chromium or ChromeDriver is missing (in Debian the packages chromium and
chromium-driver). With REPORT_SCREENSHOTS=FOLDER the pictures that are taken stay there to be looked at.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_experiments import made_experiment
from test_odd_experiments import odd_experiment
from test_report_page import EVIL, evil_experiment

from horovod_tune.analysis import analyze, write_report

_PATIENCE_S = 60.0


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
    for flag in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic"),
        *(
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
        ),
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
    def open_report(analysis: Any, width: int = 1280, height: int = 900, dark: bool = False) -> Any:
        page = write_report(analysis, tmp_path / "report.html")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        scheme.append({"name": "prefers-reduced-motion", "value": "reduce"})  # no scrolling under a click
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get_log("browser")
        browser.get(page.as_uri())
        wait_for(browser, "document.documentElement.dataset.ready === 'yes'")
        return browser

    return open_report


def wait_for(browser: Any, condition: str) -> None:
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        if browser.execute_script(f"return Boolean({condition})"):
            return
        time.sleep(0.05)
    raise AssertionError(f"not within {_PATIENCE_S} s: {condition}")


def draw_all(browser: Any) -> None:
    """Scroll through the page: charts are drawn when they come near the window."""
    height = browser.execute_script("return document.documentElement.scrollHeight")
    for top in range(0, height, 500):
        browser.execute_script(f"window.scrollTo({{top: {top}, behavior: 'instant'}})")
        browser.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 0))"
        )
    wait_for(browser, "[...document.querySelectorAll('.plot')].every((p) => p.dataset.drawn === 'yes')")
    browser.execute_script("window.scrollTo({top: 0, behavior: 'instant'})")


def painted(browser: Any) -> dict[str, int]:
    """How many pixels of each chart are not blank."""
    return browser.execute_script("""
        const drawn = [...document.querySelectorAll('.plot')].filter((p) => p.querySelector('canvas'));
        return Object.fromEntries(drawn.map((p, k) => {
          const c = p.querySelector('canvas');
          const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
          let n = 0;
          for (let i = 3; i < d.length; i += 4) if (d[i]) n += 1;
          return [p.id || `multiple-${k}`, n];
        }));""")


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


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_chart_is_drawn_and_nothing_overflows(opened, width, dark):
    browser = opened(made_experiment(10), width=width, dark=dark)
    draw_all(browser)
    drawn = painted(browser)
    assert {"best", "curves", "parallel", "pair", "rungs", "timeline"} <= set(drawn)
    assert all(pixels > 500 for pixels in drawn.values()), drawn
    across = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert across[0] <= across[1], "the page does not scroll sideways"
    assert complaints(browser) == []
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 28)" if dark else "rgb(246, 247, 249)")
    assert len(keep_screenshot(browser, f"{width}-{'dark' if dark else 'light'}")) > 10_000


def test_five_thousand_trials_do_not_freeze_the_page(opened):
    browser = opened(made_experiment(5000))
    draw_all(browser)
    assert all(pixels > 500 for pixels in painted(browser).values())
    rows = browser.execute_script("return document.querySelectorAll('#table tbody tr').length")
    assert rows == 50, "a page of the table, not all of it"
    longest = browser.execute_script("""
        const box = document.getElementById('filter');
        let worst = 0;
        for (const text of ['lr<0.01', 'relu', 'status=error', '']) {
          const start = performance.now();
          box.value = text; box.dispatchEvent(new Event('input'));
          worst = Math.max(worst, performance.now() - start);
        }
        return worst;""")
    assert longest < 20_000, "not a timing, a bound on freezing"
    keep_screenshot(browser, "5000")
    assert complaints(browser) == []


def first_column(browser: Any, column: int) -> list[str]:
    rows = "[...document.querySelectorAll('#table tbody tr')]"
    return browser.execute_script(f"return {rows}.map((r) => r.cells[arguments[0]].textContent)", column)


def test_the_table_sorts_filters_and_turns_pages(opened):
    analysis = made_experiment(120)
    browser = opened(analysis)
    ids = first_column(browser, 0)
    assert ids[0] == analysis.best_trial.trial_id, "the best first"
    browser.find_element("id", "next").click()
    assert not set(first_column(browser, 0)) & set(ids)
    heads = browser.find_elements("css selector", "#table th button")
    names = [head.text.split(" ")[0] for head in heads]
    browser.execute_script("arguments[0].click()", heads[names.index("lr")])
    rates = [float(text) for text in first_column(browser, names.index("lr"))]
    assert rates == sorted(rates) and len(rates) == 50
    box = browser.find_element("id", "filter")
    box.send_keys("lr<0.01 net/act=relu")
    wanted = [t for t in analysis.trials if t.config["lr"] < 0.01 and t.config["net"]["act"] == "relu"]
    assert browser.find_element("id", "count").text == f"{len(wanted)} of 120 trials"
    assert set(first_column(browser, 0)) <= {trial.trial_id for trial in wanted}
    box.clear()
    box.send_keys("status=error")
    failed = {trial.trial_id for trial in analysis.trials if trial.status == "ERROR"}
    assert set(first_column(browser, 0)) == failed
    box.clear()
    box.send_keys("no such thing")
    assert browser.find_element("id", "page").text == "No trial matches"


def test_a_trial_that_is_chosen_is_told_everywhere(opened):
    analysis = made_experiment(30)
    browser = opened(analysis)
    row = browser.find_element("css selector", "#table tbody tr:nth-child(3)")
    chosen = row.find_element("css selector", "td").text
    browser.execute_script("arguments[0].click()", row)
    told = browser.find_element("id", "selected")
    assert told.is_displayed() and chosen in told.text and "lr = " in told.text
    browser.find_element("id", "selected-clear").click()
    assert not told.is_displayed()


def test_brushing_an_axis_narrows_the_table(opened):
    from selenium.webdriver import ActionChains

    browser = opened(made_experiment(60))
    draw_all(browser)
    plot = browser.find_element("id", "parallel")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
    wide, high = plot.size["width"], plot.size["height"]
    last_axis = wide - 64 - wide / 2
    drag = ActionChains(browser).move_to_element_with_offset(plot, round(last_axis), round(high / 2 - 12))
    drag.click_and_hold().move_by_offset(0, -60).release().perform()
    told = browser.find_element("id", "count").text
    kept = int(told.split(" ")[0])
    assert 0 < kept < 60, told
    browser.find_element("id", "parallel-clear").click()
    assert browser.find_element("id", "count").text == "60 trials"


def test_pointing_at_a_curve_names_its_trial(opened):
    from selenium.webdriver import ActionChains

    browser = opened(made_experiment(6))
    draw_all(browser)
    plot = browser.find_element("id", "timeline")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
    tip = browser.find_element("id", "tip")
    for across in range(80, 300, 10):  # the first row's first bar begins somewhere there
        offset = (round(across - plot.size["width"] / 2), round(26 - plot.size["height"] / 2))
        ActionChains(browser).move_to_element_with_offset(plot, *offset).perform()
        if tip.is_displayed():
            break
    assert tip.is_displayed()
    assert "abcd1_0000" in tip.text and "start-up 2.5 s" in tip.text


def test_switches_and_the_theme_button_redraw(opened):
    browser = opened(made_experiment(10))
    draw_all(browser)
    before = browser.execute_script("return document.querySelector('#curves canvas').toDataURL()")
    browser.execute_script("document.querySelector('.switch[data-for=curves] [data-value=time]').click()")
    after = browser.execute_script("return document.querySelector('#curves canvas').toDataURL()")
    assert before != after
    browser.find_element("id", "theme").click()
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    assert (
        browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    )


def test_copying_gives_the_whole_configuration(opened):
    analysis = made_experiment(10)
    browser = opened(analysis)
    browser.execute_script("""
        window.copied = null;
        const clipboard = {writeText: async (t) => { window.copied = t; }};
        Object.defineProperty(navigator, 'clipboard', {value: clipboard});
        document.querySelector('.code .copy').click();""")
    wait_for(browser, "window.copied")
    namespace: dict[str, Any] = {}
    exec(browser.execute_script("return window.copied"), namespace)
    assert namespace["config"] == analysis.best_config


def test_hostile_names_and_values_are_text(opened):
    browser = opened(evil_experiment())
    draw_all(browser)
    assert browser.title.startswith(EVIL[:20])
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    heads = browser.execute_script(
        "return [...document.querySelectorAll('#table th')].map((h) => h.textContent)"
    )
    assert EVIL in heads
    assert browser.execute_script("return document.querySelectorAll('script').length") == 2
    assert complaints(browser) == []


@pytest.mark.parametrize("seed", [0, 1])
def test_odd_values_are_drawn_without_complaint(opened, tmp_path, seed):
    browser = opened(analyze(odd_experiment(tmp_path, seed), metric="loss", mode="min"))
    draw_all(browser)
    assert complaints(browser) == []
    across = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert across[0] <= across[1], "the page does not scroll sideways"
    keep_screenshot(browser, f"odd-{seed}")


def test_a_row_of_the_table_can_be_chosen_from_the_keyboard(opened):
    from selenium.webdriver.common.keys import Keys

    browser = opened(made_experiment(10))
    row = browser.find_element("css selector", "#table tbody tr")
    row.send_keys(Keys.ENTER)
    assert browser.find_element("id", "selected").is_displayed()


def test_nothing_is_fetched(opened):
    browser = opened(made_experiment(10))
    draw_all(browser)
    fetched = browser.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert fetched == []


def test_it_prints_in_light_on_paper(opened, tmp_path):
    browser = opened(made_experiment(60), dark=True)
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    import base64

    pdf = base64.b64decode(printed)
    assert pdf.startswith(b"%PDF")
    if os.environ.get("REPORT_SCREENSHOTS"):
        (Path(os.environ["REPORT_SCREENSHOTS"]) / "printed.pdf").write_bytes(pdf)
    wait_for(browser, "[...document.querySelectorAll('.plot')].every((p) => p.dataset.drawn === 'yes')")


@pytest.mark.parametrize("name", ["asha", "failing", "diverging", "distributed", "pbt", "no_metric"])
def test_reports_of_real_experiments_open_without_complaint(opened, experiments, name):
    given = {"metric": "loss", "mode": "min"} if name == "failing" else {}
    browser = opened(analyze(experiments / name, **given))
    draw_all(browser)
    assert complaints(browser) == []
    keep_screenshot(browser, name)
