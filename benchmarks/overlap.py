"""Training steps with communication beside them, against the least time that their parts allow.

``hpcdp launch -n 2 -- python -m hpcdp.benchmarks.overlap`` measures the ranks that a launcher started. Without one,
``python -m hpcdp.benchmarks.overlap --hosts 1,2,4`` starts jobs of its own: on this machine, and on as many hosts with
slow links (`cluster`; needs root).

Models are bound by communication or by computation (`steps`). In turn they are trained with gradients that are reduced
when backward is over (``overlap=False``) or beside it (``overlap=True``), and with every rank alone, all of them
computing at the same time but without a word to each other. A turn is some steps in a row, and each counts by the
slowest rank.

Beside the steps stands their critical path (`hpcdp.gradients.critical_path`): forward, backward, when each bucket is
ready and when the next forward needs it are measured in the steps without communication, and the reduction of each
bucket by itself, nothing else going on. Where ranks have no core to spare, updates count as computation, too. A path
takes what is measured alone for granted: processor time that messages and sums take from computation is not on it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from .. import comm
from ..errors import ConfigError
from ..launch.local import launched_ranks
from ..train.config import check_name
from . import program
from .cluster import Cluster, ClusterError, obstacle
from .fabric import link_rates
from .files import as_json, check_writable, write, write_json
from .machine import describe
from .options import Parser, at_least
from .steps import MODELS, measure

_JOB_TIMEOUT_S = 400
_MOST_HOSTS = 99


def table(place: dict[str, Any]) -> str:
    """One place's figures as text, at most 80 columns wide."""
    link = place.get("link_mb_s")
    lines = [f"# {where(place)}, {place['library']}"]
    if link:
        lines.append(f"# link: {link['one_way']:.1f} MB/s one way, {link['both_ways']:.1f} each way at once")
    for each in place["rows"]:
        lines.append(f"# {each['model']}, gradients of {each['mib']:.1f} MiB")
        lines.append(f"{'#':<16}{'step ms':>12}{'/ path':>9}{'exposed ms':>13}{'hidden':>9}{'other threads ms':>20}")
        for name, step_ms in each["step_ms"].items():
            line = f"{name:<16}{step_ms:>12.2f}{each['ratio'][name]:>9.2f}"
            if name in each["hidden"]:
                line += f"{each['exposed_ms'][name]:>13.2f}{100 * each['hidden'][name]:>8.0f}%"
                line += f"{each['beside_ms'][name]:>20.2f}"
            lines.append(line)
        lines.append(f"{'critical path':<16}{each['critical_path_ms']:>12.2f}           {each['critical_path']}"[:80])
        lines.append(
            f"# computation {each['compute_ms']:.2f} ms, reductions one by one {each['reductions_ms']:.2f} ms"
            + ("" if each["same_bits"] else "; WRONG: other bits")
        )
    return "\n".join(lines)


def where(place: dict[str, Any]) -> str:
    """A place in words."""
    if place.get("hosts", 1) > 1:
        return f"{place['hosts']} hosts x {place['ranks_per_node']} ranks, links of {place['rate']}"
    machine = place["machine"]
    return f"{machine['ranks']} ranks on {machine['nodes']} node" + ("s" if machine["nodes"] > 1 else "")


def job(args: argparse.Namespace) -> int:
    """What the ranks of one job do."""
    world = comm.init()
    check_writable("overlap", [args.json], world)
    place: dict[str, Any] = {"library": world.library, "machine": describe(world), "rows": []}
    with threadpool_limits(1):
        if world.num_nodes > 1:
            place["link_mb_s"] = link_rates(world)
        for name in args.models.split(","):
            place["rows"].append(measure(world, MODELS[name], args.bucket_cap_mb, args.turns, args.steps))
    if world.rank == 0:
        print(table(place), flush=True)
    write_json(args.json, world, {"benchmark": "overlap", **place})
    return 0 if all(each["same_bits"] for each in place["rows"]) else 1


def run_on(hosts: int, args: argparse.Namespace) -> dict[str, Any]:
    """The report of a job on so many hosts, or on this machine.

    Raises:
        ClusterError: the hosts cannot be made, or the job failed.
    """
    command = [sys.executable, "-m", "hpcdp.benchmarks.overlap", "--models", args.models, "--turns", str(args.turns)]
    command += ["--steps", str(args.steps)]
    command += [] if args.bucket_cap_mb is None else ["--bucket-cap-mb", str(args.bucket_cap_mb)]
    if hosts == 1:
        with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
            report = Path(folder, "report.json")
            launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(args.ranks_per_node), "--"]
            try:
                done = subprocess.run(
                    [*launch, *command, "--json", str(report)],
                    capture_output=True, text=True, timeout=_JOB_TIMEOUT_S, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                raise ClusterError("job on this machine", got=f"no end after {_JOB_TIMEOUT_S} s") from error
            place = _read(report, done)
    else:
        with Cluster(hosts, args.rate) as cluster:
            report = cluster.folder / "report.json"
            done = cluster.mpirun(args.ranks_per_node, [*command, "--json", str(report)], _JOB_TIMEOUT_S)
            place = _read(report, done)
    return {"hosts": hosts, "ranks_per_node": args.ranks_per_node, "rate": args.rate if hosts > 1 else None, **place}


def _read(report: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if not report.exists():
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in said if re.match(r"hpcdp: |[\w.]+(Error|Exception)\b", line)]
        raise ClusterError("overlap", where="job", got=(errors or said[-1:] or [f"status {done.returncode}"])[0])
    place: dict[str, Any] = json.loads(report.read_text())
    return place


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m hpcdp.benchmarks.overlap", description=__doc__)
    parser.add_argument("--hosts", default="1,2,4", metavar="N,N", help="jobs on each number of hosts; 1: this machine")
    parser.add_argument("--ranks-per-node", type=at_least(1), default=2, metavar="N", help="of every host (2)")
    parser.add_argument("--rate", default="1gbit", help="of every host's link, as tc(8) writes it")
    parser.add_argument("--models", default="wide,deep", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--turns", type=at_least(1), default=5, help="of each candidate (5)")
    parser.add_argument("--steps", type=at_least(1), default=4, help="that are timed in a turn (4)")
    parser.add_argument("--bucket-cap-mb", type=float, metavar="MB", help="as a Trainer takes it")
    parser.add_argument("--json", metavar="FILE")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    for name in args.models.split(","):
        check_name("model", name, list(MODELS))
    if args.bucket_cap_mb is not None and not args.bucket_cap_mb > 0:
        raise ConfigError("overlap", where="--bucket-cap-mb", expected="a positive size", got=args.bucket_cap_mb)
    if launched_ranks() is not None:
        return job(args)
    hosts = [int(each) if each.isdecimal() else 0 for each in args.hosts.split(",")]
    if min(hosts) < 1 or max(hosts) > _MOST_HOSTS:
        expected = f"numbers from 1 to {_MOST_HOSTS}, e.g. 1,2,4"
        raise ConfigError("overlap", where="--hosts", expected=expected, got=repr(args.hosts))
    check_writable("overlap", [args.json])
    reason = obstacle() if max(hosts) > 1 else None
    if reason is not None:
        print(f"no hosts can be made here: {reason}", file=sys.stderr)
        return 2
    places = []
    for number in hosts:
        places.append(run_on(number, args))
        print(table(places[-1]), flush=True)
    if args.json:
        write(args.json, as_json({"benchmark": "overlap", "machine": describe(), "places": places}))
    return 0 if all(each["same_bits"] for place in places for each in place["rows"]) else 1


if __name__ == "__main__":
    program.run(main)
