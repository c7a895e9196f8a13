"""The commands `report`, `show` and `export`. Importing this module loads none of their dependencies."""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from horovod_tune.analysis.open_experiment import Analysis
    from horovod_tune.analysis.results import Results


def add_parsers(subparsers: argparse._SubParsersAction) -> None:
    """Register `report`, `show` and `export`; each sets `run`, which returns the exit status."""
    about = "Write one self-contained HTML page about a Tune experiment, finished or not."
    report = subparsers.add_parser(
        "report", help="write one HTML page about an experiment", description=about
    )
    output = "the page to write (default: %(default)s; - for standard output)"
    report.add_argument("-o", "--output", default="report.html", help=output)
    pareto = 'add a section on several metrics with their modes, such as "accuracy=max,latency_ms=min" '
    pareto += "(default: those that BayesOptSearch optimised)"
    report.add_argument("--pareto", type=_objectives, metavar="METRICS", help=pareto)

    about = "Show a Tune experiment in the terminal: the best trial, and a table of trials with their curves."
    show = subparsers.add_parser("show", help="show an experiment in the terminal", description=about)
    rows = "trials in the table (default: 20)"
    show.add_argument("-n", "--rows", type=_positive_int, default=20, help=rows)
    show.add_argument("-w", "--watch", action="store_true", help="follow a running experiment until it ends")

    about = "Write one row per trial, or with --what history one row per report."
    export = subparsers.add_parser(
        "export", help="write an experiment's tables as CSV or Parquet", description=about
    )
    export.add_argument("--csv", metavar="FILE", help="write CSV to this file (- for standard output)")
    export.add_argument(
        "--parquet", metavar="FILE", help="write Parquet to this file (- for standard output)"
    )
    what = "one row per trial, or per report (default: %(default)s)"
    export.add_argument("--what", choices=("trials", "history"), default="trials", help=what)

    for parser, command in ((report, _report), (show, _show), (export, _export)):
        parser.set_defaults(run=partial(_run, command))
        option = parser.add_argument
        option("experiment", help="the experiment's folder: a path, or a URI such as s3://bucket/name")
        option("--metric", help="the metric by which trials are compared (default: the experiment's own)")
        option("--mode", choices=("min", "max"), help="whether lower or higher is better")
        limit = 'a condition that the best trial must meet, such as "latency_ms <= 20"; may be repeated '
        limit += "(default: the limits that BayesOptSearch was given)"
        option("--limit", action="append", default=[], metavar="LIMIT", help=limit)
        run = "the search to read, if several wrote into the folder (default: the newest)"
        option("--run", dest="run_name", metavar="NAME", help=run)
        scope = "compare trials by their last value or by the best of all (default: %(default)s)"
        option("--scope", choices=("last", "all"), default="last", help=scope)


def _objectives(text: str) -> dict[str, str]:
    pairs = [part.rpartition("=") for part in text.split(",")]
    objectives = {name.strip(): mode.strip() for name, _, mode in pairs}
    modes = set(objectives.values())
    if len(objectives) < max(2, len(pairs)) or not all(objectives) or not modes <= {"min", "max"}:
        raise argparse.ArgumentTypeError(f'must be like "accuracy=max,latency_ms=min", got {text!r}')
    return objectives


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number and at least 1, got {text!r}")
    return int(text)


def _run(command: Callable[[argparse.Namespace, Analysis], int], args: argparse.Namespace) -> int:
    """Read the experiment and run the command on it; return the exit status."""
    from horovod_tune.analysis.open_experiment import analyze
    from horovod_tune.analysis.results import MetricUnknown

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            how = {"metric": args.metric, "mode": args.mode, "scope": args.scope, "run": args.run_name}
            analysis = analyze(args.experiment, limits=args.limit or None, **how)
    except (OSError, ValueError, ImportError) as error:
        _print_error(error)
        return 1
    for warning in caught if command is not _show else ():  # `show` prints it in its view
        _print_error(warning.message)
    try:
        return command(args, analysis)
    except MetricUnknown as error:
        _print_error(error)
        return 2
    except BrokenPipeError:  # `cli.main` ends the command
        raise
    except OSError as error:
        _print_error(f"the command could not be completed: {error}")
        return 1


def _require_named_metric(args: argparse.Namespace, analysis: Results) -> None:
    """Raise `MetricUnknown` if the metric is not known, but an option of the command needs it."""
    if args.metric or (args.limit and not analysis.record.front):
        analysis.require_metric()


def _print_error(what: object) -> None:
    from horovod_tune.analysis.printable import one_line

    print(f"horovod-tune: {one_line(str(what))}", file=sys.stderr)


def _standard_output() -> TextIO:
    """Return standard output; a file or a pipe gets UTF-8, as every file that we write."""
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
        sys.stdout.reconfigure(encoding="utf-8")
    return sys.stdout


def _report(args: argparse.Namespace, analysis: Analysis) -> int:
    from horovod_tune.analysis.printable import counted, one_line
    from horovod_tune.analysis.report import render, write_report

    _require_named_metric(args, analysis)
    if args.output == "-":
        _standard_output().write(render(analysis, pareto=args.pareto))
    else:
        place = write_report(analysis, args.output, pareto=args.pareto)
        trials, size = counted(len(analysis.trials), "trial"), f"{place.stat().st_size / 1e6:.1f} MB"
        print(f"{one_line(str(place))}: {trials}, {size}")
    if analysis.best_number is None:
        _print_error(f"the report has no curves: {analysis.no_best_reason}")
    for problem in analysis.problems:
        print(f"not read completely: {one_line(str(problem))}", file=sys.stderr)
    return 0


def _show(args: argparse.Namespace, analysis: Analysis) -> int:
    from horovod_tune.analysis import terminal

    screen = terminal.Console()
    shown: Results = analysis
    if args.watch and analysis.state == "running":
        shown = terminal.watch(analysis, screen, rows=args.rows)
    else:
        # A line that is longer than the screen continues on the next; nothing is cut.
        screen.print(terminal.view(analysis, rows=args.rows, width=screen.width), crop=False)
    _require_named_metric(args, shown)
    return 0


def _export(args: argparse.Namespace, analysis: Analysis) -> int:
    from pathlib import Path

    from horovod_tune.analysis import export

    if Path(args.csv or "") == Path(args.parquet or ""):  # neither, or the same
        print("horovod-tune: pass --csv FILE, --parquet FILE, or both to different files", file=sys.stderr)
        return 2
    _require_named_metric(args, analysis)
    table = analysis.dataframe() if args.what == "trials" else analysis.history()
    if args.csv:
        export.write_csv(table, _standard_output() if args.csv == "-" else Path(args.csv))
    if args.parquet:
        export.write_parquet(table, sys.stdout.buffer if args.parquet == "-" else Path(args.parquet))
    return 0
