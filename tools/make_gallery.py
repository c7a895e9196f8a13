"""Run the search of `make demo`, and make the pictures and the text of docs/gallery.md from it.

python tools/make_gallery.py      # needs Chromium; a quiet machine, since times are in the pictures
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType

from horovod_tune.analysis import analyze, plots, terminal
from horovod_tune.analysis.progress import ProgressCallback
from horovod_tune.analysis.report import render

ROOT = Path(__file__).resolve().parent.parent
GALLERY = ROOT / "docs" / "gallery"
SHOWN = "/home/me/ray_results"
# Without the fonts of another site.
SVG = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
COLUMNS = 92


class _Tee(io.StringIO):
    def write(self, text: str) -> int:
        print(text, end="", file=sys.__stdout__)
        return super().write(text)


def save_svg(shown: RenderableType, name: str, title: str, folder: str = SHOWN) -> None:
    screen = Console(record=True, file=io.StringIO(), width=COLUMNS, force_terminal=True)
    screen.print(shown)
    picture = screen.export_svg(title=title, code_format=SVG, unique_id=Path(name).stem)
    (GALLERY / name).write_text(picture.replace(folder, SHOWN))


def save_png(page: Path, name: str, width: int, height: int) -> None:
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += [f"--window-size={width},{height}", "--virtual-time-budget=10000"]
    command = ["chromium", *options, f"--screenshot={GALLERY / name}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def watch() -> None:
    """Save the live table once, when half of the trials have ended and one has a curve."""
    real = ProgressCallback.on_trial_result
    saved: list[bool] = []

    def on_trial_result(self: Any, *args: Any, **info: Any) -> None:
        real(self, *args, **info)
        progress = self._progress
        running = [each for each in progress.trials.values() if each.state == "running"]
        if not saved and progress.count("done") * 2 >= progress.total and len(running[-1].values) >= 9:
            saved.append(True)
            save_svg(progress.table(16, time.time()), "live.svg", "make demo")

    ProgressCallback.on_trial_result = on_trial_result  # type: ignore[method-assign]


def main() -> None:
    watch()
    with tempfile.TemporaryDirectory() as made:
        # As long as what is shown instead, so that lines keep their lengths.
        folder = f"{made}/".ljust(len(SHOWN), "r")
        assert len(folder) == len(SHOWN), "set TMPDIR to a shorter path"
        sys.argv = ["bayesopt_digits.py", "--storage-path", folder]
        with contextlib.redirect_stdout(_Tee()) as printed:
            runpy.run_path(str(ROOT / "examples" / "bayesopt_digits.py"), run_name="__main__")
        text = printed.getvalue()
        (experiment,) = [each for each in Path(folder).iterdir() if each.is_dir()]
        analysis = analyze(experiment)
        title = f"horovod-tune show ~/ray_results/{experiment.name}"
        save_svg(terminal.view(analysis, rows=12, width=COLUMNS), "show.svg", title, folder)
        page = Path(made, "page.html")
        page.write_text(render(analysis).replace(folder, SHOWN))
        save_png(page, "report.png", 1000, 1120)
        plots.learning_curves(analysis).update_layout(width=860, height=460).write_html(page)
        page.write_text(page.read_text().replace("<body>", '<body style="margin:0">'))
        save_png(page, "learning_curves.png", 860, 460)
    last = text[text.index("search ended:") : text.index("\n", text.index("in Python:"))].replace(
        folder, SHOWN
    )
    document = ROOT / "docs" / "gallery.md"
    old = document.read_text()
    document.write_text(re.sub(r"search ended:.*?(?=\n```)", lambda _: last, old, count=1, flags=re.DOTALL))


if __name__ == "__main__":
    main()
