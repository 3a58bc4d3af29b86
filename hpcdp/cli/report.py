"""The command `hpcdp report`: one page of HTML about runs, without MPI."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ..core.checks import file_name
from ..core.environment import explained
from ..errors import ConfigError, printable, reason
from ..launch.parser import Parser
from ..train.metrics import replace_file

_EPILOG = """\
The page contains its pictures, and needs no network.

examples:
  hpcdp report runs/lenet-digits-001             writes report.html into it
  hpcdp report runs/lenet-* --output all.html    compares runs
  hpcdp report runs/lenet-digits-001 --png figs  also writes pictures
"""


def parser() -> Parser:
    """Return the parser of ``hpcdp report``."""
    made = Parser(
        prog="hpcdp report", description="Write one HTML page that shows a run, or compares several.",
        epilog=_EPILOG,
    )  # fmt: skip
    made.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="the folder of a run")
    made.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="the page (default: report.html, in the folder of a single run)",
    )
    made.add_argument("--png", metavar="DIR", type=Path, help="also write the pictures into this folder")
    return made


def main(argv: Sequence[str]) -> int:
    """Run ``hpcdp report`` with ``argv`` and return its exit status.

    Raises:
        ConfigError: a folder is no run's, or a file cannot be written.
        DataError: a file of a run is damaged.
    """
    arguments = parser().parse_args(argv)
    from ..train import report  # loads matplotlib, which --help does not need

    runs = report.read_runs(arguments.runs)
    output = arguments.output or (arguments.runs[0] if len(runs) == 1 else Path()) / "report.html"
    file_name("report", "--output", output, (".html", ".htm"))
    if arguments.png is not None:
        file_name("report", "--png", arguments.png)
    with explained("drawing", True, sys.stderr):
        figures = report.draw_all(runs)
    page = report.page(runs, figures)
    _write(output, page)
    print(f"report    {printable(str(output))}, {len(page) / 1e3:.0f} kB")
    if arguments.png is not None:
        for heading, png in figures.items():
            name = heading.lower().replace(",", "").replace(" ", "-")
            path = arguments.png / f"{name}.png"
            _write(path, png)
            print(f"picture   {printable(str(path))}")
    return 0


def _write(path: Path, content: str | bytes) -> None:
    try:
        path.parent.mkdir(exist_ok=True)  # the folder of the pictures
        replace_file(path, content)
    except OSError as error:
        raise ConfigError("report", where=path, expected="a writable path", got=reason(error)) from error
