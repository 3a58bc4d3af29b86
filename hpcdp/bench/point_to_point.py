"""Messages between pairs of ranks: latency, bandwidth of one direction and of both, many pairs at once.

Rank i of the first half is paired with rank ``i + n // 2`` of the second, so that pairs lie across nodes where ranks
are placed node by node. ``latency``, ``bandwidth`` and ``bibandwidth`` use the first pair alone; other ranks sleep
meanwhile. The patterns are those of OSU's osu_latency, osu_bw, osu_bibw and osu_mbw_mr.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..comm import World
from ..errors import ConfigError
from .measure import FreshData, MeasuringSchedule, Series, alternate, gather, wrong

PATTERNS = ("latency", "bandwidth", "bibandwidth", "multi_pair")

_TOKEN, _DATA = 1, 2  # tags


@dataclass(frozen=True)
class PairMessages:
    """How messages go: hpcdp's communicator, or the MPI library's calls."""

    send: Callable[[np.ndarray, int], Any]
    receive: Callable[[np.ndarray, int], Any]
    finish: Callable[[Sequence[Any]], Any]


def own_messages(world: World) -> PairMessages:
    """Through hpcdp's communicator."""
    comm = world.comm

    def finish(requests: Sequence[Any]) -> None:
        for request in requests:
            request.wait()

    return PairMessages(lambda x, to: comm.isend(x, to, _DATA), lambda x, of: comm.irecv(x, of, _DATA), finish)


def library_messages(world: World) -> PairMessages | None:
    """Through the MPI library itself; thread ranks have none."""
    mpi = getattr(world.comm, "mpi", None)
    if mpi is None:
        return None
    return PairMessages(
        lambda x, to: mpi.Isend(x.view(np.uint8), to, _DATA),
        lambda x, of: mpi.Irecv(x.view(np.uint8), of, _DATA),
        lambda requests: requests[0].Waitall(requests),
    )


@dataclass
class PairExchange:
    """One pattern at one size, on one rank of a pair.

    Args:
        name: as printed.
        pattern: one of `PATTERNS`.
        messages: how they go.
        data: the contents.
        x: what this rank sends, shape ``(count,)``.
        y: what it receives, of the same shape; all messages of a window go there, as in OSU's benchmarks.
        rank, peer: the two of the pair.
        window: how many messages are under way at once.
    """

    name: str
    pattern: str
    messages: PairMessages
    data: FreshData
    x: np.ndarray
    y: np.ndarray
    rank: int
    peer: int
    window: int

    def __post_init__(self) -> None:
        self._acknowledgement = np.zeros(1, np.uint8)

    def refresh(self, iteration: int) -> None:
        self.data.write(self.x, iteration)

    def timed(self) -> int:
        first = self.rank < self.peer
        begin = time.perf_counter_ns()
        if self.pattern == "latency":
            for sending in (first, not first):
                self._finish([self._send() if sending else self._receive()])
            return (time.perf_counter_ns() - begin) // 2
        if self.pattern == "bibandwidth":
            received = [self._receive() for _ in range(self.window)]
            self._finish([*received, *(self._send() for _ in range(self.window))])
            return time.perf_counter_ns() - begin
        if first:
            self._finish([self._send() for _ in range(self.window)])
            self._finish([self.messages.receive(self._acknowledgement, self.peer)])
        else:
            self._finish([self._receive() for _ in range(self.window)])
            self._finish([self.messages.send(self._acknowledgement, self.peer)])
        return time.perf_counter_ns() - begin

    def wrong(self, iteration: int) -> int:
        if self.rank < self.peer and self.pattern in ("bandwidth", "multi_pair"):
            return 0
        return self.data.wrong_input(self.y, iteration, self.peer)

    def _send(self) -> Any:
        return self.messages.send(self.x, self.peer)

    def _receive(self) -> Any:
        return self.messages.receive(self.y, self.peer)

    def _finish(self, requests: Sequence[Any]) -> None:
        self.messages.finish(requests)


class Ranks:
    """Which ranks take part, and how those of a pair meet.

    Args:
        pattern: one of `PATTERNS`.
        world: all ranks, every one of which must make this.

    Raises:
        ConfigError: on every rank, fewer than two ranks, or an odd number for pairs of all.
    """

    def __init__(self, pattern: str, world: World) -> None:
        if world.size < 2:
            raise ConfigError(
                f"bench {pattern}",
                expected="2 ranks or more",
                got="1",
                remedy=f"start it with hpcdp launch -n 2 -- hpcdp bench {pattern}",
            )
        if pattern == "multi_pair" and world.size % 2:
            raise ConfigError(f"bench {pattern}", expected="an even number of ranks", got=world.size)
        half = world.size // 2
        self.pairs = half if pattern == "multi_pair" else 1
        self.ends = (0, half)
        self._world = world
        self._token = np.zeros(1, np.uint8)
        first = world.rank < self.pairs
        self.active = first or half <= world.rank < half + self.pairs
        self.peer = world.rank + half if first else world.rank - half

    def meet(self) -> None:
        """A barrier of the active ranks."""
        comm = self._world.comm
        if self.pairs > 1:
            comm.barrier()
            return
        for sending in (self._world.rank < self.peer, self._world.rank > self.peer):
            if sending:
                comm.isend(self._token, self.peer, _TOKEN).wait()
            else:
                comm.irecv(self._token, self.peer, _TOKEN).wait()

    def rejoin(self) -> None:
        """Where the others sleep until the active ranks are done: a rank that polls would take time from them."""
        comm, half = self._world.comm, self._world.size // 2
        if self.pairs > 1:
            return
        if self.active:
            others = [rank for rank in range(1, self._world.size) if rank != half]
            for rank in others if self._world.rank == 0 else ():
                comm.isend(self._token, rank, _TOKEN).wait()
            return
        request = comm.irecv(self._token, 0, _TOKEN)
        while not request.test():
            time.sleep(0.001)


@dataclass(frozen=True)
class Sweep:
    """What is the same at every size: see `collective.CollectiveSweep`; ``window`` is how many messages are under way
    at once."""

    pattern: str
    dtype: np.dtype
    iterations: int | None = None
    warmup: int = 10
    validate: bool = True
    window: int = 64

    def schedule(self, nbytes: int, candidates: int) -> MeasuringSchedule:
        """``iterations`` where they were given, else as many as suit the size."""
        if self.iterations is not None:
            return MeasuringSchedule.exactly(self.iterations, self.warmup, candidates)
        latency = self.pattern == "latency"
        return MeasuringSchedule.for_size(
            nbytes * (1 if latency else self.window), 1000 if latency else 100, self.warmup
        )


def sweep(how: Sweep, sizes: list[int], world: World, *, beside_library: bool = False) -> Iterator[dict[str, Any]]:
    """Time a pattern at every size; every rank must go through it, and gets a row a size.

    A row has ``nbytes``, ``count``, ``iterations``, ``wrong`` (wrong elements over all ranks), and for latency ``avg``,
    ``minimum``, ``maximum`` and ``median`` of half a round trip in microseconds, for the others ``mb_s`` (all pairs
    together, decimal; by the slowest pair, both ways by the slower end), ``median_mb_s``, ``min_mb_s`` and ``max_mb_s``
    over iterations, and ``messages_s``. With ``beside_library`` the same of the MPI library's own calls, which
    alternate with hpcdp's turn by turn, is in ``library``.
    """
    ranks = Ranks(how.pattern, world)
    data = FreshData(world.rank, world.size, how.dtype)
    x, y = (np.empty(sizes[-1] // how.dtype.itemsize, how.dtype) for _ in range(2))
    ways = {"own": own_messages(world)}
    if beside_library and (messages := library_messages(world)) is not None:
        ways["library"] = messages
    for nbytes in sizes:
        count = nbytes // how.dtype.itemsize
        found = {name: Series([], 1) for name in ways}
        if ranks.active:
            mine = (data, x[:count], y[:count], world.rank, ranks.peer, how.window)
            candidates = [PairExchange(name, how.pattern, messages, *mine) for name, messages in ways.items()]
            found = alternate(candidates, ranks.meet, how.schedule(nbytes, len(ways)), how.validate)
        ranks.rejoin()
        taken = {name: _figures(how, series, ranks, nbytes) for name, series in gather(world, found).items()}
        yield {"nbytes": nbytes, "count": count, **taken.pop("own"), **taken}


def _figures(how: Sweep, series: list[Series], ranks: Ranks, nbytes: int) -> dict[str, Any]:
    # One way the clock is the sender's, who waits for an answer. Both ways an end is done before the other has all.
    clocks = ranks.ends if how.pattern == "bibandwidth" else range(ranks.pairs)
    ns = np.array([series[rank].ns for rank in clocks])
    figures = _latency(ns) if how.pattern == "latency" else _bandwidth(how, ns, nbytes)
    return {"iterations": ns.shape[1], **figures, "wrong": wrong(series)}


def _latency(ns: np.ndarray) -> dict[str, float]:
    us = ns[0] / 1e3
    figures = {"avg": us.mean(), "minimum": us.min(), "maximum": us.max(), "median": np.median(us)}
    return {name: float(value) for name, value in figures.items()}


def _bandwidth(how: Sweep, ns: np.ndarray, nbytes: int) -> dict[str, float]:
    mb = how.window * len(ns) * nbytes / 1e6  # a clock for each window of messages
    slowest = ns.max(axis=0) / 1e9
    mb_s = mb * ns.shape[1] / (ns.sum(axis=1).max() / 1e9)
    return {
        "mb_s": float(mb_s),
        "median_mb_s": float(mb / np.median(slowest)),
        "min_mb_s": float(mb / slowest.max()),
        "max_mb_s": float(mb / slowest.min()),
        "messages_s": float(mb_s * 1e6 / nbytes),
    }
