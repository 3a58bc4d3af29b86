"""Messages between pairs of ranks: latency, bandwidth of one direction and of both, many pairs at once.

Rank i of the first half is paired with rank ``i + n // 2`` of the second, so that pairs lie across nodes where ranks
are placed node by node. ``latency``, ``bandwidth`` and ``bibandwidth`` use the first pair alone; other ranks sleep
meanwhile. The patterns are those of OSU's osu_latency, osu_bw, osu_bibw and osu_mbw_mr.

Collectives over message sizes: what one call takes, for hpcdp and for the MPI library.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .. import collectives
from ..comm import World
from ..comm.communicator import bounds, reducible, split
from ..errors import ConfigError
from .measure import (
    FreshData,
    MeasuredCollective,
    MeasuringSchedule,
    Series,
    Timing,
    alternate,
    bus_factor,
    gather,
    timing,
    wrong,
)

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
class PairSweep:
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


def sweep_pairs(
    how: PairSweep, sizes: list[int], world: World, *, beside_library: bool = False
) -> Iterator[dict[str, Any]]:
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
        taken = {name: _pair_figures(how, series, ranks, nbytes) for name, series in gather(world, found).items()}
        yield {"nbytes": nbytes, "count": count, **taken.pop("own"), **taken}


def _pair_figures(how: PairSweep, series: list[Series], ranks: Ranks, nbytes: int) -> dict[str, Any]:
    # One way the clock is the sender's, who waits for an answer. Both ways an end is done before the other has all.
    clocks = ranks.ends if how.pattern == "bibandwidth" else range(ranks.pairs)
    ns = np.array([series[rank].ns for rank in clocks])
    figures = _latency(ns) if how.pattern == "latency" else _bandwidth(how, ns, nbytes)
    return {"iterations": ns.shape[1], **figures, "wrong": wrong(series)}


def _latency(ns: np.ndarray) -> dict[str, float]:
    us = ns[0] / 1e3
    figures = {"avg": us.mean(), "minimum": us.min(), "maximum": us.max(), "median": np.median(us)}
    return {name: float(value) for name, value in figures.items()}


def _bandwidth(how: PairSweep, ns: np.ndarray, nbytes: int) -> dict[str, float]:
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


@dataclass(frozen=True)
class CollectiveSweep:
    """What is the same at every size.

    Args:
        collective: a name in `CALLS`, or iallreduce.
        dtype: of the elements.
        op: of collectives that reduce.
        algorithm: as the collective takes it.
        iterations: None for as many as suit the size.
        warmup: untimed calls before.
        validate: whether results are checked.
        out_of_place: whether calls with a separate result are timed too.
        root: of collectives that have one.
    """

    collective: str
    dtype: np.dtype
    op: str = "sum"
    algorithm: str = "auto"
    iterations: int | None = None
    warmup: int = 10
    validate: bool = True
    out_of_place: bool = False
    root: int = 0

    def schedule(self, nbytes: int, usual: int, candidates: int = 1) -> MeasuringSchedule:
        """``iterations`` where they were given, else about ``usual``, and fewer of large messages."""
        if self.iterations is None:
            return MeasuringSchedule.for_size(nbytes, usual, self.warmup)
        return MeasuringSchedule.exactly(self.iterations, self.warmup, candidates)


class Buffers:
    """A rank's arrays for one sweep, large enough for its largest message.

    Args:
        sweep: its collective and dtype decide how much is needed: see `elements`.
        count: the elements of the largest message.
        world: whose ranks take part.
    """

    def __init__(self, sweep: CollectiveSweep, count: int, world: World) -> None:
        self.world = world
        self.data = FreshData(world.rank, world.size, sweep.dtype, sweep.op)
        self.x, self.out = (np.empty(size, sweep.dtype) for size in elements(sweep, count, world.size))


def elements(sweep: CollectiveSweep, count: int, ranks: int) -> tuple[int, int]:
    """How many elements a rank's input and its result need for a message of ``count`` elements.

    The message of an allgather is what each rank brings, as in OSU's benchmarks; of all others it is the whole array.
    """
    if sweep.collective == "allgather":
        return count if sweep.out_of_place else 0, ranks * count
    return count, count if sweep.out_of_place else 0


Call = Callable[[np.ndarray, np.ndarray, CollectiveSweep, World], Any]
"""Does one collective on this rank's input and result, which may lie in each other."""

CALLS: dict[str, Call] = {
    "allreduce": lambda x, out, how, world: collectives.allreduce(
        x, how.op, world, how.algorithm, None if out is x else out
    ),
    "reduce_scatter": lambda x, out, how, world: collectives.reduce_scatter(x, how.op, world, how.algorithm, out),
    "allgather": lambda x, out, how, world: collectives.allgather(x, world, how.algorithm, out),
    "broadcast": lambda x, out, how, world: collectives.broadcast(x, how.root, world, how.algorithm),
    "reduce": lambda x, out, how, world: collectives.reduce(
        x, how.op, how.root, world, how.algorithm, None if out is x else out
    ),
}
LIBRARY: dict[str, Call] = {
    "allreduce": lambda x, out, how, world: world.comm.native_allreduce(x, how.op),
    "reduce_scatter": lambda x, out, how, world: world.comm.native_reduce_scatter(x, out, how.op),
    "allgather": lambda x, out, how, world: world.comm.native_allgather(out),
    "broadcast": lambda x, out, how, world: world.comm.native_broadcast(x, how.root),
    "reduce": lambda x, out, how, world: world.comm.native_reduce(x, how.op, how.root),
}
"""The MPI library's own, in place."""


def ours(name: str, data: FreshData, x: np.ndarray, world: World, how: dict[str, str]) -> MeasuredCollective:
    """hpcdp's allreduce of ``x`` in place, to be timed beside others; ``how`` holds ``algorithm`` and ``op``."""
    return MeasuredCollective(name, data, x, x, lambda: collectives.allreduce(x, world=world, **how))


def exchange(
    how: CollectiveSweep, buffers: Buffers, count: int, *, in_place: bool = True, library: bool = False
) -> MeasuredCollective:
    """One collective of ``count`` elements (see `elements`), and what its result must be."""
    name, world, data = how.collective, buffers.world, buffers.data
    x, out = buffers.x[:count], buffers.out[:count]
    result = x if in_place else out
    check: Callable[[np.ndarray, int], int] = data.wrong
    if name == "reduce_scatter":
        first, last = bounds(count, world.size)[world.rank : world.rank + 2]
        own = x[first:last] if in_place else out[: last - first]
        result = np.empty(own.size, own.dtype) if library else own
        check = lambda result, iteration: data.wrong(result, iteration, first)  # noqa: E731
    elif name == "allgather":
        result = buffers.out[: world.size * count]
        x = split(result, world.size)[world.rank] if in_place else x
        check = lambda result, iteration: sum(  # noqa: E731
            data.wrong_input(part, iteration, rank) for rank, part in enumerate(split(result, world.size))
        )
    elif name == "broadcast":
        check = lambda result, iteration: data.wrong_input(result, iteration, how.root)  # noqa: E731
    elif name == "reduce" and world.rank != how.root:
        result = x
        check = lambda result, iteration: data.wrong_input(result, iteration, world.rank)  # noqa: E731
    do = (LIBRARY if library else CALLS)[name]
    return MeasuredCollective(name, data, x, result, lambda: do(x, result, how, world), check)


def sweep_collective(
    how: CollectiveSweep, sizes: list[int], world: World, *, beside_library: bool = False
) -> Iterator[dict[str, Any]]:
    """Time a collective at every size; every rank must go through it, and gets a row a size.

    A row has ``nbytes`` as asked for, ``count``, ``total_nbytes`` (that of the whole array: of an allgather, of all
    ranks' together), OSU's ``avg``, ``minimum`` and ``maximum`` and the ``median`` in microseconds, ``iterations``,
    ``algbw_gb_s``, ``busbw_gb_s`` and ``wrong``, the number of wrong elements over all ranks: all of calls in place.
    The same with a separate result are in ``out_of_place``, where that is asked for and exists; those of the MPI
    library, which alternates with hpcdp turn by turn, are in ``library``.
    """
    buffers = Buffers(how, sizes[-1] // how.dtype.itemsize, world)
    for nbytes in sizes:
        count = nbytes // how.dtype.itemsize
        total = nbytes * (world.size if how.collective == "allgather" else 1)

        def measured(*candidates: MeasuredCollective, total: int = total) -> list[dict[str, Any]]:
            schedule = how.schedule(total, 200, len(candidates))
            found = gather(world, alternate(candidates, world.comm.barrier, schedule, how.validate))
            return [_figures(how.collective, found[each.name], total, world.size) for each in candidates]

        candidates = [exchange(how, buffers, count)]
        if beside_library:
            peer = exchange(how, buffers, count, library=True)
            candidates.append(replace(peer, name="the MPI library"))
        own, *library = measured(*candidates)
        row = {"nbytes": nbytes, "count": count, "total_nbytes": total, **own}
        if how.out_of_place and how.collective != "broadcast":
            (row["out_of_place"],) = measured(exchange(how, buffers, count, in_place=False))
        if library:
            row["library"] = library[0]
        yield row


def _figures(collective: str, ranks: list[Series], nbytes: int, size: int) -> dict[str, Any]:
    taken = timing(ranks)
    algbw = nbytes / taken.avg / 1e3
    busbw = algbw * bus_factor(size, collective)
    return {**asdict(taken), "algbw_gb_s": algbw, "busbw_gb_s": busbw, "wrong": wrong(ranks)}


class Compute:
    """Work of a core that takes about as long as it is asked to, in steps of some microseconds."""

    _DIM = 25  # as OSU's

    def __init__(self) -> None:
        self._a = np.full((self._DIM, self._DIM), 1.0 / self._DIM, np.float32)
        self._x = np.ones(self._DIM, np.float32)
        self._y = np.empty(self._DIM, np.float32)
        begin = time.perf_counter_ns()
        self.steps(2000)
        self._step_ns = (time.perf_counter_ns() - begin) / 2000

    def steps(self, number: int) -> None:
        """So many products of a small matrix and a vector."""
        for _ in range(number):
            np.matmul(self._a, self._x, out=self._y)

    def steps_for(self, ns: float) -> int:
        """How many steps take ``ns`` nanoseconds where nothing else runs."""
        return max(1, round(ns / self._step_ns))


Start = Callable[[], Any]
"""Starts a collective and returns its request."""


@dataclass
class Overlapped:
    """A collective that is started, computed beside, and waited for; one instance is one rank's series at one size.

    Args:
        exchange: its data and check; the blocking call is not used.
        start: starts it and returns the request.
        compute: what is done meanwhile.
        steps: how long: see `Compute`.
        tests: how often ``test()`` is called meanwhile.
    """

    exchange: MeasuredCollective
    start: Start
    compute: Compute
    steps: int
    tests: int

    def __post_init__(self) -> None:
        self.name = self.exchange.name
        self.phases: list[tuple[int, int, int, int]] = []

    def refresh(self, iteration: int) -> None:
        self.exchange.refresh(iteration)

    def timed(self) -> int:
        begin = time.perf_counter_ns()
        request = self.start()
        started = time.perf_counter_ns()
        testing = 0
        for part in range(self.tests + 1):
            self.compute.steps(self.steps * (part + 1) // (self.tests + 1) - self.steps * part // (self.tests + 1))
            if part < self.tests:
                before = time.perf_counter_ns()
                request.test()
                testing += time.perf_counter_ns() - before
        computed = time.perf_counter_ns()
        request.wait()
        end = time.perf_counter_ns()
        self.phases.append((started - begin, computed - started - testing, testing, end - computed))
        return end - begin

    def wrong(self, iteration: int) -> int:
        return self.exchange.wrong(iteration)


def overlap_sweep(
    how: CollectiveSweep, sizes: list[int], world: World, *, tests: int = 0, beside_library: bool = False
) -> Iterator[dict[str, Any]]:
    """Time `iallreduce` alone, then with as much computing beside it; every rank must go through it.

    A row has OSU's columns in microseconds, means over iterations and ranks: ``overall``, ``compute``, ``init``,
    ``test``, ``wait``, ``pure`` (started and waited for at once), and ``overlap`` in percent: how much of the pure time
    was hidden, ``100 (1 - (overall - compute) / pure)``, at least 0. Also ``nbytes``, ``count``, the ``minimum`` and
    ``maximum`` over the ranks and the ``median`` of the pure time, ``busbw_gb_s`` of its mean, ``iterations`` and
    ``wrong``. With ``beside_library`` the same of the MPI library's own nonblocking allreduce, which alternates with
    hpcdp's turn by turn, is in ``library``, unless it does not know the dtype.
    """
    buffers = Buffers(how, sizes[-1] // how.dtype.itemsize, world)
    compute = Compute()
    for nbytes in sizes:
        count = nbytes // how.dtype.itemsize
        ways = _ways_to_start(how, buffers, count, beside_library)
        schedule = how.schedule(nbytes, 100, len(ways))

        def timed(
            steps: Sequence[int], tests: int, schedule: MeasuringSchedule = schedule, ways: Any = ways
        ) -> list[_Phases]:
            candidates = [
                Overlapped(plain, start, compute, each, tests) for (plain, start), each in zip(ways, steps, strict=True)
            ]
            ranks = gather(world, alternate(candidates, world.comm.barrier, schedule, how.validate))
            return [_phases(world, ranks[each.name], each.phases[schedule.warmup :]) for each in candidates]

        alone = timed([0] * len(ways), 0)
        beside = timed([compute.steps_for(1e3 * each.timing.avg) for each in alone], tests)
        own, *library = map(_overlap, alone, beside)
        for each in (own, *library):
            each["busbw_gb_s"] = bus_factor(world.size) * nbytes / each["pure"] / 1e3
        yield {"nbytes": nbytes, "count": count, **own, **({"library": library[0]} if library else {})}


def _ways_to_start(
    how: CollectiveSweep, buffers: Buffers, count: int, beside_library: bool
) -> list[tuple[MeasuredCollective, Start]]:
    """hpcdp's, and the MPI library's own, of which a mean is a sum; each with what its result must be."""
    plain, world = exchange(replace(how, collective="allreduce"), buffers, count), buffers.world
    x, op = plain.x, "sum" if how.op == "mean" else how.op
    found: list[tuple[MeasuredCollective, Start]] = [
        (plain, lambda: collectives.iallreduce(x, how.op, world, how.algorithm))
    ]
    if beside_library and reducible(x[:0]).dtype == x.dtype:
        own = MeasuredCollective("the MPI library", FreshData(world.rank, world.size, how.dtype, op), x, x, plain.call)
        found.append((own, lambda: world.comm.native_iallreduce(x, op)))
    return found


@dataclass(frozen=True)
class _Phases:
    """What a series took, and what its parts took in microseconds: start, compute, test, wait."""

    timing: Timing
    parts: list[float]
    wrong: int


def _phases(world: World, ranks: list[Series], parts_ns: list[tuple[int, int, int, int]]) -> _Phases:
    means = world.comm.allgather_json(np.mean(parts_ns, axis=0).tolist())
    return _Phases(timing(ranks), (np.mean(means, axis=0) / 1e3).tolist(), wrong(ranks))


def _overlap(alone: _Phases, beside: _Phases) -> dict[str, Any]:
    init, computing, testing, waiting = beside.parts
    pure, overall = alone.timing.avg, beside.timing.avg
    return {
        "overall": overall,
        "compute": computing,
        "init": init,
        "test": testing,
        "wait": waiting,
        "pure": pure,
        "overlap": max(0.0, 100 * (1 - (overall - computing) / pure)),
        "minimum": alone.timing.minimum,
        "maximum": alone.timing.maximum,
        "median": alone.timing.median,
        "iterations": beside.timing.iterations,
        "wrong": alone.wrong + beside.wrong,
    }
