"""Operations of torch.distributed over the backend "hpcdp" and over gloo, turn by turn in one run.

``hpcdp launch -n 2 -- python benchmarks/bench_torch_operations.py`` measures the ranks that a launcher started. Before
each timed call all ranks write their data, read their last results, and meet in a barrier. Results are checked.

Times are those of the slowest rank. Sizes are those of OSU's benchmarks: the whole tensor for all_reduce, broadcast and
reduce, one rank's part for the others. The tensors of a list do not follow each other in memory. Ranks exchange
messages in pairs, the first with the last one; ``send, recv`` is one way, half of a round trip.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench_harness import programs
from bench_harness.figures import write_json
from bench_harness.peers import Gloo, require_torch
from hpcdp import comm
from hpcdp.bench.measure import (
    FreshData,
    MeasuringSchedule,
    alternate,
    check_memory,
    check_writable,
    describe,
    format_size,
    gather,
    median_ratio,
    parse_size,
    pin_to_own_core,
    turn_medians,
    wrong,
)
from hpcdp.core.checks import check_name
from hpcdp.launch.parser import Parser, at_least

OURS, PEER = "hpcdp", "gloo"
OPERATIONS = (
    "all_reduce", "broadcast", "reduce", "all_gather_single", "all_gather", "reduce_scatter", "all_to_all_single",
    "gather", "scatter", "send, recv", "irecv, isend", "barrier",
)  # fmt: skip
_ROOT, _GAP = 0, 16
"""The root, and the elements between tensors of a list."""
_TURN_NBYTES, _MOST_REPEATS = 8 << 20, 20
_WARMUP = 3


@dataclass
class Operation:
    """An operation over one backend; see `hpcdp.bench.measure.Candidate`.

    Args:
        name: the backend.
        call: runs the operation to its end.
        data: the inputs.
        sent: this rank's inputs, each shape ``(count,)``.
        received: its results, and the rank whose input each is; None for the sum of all.
        share: the part of the measured time that counts.
    """

    name: str
    call: Callable[[], Any]
    data: FreshData
    sent: Sequence[np.ndarray] = ()
    received: Sequence[tuple[np.ndarray, int | None]] = ()
    share: float = 1.0

    def refresh(self, iteration: int) -> None:
        """See `Candidate`."""
        for x in self.sent:
            self.data.write(x, iteration)
        for x, _ in self.received:
            x.max()

    def timed(self) -> int:
        """See `Candidate`."""
        begin = time.perf_counter_ns()
        self.call()
        return int((time.perf_counter_ns() - begin) * self.share)

    def wrong(self, iteration: int) -> int:
        """See `Candidate`."""
        return sum(
            self.data.wrong(x, iteration) if rank is None else self.data.wrong_input(x, iteration, rank)
            for x, rank in self.received
        )


def operation_of(name: str, count: int, backend: str, group: Any, world: comm.World) -> Operation:
    """Return operation ``name`` with tensors of ``count`` float32 over a process group; every rank must call."""
    torch: Any = importlib.import_module("torch")
    dist, data = torch.distributed, FreshData(world.rank, world.size)
    n, me = world.size, world.rank
    peer, is_root = n - 1 - me, me == _ROOT
    x, whole, result = (np.zeros(size, np.float32) for size in (count, n * count, n * count))
    apart = np.zeros((2, n, count + _GAP), np.float32)[:, :, :count]
    tensor, all_of_x, results = map(torch.from_numpy, (x, whole, result))
    inputs, outputs = ([torch.from_numpy(line) for line in lines] for lines in apart)
    own = outputs[me]
    parts = [(line, rank) for rank, line in enumerate(result.reshape(n, count))]
    lines = [(line, rank) for rank, line in enumerate(apart[1])]

    def there_and_back() -> None:
        for is_sender in (me < peer, me > peer):
            if is_sender:
                dist.send(tensor, peer, group)
            elif me != peer:
                dist.recv(own, peer, group)

    def both_ways() -> None:
        if me != peer:
            for work in (dist.irecv(own, peer, group), dist.isend(tensor, peer, group)):
                work.wait()

    from_root, from_peer = [(apart[1, me], _ROOT)], [(apart[1, me], peer)] * (me != peer)
    sent_or_not = outputs if is_root else None
    cases: dict[str, tuple[Any, ...]] = {
        "all_reduce": (lambda: dist.all_reduce(tensor, group=group), [x], [(x, None)]),
        "broadcast": (lambda: dist.broadcast(tensor, _ROOT, group), [x] * is_root, [(x, _ROOT)]),
        "reduce": (lambda: dist.reduce(tensor, _ROOT, group=group), [x], [(x, None)] * is_root),
        "all_gather_single": (lambda: dist.all_gather_into_tensor(results, tensor, group), [x], parts),
        "all_gather": (lambda: dist.all_gather(outputs, tensor, group), [x], lines),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(own, all_of_x, group=group),
                           whole.reshape(n, count), [(apart[1, me], None)]),
        "all_to_all_single": (lambda: dist.all_to_all_single(results, all_of_x, group=group),
                              whole.reshape(n, count), parts),
        "gather": (lambda: dist.gather(tensor, sent_or_not, _ROOT, group), [x], lines if is_root else []),
        "scatter": (lambda: dist.scatter(own, inputs if is_root else None, _ROOT, group),
                    apart[0] if is_root else [], from_root),
        "send, recv": (there_and_back, [x], from_peer, 0.5),
        "irecv, isend": (both_ways, [x], from_peer),
        "barrier": (lambda: dist.barrier(group), [], []),
    }  # fmt: skip
    call, sent, received, *share = cases[name]
    return Operation(backend, call, data, sent, received, *share)


def measure(world: comm.World, name: str, nbytes: int, groups: dict[str, Any], turns: int) -> dict[str, Any]:
    """Measure an operation at one size over the backends of ``groups``; every rank must call.

    Returns ``us``, the median over turns by backend, ``ratio``, the median over turns of the first backend's time over
    the last one's, and ``wrong``, the number of wrong elements of all ranks.
    """
    candidates = [operation_of(name, max(1, nbytes // 4), backend, group, world) for backend, group in groups.items()]
    repeats = max(1, min(_MOST_REPEATS, _TURN_NBYTES // nbytes))
    found = gather(world, alternate(candidates, world.barrier, MeasuringSchedule(turns, repeats, _WARMUP)))
    medians = {backend: turn_medians(ranks) for backend, ranks in found.items()}
    first, *_, last = medians.values()
    return {
        "operation": name,
        "nbytes": nbytes,
        "us": {backend: float(np.median(values)) for backend, values in medians.items()},
        "ratio": median_ratio(first, last),
        "wrong": sum(map(wrong, found.values())),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text, at most 80 columns wide."""
    lines = [f"{'# us':<20}{'bytes':>8}{PEER:>14}{OURS:>14}{f'{PEER} / {OURS}':>18}"]
    for row in rows:
        us = "".join(f"{row['us'][backend]:>14.1f}" for backend in (PEER, OURS))
        lines.append(f"{row['operation']:<20}{format_size(row['nbytes']):>8}{us}{row['ratio']:>18.2f}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_torch_operations.py", description=__doc__)
    parser.add_argument("-m", dest="sizes", default="8,1M,64M", metavar="SIZES", help="bytes (8,1M,64M)")
    parser.add_argument("--operations", default=";".join(OPERATIONS), help=f"of {'; '.join(OPERATIONS)}")
    parser.add_argument("--turns", type=at_least(1), default=7, help="of each backend (7)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    args = parser.parse_args(argv)
    names, sizes = args.operations.split(";"), [parse_size(size) for size in args.sizes.split(",")]
    for name in names:
        check_name("operation", name, list(OPERATIONS))
    require_torch("torch_operations")
    world = comm.init()
    check_writable("torch_operations", [args.json], world)
    check_memory("torch_operations", world, max(sizes), 2 * (4 * world.size + 1))
    pin_to_own_core(world)
    gloo = Gloo(world)
    dist: Any = importlib.import_module("torch.distributed")
    groups = {backend: dist.new_group(backend=backend) for backend in (PEER, OURS)}
    rows: list[dict[str, Any]] = []
    for nbytes in sizes:
        for name in names:
            if name != "barrier" or nbytes == sizes[0]:
                rows.append(measure(world, name, nbytes, groups, args.turns))
    gloo.close()
    if world.rank == 0:
        print(table(rows), flush=True)
    write_json(args.json, world, {"benchmark": "torch_operations", "rows": rows, "machine": describe(world)})
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    programs.run(main)
