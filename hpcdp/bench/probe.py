"""Measurements of links and cores for the cost model, and what the model predicts from them for a benchmark.

Rates in a node are measured at some sizes, since MPI libraries send long messages in another way and caches are small.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..collectives import allreduce, cost_model, registry
from ..collectives.cost_model import ETHERNET, Link, MachineModel, Rates
from ..comm import World
from ..comm.communicator import Steps, resolve
from ..comm.shared_memory import NodeBarrier
from ..comm.tasks import LANES, TaskGroup
from ..errors import HpcdpError
from .command import PAIRS, REDUCING, Settings
from .measure import FreshData

_TRIES = 5
_SHORT_NBYTES, _LONG_NBYTES, _STAGED_NBYTES = 4, 1 << 20, 256 << 10
_FAR_NBYTES = 4 << 20  # networks let short bursts pass faster than their rate
_SIZES = (4 << 10, 64 << 10, _LONG_NBYTES, 4 << 20, 16 << 20, 64 << 20)
_NODE_NBYTES = 512 << 20  # of all arrays of a size in a node: many ranks have smaller ones
_TOKEN, _DATA = 1, 2  # tags
_LINK_NBYTES, _LINK_REPEATS, _NAP_S = 8 << 20, 5, 0.0002
_COPIED_NBYTES = 256 << 20  # more than caches hold

Row = dict[str, Any]


def probe(world: World) -> MachineModel:
    """The links of ``world`` as they are; every rank must call, and gets the same.

    What it cannot have, such as a link between nodes where there is one node, is what the model assumes.
    """
    nodes = world.comm.allgather_json(world.node)
    members = [[rank for rank, node in enumerate(nodes) if node == each] for each in range(world.num_nodes)]
    machine, across = ETHERNET, []
    local_size = max(map(len, members))
    sizes = [nbytes for nbytes in _SIZES if nbytes <= max(_LONG_NBYTES, _NODE_NBYTES // local_size)]
    inside = [(a, b) for ranks in members for a, b in zip(ranks[::2], ranks[1::2], strict=False)]
    if inside:
        of_first = [pair for pair in inside if nodes[pair[0]] == nodes[inside[0][0]]]
        both_ways = of_first + [(b, a) for a, b in of_first]
        machine = replace(machine, inside=_by_size(world, both_ways, sizes))
    if world.num_nodes > 1:
        across = list(zip(members[0], members[1], strict=False))
        machine = replace(machine, across=_link(world, across, _FAR_NBYTES))
    pairs = inside or across
    staging = _Staging(world)
    rates: list[Rates] = []
    for nbytes in sizes:
        copied, reduced = (_slowest(world, s) / nbytes for s in staging.copied_and_reduced_s(nbytes))
        rates.append((nbytes, copied, reduced))
    _, copy, gamma = rates[sizes.index(_LONG_NBYTES)]
    return replace(
        machine,
        copy_s_per_byte=copy,
        gamma_s_per_byte=gamma,
        by_size=tuple(rates),
        message_s=_between(world, pairs, lambda _, peer: _machines_s(world, peer)),
        wait_s=_slowest(world, _median_s(NodeBarrier(world.node_memory).barrier, 200)),
        call_s=_slowest(world, _call_s(world)),
    )


def describe(machine: MachineModel, several_nodes: bool) -> list[str]:
    """The figures as lines of text."""
    links = {"inside a node": machine.inside} | ({"across nodes": machine.across} if several_nodes else {})
    lines = [
        f"{name}: {1e6 * link.alpha_s:.1f} us, {_gb_s(link.beta_s_per_byte)} between two ranks, "
        f"{_gb_s(link.shared_s_per_byte)} between all"
        for name, link in links.items()
    ]
    core = [
        f"a core copies {_gb_s(machine.copy_s_per_byte)} from another, reduces {_gb_s(machine.gamma_s_per_byte)}",
        f"a message of a machine {1e6 * machine.message_s:.1f} us, a meeting in memory {1e6 * machine.wait_s:.1f} us, "
        f"a call {1e6 * machine.call_s:.1f} us",
    ]
    return lines + core


def _gb_s(s_per_byte: float) -> str:
    return f"{1e-9 / max(s_per_byte, 1e-15):.3g} GB/s"


def _by_size(world: World, pairs: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Link:
    """The links of ``pairs`` for messages of each size; by itself that of the longest in reach of the caches."""
    links = {nbytes: _link(world, pairs, nbytes) for nbytes in sizes}
    rates = tuple((nbytes, link.beta_s_per_byte, link.shared_s_per_byte) for nbytes, link in links.items())
    return replace(links[_LONG_NBYTES], alpha_s=min(link.alpha_s for link in links.values()), by_size=rates)


def _link(world: World, pairs: Sequence[tuple[int, int]], nbytes: int) -> Link:
    """Latency while all are at work, the rate of the first pair alone, and then what all of them share."""
    meeting = [pair for pair in pairs if pair[::-1] not in pairs or pair[0] < pair[1]]
    for _ in range(_TRIES):
        short_s = _between(world, meeting, lambda first, peer: _ping_pong_s(world, first, peer, _SHORT_NBYTES))
        long_s = _between(world, pairs[:1], lambda first, peer: _ping_pong_s(world, first, peer, nbytes))
        if long_s > short_s or nbytes < _LONG_NBYTES:  # of short messages the length need not be felt
            break
    else:
        raise HpcdpError(
            "probe", where="links", expected=f"messages of {nbytes} bytes to take longer than those of {_SHORT_NBYTES}",
            got=f"{long_s * 1e6:.1f} us and {short_s * 1e6:.1f} us",
            remedy="other programs use these cores or links: try again when it is quiet",
        )  # fmt: skip
    beta = max(long_s - short_s, 0.0) / (nbytes - _SHORT_NBYTES)
    at_once_s = _stream_s(world, dict(pairs), nbytes)
    return Link(short_s, beta, min(beta, max(at_once_s - short_s, 0.0) / (nbytes * len(pairs))))


def _between(world: World, pairs: Sequence[tuple[int, int]], measure: Callable[[bool, int], float]) -> float:
    """The slowest of what the first of each pair gets from ``measure(is the first, the other's rank)``, all at once.

    Ranks without a pair sleep meanwhile: polling would take a core from those that are measured.
    """
    token = np.zeros(1, np.uint8)
    peers = dict(pairs) | {second: first for first, second in pairs}
    firsts = [first for first, _ in pairs]
    value = 0.0
    world.barrier()
    if world.rank in peers:
        value = measure(world.rank in firsts, peers[world.rank])
        for rank in range(world.size) if world.rank == firsts[0] else ():
            if rank not in peers:
                world.comm.isend(token, rank, _TOKEN).wait()
    else:
        done = world.comm.irecv(token, firsts[0], _TOKEN)
        while not done.test():
            time.sleep(0.001)
    values = world.comm.allgather_json(value)
    return float(max(values[first] for first in firsts))


def _rounds(nbytes: int) -> int:
    return 200 if nbytes <= 4096 else 9 + 60 * _STAGED_NBYTES // (nbytes + _STAGED_NBYTES)


def _block(nbytes: int) -> np.ndarray:
    """Bytes at the beginning of a long array, as those of buckets are: its pages are huge ones, which go faster."""
    return np.empty(max(nbytes, _SIZES[-1]), np.uint8)[:nbytes]


def _ping_pong_s(world: World, first: bool, peer: int, nbytes: int) -> float:
    """Half a round trip of data that were written just before."""
    x, y, token = _block(nbytes), _block(nbytes), np.zeros(1, np.uint8)
    data = FreshData(world.rank, world.size, np.uint8)
    taken = []
    for number in range(_rounds(nbytes) + 2):
        data.write(x, number)
        for message, answer in ((token, token), (x, y)):  # the first lets both begin at once
            begin = time.perf_counter()
            for sending in (first, not first):
                if sending:
                    world.comm.isend(message, peer, _DATA).wait()
                else:
                    world.comm.irecv(answer, peer, _DATA).wait()
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken[2:])) / 2


def _stream_s(world: World, peers: dict[int, int], nbytes: int) -> float:
    """How long it takes until all have got what the ranks in ``peers`` send to their peers at once."""
    sources = {dest: source for source, dest in peers.items()}
    x, y, data = _block(nbytes), _block(nbytes), FreshData(world.rank, world.size, np.uint8)
    taken = []
    for number in range(_rounds(nbytes)):
        data.write(x, number)
        world.barrier()
        begin = time.perf_counter()
        requests = [world.comm.irecv(y, sources[world.rank], _DATA)] if world.rank in sources else []
        requests += [world.comm.isend(x, peers[world.rank], _DATA)] if world.rank in peers else []
        for request in requests:
            request.wait()
        taken.append(time.perf_counter() - begin)
    every = np.array(world.comm.allgather_json(taken))
    return float(np.median(every.max(axis=0)))


def _median_s(call: Callable[[], Any], repeats: int) -> float:
    taken = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken[2:]))


class _Staging:
    """What a core does with the memory of its node, while all its ranks do: pieces go through an area in the caches."""

    def __init__(self, world: World) -> None:
        self._memory = world.node_memory
        self._rows = self._memory.alloc((self._memory.size, 2, _STAGED_NBYTES // 4), np.float32)
        self._gate = NodeBarrier(self._memory)

    def copied_and_reduced_s(self, nbytes: int) -> tuple[float, float]:
        """Seconds to copy so many bytes, half of them to the area and half from what a neighbour wrote, and to reduce
        as many into an array of this rank's own."""
        mine, written = self._rows[self._memory.rank]
        other = self._rows[(self._memory.rank + 1) % self._memory.size, 0]
        x = np.ones(nbytes // 4, np.float32)
        pieces = [x[at : at + mine.size] for at in range(0, x.size, mine.size)]

        def copy() -> None:
            for number, piece in enumerate(pieces):
                if number % 2:
                    piece[...] = other[: piece.size]
                else:
                    written[: piece.size] = piece

        def reduce() -> None:
            for piece in pieces:
                np.add(piece, other[: piece.size], out=piece)

        taken: dict[Callable[[], None], list[float]] = {copy: [], reduce: []}
        for number in range(_rounds(nbytes)):
            for do, seconds in taken.items():
                mine[...] = number % 3
                self._gate.barrier()
                begin = time.perf_counter()
                do()
                seconds.append(time.perf_counter() - begin)
                self._gate.barrier()
        copied, reduced = (float(np.median(seconds[1:])) for seconds in taken.values())
        return copied, reduced


def _call_s(world: World) -> float:
    """A call that has nothing to send."""
    nothing = np.empty(0, np.float32)
    return _median_s(lambda: allreduce(nothing, world=world, algorithm="native"), 100)


def _machines_s(world: World, peer: int) -> float:
    """What a message sent and one received cost a core, when many machines progress together."""
    rounds = 20

    def swap(tag: int) -> Steps:
        x, y = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
        for _ in range(rounds):
            yield [world.comm.isend(x, peer, tag), world.comm.irecv(y, peer, tag)]

    taken = []
    for _ in range(7):
        begin = time.perf_counter()
        TaskGroup([swap(_DATA + lane) for lane in range(LANES)]).wait()
        taken.append((time.perf_counter() - begin) / (rounds * LANES))
    return float(np.median(taken))


def _slowest(world: World, seconds: float) -> float:
    return float(max(world.comm.allgather_json(seconds)))


def copy_rates(world: World, nbytes: int = _COPIED_NBYTES, repeats: int = 5) -> dict[str, float]:
    """GB/s copied (each byte counted once) from one private array to another: rank 0 alone, and all ranks at once.

    Every rank must call.
    """
    source, target = np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
    seconds: dict[str, list[float]] = {"one_core": [], "all_cores": []}
    for _ in range(repeats):
        for how, taking_part in (("one_core", world.rank == 0), ("all_cores", True)):
            world.comm.barrier()
            begin = time.perf_counter()
            if taking_part:
                np.copyto(target, source)
            seconds[how].append(time.perf_counter() - begin)
            world.comm.barrier()
    medians = world.comm.allgather_json({how: float(np.median(taken)) for how, taken in seconds.items()})
    return {
        "one_core_gb_s": nbytes / medians[0]["one_core"] / 1e9,
        "all_cores_gb_s": world.size * nbytes / max(each["all_cores"] for each in medians) / 1e9,
    }


def link_rates(world: World, nbytes: int = _LINK_NBYTES) -> dict[str, float]:
    """The rate of a link in MB/s, ``one_way`` and ``both_ways`` at once (each direction); every rank must call.

    Medians over messages of ``nbytes`` between the first ranks of the first two nodes. The other ranks nap.
    """
    nodes = world.comm.allgather_json(world.node)
    ends = [nodes.index(0), nodes.index(1)]
    block, other = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    token = np.zeros(1, np.uint8)
    rates = {}
    for name, directions in (("one_way", (0,)), ("both_ways", (0, 1))):
        taken_s = []
        world.barrier()
        if world.rank in ends:
            me = ends.index(world.rank)
            peer = ends[1 - me]
            for _ in range(1 + _LINK_REPEATS):
                _swap(world, token, peer)
                begin = time.perf_counter()
                requests = [world.comm.isend(block, peer)] if me in directions else []
                requests += [world.comm.irecv(other, peer)] if 1 - me in directions else []
                for request in requests:
                    request.wait()
                _swap(world, token, peer)
                taken_s.append(time.perf_counter() - begin)
        sleeping_barrier(world)
        rates[name] = world.comm.allgather_json(nbytes / float(np.median(taken_s[1:])) / 1e6 if taken_s else 0)[ends[0]]
    return rates


def _swap(world: World, token: np.ndarray, peer: int) -> None:
    sent = world.comm.isend(token, peer)
    world.comm.irecv(np.empty_like(token), peer).wait()
    sent.wait()


def sleeping_barrier(world: World) -> None:
    """A barrier whose waiting ranks leave the cores to those that are still at work."""
    token = np.zeros(1, np.uint8)
    if world.rank:
        world.comm.isend(token, 0).wait()
        answer = world.comm.irecv(token, 0)
        while not answer.test():
            time.sleep(_NAP_S)
        return
    for arrived in [world.comm.irecv(np.empty_like(token), rank) for rank in range(1, world.size)]:
        while not arrived.test():
            time.sleep(_NAP_S)
    for rank in range(1, world.size):
        world.comm.isend(token, rank).wait()


Predictor = Callable[[Row], dict[str, float]]
"""What is predicted of a row's benchmark, from its sizes: ``predicted_us`` or ``predicted_mb_s``."""


def predictor(settings: Settings, world: World) -> tuple[Predictor | None, str]:
    """How to predict, and a line that says what from; every rank must call, and must call what it returns.

    Links and cores are those that `hpcdp tune` has measured, else they are measured now. None for a rank alone, and
    where ranks share cores: the model takes a core for each, and how they are scheduled decides then.

    Raises:
        UnsupportedError: when it is called, for an algorithm that the model does not know; it lists those it does.
    """
    if world.size == 1:
        return None, "No predictions: a rank alone exchanges nothing."
    if reason := registry.crowded(world):
        return None, f"No predictions: {reason}, and the model takes a core for each."
    if registry.loaded(world) is not None:
        machine, basis = registry.machine(world), "that hpcdp tune has measured"
    else:
        machine, basis = probe(world), "measured just now; hpcdp tune keeps them"
    made = _of_messages if settings.benchmark in PAIRS else _of_collective
    return made(settings, world, machine), f"Predicted for links and cores {basis}."


def _of_messages(settings: Settings, world: World, machine: MachineModel) -> Predictor:
    """Half a round trip takes ``alpha + nbytes beta``, and half of what a call does.

    In a window the links carry one message while cores do what the next one needs: in a node these are the same cores,
    and take alpha for it; across nodes the slower of both sets the time, and each direction has a link of its own.
    """
    half, name = world.size // 2, settings.benchmark
    nodes = world.comm.allgather_json(world.node)
    inside = nodes[0] == nodes[half]
    link = machine.inside if inside else machine.across
    pairs = half if name == "multi_pair" else 1
    ways = 2 if name == "bibandwidth" else 1

    def latency_us(row: Row) -> dict[str, float]:
        nbytes: int = row["nbytes"]
        seconds = link.alpha_s + nbytes * link.at(nbytes).beta_s_per_byte + machine.call_s / 2
        return {"predicted_us": 1e6 * seconds}

    def bandwidth_mb_s(row: Row) -> dict[str, float]:
        nbytes: int = row["nbytes"]
        core_s, carried_s = ways * machine.inside.alpha_s, nbytes * link.at(nbytes).shared_s_per_byte * pairs
        message_s = core_s + ways * carried_s if inside else max(core_s, carried_s)
        seconds = settings.window * message_s + 2 * link.alpha_s
        return {"predicted_mb_s": 1e-6 * settings.window * ways * pairs * nbytes / seconds}

    return latency_us if name == "latency" else bandwidth_mb_s


def _of_collective(settings: Settings, world: World, machine: MachineModel) -> Predictor:
    """See `cost.predicted_s`; of "auto", the algorithm that it chooses."""
    collective, dtype = settings.benchmark.removeprefix("i"), np.dtype(settings.dtype)
    op = resolve(collective, settings.op, dtype) if settings.benchmark in REDUCING else None
    topology = registry.topology(world)

    def predicted_us(row: Row) -> dict[str, float]:
        nbytes: int = row["total_nbytes"] if "total_nbytes" in row else row["nbytes"]
        algorithm = settings.algorithm
        if algorithm == "auto":
            algorithm = registry.choose(collective, nbytes, dtype, op, world)
        return {"predicted_us": 1e6 * cost_model.predicted_s(collective, algorithm, nbytes, topology, machine)}

    return predicted_us


def with_predictions(rows: Iterable[Row], predicted: Predictor) -> Iterator[Row]:
    """The rows, each with what is predicted of it."""
    for row in rows:
        yield row | predicted(row)
