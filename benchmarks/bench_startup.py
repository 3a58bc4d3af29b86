"""The time of ``import hpcdp``, and of a launch on one machine until every rank has its world.

``python benchmarks/bench_startup.py --ranks 2`` starts fresh interpreters for each timing and takes medians.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench_harness import programs
from hpcdp.bench.measure import as_json, check_writable, describe, write
from hpcdp.errors import LaunchError
from hpcdp.launch.parser import Parser, at_least

_IMPORT = "import time; begin = time.perf_counter(); import hpcdp; print(time.perf_counter() - begin)"
# The clock is the machine's, the same for all processes: a rank says when it knew the world.
_KNOW_THE_WORLD = (
    "import sys, time, pathlib, hpcdp; world = hpcdp.init(); now = time.clock_gettime(time.CLOCK_MONOTONIC); "
    "pathlib.Path(sys.argv[1], str(world.rank)).write_text(str(now))"
)


def _output(command: list[str]) -> tuple[str, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError("start-up", where=" ".join(command[:6]), expected="status 0", got=done.stderr.strip()[-300:])
    return done.stdout, done.stderr


def import_seconds(repeats: int) -> float:
    """Median seconds of ``import hpcdp`` in a fresh interpreter, without the interpreter's own start."""
    return float(np.median([float(_output([sys.executable, "-c", _IMPORT])[0]) for _ in range(repeats)]))


def slowest_imports(top: int) -> list[tuple[str, float]]:
    """Return the modules of ``import hpcdp`` that take longest themselves, in seconds (``-X importtime``)."""
    text = _output([sys.executable, "-X", "importtime", "-c", "import hpcdp"])[1]
    found = re.findall(r"import time:\s+(\d+) \|\s+\d+ \| +(\S+)", text)
    longest = sorted(((name, int(us) / 1e6) for us, name in found), key=lambda each: -each[1])
    return longest[:top]


def launch_seconds(ranks: int, repeats: int) -> float:
    """Median seconds from ``hpcdp launch`` until the last rank knew the world."""
    taken = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="startup-") as folder:
            program = [sys.executable, "-c", _KNOW_THE_WORLD, folder]
            begin = time.clock_gettime(time.CLOCK_MONOTONIC)
            _output([sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(ranks), "--", *program])
            taken.append(max(float(Path(folder, str(rank)).read_text()) for rank in range(ranks)) - begin)
    return float(np.median(taken))


def measure(ranks: int, repeats: int) -> dict[str, Any]:
    """Return ``import_s``, ``launch_s`` and ``slowest_imports``."""
    import_seconds(1)  # the first one reads the files from disk
    return {
        "ranks": ranks,
        "import_s": import_seconds(repeats),
        "launch_s": launch_seconds(ranks, repeats),
        "slowest_imports": slowest_imports(5),
    }


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_startup.py", description=__doc__)
    parser.add_argument("--ranks", type=at_least(1), default=2)
    parser.add_argument("--repeats", type=at_least(1), default=9)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    check_writable("startup", [args.json])
    result = measure(args.ranks, args.repeats)
    print(f"import hpcdp {result['import_s']:.3f} s; hpcdp launch -n {args.ranks} {result['launch_s']:.3f} s")
    for name, seconds in result["slowest_imports"]:
        print(f"  {name:<40}{1e3 * seconds:>8.1f} ms")
    if args.json:
        report = {"benchmark": "startup", "machine": describe(), **result}
        write(args.json, as_json(report))
    return 0


if __name__ == "__main__":
    programs.run(main)
