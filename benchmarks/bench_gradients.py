"""Gradients through a Trainer: their allreduce, and reduce and update, against a peer's allreduce and update.

``mpirun -n 2 python benchmarks/bench_gradients.py -m 64K:64M`` (one node). A model here is nothing but flat parameters.
Before each step of SGD with momentum all ranks read them and write gradients anew, as forward and backward do: what
other cores have read takes longer to write. A `Trainer` as it is made by itself stands beside both owners that it
chooses from. The peers reduce a private array and update it with the fastest fused kernel at hand: the MPI library with
hpcdp's own, gloo with PyTorch's. Every candidate's parameters are checked against the same updates in plain NumPy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench_floor import Floor, print_line_of
from bench_harness import programs
from bench_harness.figures import write_json
from bench_harness.peers import Gloo, gloo_or_reason
from bench_harness.programs import sweep_parser
from hpcdp import comm, optim
from hpcdp.bench.measure import (
    Candidate,
    FreshData,
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
from hpcdp.data_parallel.bucket_trainer import BucketTrainer

OURS = "Trainer"
_LR, _MOMENTUM = 0.01, 0.9
_PARAMETER_COUNT = 1 << 20
_TOLERANCE = 1e-4


@dataclass
class FlatParameter:
    """A parameter of a model without layers: what `hpcdp.data_parallel` needs and nothing else."""

    name: str
    data: np.ndarray
    grad: Any = None
    grad_req: str = "write"
    grad_hook: Callable[[Any], None] | None = None


def flat_parameters(count: int) -> list[FlatParameter]:
    """``count`` zeros, float32, in parameters of up to 4 MiB."""
    sizes = [min(_PARAMETER_COUNT, count - start) for start in range(0, count, _PARAMETER_COUNT)]
    return [FlatParameter(f"p{i}", np.zeros(size, np.float32)) for i, size in enumerate(sizes)]


class _Gradients:
    """Parameters whose gradients lie in a Trainer's buckets, written as backward writes them."""

    def __init__(self, world: comm.World, data: FreshData, count: int, owner: str) -> None:
        self.data = data
        self.params = flat_parameters(count)
        self.trainer = BucketTrainer(self.params, optim.SGD(lr=_LR, momentum=_MOMENTUM), world=world, owner=owner)

    def write(self, iteration: int) -> None:
        for param in self.params:
            self.data.write(param.grad, iteration)
            if param.grad_hook is not None:
                param.grad_hook(param)


class GradientAllreduce:
    """`Trainer.allreduce_grads`: the allreduce of buckets that lie in the node's memory."""

    def __init__(self, name: str, world: comm.World, data: FreshData, count: int) -> None:
        self.name = name
        self._gradients = _Gradients(world, data, count, "auto")

    def refresh(self, iteration: int) -> None:
        """Write the data of an iteration into the inputs."""
        self._gradients.trainer.reducer.reset()  # as the update that is not timed here would
        self._gradients.write(iteration)

    def timed(self) -> int:
        """Run the exchange once and return its nanoseconds."""
        begin = time.perf_counter_ns()
        self._gradients.trainer.allreduce_grads()
        return time.perf_counter_ns() - begin

    def wrong(self, iteration: int) -> int:
        """Return how many elements of the result of an iteration are wrong."""
        return sum(self._gradients.data.wrong(param.grad, iteration) for param in self._gradients.params)


class _Reference:
    """The parameters after each step by SGD with momentum, in plain NumPy, of one block that all of them repeat."""

    def __init__(self, world: comm.World, data: FreshData) -> None:
        self._data = data
        self._scale = 1 / world.size
        self._momentum: Any = 0.0
        self.params: Any = 0.0

    def step(self, iteration: int) -> None:
        self._momentum = _MOMENTUM * self._momentum + self._scale * self._data.reduced(iteration).astype(np.float64)
        self.params = self.params - _LR * self._momentum

    def wrong(self, params: np.ndarray) -> int:
        return count_wrong(params, self.params.astype(np.float32), _TOLERANCE)


class TrainerStep:
    """`Trainer.step`: reduction and update by ``owner``."""

    def __init__(self, name: str, world: comm.World, data: FreshData, count: int, owner: str) -> None:
        self.name = name
        self._gradients = _Gradients(world, data, count, owner)
        self._reference = _Reference(world, data)

    def refresh(self, iteration: int) -> None:
        """Write the data of an iteration into the inputs."""
        for param in self._gradients.params:
            np.sum(param.data)
        self._gradients.write(iteration)
        self._reference.step(iteration)

    def timed(self) -> int:
        """Run the exchange once and return its nanoseconds."""
        begin = time.perf_counter_ns()
        self._gradients.trainer.step(1)
        return time.perf_counter_ns() - begin

    def wrong(self, iteration: int) -> int:
        """Return how many elements of the result of an iteration are wrong."""
        return sum(self._reference.wrong(param.data) for param in self._gradients.params)


@dataclass
class PeerStep:
    """A peer's allreduce of the private array ``grad``, then an update of ``param``; ``step`` does both."""

    name: str
    data: FreshData
    reference: _Reference
    grad: np.ndarray
    param: np.ndarray
    step: Callable[[], None]

    def refresh(self, iteration: int) -> None:
        """Write the data of an iteration into the inputs."""
        np.sum(self.param)
        self.data.write(self.grad, iteration)
        self.reference.step(iteration)

    def timed(self) -> int:
        """Run the exchange once and return its nanoseconds."""
        begin = time.perf_counter_ns()
        self.step()
        return time.perf_counter_ns() - begin

    def wrong(self, iteration: int) -> int:
        """Return how many elements of the result of an iteration are wrong."""
        return self.reference.wrong(self.param)


def mpi_step(world: comm.World, data: FreshData, count: int) -> PeerStep:
    """Return a step with the MPI library's allreduce in place, then hpcdp's fused SGD on every rank."""
    grad, param = np.empty(count, np.float32), np.zeros(count, np.float32)
    optimizer = optim.SGD(lr=_LR, momentum=_MOMENTUM)
    state = optimizer.init_state(param)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        world.comm.native_allreduce(grad, "sum")
        optimizer.update(param, grad, state, step=steps, scale=1 / world.size)

    return PeerStep("MPI, fused SGD", data, _Reference(world, data), grad, param, step)


def gloo_step(world: comm.World, gloo: Gloo, data: FreshData, count: int) -> PeerStep:
    """Gloo's allreduce, the mean that DistributedDataParallel takes, and PyTorch's fused SGD."""
    grad, param = np.empty(count, np.float32), np.zeros(count, np.float32)
    reduce = gloo.exchange(data, grad).call
    tensor = gloo.torch.from_numpy(param).requires_grad_()
    tensor.grad = gloo.torch.from_numpy(grad)
    optimizer = gloo.torch.optim.SGD([tensor], lr=_LR, momentum=_MOMENTUM, fused=True)

    def step() -> None:
        reduce()
        tensor.grad.mul_(1 / world.size)
        optimizer.step()

    return PeerStep("gloo, torch SGD", data, _Reference(world, data), grad, param, step)


def compare_updates(
    world: comm.World, floor: Floor, gloo: Gloo | None, nbytes: int, iterations: int, warmup: int
) -> dict[str, Any]:
    """One size; every rank must call.

    Returns ``nbytes``, ``median_us`` by name, the best ``peer`` and its ``ratio`` to `OURS` (the median of the ratios
    within turns), and ``wrong``, the wrong elements by name.
    """
    count = max(1, nbytes // 4)
    data = FreshData(world.rank, world.size)
    peers: list[Candidate] = [mpi_step(world, data, count)]
    if gloo is not None:
        peers.append(gloo_step(world, gloo, data, count))
    candidates: list[Candidate] = [
        TrainerStep(OURS, world, data, count, "auto"),
        TrainerStep("owners of shards", world, data, count, "shard"),
        TrainerStep("every rank", world, data, count, "rank"),
        *peers,
    ]
    found = gather(world, alternate(candidates, floor.barrier, MeasuringSchedule.for_size(nbytes, iterations, warmup)))
    taken = {name: turn_medians(ranks) for name, ranks in found.items()}
    medians = {name: float(np.median(us)) for name, us in taken.items()}
    peer = min((each.name for each in peers), key=medians.__getitem__)
    return {
        "nbytes": count * 4,
        "median_us": medians,
        "peer": peer,
        "ratio": median_ratio(taken[peer], taken[OURS]),
        "wrong": {name: wrong(ranks) for name, ranks in found.items()},
    }


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    args = sweep_parser("gradients", __doc__, "64K:64M", "bytes of the parameters", 2).parse_args(argv)
    sizes = size_range(args.sizes, args.factor)
    world = comm.init()
    check_writable("gradients", [args.json], world)
    pin_to_own_core(world)
    gloo, reason = gloo_or_reason(world)
    floor = Floor(world, 4)
    rows = []
    for nbytes in sizes:
        measure = partial(compare_updates, world, floor, gloo, nbytes, args.iterations, args.warmup)
        rows.append(floor.beside(measure))
        if world.rank == 0:
            names = rows[0]["median_us"]
            if len(rows) == 1:
                print(
                    f"# reduce and update, float32, {world.size} ranks, {world.library}; median us of the slowest rank"
                )
                print(f"{'# Size':<10}" + "".join(f"{name:>20}" for name in names) + f"{'ratio':>9}")
            columns = "".join(f"{us:>20.2f}" for us in rows[-1]["median_us"].values())
            faulty = ", ".join(name for name, count in rows[-1]["wrong"].items() if count)
            print(
                f"{format_size(rows[-1]['nbytes']):<10}{columns}{rows[-1]['ratio']:>9.2f}"
                + (f"  WRONG: {faulty}" if faulty else ""),
                flush=True,
            )
            print_line_of(rows[-1])
    if gloo is not None:
        gloo.close()
    report = {"benchmark": "gradients", "machine": describe(world), "library": world.library, "skipped": reason}
    write_json(args.json, world, {**report, "rows": rows})
    return 1 if any(count for row in rows for count in row["wrong"].values()) else 0


if __name__ == "__main__":
    programs.run(main)
