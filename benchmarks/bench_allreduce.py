"""hpcdp's allreduce against the machine's floor and other libraries, turn by turn in one run.

``mpirun -n 2 python benchmarks/bench_allreduce.py -m 4:64M`` (one node). In a turn the bare patterns of `bench_floor`,
hpcdp, the MPI library in place and out of place, and gloo where PyTorch is installed, each reduce data that were
written just before. Times are medians in microseconds; ``floor %`` is the best pattern's time over hpcdp's, ``peer x``
the best peer's over hpcdp's, both as the median of the ratios within turns: for gradients in buckets in the node's
memory (``Trainer.allreduce_grads``), and for any array (``hpcdp.allreduce``).

MPICH needs an environment of its own beside Open MPI, so whole jobs alternate with it:
``python benchmarks/bench_allreduce.py --mpich .venv-mpich/bin/python`` starts them, outside mpirun, and joins what they
report. The suite, `bench_suite`, goes the same way.
"""

from __future__ import annotations

import argparse
import textwrap
from functools import partial
from typing import Any

import numpy as np

from bench_floor import STAGED, Floor, limits_of, print_line_of
from bench_gradients import GradientAllreduce
from bench_harness import programs
from bench_harness.figures import ours, write_json
from bench_harness.peers import Gloo, check_python, gloo_or_reason, mpi_exchanges
from bench_harness.programs import sweep_parser
from bench_harness.verdicts import allreduce_rounds, best_peer_ratio, median_by_size
from bench_suite import Suite
from hpcdp import comm
from hpcdp.bench.measure import (
    Candidate,
    FreshData,
    MeasuringSchedule,
    alternate,
    as_json,
    check_writable,
    describe,
    format_size,
    gather,
    median_ratio,
    pin_to_own_core,
    size_range,
    turn_medians,
    write,
    wrong,
)
from hpcdp.launch.parser import at_least

OURS = ("hpcdp buckets", "hpcdp any array")


def compare(
    world: comm.World, floor: Floor, gloo: Gloo | None, nbytes: int, *, iterations: int, warmup: int
) -> dict[str, Any]:
    """One size; every rank must call.

    Returns ``nbytes``, ``median_us`` by name, the best pattern (``floor``) and the best ``peer`` (None without any),
    the ``floor_share`` and ``peer_ratio`` of each of `OURS`, ``staged_share``, that of the bare exchange of private
    arrays for any array, and ``wrong``, the wrong elements by name.
    """
    count = max(1, nbytes // 4)
    data = FreshData(world.rank, world.size)
    x, out = np.empty(count, np.float32), np.empty(count, np.float32)
    patterns = floor.patterns(count)
    peers: list[Candidate] = [*mpi_exchanges(world, data, x, out)]
    if gloo is not None:
        peers.append(gloo.exchange(data, x))
    candidates: list[Candidate] = [
        GradientAllreduce(OURS[0], world, data, count),
        ours(OURS[1], data, x, world, {"algorithm": "auto", "op": "sum"}),
        *patterns,
        *peers,
    ]
    found = gather(world, alternate(candidates, floor.barrier, MeasuringSchedule.for_size(nbytes, iterations, warmup)))
    taken = {name: turn_medians(ranks) for name, ranks in found.items()}
    medians = {name: float(np.median(us)) for name, us in taken.items()}
    best_pattern = min((each.name for each in patterns[:STAGED]), key=medians.__getitem__)
    best_peer = min((each.name for each in peers), key=medians.__getitem__, default=None)
    return {
        "nbytes": count * 4,
        "median_us": medians,
        "floor": best_pattern,
        "floor_share": {name: median_ratio(taken[best_pattern], taken[name]) for name in OURS},
        "staged_share": median_ratio(taken[patterns[STAGED].name], taken[OURS[1]]),
        "peer": best_peer,
        "peer_ratio": {name: median_ratio(taken[best_peer], taken[name]) for name in OURS} if best_peer else {},
        "wrong": {name: wrong(ranks) for name, ranks in found.items()},
    }


def print_row(row: dict[str, Any], *, heading: bool) -> None:
    """One size, a line a candidate, under the heading where that is asked for; at most 80 columns wide."""
    if heading:
        print(f"{'# Size':<8}{'candidate':<28}{'median us':>12}{'floor %':>9}{'peer x':>8}")
    first = format_size(row["nbytes"])
    for name, us in row["median_us"].items():
        share = f"{100 * row['floor_share'][name]:.0f}" if name in row["floor_share"] else ""
        ratio = f"{row['peer_ratio'][name]:.2f}" if name in row["peer_ratio"] else ""
        what = {row["floor"]: "floor", row["peer"]: "best peer"}.get(name, "")
        faulty = f"{row['wrong'][name]} WRONG" if row["wrong"][name] else ""
        line = f"{first:<8}{name:<28}{us:>12.2f}{share:>9}{ratio:>8}  {faulty or what}"
        print(line.rstrip(), flush=True)
        first = ""
    print_line_of(row)


def alternate_jobs(args: argparse.Namespace) -> int:
    """Run this comparison and MPICH's allreduce as alternating jobs, print their table, and return the exit status."""
    suite = Suite(args.ranks, args.sizes, args.rounds, False, args.mpich)
    for _ in range(args.rounds):
        suite.allreduces(["-m", args.sizes, "--factor", str(args.factor)], ["-i", str(args.iterations)])
    for failure in suite.failures:
        print(f"# failed: {failure}")
    rounds, peers = allreduce_rounds(suite.results)
    if rounds:
        names = (*OURS, *peers)
        best = {own: best_peer_ratio(rounds, own, peers) for own in OURS}
        print(f"# medians over {args.rounds} rounds; peer x: the best peer's time over hpcdp's")
        print(f"{'# Size':<8}{'candidate':<28}{'median us':>12}{'peer x':>9}")
        columns = {name: median_by_size(rounds, partial(_median_of, name)) for name in names}
        for nbytes in columns[OURS[0]]:
            first = format_size(nbytes)
            for name in (name for name in names if nbytes in columns[name]):
                ratio = f"{best[name][nbytes][0]:.2f}" if nbytes in best.get(name, ()) else ""
                what = "best peer" if best[OURS[0]].get(nbytes, (0, ""))[1] == name else ""
                print(f"{first:<8}{name:<28}{columns[name][nbytes]:>12.2f}{ratio:>9}  {what}".rstrip())
                first = ""
    if args.json:
        write(args.json, as_json(suite.results))
    return 1 if suite.failures else 0


def _median_of(name: str, row: dict[str, Any]) -> float | None:
    return row["median_us"].get(name)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = sweep_parser("allreduce", __doc__, "4:64M", "message sizes in bytes", 3)
    parser.add_argument("--mpich", metavar="PYTHON", help="start jobs in turn with this Python, which has MPICH")
    parser.add_argument("--ranks", type=at_least(2), default=2, help="of those jobs")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="how often each of those jobs is run")
    args = parser.parse_args(argv)
    sizes = size_range(args.sizes, args.factor)
    if args.mpich:
        check_python("allreduce --mpich", args.mpich)
        check_writable("allreduce", [args.json])
        return alternate_jobs(args)
    world = comm.init()
    check_writable("allreduce", [args.json], world)
    pin_to_own_core(world)
    gloo, reason = gloo_or_reason(world)
    if world.rank == 0:
        print(f"# allreduce, sum of float32, {world.size} ranks, {world.library}")
        print("# median us of the slowest rank; floor %: the best pattern's time over hpcdp's;")
        print("# peer x: the best peer's time over hpcdp's")
        print(f"# {reason}; not compared" if reason else "# gloo: torch.distributed, one thread")
    floor = Floor(world, max(sizes))
    rows = []
    for nbytes in sizes:
        measure = partial(compare, world, floor, gloo, nbytes, iterations=args.iterations, warmup=args.warmup)
        rows.append(floor.beside(measure))
        if world.rank == 0:
            print_row(rows[-1], heading=len(rows) == 1)
    limits = limits_of(floor)
    if world.rank == 0:
        facts = ", ".join(f"{name} {value:.2f}" for name, value in limits.items())
        print(textwrap.fill(facts, 80, initial_indent="# ", subsequent_indent="# "))
    if gloo is not None:
        gloo.close()
    report = {"benchmark": "allreduce", "machine": describe(world), "library": world.library, "limits": limits}
    write_json(args.json, world, {**report, "skipped": reason, "rows": rows})
    return 1 if any(count for row in rows for count in row["wrong"].values()) else 0


if __name__ == "__main__":
    programs.run(main)
