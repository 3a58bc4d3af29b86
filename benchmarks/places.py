"""Where a benchmark runs: on this machine, or on several hosts with slow links, each in a job of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from hpcdp.bench.probe import link_rates
from hpcdp.bench.results import as_json, check_writable, describe, write, write_json
from hpcdp.comm import World, init
from hpcdp.errors import ConfigError
from hpcdp.launch.arguments import at_least

from .cluster import Cluster, ClusterError, obstacle
from .harness import jobs

_MOST_HOSTS = 99


def add_options(parser: argparse.ArgumentParser, hosts: str) -> None:
    """``--hosts``, ``--ranks-per-node``, ``--rate`` and ``--json``."""
    parser.add_argument("--hosts", default=hosts, metavar="N,N", help="jobs on each number of hosts; 1: this machine")
    parser.add_argument("--ranks-per-node", type=at_least(1), default=2, metavar="N", help="of every host (2)")
    parser.add_argument("--rate", default="1gbit", help="of every host's link, as tc(8) writes it")
    parser.add_argument("--json", metavar="FILE")


def measure_places(
    name: str, arguments: list[str], args: argparse.Namespace, timeout_s: float, show: Callable[[dict[str, Any]], str]
) -> list[dict[str, Any]] | None:
    """Run ``python -m hpcdp.benchmarks.<name>`` with ``arguments`` at each place that ``args`` asks for.

    Prints each place's report as ``show`` puts it, and writes all of them where ``args.json`` says.

    Returns:
        The reports, with ``hosts``, ``ranks_per_node`` and ``rate``; None where no hosts can be made, which is said.

    Raises:
        ConfigError: a number of hosts that is none.
        ClusterError: the hosts cannot be made, or a job failed.
    """
    hosts = [int(each) if each.isdecimal() else 0 for each in args.hosts.split(",")]
    if min(hosts) < 1 or max(hosts) > _MOST_HOSTS:
        expected = f"numbers from 1 to {_MOST_HOSTS}, e.g. 1,2,4"
        raise ConfigError(name, where="--hosts", expected=expected, got=repr(args.hosts))
    check_writable(name, [args.json])
    reason = obstacle() if max(hosts) > 1 else None
    if reason is not None:
        print(f"no hosts can be made here: {reason}", file=sys.stderr)
        return None
    places = []
    for number in hosts:
        place = _run_on(number, name, arguments, args, timeout_s)
        rate = args.rate if number > 1 else None
        places.append({"hosts": number, "ranks_per_node": args.ranks_per_node, "rate": rate, **place})
        print(show(places[-1]), flush=True)
    if args.json:
        write(args.json, as_json({"benchmark": name, "machine": describe(), "places": places}))
    return places


def measure_models(
    name: str,
    args: argparse.Namespace,
    measure: Callable[[World, str], dict[str, Any]],
    show: Callable[[dict[str, Any]], str],
) -> dict[str, Any]:
    """What the ranks of one job do: ``measure(world, model)`` for each of ``args.models``, on one BLAS thread.

    Rank 0 prints the report as ``show`` puts it, and writes it where ``args.json`` says; every rank must call.

    Returns:
        The report: what was measured as ``rows``, and over several nodes the rates of a link.
    """
    world = init()
    check_writable(name, [args.json], world)
    place: dict[str, Any] = {"library": world.library, "machine": describe(world)}
    with threadpool_limits(1):
        if world.num_nodes > 1:
            place["link_mb_s"] = link_rates(world)
        place["rows"] = [measure(world, model) for model in args.models.split(",")]
    if world.rank == 0:
        print(show(place), flush=True)
    write_json(args.json, world, {"benchmark": name, **place})
    return place


def where(place: dict[str, Any]) -> str:
    """A place in words."""
    if place.get("hosts", 1) > 1:
        return f"{place['hosts']} hosts x {place['ranks_per_node']} ranks, links of {place['rate']}"
    machine = place["machine"]
    return f"{machine['ranks']} ranks on {machine['nodes']} node" + ("s" if machine["nodes"] > 1 else "")


def _run_on(hosts: int, name: str, arguments: list[str], args: argparse.Namespace, timeout_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", f"hpcdp.benchmarks.{name}", *arguments]
    if hosts > 1:
        with Cluster(hosts, args.rate) as cluster:
            report = cluster.folder / "report.json"
            return _read(name, report, cluster.mpirun(args.ranks_per_node, [*command, "--json", report], timeout_s))
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        report = Path(folder, "report.json")
        launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(args.ranks_per_node), "--"]
        return _read(name, report, jobs.run([*launch, *command, "--json", str(report)], timeout_s))


def _read(name: str, report: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if not report.exists():
        raise ClusterError(name, where="job", got=f"status {done.returncode}: {jobs.reason(done)}")
    found: dict[str, Any] = json.loads(report.read_text())
    return found
