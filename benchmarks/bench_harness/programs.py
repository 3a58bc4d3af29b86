"""The start and the end of the programs here, and the jobs that they start one after another."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from hpcdp.core.environment import end_early, fail
from hpcdp.errors import ConfigError, HpcdpError, LaunchError
from hpcdp.launch.parser import Parser, at_least
from hpcdp.launch.process_monitor import bound

PROGRAMS = Path(__file__).resolve().parents[1]
"""The folder of the programs."""


def path_of(name: str) -> Path:
    """Return the file of the program ``bench_<name>.py``."""
    return PROGRAMS / f"bench_{name}.py"


def run(main: Callable[[], int]) -> NoReturn:
    """Leave with the status of ``main``, with 2 and one line on stderr where it raised an `HpcdpError`.

    Rank 0 reports wrong arguments, which are the same on all ranks; every rank may report other errors.
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
    """Return the parser of a comparison over sizes: OSU's -m, -i and -x, the factor, and a file for the figures."""
    parser = Parser(prog=f"python benchmarks/bench_{name}.py", description=description)
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


ENDED = 124
"""The status of a job that has taken too long, as of timeout(1)."""

_ENDING_S = 20.0
"""So long a launcher may take to end its ranks."""


def run_job(command: Sequence[str], timeout_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``command``, with ``variables`` in its environment, to its end, or for ``timeout_s`` seconds.

    Nothing of it runs on then, nor when this process ends, however that may be: it would take time from what is
    measured next.
    """
    process = subprocess.Popen(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=bound(),
    )  # fmt: skip
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
            return subprocess.CompletedProcess(command, process.returncode, out, err)
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_ENDING_S)
            process.kill()
    return subprocess.CompletedProcess(command, ENDED, "", f"ended after {timeout_s:g} s")


def finished(what: str, where: str, command: Sequence[str], timeout_s: float, **variables: str) -> str:
    """Return the output of ``command``, see `run_job`.

    Raises:
        LaunchError: the exit status is not 0.
    """
    done = run_job(command, timeout_s, **variables)
    if done.returncode:
        raise LaunchError(what, where=where, expected="status 0", got=f"{done.returncode}: {reason(done)}")
    return done.stdout


def reason(done: subprocess.CompletedProcess[str], known: str = "") -> str:
    """Return why a job has failed: the first error in its output, else ``known``, else the last line."""
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip(" -")]
    errors = [line for line in lines if re.match(r"hpcdp: |[\w.]+(Error|Exception)\b", line)]
    return next(filter(None, [*errors[:1], known, *lines[-1:], "no output"]))
