"""How the programs here begin and end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hpcdp.errors import ConfigError, HpcdpError
from hpcdp.launch.arguments import Parser, at_least
from hpcdp.launch.ending import end_early, fail


def run(main: Callable[[], int]) -> NoReturn:
    """Leave with the status of ``main``, with 2 and one line on stderr where it raised an `HpcdpError`.

    What was asked wrongly is so on all ranks, and rank 0 says it; of another error every rank may speak.
    """
    try:
        status = main()
        sys.stdout.flush()
    except HpcdpError as error:
        status = fail(error, 2, by_all=isinstance(error, ConfigError))
    except (KeyboardInterrupt, OSError) as error:
        status = end_early(error, Path(sys.argv[0]).stem)
    raise SystemExit(status)


def sweep_parser(
    name: str, description: str | None, sizes: str, size_help: str, warmup: int, factor: int = 4
) -> argparse.ArgumentParser:
    """The flags of a comparison over sizes: OSU's -m, -i and -x, the factor between sizes, a file for the figures."""
    parser = Parser(prog=f"python -m hpcdp.benchmarks.{name}", description=description)
    parser.add_argument("-m", dest="sizes", default=sizes, metavar="MIN:MAX", help=f"{size_help} ({sizes})")
    parser.add_argument(
        "--factor", type=int, default=factor, metavar="N", help=f"each size is N times the one before ({factor})"
    )
    parser.add_argument("-i", dest="iterations", type=at_least(1), default=100, metavar="N", help="timings (100)")
    parser.add_argument(
        "-x", dest="warmup", type=at_least(0), default=warmup, metavar="N", help=f"untimed calls before ({warmup})"
    )
    parser.add_argument("--json", metavar="FILE", help="the figures, and the machine they were measured on")
    return parser
