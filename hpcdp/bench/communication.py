"""Benchmarks of messages between pairs of ranks and of collectives over message sizes, for hpcdp and the MPI library.

Rank i of the first half of the ranks is paired with rank ``i + n // 2``, so pairs span nodes if ranks are placed node
by node. ``latency``, ``bandwidth`` and ``bibandwidth`` use the first pair only, while the other ranks sleep. The
patterns are those of OSU's osu_latency, osu_bw, osu_bibw and osu_mbw_mr.
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
from .command import BLOCKS
from .measure import (
    FreshData,
    MeasuredCollective,
    MeasuringSchedule,
    Series,
    Timing,
    alternate,
    bus_factor,
    gather,
    sleeping_barrier,
    timing,
    wrong,
)

_TOKEN, _DATA = 1, 2  # tags


@dataclass(frozen=True)
class PairMessages:
    """The calls that send messages: those of hpcdp's communicator, or of the MPI library."""

    send: Callable[[np.ndarray, int], Any]
    receive: Callable[[np.ndarray, int], Any]
    finish: Callable[[Sequence[Any]], Any]


def own_messages(world: World) -> PairMessages:
    """Return the calls of hpcdp's communicator."""
    comm = world.comm

    def finish(requests: Sequence[Any]) -> None:
        for request in requests:
            request.wait()

    return PairMessages(lambda x, to: comm.isend(x, to, _DATA), lambda x, of: comm.irecv(x, of, _DATA), finish)


def public_messages(world: World) -> PairMessages:
    """Return the public functions, whose messages say the shape and dtype of their array."""
    return PairMessages(
        lambda x, to: collectives.isend(x, to, _DATA, world),
        lambda x, of: collectives.irecv(x, of, _DATA, world),
        lambda operations: [operation.wait() for operation in operations],
    )


def library_messages(world: World) -> PairMessages | None:
    """Return the calls of the MPI library; None for thread ranks."""
    mpi = _mpi(world)
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
        name: the name in the output.
        pattern: one of `command.PAIRS`.
        messages: the calls to time.
        data: the contents of the messages.
        x: the send buffer, shape ``(count,)``.
        y: the receive buffer, of the same shape, for all messages of a window, as in OSU's benchmarks.
        rank, peer: the two ranks of the pair.
        window: the number of concurrent messages.
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
        self._acknowledgment = np.zeros(1, np.uint8)

    def refresh(self, iteration: int) -> None:
        """See `Candidate`."""
        self.data.write(self.x, iteration)

    def timed(self) -> int:
        """See `Candidate`."""
        first = self.rank < self.peer
        begin = time.perf_counter_ns()
        if self.pattern in ("latency", "pt2pt"):
            for sending in (first, not first):
                self._finish([self._send() if sending else self._receive()])
            return (time.perf_counter_ns() - begin) // 2
        if self.pattern == "bibandwidth":
            received = [self._receive() for _ in range(self.window)]
            self._finish([*received, *(self._send() for _ in range(self.window))])
            return time.perf_counter_ns() - begin
        if first:
            self._finish([self._send() for _ in range(self.window)])
            self._finish([self.messages.receive(self._acknowledgment, self.peer)])
        else:
            self._finish([self._receive() for _ in range(self.window)])
            self._finish([self.messages.send(self._acknowledgment, self.peer)])
        return time.perf_counter_ns() - begin

    def wrong(self, iteration: int) -> int:
        """See `Candidate`."""
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
    """The pairs of a pattern, and their synchronization. Every rank must create it.

    Args:
        pattern: one of `command.PAIRS`.
        world: all ranks.

    Raises:
        ConfigError: there are fewer than two ranks, or an odd number for multi_pair; on every rank.
    """

    def __init__(self, pattern: str, world: World) -> None:
        if world.size < 2:
            raise ConfigError(
                f"bench {pattern}", expected="2 ranks or more", got="1",
                remedy=f"start it with hpcdp launch -n 2 -- hpcdp bench {pattern}",
            )  # fmt: skip
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
        """Synchronize the active ranks."""
        comm = self._world.comm
        if self.pairs > 1:
            comm.barrier()
            return
        for sending in (self._world.rank < self.peer, self._world.rank > self.peer):
            if sending:
                comm.isend(self._token, self.peer, _TOKEN).wait()
            else:
                comm.irecv(self._token, self.peer, _TOKEN).wait()


@dataclass(frozen=True)
class PairSweep:
    """The settings of a sweep over sizes, as in `CollectiveSweep`; ``window`` is the number of concurrent messages."""

    pattern: str
    dtype: np.dtype
    iterations: int | None = None
    warmup: int = 10
    validate: bool = True
    window: int = 64

    def schedule(self, nbytes: int, candidates: int) -> MeasuringSchedule:
        """Return the schedule of a size: ``iterations`` timings, or a number by the size."""
        if self.iterations is not None:
            return MeasuringSchedule.exactly(self.iterations, self.warmup, candidates)
        latency = self.pattern in ("latency", "pt2pt")
        return MeasuringSchedule.for_size(
            nbytes * (1 if latency else self.window), 1000 if latency else 100, self.warmup
        )


def sweep_pairs(
    how: PairSweep, sizes: list[int], world: World, *, beside_library: bool = False
) -> Iterator[dict[str, Any]]:
    """Time a pattern at every size and yield a row for each size; every rank must iterate.

    Every row has ``nbytes``, ``count``, ``iterations`` and ``wrong`` (wrong elements on all ranks). Latency has
    ``avg``, ``minimum``, ``maximum`` and ``median`` of half a round trip in microseconds. The other patterns have
    ``mb_s`` (decimal, all pairs together, by the slowest pair; bibandwidth by the slower end), ``median_mb_s``,
    ``min_mb_s`` and ``max_mb_s`` over iterations, and ``messages_s``. With ``beside_library``, ``library`` has the same
    for the MPI library's own calls, which alternate with hpcdp's turn by turn.
    """
    ranks = Ranks(how.pattern, world)
    data = FreshData(world.rank, world.size, how.dtype)
    x, y = (np.empty(sizes[-1] // how.dtype.itemsize, how.dtype) for _ in range(2))
    calls = {"own": public_messages(world) if how.pattern == "pt2pt" else own_messages(world)}
    if beside_library and (messages := library_messages(world)) is not None:
        calls["library"] = messages
    for nbytes in sizes:
        count = nbytes // how.dtype.itemsize
        timings = {name: Series([], 1) for name in calls}
        if ranks.active:
            mine = (data, x[:count], y[:count], world.rank, ranks.peer, how.window)
            candidates = [PairExchange(name, how.pattern, messages, *mine) for name, messages in calls.items()]
            timings = alternate(candidates, ranks.meet, how.schedule(nbytes, len(calls)), how.validate)
        sleeping_barrier(world)  # polling ranks would take time from the active ones
        figures = {name: _pair_figures(how, series, ranks, nbytes) for name, series in gather(world, timings).items()}
        yield {"nbytes": nbytes, "count": count, **figures.pop("own"), **figures}


def _pair_figures(how: PairSweep, series: list[Series], ranks: Ranks, nbytes: int) -> dict[str, Any]:
    # One way the sender's clock counts, since it waits for an answer. Both ways one end finishes before the other.
    clocks = ranks.ends if how.pattern == "bibandwidth" else range(ranks.pairs)
    ns = np.array([series[rank].ns for rank in clocks])
    figures = _latency(ns) if how.pattern in ("latency", "pt2pt") else _bandwidth(how, ns, nbytes)
    return {"iterations": ns.shape[1], **figures, "wrong": wrong(series)}


def _latency(ns: np.ndarray) -> dict[str, float]:
    us = ns[0] / 1e3
    figures = {"avg": us.mean(), "minimum": us.min(), "maximum": us.max(), "median": np.median(us)}
    return {name: float(value) for name, value in figures.items()}


def _bandwidth(how: PairSweep, ns: np.ndarray, nbytes: int) -> dict[str, float]:
    mb = how.window * len(ns) * nbytes / 1e6  # one clock for each window of messages
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
    """The settings of a sweep over sizes.

    Args:
        collective: a name in `CALLS`, or iallreduce.
        dtype: the dtype of the elements.
        op: the reduction, for collectives that reduce.
        algorithm: the algorithm of the collective.
        iterations: the number of timed calls; None: by size.
        warmup: untimed calls before.
        validate: check the results.
        out_of_place: time calls with a separate result, too.
        root: the root, for collectives that have one.
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
        """Return the schedule of a size: ``iterations`` timings, or about ``usual``, fewer for large messages."""
        if self.iterations is None:
            return MeasuringSchedule.for_size(nbytes, usual, self.warmup)
        return MeasuringSchedule.exactly(self.iterations, self.warmup, candidates)


class Buffers:
    """A rank's arrays for one sweep, large enough for its largest message.

    Args:
        sweep: the settings of the sweep.
        count: the elements of the largest message.
        world: the ranks.
    """

    def __init__(self, sweep: CollectiveSweep, count: int, world: World) -> None:
        self.world = world
        self.data = FreshData(world.rank, world.size, sweep.dtype, sweep.op)
        self.x, self.out = (np.empty(size, sweep.dtype) for size in elements(sweep, count, world.size))


def elements(sweep: CollectiveSweep, count: int, ranks: int) -> tuple[int, int]:
    """Return the elements of a rank's input and of its result for a message of ``count`` elements.

    The message of an allgather and of `BLOCKS` is the contribution of one rank, or that for one rank, as in OSU's
    benchmarks, of others the whole array.
    """
    if sweep.collective == "allgather":
        return count if sweep.out_of_place else 0, ranks * count
    if sweep.collective in BLOCKS:
        return ranks * count, ranks * count
    return count, count if sweep.out_of_place else 0


Call = Callable[[np.ndarray, np.ndarray, CollectiveSweep, World], Any]
"""A call of one collective with this rank's input and result, which may overlap."""

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
    "allgatherv": lambda x, out, how, world: collectives.allgather(x, world, how.algorithm),
    "alltoall": lambda x, out, how, world: collectives.alltoall(x, None, world, out, how.algorithm),
    "gather": lambda x, out, how, world: collectives.gather(
        x, how.root, world, out if world.rank == how.root else None
    ),
    "scatter": lambda x, out, how, world: collectives.scatter(
        x if world.rank == how.root else None, how.root, world, out=out
    ),
}


def _mpi(world: World) -> Any:
    """Return the communicator of mpi4py; None for thread ranks."""
    return getattr(world.comm, "mpi", None)


LIBRARY: dict[str, Call] = {
    "allreduce": lambda x, out, how, world: world.comm.native_allreduce(x, how.op),
    "reduce_scatter": lambda x, out, how, world: world.comm.native_reduce_scatter(x, out, how.op),
    "allgather": lambda x, out, how, world: world.comm.native_allgather(out),
    "broadcast": lambda x, out, how, world: world.comm.native_broadcast(x, how.root),
    "reduce": lambda x, out, how, world: world.comm.native_reduce(x, how.op, how.root),
    "allgatherv": lambda x, out, how, world: _mpi(world).Allgatherv(x, [out, [x.size] * world.size]),
    "alltoall": lambda x, out, how, world: _mpi(world).Alltoall(x, out),
    "gather": lambda x, out, how, world: _mpi(world).Gather(x, out if world.rank == how.root else None, how.root),
    "scatter": lambda x, out, how, world: _mpi(world).Scatter(x if world.rank == how.root else None, out, how.root),
}
"""The MPI library's own collectives, in place unless they are of `BLOCKS`."""


def exchange(
    how: CollectiveSweep, buffers: Buffers, count: int, *, in_place: bool = True, library: bool = False
) -> MeasuredCollective:
    """Return a candidate for one collective of ``count`` elements (see `elements`), with the check of its result."""
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
    elif name in BLOCKS:
        x, result, check = _of_blocks(how, buffers, count)
    elif name == "broadcast":
        check = lambda result, iteration: data.wrong_input(result, iteration, how.root)  # noqa: E731
    elif name == "reduce" and world.rank != how.root:
        result = x
        check = lambda result, iteration: data.wrong_input(result, iteration, world.rank)  # noqa: E731
    do = (LIBRARY if library else CALLS)[name]
    returns = name == "allgatherv" and not library
    return MeasuredCollective(name, data, x, result, lambda: do(x, result, how, world), check, returns)


def _of_blocks(
    how: CollectiveSweep, buffers: Buffers, count: int
) -> tuple[np.ndarray, np.ndarray, Callable[[np.ndarray, int], int]]:
    """Return the input and the result of a collective of blocks, and the check of the result."""
    name, world, data = how.collective, buffers.world, buffers.data
    n, rank = world.size, world.rank
    everything, out = buffers.x[: n * count], buffers.out[: n * count]
    if name == "scatter":
        result = out[:count]
        return everything, result, lambda result, iteration: data.wrong_input(result, iteration, how.root, rank * count)
    if name == "gather" and rank != how.root:
        return everything[:count], out[:0], lambda result, iteration: 0
    first = rank * count if name == "alltoall" else 0
    x = everything if name == "alltoall" else everything[:count]

    def check(result: np.ndarray, iteration: int) -> int:
        parts = enumerate(split(result, n))
        return sum(data.wrong_input(part, iteration, other, first) for other, part in parts)

    return x, out, check


def sweep_collective(
    how: CollectiveSweep, sizes: list[int], world: World, *, beside_library: bool = False
) -> Iterator[dict[str, Any]]:
    """Time a collective at every size and yield a row for each size; every rank must iterate.

    A row has the figures of calls in place: ``nbytes``, ``count``, ``total_nbytes`` (the whole array, for an allgather
    that of all ranks), OSU's ``avg``, ``minimum`` and ``maximum`` and the ``median`` in microseconds, ``iterations``,
    ``algbw_gb_s``, ``busbw_gb_s`` and ``wrong``, the number of wrong elements on all ranks. ``out_of_place`` has the
    same for calls with a separate result, if requested and possible, and ``library`` for the MPI library, which
    alternates with hpcdp turn by turn.
    """
    buffers = Buffers(how, sizes[-1] // how.dtype.itemsize, world)
    for nbytes in sizes:
        count = nbytes // how.dtype.itemsize
        total = nbytes * (world.size if how.collective in ("allgather", *BLOCKS) else 1)

        def measured(*candidates: MeasuredCollective, total: int = total) -> list[dict[str, Any]]:
            schedule = how.schedule(total, 200, len(candidates))
            series = gather(world, alternate(candidates, world.comm.barrier, schedule, how.validate))
            return [_figures(how.collective, series[candidate.name], total, world.size) for candidate in candidates]

        candidates = [exchange(how, buffers, count)]
        if beside_library:
            peer = exchange(how, buffers, count, library=True)
            candidates.append(replace(peer, name="the MPI library"))
        own, *library = measured(*candidates)
        row = {"nbytes": nbytes, "count": count, "total_nbytes": total, **own}
        if how.out_of_place and how.collective not in ("broadcast", *BLOCKS):
            (row["out_of_place"],) = measured(exchange(how, buffers, count, in_place=False))
        if library:
            row["library"] = library[0]
        yield row


def _figures(collective: str, ranks: list[Series], nbytes: int, size: int) -> dict[str, Any]:
    latencies = timing(ranks)
    algbw = nbytes / latencies.avg / 1e3
    busbw = algbw * bus_factor(size, collective)
    return {**asdict(latencies), "algbw_gb_s": algbw, "busbw_gb_s": busbw, "wrong": wrong(ranks)}


class Compute:
    """Computation of a given duration on one core, in steps of some microseconds."""

    _DIM = 25  # as OSU's

    def __init__(self) -> None:
        self._a = np.full((self._DIM, self._DIM), 1.0 / self._DIM, np.float32)
        self._x = np.ones(self._DIM, np.float32)
        self._y = np.empty(self._DIM, np.float32)
        begin = time.perf_counter_ns()
        self.steps(2000)
        self._step_ns = (time.perf_counter_ns() - begin) / 2000

    def steps(self, number: int) -> None:
        """Compute ``number`` products of a small matrix and a vector."""
        for _ in range(number):
            np.matmul(self._a, self._x, out=self._y)

    def steps_for(self, ns: float) -> int:
        """Return the number of steps that take ``ns`` nanoseconds on an idle core."""
        return max(1, round(ns / self._step_ns))


Start = Callable[[], Any]
"""A function that starts a collective and returns its request."""


@dataclass
class Overlapped:
    """A nonblocking collective with overlapped computation: one rank's series at one size.

    Args:
        exchange: the data and the check of its results; its blocking call is not used.
        start: a function that starts the collective and returns the request.
        compute: the computation between start and wait.
        steps: the steps of the computation, see `Compute`.
        tests: the number of calls of ``test()`` during the computation.
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
        """See `Candidate`."""
        self.exchange.refresh(iteration)

    def timed(self) -> int:
        """See `Candidate`."""
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
        """See `Candidate`."""
        return self.exchange.wrong(iteration)


def overlap_sweep(
    how: CollectiveSweep, sizes: list[int], world: World, *, tests: int = 0, beside_library: bool = False
) -> Iterator[dict[str, Any]]:
    """Time `iallreduce` alone and with computation of equal duration, and yield a row for each size; all must iterate.

    A row has OSU's columns in microseconds, means over iterations and ranks: ``overall``, ``compute``, ``init``,
    ``test``, ``wait`` and ``pure`` (start and wait without computation). ``overlap`` is the percentage of the pure time
    that was hidden, ``100 (1 - (overall - compute) / pure)``, at least 0. The row also has ``nbytes``, ``count``, the
    ``minimum`` and ``maximum`` over ranks and the ``median`` of the pure time, ``busbw_gb_s`` of its mean,
    ``iterations`` and ``wrong``. With ``beside_library``, ``library`` has the same for the MPI library's own
    nonblocking allreduce, if it supports the dtype; it alternates with hpcdp's turn by turn.
    """
    buffers = Buffers(how, sizes[-1] // how.dtype.itemsize, world)
    compute = Compute()
    for nbytes in sizes:
        count = nbytes // how.dtype.itemsize
        starts = _starts(how, buffers, count, beside_library)
        schedule = how.schedule(nbytes, 100, len(starts))

        def timed(
            steps: Sequence[int], tests: int, schedule: MeasuringSchedule = schedule, starts: Any = starts
        ) -> list[_Phases]:
            candidates = [
                Overlapped(plain, start, compute, count, tests)
                for (plain, start), count in zip(starts, steps, strict=True)
            ]
            ranks = gather(world, alternate(candidates, world.comm.barrier, schedule, how.validate))
            return [
                _phases(world, ranks[candidate.name], candidate.phases[schedule.warmup :]) for candidate in candidates
            ]

        alone = timed([0] * len(starts), 0)
        beside = timed([compute.steps_for(1e3 * phases.timing.avg) for phases in alone], tests)
        own, *library = map(_overlap, alone, beside)
        for figures in (own, *library):
            figures["busbw_gb_s"] = bus_factor(world.size) * nbytes / figures["pure"] / 1e3
        yield {"nbytes": nbytes, "count": count, **own, **({"library": library[0]} if library else {})}


def _starts(
    how: CollectiveSweep, buffers: Buffers, count: int, beside_library: bool
) -> list[tuple[MeasuredCollective, Start]]:
    """Return the nonblocking allreduces to time, each with the check of its result; the MPI library's mean is a sum."""
    plain, world = exchange(replace(how, collective="allreduce"), buffers, count), buffers.world
    x, op = plain.x, "sum" if how.op == "mean" else how.op
    starts: list[tuple[MeasuredCollective, Start]] = [
        (plain, lambda: collectives.iallreduce(x, how.op, world, how.algorithm))
    ]
    if beside_library and reducible(x[:0]).dtype == x.dtype:
        own = MeasuredCollective("the MPI library", FreshData(world.rank, world.size, how.dtype, op), x, x, plain.call)
        starts.append((own, lambda: world.comm.native_iallreduce(x, op)))
    return starts


@dataclass(frozen=True)
class _Phases:
    """The timing of a series, and of its parts in microseconds: start, compute, test, wait."""

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
