"""Latency and bandwidth of hpcdp's allreduce, in OSU's columns.

``mpirun -n 2 python -m hpcdp.benchmarks.allreduce -m 4:64M -T float32 --algorithm shared``. algbw is bytes / time and
busbw ``2 (n - 1) / n`` of it, in decimal GB/s (nccl-tests, PERFORMANCE.md). Every rank's data differ and are written
anew before each timing; results are checked unless ``-c 0``, and wrong ones make the exit status 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from .. import collectives, comm
from .machine import describe, pin_to_own_core, write_json
from .measure import (
    Exchange,
    FreshData,
    Schedule,
    alternate,
    bus_factor,
    gather,
    size_range,
    timing,
    wrong,
)


def ours(name: str, data: FreshData, x: np.ndarray, world: comm.World, how: dict[str, str]) -> Exchange:
    """hpcdp's allreduce of ``x`` in place; ``how`` holds ``algorithm`` and ``op``."""
    return Exchange(name, data, x, x, lambda: collectives.allreduce(x, world=world, **how))


def sweep(
    world: comm.World,
    sizes: list[int],
    make: Callable[[int], Exchange],
    *,
    iterations: int = 200,
    warmup: int = 10,
    validate: bool = True,
) -> list[dict[str, Any]]:
    """Time ``make(nbytes)`` at every size; every rank must call.

    Returns one row a size: ``nbytes``, OSU's ``avg``, ``minimum`` and ``maximum`` and the ``median`` in microseconds,
    ``iterations``, ``algbw_gb_s``, ``busbw_gb_s``, and ``wrong``, the number of wrong elements over all ranks.
    """
    rows = []
    for nbytes in sizes:
        exchange = make(nbytes)
        schedule = Schedule.for_size(nbytes, iterations, warmup)
        ranks = gather(world, alternate([exchange], world.comm.barrier, schedule, validate))[exchange.name]
        taken = timing(ranks)
        algbw = exchange.x.nbytes / taken.avg / 1e3
        rows.append(
            {
                "nbytes": exchange.x.nbytes,
                **asdict(taken),
                "algbw_gb_s": algbw,
                "busbw_gb_s": algbw * bus_factor(world.size),
                "wrong": wrong(ranks),
            }
        )
    return rows


def print_table(rows: list[dict[str, Any]], title: str, validated: bool) -> None:
    """OSU's columns, then the bandwidths, then whether the results were right."""
    print(f"# hpcdp {title}")
    print(
        f"{'# Size':<12}{'Avg Latency(us)':>18}{'Min Latency(us)':>18}{'Max Latency(us)':>18}{'Iterations':>12}"
        f"{'algbw(GB/s)':>14}{'busbw(GB/s)':>14}{'Validation':>12}"
    )
    for row in rows:
        verdict = "-" if not validated else "Pass" if row["wrong"] == 0 else "Fail"
        print(
            f"{row['nbytes']:<12}{row['avg']:>18.2f}{row['minimum']:>18.2f}{row['maximum']:>18.2f}{row['iterations']:>12}"
            f"{row['algbw_gb_s']:>14.2f}{row['busbw_gb_s']:>14.2f}{verdict:>12}"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hpcdp.benchmarks.allreduce", description=__doc__)
    parser.add_argument("-m", dest="sizes", default="4:64M", metavar="MIN:MAX", help="message sizes in bytes")
    parser.add_argument("-f", dest="factor", type=int, default=2, help="each size is so many times the one before")
    parser.add_argument("-i", dest="iterations", type=int, default=200)
    parser.add_argument("-x", dest="warmup", type=int, default=10)
    parser.add_argument("-c", dest="validate", type=int, choices=(0, 1), default=1, help="check the results")
    parser.add_argument("-T", dest="dtype", default="float32", help="a NumPy dtype, e.g. float16, int32")
    parser.add_argument("--op", default="sum")
    parser.add_argument("--algorithm", default="auto")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    world = comm.init()
    pin_to_own_core(world)
    sizes = size_range(args.sizes, args.factor)
    dtype = np.dtype(args.dtype)
    data = FreshData(world.rank, world.size, dtype, args.op)
    how = {"algorithm": args.algorithm, "op": args.op}
    block = np.empty(max(1, max(sizes) // dtype.itemsize), dtype)

    def make(nbytes: int) -> Exchange:
        return ours("hpcdp", data, block[: max(1, nbytes // dtype.itemsize)], world, how)

    rows = sweep(world, sizes, make, iterations=args.iterations, warmup=args.warmup, validate=bool(args.validate))
    if world.rank == 0:
        title = f"allreduce, {args.op} of {dtype}, algorithm {args.algorithm}, {world.size} ranks"
        print_table(rows, title, bool(args.validate))
    write_json(
        args.json,
        world,
        {"benchmark": "allreduce", **how, "dtype": str(dtype), "machine": describe(world), "rows": rows},
    )
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
