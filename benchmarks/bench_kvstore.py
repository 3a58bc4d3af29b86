"""Key-value stores against collectives that move as many bytes, turn by turn in one run.

``mpirun -n 2 python benchmarks/bench_kvstore.py -m 4K:16M``: ``pushpull`` of a ``dist_sync`` store without an updater
(the sum is stored, and pulled) beside ``hpcdp.allreduce`` of the same array, the MPI library's own, and a copy of it by
all ranks at once. In place both overwrite the array; to another array both leave it. A store keeps the sum besides:
``allreduce, sum kept`` is an allreduce in place after which every rank copies its part of the sum, which is what must
be done at the least. ``push, then pull`` is what a program does that computes in between; ``pushpull, SGD`` is that of
a store that updates its values by what is pushed. Data are written just before each call, and sums are checked. Times
are medians in microseconds of the slowest rank; a ratio is allreduce's time over pushpull's, the median of those within
turns.

In a node ``dist_async`` follows: rounds over eight keys (fewer long ones), which all ranks push and pull in the same
order, beside copies of as many bytes by all ranks at once. What the keys are in the end is the sum of all pushes.

``HPCDP_RANKS_PER_NODE=1`` makes a node of each rank: sums then go from node to node, which allreduce may leave to the
MPI library, whose ranks share memory all the same; so there allreduce's ring, which is the way of a store, stands
beside it.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench_floor import Floor, limits_of, print_line_of
from bench_harness import programs
from bench_harness.figures import ours, write_json
from bench_harness.programs import sweep_parser
from hpcdp import collectives, comm, kvstore, optim
from hpcdp.bench.measure import (
    FreshData,
    MeasuredCollective,
    MeasuringSchedule,
    alternate,
    check_writable,
    count_wrong,
    describe,
    format_size,
    gather,
    median_ratio,
    pin_to_own_core,
    size_range,
    turn_medians,
    wrong,
)
from hpcdp.comm.communicator import bounds

IN_PLACE, APART = "in place", "to another array"
RING, KEPT = "allreduce, ring", "allreduce, sum kept"
PUSH_THEN_PULL, UPDATED = "push, then pull", "pushpull, SGD"
_KEYS, _MOST_NBYTES = 8, 16 << 20


class Updating(MeasuredCollective):
    """A push and pull of a store that subtracts what is pushed from a value of zeros."""

    def __init__(self, data: FreshData, x: np.ndarray, call: Callable[[], object]) -> None:
        self._total = np.zeros_like(data.reduced(0))
        super().__init__(UPDATED, data, x, x, call, lambda value, _: count_wrong(value, -self._total, 0.0))

    def refresh(self, iteration: int) -> None:
        """Write the data of an iteration into the inputs."""
        super().refresh(iteration)
        self._total += self.data.reduced(iteration)


def compare(world: comm.World, store: kvstore.KVStore, nbytes: int, *, iterations: int, warmup: int) -> dict[str, Any]:
    """One size, whose key is new to ``store``; every rank must call.

    Returns ``nbytes``, ``median_us`` by name, ``ratio``, allreduce's time over pushpull's `IN_PLACE` and `APART` (that
    of what has `KEPT` the sum, and, on several nodes, of the `RING` in place), ``mpi_ratio``, that of the MPI library
    in place, ``copy_share``, the copy's time over that of pushpull in place, and ``wrong``, the wrong elements by name.
    """
    count = max(1, nbytes // 4)
    data = FreshData(world.rank, world.size)
    x, out = np.empty(count, np.float32), np.empty(count, np.float32)
    store.init(count, np.zeros(count, np.float32))
    updating = kvstore.create("dist_sync", world)
    updating.init(count, np.zeros(count, np.float32))
    updating.set_optimizer(optim.SGD(lr=1.0))

    first, last = bounds(count, world.size)[world.rank : world.rank + 2]
    kept = np.empty(last - first, np.float32)

    def keep_sum() -> None:
        collectives.allreduce(x, world=world)
        kept[...] = x[first:last]

    def push_then_pull() -> None:
        store.push(count, x)
        store.pull(count, out)

    def call(name: str, result: np.ndarray, do: Callable[[], object]) -> MeasuredCollective:
        return MeasuredCollective(name, data, x, result, do)

    candidates = [
        call(f"pushpull {IN_PLACE}", x, lambda: store.pushpull(count, x)),
        ours(f"allreduce {IN_PLACE}", data, x, world, {}),
        call(f"pushpull {APART}", out, lambda: store.pushpull(count, x, out)),
        call(f"allreduce {APART}", out, lambda: collectives.allreduce(x, world=world, out=out)),
        call(KEPT, x, keep_sum),
        call(PUSH_THEN_PULL, out, push_then_pull),
        Updating(data, x, lambda: updating.pushpull(count, x)),
        call("MPI in place", x, lambda: world.comm.native_allreduce(x, "sum")),
        MeasuredCollective(
            "copy", data, x, out, partial(np.copyto, out, x), lambda result, _: int((result != x).sum())
        ),
    ]
    if world.num_nodes > 1:
        candidates.append(ours(RING, data, x, world, {"algorithm": "ring"}))
    found = gather(
        world, alternate(candidates, world.comm.barrier, MeasuringSchedule.for_size(nbytes, iterations, warmup))
    )
    taken = {name: turn_medians(ranks) for name, ranks in found.items()}
    ratio = {how: median_ratio(taken[f"allreduce {how}"], taken[f"pushpull {how}"]) for how in (IN_PLACE, APART)}
    own = taken[f"pushpull {IN_PLACE}"]
    ratio |= {name: median_ratio(taken[name], own) for name in (KEPT, RING) if name in taken}
    return {
        "nbytes": count * 4,
        "median_us": {name: float(np.median(us)) for name, us in taken.items()},
        "ratio": ratio,
        "mpi_ratio": median_ratio(taken["MPI in place"], own),
        "copy_share": median_ratio(taken["copy"], own),
        "wrong": {name: wrong(ranks) for name, ranks in found.items()},
    }


class Rounds:
    """Calls for some keys of an asynchronous store, one after another; adds up what is pushed.

    Args:
        name: as printed.
        data: the inputs.
        x: what is pushed, shape ``(keys, count)``.
        call: does it for one key.
        total: what all ranks have pushed so far, a block that the keys repeat; changed in place. None: nothing is.
    """

    def __init__(
        self, name: str, data: FreshData, x: np.ndarray, call: Callable[[int], object], total: np.ndarray | None
    ) -> None:
        self.name, self._data, self._x, self._call, self._total = name, data, x, call, total

    def refresh(self, iteration: int) -> None:
        """Write the data of an iteration into the inputs."""
        self._data.write(self._x.reshape(-1), iteration)
        if self._total is not None:
            self._total += self._data.reduced(iteration)

    def timed(self) -> int:
        """Run the exchange once and return its nanoseconds."""
        begin = time.perf_counter_ns()
        for number in range(len(self._x)):
            self._call(number)
        return time.perf_counter_ns() - begin

    def wrong(self, iteration: int) -> int:
        """Return how many elements of the result of an iteration are wrong."""
        return 0  # the sum is looked at in the end: meanwhile others push


def compare_asynchronous(world: comm.World, nbytes: int, *, iterations: int, warmup: int) -> dict[str, Any]:
    """``dist_async`` with keys of one size, in a store of their own; every rank must call.

    Returns ``nbytes`` and ``keys``, ``median_us`` of one key by name, ``copy_share``, the time of a copy of as many
    bytes over that of what has the name, and ``wrong``, the elements that are not the sum of all pushes.
    """
    count = max(1, nbytes // 4)
    keys = range(max(1, min(_KEYS, _MOST_NBYTES // nbytes)))
    data = FreshData(world.rank, world.size)
    total = np.zeros_like(data.reduced(0))
    x, out = (np.zeros((len(keys), count), np.float32) for _ in range(2))
    store = kvstore.create("dist_async", world)
    store.init(list(keys), list(out))
    store.set_optimizer(optim.SGD(lr=1.0))

    def push_then_pull(key: int) -> None:
        store.push(key, x[key])
        store.pull(key, out[key])

    candidates = [
        Rounds("copy", data, x, lambda key: np.copyto(out[key], x[key]), None),
        Rounds("push", data, x, lambda key: store.push(key, x[key]), total),
        Rounds("pull", data, x, lambda key: store.pull(key, out[key]), None),
        Rounds(PUSH_THEN_PULL, data, x, push_then_pull, total),
        Rounds("pushpull", data, x, lambda key: store.pushpull(key, x[key], out[key]), total),
    ]
    found = gather(
        world, alternate(candidates, world.comm.barrier, MeasuringSchedule(iterations, 1, warmup), validate=False)
    )
    store.barrier()
    for key in keys:
        store.pull(key, out[key])
    taken = {name: turn_medians(ranks) / len(keys) for name, ranks in found.items()}
    return {
        "nbytes": count * 4,
        "keys": len(keys),
        "median_us": {name: float(np.median(us)) for name, us in taken.items()},
        "copy_share": {name: median_ratio(taken["copy"], us) for name, us in taken.items() if name != "copy"},
        "wrong": sum(world.comm.allgather_json(count_wrong(out.reshape(-1), -total, 0.0))),
    }


def print_asynchronous(row: dict[str, Any], *, heading: bool) -> None:
    """One size of ``dist_async``, a line a candidate."""
    if heading:
        print("# dist_async; median us of a key, of the slowest rank; share: of the copy rate")
        print(f"{'# Size':<8}{'candidate':<30}{'median us':>12}{'share':>13}")
    first = format_size(row["nbytes"])
    for name, us in row["median_us"].items():
        share = f"{row['copy_share'][name]:.2f}" if name in row["copy_share"] else ""
        print(f"{first:<8}{name:<30}{us:>12.2f}{share:>13}".rstrip(), flush=True)
        first = ""
    if row["wrong"]:
        print(f"# {row['wrong']} WRONG", flush=True)
    print_line_of(row)


def print_row(row: dict[str, Any], *, heading: bool) -> None:
    """One size, a line a candidate, under the heading where that is asked for; at most 80 columns wide."""
    if heading:
        print(f"{'# Size':<8}{'candidate':<28}{'median us':>11}{'allreduce x':>13}{'kept x':>8}{'MPI x':>8}")
    first = format_size(row["nbytes"])
    for name, us in row["median_us"].items():
        ratio = row["ratio"].get(name.removeprefix("pushpull ")) if name.startswith("pushpull") else None
        shown = "" if ratio is None else f"{ratio:.2f}"
        in_place = name == f"pushpull {IN_PLACE}"
        kept, mpi = (f"{row['ratio'][KEPT]:.2f}", f"{row['mpi_ratio']:.2f}") if in_place else ("", "")
        faulty = f"{row['wrong'][name]} WRONG" if row["wrong"][name] else ""
        print(f"{first:<8}{name:<28}{us:>11.2f}{shown:>13}{kept:>8}{mpi:>8}  {faulty}".rstrip(), flush=True)
        first = ""
    print_line_of(row)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
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
        print("# median us of the slowest rank; x: what that takes over pushpull's")
    rows = []
    floor = Floor(world, max(sizes)) if world.num_nodes == 1 else None
    for nbytes in sizes:
        measure = partial(compare, world, store, nbytes, iterations=args.iterations, warmup=args.warmup)
        rows.append(measure() if floor is None else floor.beside(measure))
        if world.rank == 0:
            print_row(rows[-1], heading=len(rows) == 1)
    asynchronous = []
    limits = {}
    if floor is not None:
        for nbytes in sizes:
            measure = partial(compare_asynchronous, world, nbytes, iterations=args.iterations, warmup=args.warmup)
            asynchronous.append(floor.beside(measure))
            if world.rank == 0:
                print_asynchronous(asynchronous[-1], heading=len(asynchronous) == 1)
        limits = limits_of(floor)
    if world.rank == 0 and limits:
        facts = ", ".join(f"{name} {value:.2f}" for name, value in limits.items())
        print(textwrap.fill(facts, 80, initial_indent="# ", subsequent_indent="# "))
    report = {"benchmark": "kvstore", "machine": describe(world), "library": world.library, "limits": limits}
    write_json(args.json, world, {**report, "rows": rows, "asynchronous": asynchronous})
    faulty = any(any(row["wrong"].values()) for row in rows) or any(row["wrong"] for row in asynchronous)
    return 1 if faulty else 0


if __name__ == "__main__":
    programs.run(main)
