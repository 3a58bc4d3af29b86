"""Key-value stores against collectives that move as many bytes, turn by turn in one run.

``mpirun -n 2 python -m hpcdp.benchmarks.kvstore -m 4K:16M``: ``pushpull`` of a ``dist_sync`` store without an updater
(the sum is stored, and pulled) beside ``hpcdp.allreduce`` of the same array, the MPI library's own, and a copy of it by
all ranks at once. In place both overwrite the array; to another array both leave it. ``push, then pull`` is what a
program does that computes in between. Data are written just before each call, and sums are checked. Times are medians
in microseconds of the slowest rank; a ratio is allreduce's time over pushpull's, the median of those within turns.

``HPCDP_RANKS_PER_NODE=1`` makes a node of each rank: sums then go from node to node, which allreduce may leave to the
MPI library, whose ranks share memory all the same; so there allreduce's ring, which is the way of a store, stands
beside it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .. import collectives, comm, kvstore
from . import program
from .collective import ours
from .files import check_writable, write_json
from .floor import Floor, copy_rates
from .machine import describe, pin_to_own_core
from .measure import (
    Exchange,
    FreshData,
    Schedule,
    alternate,
    format_size,
    gather,
    median_ratio,
    size_range,
    sweep_parser,
    turn_medians,
    wrong,
)

IN_PLACE, APART = "in place", "to another array"
RING = "allreduce, ring"


def compare(world: comm.World, store: kvstore.KVStore, nbytes: int, *, iterations: int, warmup: int) -> dict[str, Any]:
    """One size, whose key is new to ``store``; every rank must call.

    Returns ``nbytes``, ``median_us`` by name, ``ratio``, allreduce's time over pushpull's `IN_PLACE` and `APART` (and
    the `RING`'s, on several nodes), ``mpi_ratio``, that of the MPI library in place, ``copy_share``, the copy's time
    over that of pushpull in place, and ``wrong``, the wrong elements by name.
    """
    count = max(1, nbytes // 4)
    data = FreshData(world.rank, world.size)
    x, out = np.empty(count, np.float32), np.empty(count, np.float32)
    store.init(count, np.zeros(count, np.float32))

    def push_then_pull() -> None:
        store.push(count, x)
        store.pull(count, out)

    def call(name: str, result: np.ndarray, do: Callable[[], object]) -> Exchange:
        return Exchange(name, data, x, result, do)

    candidates = [
        call(f"pushpull {IN_PLACE}", x, lambda: store.pushpull(count, x)),
        ours(f"allreduce {IN_PLACE}", data, x, world, {}),
        call(f"pushpull {APART}", out, lambda: store.pushpull(count, x, out)),
        call(f"allreduce {APART}", out, lambda: collectives.allreduce(x, world=world, out=out)),
        call("push, then pull", out, push_then_pull),
        call("MPI in place", x, lambda: world.comm.native_allreduce(x, "sum")),
        Exchange("copy", data, x, out, partial(np.copyto, out, x), lambda result, _: int((result != x).sum())),
    ]
    if world.num_nodes > 1:
        candidates.append(ours(RING, data, x, world, {"algorithm": "ring"}))
    found = gather(world, alternate(candidates, world.comm.barrier, Schedule.for_size(nbytes, iterations, warmup)))
    taken = {name: turn_medians(ranks) for name, ranks in found.items()}
    ratio = {how: median_ratio(taken[f"allreduce {how}"], taken[f"pushpull {how}"]) for how in (IN_PLACE, APART)}
    own = taken[f"pushpull {IN_PLACE}"]
    return {
        "nbytes": count * 4,
        "median_us": {name: float(np.median(us)) for name, us in taken.items()},
        "ratio": ratio | ({RING: median_ratio(taken[RING], own)} if RING in taken else {}),
        "mpi_ratio": median_ratio(taken["MPI in place"], own),
        "copy_share": median_ratio(taken["copy"], own),
        "wrong": {name: wrong(ranks) for name, ranks in found.items()},
    }


def print_row(row: dict[str, Any], *, heading: bool) -> None:
    """One size, a line a candidate, under the heading where that is asked for; at most 80 columns wide."""
    if heading:
        print(f"{'# Size':<8}{'candidate':<30}{'median us':>12}{'allreduce x':>13}{'MPI x':>8}")
    first = format_size(row["nbytes"])
    for name, us in row["median_us"].items():
        ratio = row["ratio"].get(name.removeprefix("pushpull ")) if name.startswith("pushpull") else None
        shown = "" if ratio is None else f"{ratio:.2f}"
        mpi = f"{row['mpi_ratio']:.2f}" if name == f"pushpull {IN_PLACE}" else ""
        faulty = f"{row['wrong'][name]} WRONG" if row["wrong"][name] else ""
        print(f"{first:<8}{name:<30}{us:>12.2f}{shown:>13}{mpi:>8}  {faulty}".rstrip(), flush=True)
        first = ""


def main(argv: list[str] | None = None) -> int:
    parser = sweep_parser("kvstore", __doc__, "4K:16M", "value sizes in bytes", 3, factor=16)
    args = parser.parse_args(argv)
    sizes = size_range(args.sizes, args.factor)
    world = comm.init()
    check_writable("kvstore", [args.json], world)
    if world.num_nodes == 1:  # else the first ranks of all nodes may be on one machine
        pin_to_own_core(world)
    store = kvstore.create("dist_sync", world)
    if world.rank == 0:
        print(f"# dist_sync, sum of float32, ranks: {world.size}, nodes: {world.num_nodes}, {world.library}")
        print("# median us of the slowest rank; x: what allreduce or MPI takes over pushpull's")
    rows = []
    for nbytes in sizes:
        rows.append(compare(world, store, nbytes, iterations=args.iterations, warmup=args.warmup))
        if world.rank == 0:
            print_row(rows[-1], heading=len(rows) == 1)
    limits = copy_rates(Floor(world, max(sizes))) if world.num_nodes == 1 else {}
    if world.rank == 0 and limits:
        facts = ", ".join(f"{name} {value:.2f}" for name, value in limits.items())
        print(textwrap.fill(facts, 80, initial_indent="# ", subsequent_indent="# "))
    report = {"benchmark": "kvstore", "machine": describe(world), "library": world.library, "limits": limits}
    write_json(args.json, world, {**report, "rows": rows})
    return 1 if any(count for row in rows for count in row["wrong"].values()) else 0


if __name__ == "__main__":
    program.run(main)
