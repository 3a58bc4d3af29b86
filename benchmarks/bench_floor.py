"""The machine's own limits: bare exchanges over memory shared by the ranks, copy rates, latency between cores.

``mpirun -n 2 python benchmarks/bench_floor.py -m 4:256M`` prints, for each size, what bare compiled access patterns
(`bench_harness.access_patterns`) need for the exchange of an allreduce. The best of the four that work on shared arrays
is the floor that hpcdp's allreduce is compared with; a fifth one is for arrays that are not in shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench_harness import programs
from bench_harness.figures import write_json
from hpcdp import comm, kernels
from hpcdp.bench.measure import (
    FreshData,
    MeasuringSchedule,
    alternate,
    check_writable,
    describe,
    format_size,
    gather,
    pin_to_own_core,
    size_range,
    timing,
    wrong,
)
from hpcdp.bench.tune import copy_rates
from hpcdp.errors import UnsupportedError
from hpcdp.launch.parser import Parser, at_least

STAGED = 4
"""The pattern for arrays that are not in shared memory; the floor is the best of those before it."""

_SHORT_ROUNDS = 2000


class Floor:
    """Shared memory for bare exchanges of up to ``max_nbytes`` a rank; every rank of one node must make it together.

    Args:
        world: all ranks on one node, at least two.
        max_nbytes: the largest size that will be asked for.

    Raises:
        UnsupportedError: a world of one rank, or of several nodes.
    """

    def __init__(self, world: comm.World, max_nbytes: int) -> None:
        if world.size < 2 or world.num_nodes > 1:
            raise UnsupportedError(
                "floor", expected="2 ranks or more on one node", got=f"{world.size} ranks on {world.num_nodes} nodes"
            )
        self.stride = kernels.load("shm_exchange").STRIDE
        from bench_harness import access_patterns  # not before: Numba would be loaded with the module

        self.kernel = access_patterns
        self.world = world
        count = max(1, max_nbytes // 4)
        memory = world.node_memory
        self._rows = memory.alloc((world.size * count,), np.float32)
        self._shared = memory.alloc((count,), np.float32)
        self._flags = memory.alloc((2 * world.size * self.stride,), np.int32)
        self._out = np.zeros(count, np.float32)
        self._clock = np.zeros(3, np.int64)
        self._epoch = 0

    def rows(self, count: int) -> np.ndarray:
        """Return the inputs, shape ``(ranks, count)``, float32, in memory shared by the ranks."""
        return self._rows[: self.world.size * count].reshape(self.world.size, count)

    def barrier(self) -> None:
        """Synchronize all ranks within some hundred nanoseconds by spinning; every rank needs its own core."""
        self._epoch = self.kernel.barrier(self._flags, self.world.rank, self._epoch)

    def exchange(self, pattern: int, count: int) -> int:
        """One bare exchange of the first ``count`` elements; the nanoseconds that it took this rank."""
        self._epoch = self.kernel.timed_exchange(
            pattern,
            self.rows(count),
            self._shared[:count],
            self._out[:count],
            self._flags,
            self.world.rank,
            self._epoch,
            self._clock,
        )
        return int(self._clock[2])

    def result(self, pattern: int, count: int) -> np.ndarray:
        """Return the array that has the sum after `exchange`."""
        return self.rows(count)[self.world.rank] if pattern in (2, 3) else self._out[:count]

    def input(self, pattern: int, count: int) -> np.ndarray:
        """Return the array for this rank's input of `exchange`."""
        return self._out[:count] if pattern == STAGED else self.rows(count)[self.world.rank]

    def patterns(self, count: int) -> list[BareExchange]:
        """Return the patterns at this size as candidates of `measure.alternate`, the staged one last."""
        data = FreshData(self.world.rank, self.world.size)
        return [BareExchange(name, self, data, i, count) for i, name in enumerate(self.kernel.PATTERNS)]

    def line_round_trip_ns(self, rounds: int = 20000) -> float:
        """Nanoseconds for one cache line to go from the core of rank 0 to that of rank 1 and back."""
        self._epoch = self.kernel.ping_pong(self._flags, self.world.rank, self._epoch, rounds, self._clock)
        elapsed = float(self._clock[2]) / rounds
        self.barrier()
        return elapsed

    def beside(self, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the row of ``measure``, with the ``line_round_trip_ns`` before and after it as a list.

        The two differ if the host has moved the virtual machine to cores that share a cache, or do not.
        """
        before = self.line_round_trip_ns(_SHORT_ROUNDS)
        row = measure()
        return row | {"line_round_trip_ns": [before, self.line_round_trip_ns(_SHORT_ROUNDS)]}


def print_line_of(row: dict[str, Any]) -> None:
    """Print the distance of the cores, if `Floor.beside` has measured it."""
    if "line_round_trip_ns" in row:
        before, after = row["line_round_trip_ns"]
        print(f"# a cache line there and back: {before:.0f} ns before, {after:.0f} ns behind", flush=True)


@dataclass
class BareExchange:
    """One pattern at one size, timed inside the compiled code."""

    name: str
    floor: Floor
    data: FreshData
    pattern: int
    count: int

    def refresh(self, iteration: int) -> None:
        """Write the data of an iteration into the inputs."""
        self.data.write(self.floor.input(self.pattern, self.count), iteration)

    def timed(self) -> int:
        """Run the exchange once and return its nanoseconds."""
        return self.floor.exchange(self.pattern, self.count)

    def wrong(self, iteration: int) -> int:
        """Return how many elements of the result of an iteration are wrong."""
        return self.data.wrong(self.floor.result(self.pattern, self.count), iteration)


def limits_of(floor: Floor) -> dict[str, float]:
    """Measure the bounds of every exchange: `Floor.line_round_trip_ns` for two ranks, and `copy_rates`."""
    line = {"line_round_trip_ns": floor.line_round_trip_ns()} if floor.world.size > 1 else {}
    return line | copy_rates(floor.world)


def sweep(world: comm.World, sizes: list[int], iterations: int, warmup: int) -> list[dict[str, Any]]:
    """Median microseconds of every pattern at every size, and the best of the four on shared arrays; all must call."""
    floor = Floor(world, max(sizes))
    rows = []
    for nbytes in sizes:
        schedule, count = MeasuringSchedule.for_size(nbytes, iterations, warmup), max(1, nbytes // 4)
        found = gather(world, alternate(floor.patterns(count), floor.barrier, schedule))
        medians = {name: timing(ranks).median for name, ranks in found.items()}
        rows.append(
            {
                "nbytes": count * 4,
                "median_us": medians,
                "best": min(list(medians)[:STAGED], key=medians.__getitem__),
                "wrong": sum(map(wrong, found.values())),
            }
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_floor.py", description=__doc__)
    parser.add_argument("-m", dest="sizes", default="4:256M", metavar="MIN:MAX", help="message sizes in bytes")
    parser.add_argument("-i", dest="iterations", type=at_least(1), default=200)
    parser.add_argument("-x", dest="warmup", type=at_least(0), default=2)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    world = comm.init()
    check_writable("floor", [args.json], world)
    core = pin_to_own_core(world)
    rows = sweep(world, size_range(args.sizes), args.iterations, args.warmup)
    floor = Floor(world, 4)
    limits = limits_of(floor)
    if world.rank == 0:
        print(f"# bare exchanges, float32, {world.size} ranks, rank 0 on core {core} of {os.cpu_count()}; median us")
        print(f"# {'Size':>10}" + "".join(f"{name:>24}" for name in rows[0]["median_us"]) + f"{'best GB/s':>12}")
        for row in rows:
            best = row["nbytes"] / row["median_us"][row["best"]] / 1e3
            columns = "".join(f"{us:>24.2f}" for us in row["median_us"].values())
            print(f"{format_size(row['nbytes']):>12}{columns}{best:>12.2f}" + (" WRONG" if row["wrong"] else ""))
        print("# " + ", ".join(f"{name} {value:.2f}" for name, value in limits.items()))
    write_json(args.json, world, {"benchmark": "floor", "machine": describe(world), "limits": limits, "rows": rows})
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    programs.run(main)
