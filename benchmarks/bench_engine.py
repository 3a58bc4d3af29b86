"""The cost of a push to the dependency engine, compared with a submit to a pool of one thread.

``python benchmarks/bench_engine.py`` hands over small functions with one read and one write, turn by turn to the engine
and to ``concurrent.futures.ThreadPoolExecutor``, which knows no dependencies and no bound. A call alone is timed one by
one, so its time includes that of the clock (about 0.05 us); until all have run, as a whole; there and back, with a wait
for each task. Every turn checks that each function ran once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from bench_harness import programs
from hpcdp.bench.measure import as_json, check_writable, describe, median_ratio, write
from hpcdp.engine import Engine
from hpcdp.errors import HpcdpError
from hpcdp.launch.parser import Parser, at_least

TARGET_US = 10.0
"""The most that a push may cost, median."""

POOL = "pool"


class Executor(Protocol):
    """Runs functions on another thread, in the order in which they are handed over."""

    def hand_over(self, fn: Callable[[], object]) -> None:
        """Start ``fn`` on the other thread, after all earlier ones."""

    def wait_for_last(self) -> None:
        """Wait until the function that was handed over last has run."""

    def close(self) -> None:
        """End the thread."""


class ByEngine:
    """`Engine.push`, each function reading one of two groups of variables and writing the other's.

    Args:
        variables: in each group, taken in turn; with one, every task waits for the one before.
        synchronous: as of the engine.
    """

    def __init__(self, variables: int, synchronous: bool = False) -> None:
        self._engine = Engine(synchronous=synchronous)
        self._pairs = [((self._engine.variable(),), (self._engine.variable(),)) for _ in range(variables)]
        self._number = 0
        self._written = self._pairs[0][1][0]

    def hand_over(self, fn: Callable[[], object]) -> None:
        """Start ``fn`` on the other thread, after all earlier ones."""
        self._number = (self._number + 1) % len(self._pairs)
        reads, writes = self._pairs[self._number]
        self._engine.push(fn, reads, writes)
        self._written = writes[0]

    def wait_for_last(self) -> None:
        """Wait until the function that was handed over last has run."""
        self._engine.wait_to_read(self._written)

    def close(self) -> None:
        """End the thread."""
        self._engine.shutdown()


class ByPool:
    """``ThreadPoolExecutor(1).submit``."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._last: Future[object] | None = None

    def hand_over(self, fn: Callable[[], object]) -> None:
        """Start ``fn`` on the other thread, after all earlier ones."""
        self._last = self._pool.submit(fn)

    def wait_for_last(self) -> None:
        """Wait until the function that was handed over last has run."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


@dataclass
class Found:
    """Microseconds of one candidate, an item a turn: its median call, the 99th of 100 calls, and the two others."""

    call: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    all_run: list[float] = field(default_factory=list)
    round_trip: list[float] = field(default_factory=list)


def turn(executor: Executor, count: int, found: Found) -> None:
    """Time ``count`` functions of each kind.

    Raises:
        HpcdpError: one of them did not run, or ran twice.
    """
    ran = [0]

    def small() -> None:
        ran[0] += 1

    clock = time.perf_counter_ns
    calls = np.empty(count, np.int64)
    for i in range(count):
        begin = clock()
        executor.hand_over(small)
        calls[i] = clock() - begin
    executor.wait_for_last()
    begin = clock()
    for _ in range(count):
        executor.hand_over(small)
    executor.wait_for_last()
    all_run = clock() - begin
    trips = max(1, count // 10)
    begin = clock()
    for _ in range(trips):
        executor.hand_over(small)
        executor.wait_for_last()
    round_trip = clock() - begin
    if ran[0] != 2 * count + trips:
        raise HpcdpError("engine benchmark", expected=f"{2 * count + trips} runs", got=ran[0])
    found.call.append(float(np.median(calls)) / 1e3)
    found.p99.append(float(np.percentile(calls, 99)) / 1e3)
    found.all_run.append(all_run / count / 1e3)
    found.round_trip.append(round_trip / trips / 1e3)


def measure(turns: int, count: int) -> list[dict[str, Any]]:
    """Return a row for each candidate: medians over turns, and the pool's times as multiples of them."""
    candidates: dict[str, Executor] = {
        "engine, each after the one before": ByEngine(1),
        "engine, 64 pairs of variables": ByEngine(64),
        "engine, synchronous": ByEngine(1, synchronous=True),
        POOL: ByPool(),
    }
    found = {name: Found() for name in candidates}
    names = list(candidates)
    try:
        for executor in candidates.values():
            turn(executor, count, Found())
        for number in range(turns):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                turn(candidates[name], count, found[name])
    finally:
        for executor in candidates.values():
            executor.close()
    rows = []
    for name, series in found.items():
        row: dict[str, Any] = {"name": name}
        for what, values in vars(series).items():
            row[f"{what}_us"] = float(np.median(values))
            if what != "p99":
                row[f"{what}_pool_ratio"] = median_ratio(getattr(found[POOL], what), values)
        rows.append(row)
    return rows


def _line(row: dict[str, Any]) -> str:
    """Return a line of the table, at most 80 columns wide on machines of any speed."""

    def short(x: float, digits: int) -> str:
        return f"{x:.{digits if x < 100 else 0}f}"

    cells = [
        f"{short(row[f'{w}_us'], 2)} ({short(row[f'{w}_pool_ratio'], 1)})" for w in ("call", "all_run", "round_trip")
    ]
    return f"{row['name']:<34}{cells[0]:>13}{short(row['p99_us'], 1):>7}{cells[1]:>13}{cells[2]:>13}"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_engine.py", description=__doc__)
    parser.add_argument("--turns", type=at_least(1), default=25, metavar="N", help="of each candidate (25)")
    parser.add_argument("--count", type=at_least(10), default=2000, metavar="N", help="functions a turn (2000)")
    parser.add_argument("--json", metavar="FILE", help="the figures, and the machine they were measured on")
    args = parser.parse_args(argv)
    check_writable("engine", [args.json])
    rows = measure(args.turns, args.count)
    print(f"# us a task, medians of {args.turns} turns of {args.count}; in brackets the pool's, as a multiple")
    print(f"{'':<34}{'call':>13}{'p99':>7}{'all run':>13}{'round trip':>13}")
    for row in rows:
        print(_line(row))
    slowest = max(row["call_us"] for row in rows if row["name"] != POOL and "synchronous" not in row["name"])
    print(f"# target: a push below {TARGET_US:.0f} us: {'met' if slowest < TARGET_US else 'missed'}, {slowest:.2f} us")
    if args.json:
        write(args.json, as_json({"benchmark": "engine", "machine": describe(), "target_us": TARGET_US, "rows": rows}))
    return 0


if __name__ == "__main__":
    programs.run(main)
