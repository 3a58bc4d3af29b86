"""Sums of gradients on a GPU by the ranks of a launcher; `bench_gpu` runs the cases as jobs.

``hpcdp launch -n 4 -- python benchmarks/bench_gpu_sums.py shared -m 256M`` runs one case:

- ``shared``: one rank sums the arrays of all ranks on the GPU that they share (CUDA IPC).
- ``staging``: an array is copied through the host and back, as in sums over nodes, without a network.
- ``training``: steps with and without overlap; with ``HPCDP_RANKS_PER_NODE=2`` on virtual nodes.
- ``graphs``: the same with CUDA graphs; ``codes``: with each codec between nodes.
- ``nccl``: a sum of one rank, and a call that NCCL refuses; ``refused``: two ranks on one GPU, which NCCL refuses.

Each case compares its results with the expected ones.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from bench_harness import programs
from bench_harness.figures import write_json
from hpcdp import comm as comm_module
from hpcdp import nn, optim
from hpcdp.bench.measure import FreshData, check_writable, describe, parse_size
from hpcdp.comm import World, gpu_buckets
from hpcdp.comm.communicator import Steps
from hpcdp.comm.gpu_buckets.cuda_ipc import CudaIpc
from hpcdp.comm.gpu_buckets.nccl import Nccl
from hpcdp.comm.gpu_buckets.transport import NodeRows, RowSize, lone_rows, offers, own_offer
from hpcdp.comm.progress import run_until_complete
from hpcdp.core.arrays import Array, Streams, to_host
from hpcdp.data_parallel.gpu_reduction import Staging
from hpcdp.errors import DeviceError
from hpcdp.launch.parser import Parser
from hpcdp.train import TrainStep
from hpcdp.train.trainer import Trainer

_TURNS, _BATCH, _WIDTH = 7, 256, 2048
_ROUNDS, _STEPS = 6, 3
"""Turns of each candidate of a comparison, and the steps of a turn."""
_WARM_UP = 3
"""Untimed steps: graphs are traced in the first and captured in the second."""
_FLOAT = np.dtype(np.float32)
_CODECS = ("2bit", "1bit", "fp16", "topk")

Figures = dict[str, Any]
"""``summary``: the figures in a few words; ``share``: the fraction of the device's rate, or None; ``wrong``: the number
of wrong elements or errors."""


def _slowest(world: World, turn: Callable[[], float]) -> float:
    """Return the median of the slowest rank's seconds over all turns but the first; every rank must call."""
    taken = []
    for _ in range(_TURNS + 1):
        world.comm.barrier()
        taken.append(max(world.comm.allgather_json(turn())))
    return float(np.median(taken[1:]))


def _copy_s(streams: Streams, pairs: list[tuple[Array, Array]]) -> float:
    """Return the seconds of simultaneous copies ``(target, source)``, each on its own stream."""
    copy_streams = [streams.stream() for _ in pairs]

    def turn() -> float:
        begin = time.perf_counter()
        for (target, source), stream in zip(pairs, copy_streams, strict=True):
            streams.copy_async(target, source, stream)
        for stream in copy_streams:
            streams.synchronize(stream)
        return time.perf_counter() - begin

    return float(np.median([turn() for _ in range(_TURNS + 1)][1:]))


def _sums(world: World, streams: Streams, row: NodeRows, source: Array) -> tuple[float, Array]:
    """Sum the rows, each a copy of its rank's ``source``, into all rows; return the seconds and the own row."""
    streams.follow(row.stream)  # the copy of `source` to the GPU may not be complete

    def turn() -> float:
        streams.copy_async(row.mine, source, row.stream)
        streams.synchronize(row.stream)
        world.comm.barrier()
        begin = time.perf_counter()
        run_until_complete(row.allreduce())
        streams.synchronize(row.stream)
        return time.perf_counter() - begin

    return _slowest(world, turn), row.mine


def shared(world: World, count: int) -> Figures:
    """Measure the sum of rows of ``count`` elements, into each row, by ranks that share one GPU."""
    streams, data = Streams(world.device), FreshData(world.rank, world.size)
    x = np.empty(count, np.float32)
    data.write(x, 0)
    source = streams.array(x)
    group = CudaIpc(world.node_comm, world.node_memory, streams, [RowSize(count, _FLOAT)])
    (row,) = group.hand_out()
    taken, result = _sums(world, streams, row, source)
    wrong = sum(world.comm.allgather_json(data.wrong(to_host(result), 0)))
    copy_s = _copy_s(streams, [(streams.array(x), source)]) if world.rank == 0 else 0.0
    copy_s = world.comm.allgather_json(copy_s)[0]  # measured on rank 0 while the others wait
    del row, result
    group.close()
    moved = 2 * world.size * x.nbytes
    rate, copied = moved / taken, 2 * x.nbytes / copy_s
    summary = f"{1e-9 * rate:.0f} GB/s of memory, a copy {1e-9 * copied:.0f}"
    return {"summary": summary, "share": rate / copied, "wrong": wrong, "seconds": taken, "copy_s": copy_s}


def staging(world: World, count: int) -> Figures:
    """Measure copies to the host and back in segments, against two simultaneous copies of the array, one each way."""
    streams, data = Streams(world.device), FreshData(world.rank, world.size)
    x = np.empty(count, np.float32)
    data.write(x, 0)
    (row,) = lone_rows(streams, [RowSize(count, _FLOAT)])
    source = streams.array(x)  # must live until the copy is complete
    streams.follow(row.stream)
    streams.copy_async(row.mine, source, row.stream)
    streams.synchronize(row.stream)
    staged = Staging(streams, [x.nbytes])

    def nothing(x: np.ndarray, tag: int, turn: object) -> Steps:
        yield []

    def machine() -> Steps:
        streams.wait_events(row.stream, (yield from staged.sum(0, row.mine, row, nothing, 0, None)))

    def turn() -> float:
        begin = time.perf_counter()
        run_until_complete(machine())
        streams.synchronize(row.stream)
        return time.perf_counter() - begin

    taken = _slowest(world, turn)
    wrong = data.wrong(to_host(row.mine), 0)
    down, up = (streams.pinned(x.nbytes).view(np.float32) for _ in range(2))
    copy_s = _copy_s(streams, [(down, row.mine), (source, up)])
    summary = f"{1e-9 * x.nbytes / taken:.1f} GB/s each way, pinned copies {1e-9 * x.nbytes / copy_s:.1f}"
    return {"summary": summary, "share": copy_s / taken, "wrong": wrong, "seconds": taken, "copy_s": copy_s}


def training(world: World, count: int, hybridize: bool = False) -> Figures:
    """Measure steps of a network of about ``count`` parameters, with reductions after and during backward.

    All layers have the same size. Both schedules give the same bits.
    """
    (after, during), wrong, transport = _both_schedules(world, count, None, hybridize)
    summary = f"{transport}: step {1e3 * after:.1f} ms, with overlap {1e3 * during:.1f}"
    return {"summary": summary, "share": None, "wrong": wrong, "seconds": {"after": after, "during": during}}


def graphs(world: World, count: int) -> Figures:
    """Measure as `training`, with steps as CUDA graphs, which are split where reductions start during backward."""
    return training(world, count, hybridize=True)


def codes(world: World, count: int) -> Figures:
    """Measure as `training`, with each codec between nodes and a quarter of the parameters; no effect on one node."""
    seconds, wrong, texts = {}, 0, []
    for codec in _CODECS:
        (after, during), differ, _ = _both_schedules(world, max(1, count // len(_CODECS)), codec, False)
        seconds[codec], wrong = {"after": after, "during": during}, wrong + differ
        texts.append(f"{codec} {1e3 * after:.1f} ms, {1e3 * during:.1f}")
    return {"summary": "step, with overlap: " + "; ".join(texts), "share": None, "wrong": wrong, "seconds": seconds}


def _both_schedules(
    world: World, count: int, codec: str | None, hybridize: bool
) -> tuple[tuple[float, float], int, str]:
    """Return the seconds of a step without and with overlap, the number of differing parameters, and the transport.

    Seconds are medians of alternating turns, each schedule first equally often. Parameters are compared between the
    two schedules, and with those of rank 0.
    """
    both = after, during = [_Training(world, count, overlap, codec, hybridize) for overlap in (False, True)]
    turns = np.empty((_ROUNDS, 2))
    for number in range(_ROUNDS):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            turns[number, which] = both[which].step_s()
    first, second = map(float, np.median(turns, axis=0))
    differ = sum(int(np.count_nonzero(a != b)) for a, b in zip(after.params(), during.params(), strict=True))
    sums = world.comm.allgather_json([zlib.crc32(param.tobytes()) for param in during.params()])
    return (first, second), sum(world.comm.allgather_json(differ + (sums[world.rank] != sums[0]))), during.transport


class _Training:
    """A network of about ``count`` parameters that trains on one batch, and the transport of its sums."""

    def __init__(self, world: World, count: int, overlap: bool, codec: str | None, hybridize: bool) -> None:
        rng = np.random.default_rng(world.rank)
        streams = Streams(world.device)
        x, y = rng.standard_normal((_BATCH, _WIDTH), np.float32), rng.integers(0, 10, _BATCH)
        hidden = (_WIDTH,) * max(1, count // _WIDTH**2)
        self._world, self._batch = world, (streams.array(x), streams.array(y))
        self._net = nn.models.mlp(_WIDTH, 10, hidden, seed=0).to(world.device)
        params, rule = self._net.parameters(), optim.SGD(lr=0.01)
        trainer = Trainer(params, rule, world=world, overlap=overlap, compression=codec)
        self._step = TrainStep(self._net, trainer)
        self._step.hybridize(hybridize)
        reduction = trainer.reducer.reduction  # type: ignore[attr-defined]
        is_direct = getattr(reduction, "goes_direct", False)
        self.transport = "host" if reduction.way is None else reduction.way.name + ", MPI on its memory" * is_direct
        self._run_steps(_WARM_UP)

    def _run_steps(self, number: int) -> None:
        for _ in range(number):
            losses, _output = self._step(*self._batch)
        to_host(losses.data)  # waits for all steps

    def step_s(self) -> float:
        """Return the seconds per step on the slowest rank, over several without waits; every rank must call."""
        self._world.comm.barrier()
        begin = time.perf_counter()
        self._run_steps(_STEPS)
        return max(self._world.comm.allgather_json(time.perf_counter() - begin)) / _STEPS

    def params(self) -> list[np.ndarray]:
        """Return copies of the parameters on the host."""
        return [to_host(param.data).copy() for param in self._net.parameters()]


def nccl(world: World, count: int) -> Figures:
    """Measure a sum by NCCL with one rank, and check that NCCL refuses a wrong call."""
    streams, data = Streams(world.device), FreshData(world.rank, world.size)
    offered = offers(world.node_comm, own_offer(world.device, shares_memory=True))
    if not offered[0].nccl:
        return {"summary": "skipped: CuPy finds no NCCL", "share": None, "wrong": 0}
    x = np.empty(count, np.float32)
    data.write(x, 0)
    communicator = Nccl(world.node_comm, world.node_memory, streams, offered, world.rank)
    group = communicator.group([RowSize(count, _FLOAT), RowSize(8, _FLOAT)])
    row, small = group.hand_out()
    taken, result = _sums(world, streams, row, streams.array(x))
    wrong = data.wrong(to_host(result), 0)
    at, no_such_rank = int(small.mine.data.ptr), 5
    errors = []
    for call in (
        lambda: communicator.launch(lambda comm, stream: comm.reduce(at, at, 8, 7, 0, no_such_rank, stream)),
        communicator.check,
    ):
        try:
            call()
            wrong += 1
        except DeviceError as error:
            errors.append(str(error))
    group.close()
    text = f"version {offered[0].nccl}, {1e6 * taken:.0f} us; refuses a missing rank"
    return {"summary": text, "share": None, "wrong": wrong, "seconds": taken, "errors": errors}


def refused(world: World, count: int) -> Figures:
    """Check that NCCL refuses two ranks on one GPU, and that CUDA IPC is chosen."""
    streams = Streams(world.device)
    offered = offers(world.node_comm, own_offer(world.device, shares_memory=True))
    if len({offer.bus_id for offer in offered}) > 1:
        return {"summary": "skipped: these ranks have GPUs of their own", "share": None, "wrong": 0}
    reason, wrong = "", 1
    try:
        Nccl(world.node_comm, world.node_memory, streams, offered, world.rank)
    except DeviceError as error:
        reason, wrong = str(error), 0
    _, transport = gpu_buckets.make(world, streams, [RowSize(8, _FLOAT)])
    wrong = sum(world.comm.allgather_json(wrong + (transport.name != "CUDA_IPC")))
    return {"summary": f"NCCL refuses, {transport.name} is used", "share": None, "wrong": wrong, "errors": [reason]}


CASES = {case.__name__: case for case in (shared, staging, training, graphs, codes, nccl, refused)}
"""The cases by name. Each takes the world and the number of elements; every rank must call it."""


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_gpu_sums.py", description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("-m", dest="size", default="256M", help="bytes of float32 (256M)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    args = parser.parse_args(argv)
    world = comm_module.init()
    check_writable("gpu_sums", [args.json], world)
    if world.device.kind == "cpu":
        if world.rank == 0:
            print("skipped: no NVIDIA GPU, or no CuPy")
        return 0
    world.device.use()
    figures = CASES[args.case](world, max(1, parse_size(args.size) // 4))
    if world.rank == 0:
        print(
            f"{args.case}: {figures['summary']}" + (f"  WRONG: {figures['wrong']}" if figures["wrong"] else ""),
            flush=True,
        )
    write_json(args.json, world, {"case": args.case, "machine": describe(world), **figures})
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    programs.run(main)
