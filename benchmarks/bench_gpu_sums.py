"""Sums of gradients on a GPU, by the ranks that a launcher has started: what `bench_gpu` runs as jobs.

``hpcdp launch -n 4 -- python benchmarks/bench_gpu_sums.py shared -m 256M`` lets one rank sum what four have on the
GPU that they share (CUDA IPC). ``staging`` brings an array through the host and back as sums over nodes do, without a
network. ``training`` trains with and without overlap, with ``HPCDP_RANKS_PER_NODE=2`` on virtual nodes, ``graphs`` by
CUDA graphs, and ``codes`` by each codec between nodes. ``nccl`` sums with one rank, and lets NCCL refuse a call;
``refused`` offers it two ranks on one GPU. All compare what comes out.
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
from hpcdp.comm import World, gpu_rows
from hpcdp.comm.communicator import Steps
from hpcdp.comm.gpu_rows.cuda_ipc import CudaIpc
from hpcdp.comm.gpu_rows.nccl import Nccl
from hpcdp.comm.gpu_rows.transport import NodeRows, RowSize, lone_rows, offers, own_offer
from hpcdp.comm.tasks import run_until_complete
from hpcdp.core.arrays import Array, to_host
from hpcdp.core.devices import Streams
from hpcdp.data_parallel.gpu_reduction import Staging
from hpcdp.errors import DeviceError
from hpcdp.launch.parser import Parser
from hpcdp.train import TrainStep
from hpcdp.train.trainer import Trainer

_TURNS, _BATCH, _WIDTH = 7, 256, 2048
_ROUNDS, _STEPS = 6, 3
"""Turns of each side of a comparison, and the steps of one."""
_WARM_UP = 3
"""Steps that are not counted: graphs are traced in the first and captured in the second."""
_FLOAT = np.dtype(np.float32)
_CODECS = ("2bit", "1bit", "fp16", "topk")

Found = dict[str, Any]
"""``told``: the figures in a few words; ``share`` of what the device can do at most, None where nothing is rated;
``wrong``: how many elements, or errors, are not what they must be."""


def _slowest(world: World, turn: Callable[[], float]) -> float:
    """Return the median over turns, but the first, of the slowest rank's seconds; every rank must call."""
    taken = []
    for _ in range(_TURNS + 1):
        world.comm.barrier()
        taken.append(max(world.comm.allgather_json(turn())))
    return float(np.median(taken[1:]))


def _copy_s(streams: Streams, pairs: list[tuple[Array, Array]]) -> float:
    """Seconds of copies ``(target, source)``, each on a stream of its own, all at once."""
    each_on = [streams.stream() for _ in pairs]

    def turn() -> float:
        begin = time.perf_counter()
        for (target, source), stream in zip(pairs, each_on, strict=True):
            streams.copy_async(target, source, stream)
        for stream in each_on:
            streams.synchronize(stream)
        return time.perf_counter() - begin

    return float(np.median([turn() for _ in range(_TURNS + 1)][1:]))


def _sums(world: World, streams: Streams, row: NodeRows, source: Array) -> tuple[float, Array]:
    """Seconds in which the rows, each of which is its rank's ``source``, are summed into all of them; the result."""
    streams.follow(row.stream)  # `source` may be on its way to the GPU

    def turn() -> float:
        streams.copy_async(row.mine, source, row.stream)
        streams.synchronize(row.stream)
        world.comm.barrier()
        begin = time.perf_counter()
        run_until_complete(row.allreduce())
        streams.synchronize(row.stream)
        return time.perf_counter() - begin

    return _slowest(world, turn), row.mine


def shared(world: World, count: int) -> Found:
    """All ranks share one GPU: rows of ``count`` are read, and the sum is written into each."""
    streams, data = Streams(world.device), FreshData(world.rank, world.size)
    x = np.empty(count, np.float32)
    data.write(x, 0)
    source = streams.array(x)
    group = CudaIpc(world.node_comm, world.node_memory, streams, [RowSize(count, _FLOAT)])
    (row,) = group.hand_out()
    taken, result = _sums(world, streams, row, source)
    wrong = sum(world.comm.allgather_json(data.wrong(to_host(result), 0)))
    copy_s = _copy_s(streams, [(streams.array(x), source)]) if world.rank == 0 else 0.0
    copy_s = world.comm.allgather_json(copy_s)[0]  # while the others wait
    del row, result
    group.close()
    moved = 2 * world.size * x.nbytes
    rate, copied = moved / taken, 2 * x.nbytes / copy_s
    told = f"{1e-9 * rate:.0f} GB/s of memory, a copy {1e-9 * copied:.0f}"
    return {"told": told, "share": rate / copied, "wrong": wrong, "seconds": taken, "copy_s": copy_s}


def staging(world: World, count: int) -> Found:
    """To the host in segments and back, against two copies of the whole at once, one each way."""
    streams, data = Streams(world.device), FreshData(world.rank, world.size)
    x = np.empty(count, np.float32)
    data.write(x, 0)
    (row,) = lone_rows(streams, [RowSize(count, _FLOAT)])
    source = streams.array(x)  # which must live until it is copied
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
    told = f"{1e-9 * x.nbytes / taken:.1f} GB/s each way, pinned copies {1e-9 * x.nbytes / copy_s:.1f}"
    return {"told": told, "share": copy_s / taken, "wrong": wrong, "seconds": taken, "copy_s": copy_s}


def training(world: World, count: int, hybridize: bool = False) -> Found:
    """Measure steps of a network of about ``count`` parameters, with reductions after and during backward.

    Layers have one size. Both ways have the same bits.
    """
    (behind, beside), wrong, way = _both_ways(world, count, None, hybridize)
    told = f"{way}: step {1e3 * behind:.1f} ms, with overlap {1e3 * beside:.1f}"
    return {"told": told, "share": None, "wrong": wrong, "seconds": {"behind": behind, "beside": beside}}


def graphs(world: World, count: int) -> Found:
    """As `training`, each step by CUDA graphs, which are cut where reductions begin beside backward."""
    return training(world, count, hybridize=True)


def codes(world: World, count: int) -> Found:
    """As `training`, by each codec between nodes, with a quarter of the parameters; on one node they change nothing."""
    found, wrong, told = {}, 0, []
    for codec in _CODECS:
        (behind, beside), differ, _ = _both_ways(world, max(1, count // len(_CODECS)), codec, False)
        found[codec], wrong = {"behind": behind, "beside": beside}, wrong + differ
        told.append(f"{codec} {1e3 * behind:.1f} ms, {1e3 * beside:.1f}")
    return {"told": "step, with overlap: " + "; ".join(told), "share": None, "wrong": wrong, "seconds": found}


def _both_ways(world: World, count: int, codec: str | None, hybridize: bool) -> tuple[tuple[float, float], int, str]:
    """Return the seconds of a step without and with overlap, the number of differing parameters, and the transport.

    Seconds are medians of alternating turns, each way first equally often. Parameters are compared between the two
    ways, and with those of rank 0.
    """
    both = behind, beside = [_Training(world, count, overlap, codec, hybridize) for overlap in (False, True)]
    turns = np.empty((_ROUNDS, 2))
    for number in range(_ROUNDS):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            turns[number, which] = both[which].step_s()
    first, second = map(float, np.median(turns, axis=0))
    differ = sum(int(np.count_nonzero(a != b)) for a, b in zip(behind.params(), beside.params(), strict=True))
    sums = world.comm.allgather_json([zlib.crc32(each.tobytes()) for each in beside.params()])
    return (first, second), sum(world.comm.allgather_json(differ + (sums[world.rank] != sums[0]))), beside.way


class _Training:
    """A network of about ``count`` parameters that takes its steps on one batch, and how its sums go."""

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
        self.way = "host" if reduction.way is None else reduction.way.name + ", MPI on its memory" * is_direct
        self._take(_WARM_UP)

    def _take(self, number: int) -> None:
        for _ in range(number):
            losses, _output = self._step(*self._batch)
        to_host(losses.data)  # which waits for all of them

    def step_s(self) -> float:
        """Return the seconds per step on the slowest rank, over several without waits; every rank must call."""
        self._world.comm.barrier()
        begin = time.perf_counter()
        self._take(_STEPS)
        return max(self._world.comm.allgather_json(time.perf_counter() - begin)) / _STEPS

    def params(self) -> list[np.ndarray]:
        """On the host."""
        return [to_host(each.data).copy() for each in self._net.parameters()]


def nccl(world: World, count: int) -> Found:
    """NCCL with one rank: its sum, and how a call ends that it refuses."""
    streams, data = Streams(world.device), FreshData(world.rank, world.size)
    offered = offers(world.node_comm, own_offer(world.device, shares_memory=True))
    if not offered[0].nccl:
        return {"told": "skipped: CuPy finds no NCCL", "share": None, "wrong": 0}
    x = np.empty(count, np.float32)
    data.write(x, 0)
    communicator = Nccl(world.node_comm, world.node_memory, streams, offered, world.rank)
    group = communicator.group([RowSize(count, _FLOAT), RowSize(8, _FLOAT)])
    row, small = group.hand_out()
    taken, result = _sums(world, streams, row, streams.array(x))
    wrong = data.wrong(to_host(result), 0)
    at, no_such_rank = int(small.mine.data.ptr), 5
    told = []
    for act in (
        lambda: communicator.launch(lambda comm, stream: comm.reduce(at, at, 8, 7, 0, no_such_rank, stream)),
        communicator.check,
    ):
        try:
            act()
            wrong += 1
        except DeviceError as error:
            told.append(str(error))
    group.close()
    text = f"version {offered[0].nccl}, {1e6 * taken:.0f} us; refuses a rank that is not there"
    return {"told": text, "share": None, "wrong": wrong, "seconds": taken, "errors": told}


def refused(world: World, count: int) -> Found:
    """Two ranks on one GPU: NCCL is not begun, and CUDA IPC is chosen."""
    streams = Streams(world.device)
    offered = offers(world.node_comm, own_offer(world.device, shares_memory=True))
    if len({each.bus_id for each in offered}) > 1:
        return {"told": "skipped: these ranks have GPUs of their own", "share": None, "wrong": 0}
    told, wrong = "", 1
    try:
        Nccl(world.node_comm, world.node_memory, streams, offered, world.rank)
    except DeviceError as error:
        told, wrong = str(error), 0
    _, way = gpu_rows.make(world, streams, [RowSize(8, _FLOAT)])
    wrong = sum(world.comm.allgather_json(wrong + (way.name != "CUDA_IPC")))
    return {"told": f"NCCL refuses, {way.name} is taken", "share": None, "wrong": wrong, "errors": [told]}


CASES = {each.__name__: each for each in (shared, staging, training, graphs, codes, nccl, refused)}
"""By name: each takes the world and how many elements, and every rank must call it."""


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_gpu_sums.py", description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("-m", dest="size", default="256M", help="bytes of float32 (256M)")
    parser.add_argument("--json", metavar="FILE", help="for the figures")
    args = parser.parse_args(argv)
    world = comm_module.init()
    check_writable("gpu_sums", [args.json], world)
    if world.device.kind == "cpu":
        if world.rank == 0:
            print("skipped: no NVIDIA GPU, or no CuPy")
        return 0
    world.device.use()
    found = CASES[args.case](world, max(1, parse_size(args.size) // 4))
    if world.rank == 0:
        print(f"{args.case}: {found['told']}" + (f"  WRONG: {found['wrong']}" if found["wrong"] else ""), flush=True)
    write_json(args.json, world, {"case": args.case, "machine": describe(world), **found})
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    programs.run(main)
