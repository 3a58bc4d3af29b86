"""Allreduce across hosts on slow links, against the rate of the link and the MPI library's own, turn by turn.

``python benchmarks/bench_fabric.py --hosts 2,4 --ranks-per-node 2 --rate 1gbit`` makes the hosts on this machine
(`bench_harness.cluster`; needs root) and runs jobs of its own on them. The link is measured in the same job: one
message between two hosts, and one in each direction at once. An allreduce over H hosts must send ``2 (H - 1) / H`` of
its bytes from every host, so the bound is that over the link's rate; ``% bound`` is the bound over the median time.
``MPI x`` is the MPI library's time over this one's, as the median of the ratios within turns. MPICH, which needs an
environment of its own, is measured in jobs that alternate with the others, gloo where PyTorch is installed. `hpcdp
tune` runs on the hosts before, so "auto" is what it has chosen there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from bench_harness import programs
from bench_harness.cluster import Cluster, ClusterError, obstacle
from bench_harness.figures import ours, write_json
from bench_harness.peers import check_python, gloo_or_reason
from hpcdp import comm
from hpcdp.bench.measure import (
    Candidate,
    FreshData,
    MeasuredCollective,
    MeasuringSchedule,
    alternate,
    as_json,
    bus_factor,
    check_writable,
    describe,
    format_size,
    gather,
    median_ratio,
    parse_size,
    sleeping_barrier,
    turn_medians,
    write,
    wrong,
)
from hpcdp.bench.tune import link_rates
from hpcdp.collectives import ALGORITHMS, allreduce
from hpcdp.collectives.algorithm_choice import choose
from hpcdp.comm.communicator import resolve
from hpcdp.core.checks import check_name
from hpcdp.errors import ConfigError, UnsupportedError
from hpcdp.launch.parser import Parser, at_least

PEER = "MPI"
_SIZES = "4,64K,1M,4M,16M,64M"
_ALGORITHMS = ",".join(["auto", *(name for name in ALGORITHMS["allreduce"] if name != "reference")])
_TUNED_TO = 16 << 20
_JOB_TIMEOUT_S = 600
_MOST_HOSTS = 99
_RATE = r"[0-9]+(\.[0-9]+)?[kmg]?(bit|bps)"  # of those that tc(8) knows, what cluster.sh takes


def usable(world: comm.World, names: Sequence[str]) -> list[str]:
    """Return the algorithms in ``names`` that can reduce over the nodes of this world; every rank must call."""
    found = []
    for name in names:
        try:
            allreduce(np.ones(1, np.float32), world=world, algorithm=name)
        except UnsupportedError:
            continue
        found.append(name)
    return found


def measure(
    world: comm.World, names: Sequence[str], peers: Sequence[Any], nbytes: int, schedule: MeasuringSchedule
) -> dict[str, Any]:
    """One size; every rank must call.

    Returns ``nbytes``, ``auto`` (the algorithm that "auto" chooses) and for every candidate ``median_ms`` (of the
    slowest rank), ``spread`` (the distance of the quartiles over the median), ``mpi_ratio`` and the number of ``wrong``
    elements.
    """
    count = max(1, nbytes // 4)
    data = FreshData(world.rank, world.size)
    x = np.empty(count, np.float32)
    candidates: list[Candidate] = [MeasuredCollective(PEER, data, x, x, lambda: world.comm.native_allreduce(x, "sum"))]
    candidates += [ours(name, data, x, world, {"algorithm": name, "op": "sum"}) for name in names]
    candidates += [peer.exchange(data, x) for peer in peers]
    found = gather(world, alternate(candidates, lambda: sleeping_barrier(world), schedule))
    taken = {name: turn_medians(ranks) for name, ranks in found.items()}
    auto = choose("allreduce", count * 4, x.dtype, resolve("allreduce", "sum", x.dtype), world)
    row: dict[str, Any] = {
        "nbytes": count * 4,
        "auto": auto,
        "median_ms": {},
        "spread": {},
        "mpi_ratio": {},
        "wrong": {},
    }
    for name, us in taken.items():
        low, middle, high = np.percentile(us, (25, 50, 75))
        row["median_ms"][name] = middle / 1e3
        row["spread"][name] = (high - low) / middle
        row["mpi_ratio"][name] = median_ratio(taken[PEER], us)
        row["wrong"][name] = wrong(found[name])
    return row


def job(args: argparse.Namespace) -> int:
    """Measure the link and every size on the hosts, and write the report."""
    tempfile.tempdir = str(Path(args.json).parent)  # where all ranks meet: their /tmp are their hosts' own
    world = comm.init()
    names = [] if args.peer_only else usable(world, args.algorithms.split(","))
    gloo, reason = (None, "") if args.peer_only else gloo_or_reason(world)
    link, rows = [link_rates(world)], []
    for nbytes in map(parse_size, args.sizes.split(",")):
        schedule = MeasuringSchedule.for_size(nbytes, args.iterations, args.warmup)
        rows.append(measure(world, names, [gloo] if gloo else [], nbytes, schedule))
        if world.rank == 0:
            print(format_size(nbytes), {name: round(ms, 3) for name, ms in rows[-1]["median_ms"].items()})
    link.append(link_rates(world))
    if gloo is not None:
        gloo.close()
    report = {"library": world.library, "machine": describe(world), "skipped": reason, "rows": rows}
    rates = {
        name: max(each[name] for each in link) for name in link[0]
    }  # a limit: what slowed one down is no part of it
    write_json(args.json, world, {**report, "link_mb_s": rates})
    return 1 if any(count for row in rows for count in row["wrong"].values()) else 0


def merged(rounds: Sequence[dict[str, Any]], mpich: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over rounds by size and candidate, including MPICH, and the bound by the best link rate."""
    link = {name: max(each["link_mb_s"][name] for each in rounds) for name in rounds[0]["link_mb_s"]}
    nodes = rounds[0]["machine"]["nodes"]
    rows = []
    for number, first in enumerate(rounds[0]["rows"]):
        here = [each["rows"][number] for each in rounds]
        row: dict[str, Any] = {"nbytes": first["nbytes"], "auto": first["auto"]}
        row["bound_ms"] = bus_factor(nodes) * first["nbytes"] / link["one_way"] / 1e3
        for key in ("median_ms", "spread", "mpi_ratio"):
            row[key] = {name: float(np.median([each[key][name] for each in here])) for name in first[key]}
        row["wrong"] = {name: sum(each["wrong"][name] for each in here) for name in first["wrong"]}
        others = [each["rows"][number] for each in mpich[: len(here)]]
        if others:
            times = [each["median_ms"][PEER] for each in others]
            row["median_ms"]["MPICH"] = float(np.median(times))
            row["spread"]["MPICH"] = float(np.median([each["spread"][PEER] for each in others]))
            ours = [each["median_ms"][PEER] for each in here[: len(times)]]
            row["mpi_ratio"]["MPICH"] = median_ratio(ours, times)
            row["wrong"]["MPICH"] = sum(each["wrong"][PEER] for each in others)
        row["bound_share"] = {name: row["bound_ms"] / ms for name, ms in row["median_ms"].items()}
        rows.append(row)
    return {"library": rounds[0]["library"], "nodes": nodes, "link_mb_s": link, "rows": rows}


def table(found: dict[str, Any], title: str) -> str:
    """Format the merged figures as text of at most 80 columns."""
    link = found["link_mb_s"]
    lines = [
        f"# {title}, {found['library']}",
        f"# link: {link['one_way']:.1f} MB/s one way, {link['both_ways']:.1f} each way at once",
        *textwrap.wrap(f"# auto: {_as_chosen(found['rows'])}", 80, subsequent_indent="#   "),
        f"{'# size':<8}{'bound ms':>10}  {'':<17}{'median ms':>11}{'spread':>8}{'% bound':>9}{'MPI x':>7}",
    ]
    for row in found["rows"]:
        first = f"{format_size(row['nbytes']):<8}{row['bound_ms']:>10.3f}"
        for name, ms in row["median_ms"].items():
            line = f"{first:<18}  {name:<17}{ms:>11.3f}{100 * row['spread'][name]:>7.0f}%"
            line += f"{100 * row['bound_share'][name]:>9.1f}{row['mpi_ratio'][name]:>7.2f}"
            lines.append(line + (f" {row['wrong'][name]} WRONG" if row["wrong"][name] else ""))
            first = ""
    return "\n".join(lines)


def _as_chosen(rows: Sequence[dict[str, Any]]) -> str:
    """Describe the choices of "auto" by size."""
    groups = groupby(rows, key=lambda row: row["auto"])
    return "; ".join(f"{name} at {', '.join(format_size(row['nbytes']) for row in group)}" for name, group in groups)


def run_on(hosts: int, args: argparse.Namespace) -> dict[str, Any]:
    """Make the hosts, run the jobs on them in rounds, and merge what they report.

    Raises:
        ClusterError: the hosts cannot be made, or a job failed.
    """
    reports: dict[str, list[dict[str, Any]]] = {}
    pythons = {PEER: sys.executable} | ({"MPICH": args.mpich} if args.mpich else {})
    share = [Path(python).absolute().parent.parent for python in pythons.values()]
    with Cluster(hosts, args.rate, share) as cluster:
        os.environ["HPCDP_TUNING_DIR"] = str(cluster.folder / "tuning")
        largest = min(_TUNED_TO, max(map(int, args.sizes.split(","))))
        tune = [sys.executable, "-m", "hpcdp.cli", "tune", "allreduce", "--quick", "-m", f"4:{largest}"]
        done = cluster.mpirun(args.ranks_per_node, tune, _JOB_TIMEOUT_S)
        if done.returncode:
            raise ClusterError(f"hpcdp tune on {hosts} hosts", got=programs.reason(done))
        for number in range(args.rounds):
            for library, python in pythons.items():
                report = cluster.folder / f"{library}-{number}.json"
                argv = [python, str(programs.path_of("fabric")), "--job", "--json", str(report)]
                argv += ["--sizes", args.sizes, "--algorithms", args.algorithms]
                argv += ["-i", str(args.iterations), "-x", str(args.warmup)]
                argv += [] if library == PEER else ["--peer-only"]
                done = cluster.mpirun(args.ranks_per_node, argv, _JOB_TIMEOUT_S)
                if not report.exists():
                    raise ClusterError(f"job on {hosts} hosts", where=library, got=programs.reason(done))
                reports.setdefault(library, []).append(json.loads(report.read_text()))
    found = merged(reports[PEER], reports.get("MPICH", []))
    skipped = [reports[PEER][0]["skipped"]] if reports[PEER][0]["skipped"] else []
    setup = {"hosts": hosts, "ranks_per_node": args.ranks_per_node, "rate": args.rate, "rounds": args.rounds}
    return {**setup, "skipped": skipped, **found}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python benchmarks/bench_fabric.py", description=__doc__)
    parser.add_argument("--hosts", default="2,4", metavar="N,N", help="a cluster of each number of hosts")
    parser.add_argument("--ranks-per-node", type=at_least(1), default=2, metavar="N", help="of every host (2)")
    parser.add_argument("--rate", default="1gbit", help="of every host's link, as tc(8) writes it")
    parser.add_argument("--sizes", default=_SIZES, help="message sizes in bytes")
    parser.add_argument("--algorithms", default=_ALGORITHMS, help="of hpcdp; those that exist and fit are measured")
    parser.add_argument("-i", dest="iterations", type=at_least(1), default=40, help="timings a size, fewer above 1M")
    parser.add_argument("-x", dest="warmup", type=at_least(0), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=1, help="jobs of each library, which alternate")
    parser.add_argument("--mpich", metavar="PYTHON", default="", help="a Python with mpi4py and MPICH, to compare with")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peer-only", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    args = _parser().parse_args(argv)
    if args.job:
        return job(args)
    sizes = ",".join(str(parse_size(each)) for each in args.sizes.split(","))
    args.sizes = sizes
    hosts = [int(each) if each.isdecimal() else 0 for each in args.hosts.split(",")]
    if min(hosts) < 2 or max(hosts) > _MOST_HOSTS:
        expected = f"numbers from 2 to {_MOST_HOSTS}, e.g. 2,4"
        raise ConfigError("fabric", where="--hosts", expected=expected, got=repr(args.hosts))
    for name in args.algorithms.split(","):
        check_name("allreduce algorithm", name, ["auto", *ALGORITHMS["allreduce"]])
    if not re.fullmatch(_RATE, args.rate) or not re.search("[1-9]", args.rate):
        raise ConfigError("fabric", where="--rate", expected="a rate such as 1gbit or 100mbit", got=repr(args.rate))
    if args.mpich:
        check_python("fabric --mpich", args.mpich)
    check_writable("fabric", [args.json])
    reason = obstacle()
    if reason is not None:
        print(f"no hosts can be made here: {reason}", file=sys.stderr)
        return 2
    found = []
    for number in hosts:
        found.append(run_on(number, args))
        print(table(found[-1], f"{number} hosts x {args.ranks_per_node} ranks, links of {args.rate}"), flush=True)
    if args.json:
        report = {"benchmark": "fabric", "machine": describe(), "fabrics": found}
        write(args.json, as_json(report))
    return 1 if any(count for each in found for row in each["rows"] for count in row["wrong"].values()) else 0


if __name__ == "__main__":
    programs.run(main)
