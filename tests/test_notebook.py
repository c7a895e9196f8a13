"""`examples/first_search.ipynb` runs from top to bottom; its search can be interrupted and run again."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.processes]

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parent.parent / "examples" / "first_search.ipynb"
_CELL_LIMIT_S = 250

# Interrupts the search as the kernel's ■ does, once three trials have ended.
_INTERRUPT = """
import os, signal
class _Interrupt(tune.Callback):
    ended = 0
    def on_trial_complete(self, iteration, trials, trial, **info):
        self.ended += 1
        if self.ended == 3:
            os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory):
    """The notebook after it ran, with its search run twice: interrupted the first time."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    search = next(place for place, cell in enumerate(notebook.cells) if "tune.run(" in cell.source)
    folder = tmp_path_factory.mktemp("notebook")
    cell = notebook.cells[search]
    cell.source = cell.source.replace("num_samples=12", "num_samples=6")
    assert "num_samples=6" in cell.source
    interrupted = nbformat.v4.new_code_cell(
        _INTERRUPT + cell.source.replace("num_samples=6", "num_samples=6, callbacks=[_Interrupt()]")
    )
    notebook.cells.insert(search, interrupted)
    # Without it the kernel ends while Ray runs, as when a browser's tab is closed.
    assert notebook.cells[-1].source.strip().endswith("ray.shutdown()")
    notebook.cells[-1].source = notebook.cells[-1].source.replace("ray.shutdown()", "")
    notebook.cells.append(
        nbformat.v4.new_code_cell("print(len(results.trials), analysis.runs, analysis.problems)")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("RAY_AIR_NEW_OUTPUT", "1")  # as users have it
        patch.setenv("RAY_raylet_start_wait_time_s", "120")  # on a busy machine 30 s are too few
        client = nbclient.NotebookClient(
            notebook,
            timeout=_CELL_LIMIT_S,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
        )
        with (folder / "stderr.txt").open("w") as stderr:
            client.execute(stderr=stderr)
    notebook.stderr = (folder / "stderr.txt").read_text()
    return notebook


def outputs(notebook, source: str) -> list:
    """All outputs of the last cell with such a source."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source][-1].outputs


def html(found: list) -> str:
    return "".join(out.get("data", {}).get("text/html", "") for out in found)


def printed(found: list) -> str:
    return "".join(out.get("text", "") for out in found)


def test_a_search_shows_its_table_and_can_be_interrupted_and_run_again(executed):
    searched = outputs(executed, "tune.run(")
    assert html(searched) == "<div></div>", "the live table gives way to the last screen"
    assert "search ended: 6 of 6 trials ended" in printed(searched)
    first = next(cell for cell in executed.cells if "_Interrupt()" in cell.source)
    said = printed(first.outputs)
    assert "of 6 trials ended" in said and "6 of 6 trials ended" not in said
    (said,) = [out.text for out in outputs(executed, "print(len(results.trials)")]
    assert said.startswith("6 ('20") and said.rstrip().endswith("()"), said
    assert said.count("_") == 2, "two searches are in the folder, and the second one's trials were read"
    assert "SIGTERM" not in executed.stderr, "the kernel ends without a trace"


def test_an_analysis_and_pictures_are_inline(executed):
    shown = html(outputs(executed, "analyze(results)"))
    assert "best loss " in shown and "curve" in shown
    for plot in ("learning_curves", "parallel_coordinates"):
        assert any("application/vnd.plotly.v1+json" in out.get("data", {}) for out in outputs(executed, plot))
