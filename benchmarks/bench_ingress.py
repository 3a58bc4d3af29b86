"""Asynchronous stores over slow links: how much of a link they use, and what comes in at each of n servers.

``python benchmarks/bench_ingress.py --workers 3 --servers 1,2,3 --rate 1gbit`` makes the hosts on this machine
(`bench_harness.cluster`; needs root) and runs jobs of its own on them.

First two hosts with one worker each, which push and pull keys of 1 MB that the other one keeps, all pushes before any
pull: payload in each direction against the rate of the link, which is measured in the same turns. Then workers on hosts
of their own push large keys, cut over n servers on hosts of theirs: by the counts of the servers' links each takes 1/n
of what all workers push. A round cannot be shorter than the link of a server, or of a worker, needs.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np

from bench_harness import programs, traffic
from bench_harness.cluster import Cluster, ClusterError, obstacle
from bench_harness.figures import write_json
from hpcdp import comm
from hpcdp.bench.measure import as_json, check_writable, describe, format_size, parse_size, write
from hpcdp.core.environment import launched_rank
from hpcdp.errors import ConfigError
from hpcdp.kvstore import serve
from hpcdp.launch.parser import Parser, at_least

_JOB_TIMEOUT_S = 300
_MOST_HOSTS = 99
_OURS, _LIMIT, _GRID = "#3566a8", "#6b6b6b", "#d9d9d9"


def table(report: dict[str, Any]) -> str:
    """Format the figures as text of at most 80 columns."""
    link, shares = report["link"]["link_mb_s"], report["link"]["share"]
    lines = [
        f"# dist_async, links of {report['rate']}, {report['library']}",
        f"# link: {link['one_way']:.1f} MB/s one way, {link['both_ways']:.1f} each way at once",
        f"{'# 2 hosts, ' + str(report['link']['keys']) + ' keys of 1M':<40}{'MB/s each way':>16}{'of the link':>14}",
    ]
    for name, mb_s in report["link"]["mb_s"].items():
        lines.append(f"{name:<40}{mb_s:>16.1f}{100 * shares[name]:>13.0f}%")
    workers, size = report["workers"], format_size(report["nbytes"])
    lines.append(f"# {workers} workers push {size} each a round, in {report['keys']} keys")
    lines.append(f"{'# servers':<12}{'MB in, each':>28}{'m S / n':>10}{'round ms':>12}{'link ms':>12}")
    for row in report["rows"]:
        received = ", ".join(f"{mb:.1f}" for mb in row["received_mb"])
        line = f"{row['servers']:<12}{received:>28}{row['expected_mb']:>10.1f}"
        lines.append(line + f"{row['round_ms']:>12.1f}{row['bound_ms']:>12.1f}")
    faulty = report["link"]["wrong"] + sum(row["wrong"] for row in report["rows"])
    return "\n".join([*lines, *([f"# {faulty} WRONG"] if faulty else [])])


def draw(report: dict[str, Any], path: str) -> None:
    """Draw the traffic into each server and the time of a round."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, workers = report["rows"], report["workers"]
    figure = Figure(figsize=(7.6, 3.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    counts = [row["servers"] for row in rows]
    line = np.linspace(min(counts), max(counts))
    limit = {"color": _LIMIT, "linewidth": 1.2, "linestyle": (0, (5, 3))}
    left.plot(line, workers * report["nbytes"] / 1e6 / line, label="m S / n", **limit)
    points = [(row["servers"], mb) for row in rows for mb in row["received_mb"]]
    left.plot(*zip(*points, strict=True), color=_OURS, linestyle="", marker="o", markersize=4.5, label="each server")
    left.set_ylabel("MB in a round, as the link counts them")
    left.set_title("what comes in at a server", fontsize=10, loc="left")
    bounds = [row["bound_ms"] for row in rows]
    right.plot(counts, bounds, marker="_", label="what the slowest link needs", **limit)
    times = [row["round_ms"] for row in rows]
    right.plot(counts, times, color=_OURS, linewidth=1.8, marker="o", markersize=4.5, label="measured, median")
    right.set_ylabel("ms a round")
    right.set_title("how long a round takes", fontsize=10, loc="left")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.set_xticks(counts)
        axes.set_xlabel("servers (n)")
        axes.grid(True, color=_GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="best")
    title = f"{workers} workers push {format_size(report['nbytes'])} each, links of {report['rate']}"
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.savefig(path)


def job(args: argparse.Namespace) -> int:
    """Run a rank on its host: a worker, or after the workers a server."""
    rank = launched_rank()
    if rank is not None and rank >= args.workers:
        serve.main()
        return 0
    world = comm.init()
    if args.job == "link":
        found = traffic.link_turns(world, args.keys, args.turns, args.repeats)
    else:
        found = traffic.ingress(world, int(args.servers), parse_size(args.size), args.keys, args.turns)
    write_json(args.json, world, {"library": world.library, **found})
    return 0


def _run(hosts: int, what: str, workers: int, arguments: dict[str, object], rate: str) -> dict[str, Any]:
    """Run a job on separate hosts with one rank each, the workers on the first ones."""
    with Cluster(hosts, rate) as cluster:
        report = cluster.folder / "report.json"
        argv = [sys.executable, str(programs.path_of("ingress")), "--job", what, "--json", str(report)]
        for flag, value in (arguments | {"--workers": workers}).items():
            argv += [flag, str(value)]
        done = cluster.mpirun(1, argv, _JOB_TIMEOUT_S)
        if not report.exists():
            raise ClusterError("ingress", where=f"job on {hosts} hosts", got=programs.reason(done))
        found: dict[str, Any] = json.loads(report.read_text())
        return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Make the hosts, run the jobs, and put together what they report."""
    how = {"--keys": 16, "--turns": args.turns, "--repeats": 2 if args.turns > 1 else 1}
    link = _run(2, "link", 2, how, args.rate)
    nbytes, workers = parse_size(args.size), args.workers
    rows = []
    for servers in map(int, args.servers.split(",")):
        how = {"--keys": args.keys, "--turns": args.turns, "--size": nbytes, "--servers": servers}
        row = _run(workers + servers, "ingress", workers, how, args.rate)
        row["expected_mb"] = workers * nbytes / servers / 1e6
        row["bound_ms"] = 1e3 * max(row["expected_mb"], nbytes / 1e6) / link["link_mb_s"]["one_way"]
        rows.append(row)
    facts = {"benchmark": "ingress", "machine": describe(), "library": link["library"], "rate": args.rate}
    return {**facts, "link": link, "workers": workers, "nbytes": nbytes, "keys": args.keys, "rows": rows}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python benchmarks/bench_ingress.py", description=__doc__)
    parser.add_argument("--workers", type=at_least(1), default=3, metavar="N", help="on a host each (3)")
    parser.add_argument("--servers", default="1,2,3", metavar="N,N", help="jobs with each number of servers (1,2,3)")
    parser.add_argument("--rate", default="1gbit", help="of every host's link, as tc(8) writes it")
    parser.add_argument("--size", default="32M", help="that each worker pushes in a round (32M)")
    parser.add_argument("--keys", type=at_least(1), default=4, metavar="N", help="in so many keys (4)")
    parser.add_argument("--turns", type=at_least(1), default=7, metavar="N", help="turns and rounds (7)")
    parser.add_argument("--json", metavar="FILE", help="the figures, and the machine they were measured on")
    parser.add_argument("--plot", metavar="FILE", help="a picture of what comes in at each server")
    parser.add_argument("--job", choices=("link", "ingress"), help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    args = _parser().parse_args(argv)
    if args.job:
        return job(args)
    numbers = [int(each) if each.isdecimal() else 0 for each in args.servers.split(",")]
    if min(numbers) < 1 or args.workers + max(numbers) > _MOST_HOSTS:
        expected = f"numbers from 1, e.g. 1,2,3, with the workers at most {_MOST_HOSTS}"
        raise ConfigError("ingress", where="--servers", expected=expected, got=repr(args.servers))
    parse_size(args.size)
    check_writable("ingress", [args.json, args.plot])
    reason = obstacle()
    if reason is not None:
        print(f"no hosts can be made here: {reason}", file=sys.stderr)
        return 2
    report = measure(args)
    print(table(report), flush=True)
    if args.json:
        write(args.json, as_json(report))
    if args.plot:
        draw(report, args.plot)
    return 1 if report["link"]["wrong"] or any(row["wrong"] for row in report["rows"]) else 0


if __name__ == "__main__":
    programs.run(main)
