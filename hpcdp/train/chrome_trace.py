"""One trace file of all ranks, in the Trace Event Format of chrome://tracing and ui.perfetto.dev.

A rank is drawn as a process, a lane of its `Trace` as a thread. Each rank converts its slices to JSON lines and sends
them to rank 0 in pieces. Rank 0 writes them as they arrive, so a trace may be larger than its memory.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import socket
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from ..comm import Communicator, World, init
from ..comm.consistency import on_rank_0
from ..comm.world import require_world
from ..core.checks import instance
from ..core.files import own_part_of
from ..engine import Engine, default_engine
from ..engine.engine import MAIN, Slice, Trace
from ..errors import ConfigError, reason, to_stderr

LANES = (MAIN, "communication", "update", "io")
"""The order in which lanes are drawn; other lanes follow by name."""

ROUNDS = 32
"""Round trips for the comparison of two clocks; the fastest one is used."""

PIECE_NBYTES = 1 << 20

_HEADER = b'{"displayTimeUnit":"ms","traceEvents":[\n'


class Offset(NamedTuple):
    """The offset of a rank's clock from the clock of rank 0 at one moment."""

    time_ns: int
    """The moment, on the rank's own clock."""
    ahead_ns: int
    uncertainty_ns: int
    """The largest possible distance of the true offset from ``ahead_ns``."""


def traced(path: str | Path, world: World | None = None, trace: Trace | None = None) -> Recording:
    """Return a context that traces its block and writes the trace to ``path`` at the end; every rank must enter it.

    Trainers and other objects record their slices if they are created within the block. The file gets its name when it
    is complete, so neither an exception nor a killed job leaves a partial file. A write error does not end the program:
    it is reported once on standard error and kept in ``failure``.

    Args:
        path: a file on the file system of rank 0; an existing trace is replaced. A relative path is resolved when the
            block begins.
        world: default `hpcdp.init()`.
        trace: the trace to record into, default ``Trace()``.

    Raises:
        ConfigError: ``path`` cannot be written, or is a file but not a trace (on every rank, before the block runs);
            the world is already traced; or an argument is invalid.
    """
    instance("traced", "path", path, (str, os.PathLike), "a file, as a str or a Path")
    instance("traced", "trace", trace, (Trace, NoneType), "a Trace, or None")
    require_world("traced", world)
    return Recording(Path(path), init() if world is None else world, trace)


def check_path(path: str | Path) -> None:
    """Raise `ConfigError` unless a trace can be written to ``path``; one process of a job calls it.

    Creates the folder.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not (path.is_file() and _is_trace(path)):
            raise ConfigError(
                "write the trace", where=path, expected="a new file, or a trace to replace", got="another file",
                remedy="choose another name",
            )  # fmt: skip
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        got = reason(error) + (f": {path.parent}" if isinstance(error, FileExistsError) else "")
        raise ConfigError("write the trace", where=path, got=got, remedy="choose another name") from error


def _is_trace(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_HEADER)) in (_HEADER, b"")


class Recording:
    """A trace in progress on all ranks, see `traced`."""

    def __init__(self, path: Path, world: World, trace: Trace | None) -> None:
        self.path = path
        self.trace = Trace() if trace is None else trace
        self.num_slices = 0
        """The number of slices of all ranks; set at the end."""
        self.num_dropped = 0
        """The number of slices and counts of all ranks beyond the capacity of their traces; set at the end."""
        self.failure: OSError | None = None
        """The error that kept rank 0 from writing the file, or None."""
        self._world = world

    def __enter__(self) -> Self:
        world, trace = self._world, self.trace
        if Trace in world.kept:
            raise ConfigError("traced", expected="a world that is not being traced", got="a nested traced()")
        on_rank_0(world.comm, lambda: check_path(self.path))
        if world.rank == 0:
            self._place = Path(os.path.realpath(self.path))  # replaces the target of a link, not the link
        self._comm = world.keep("messages of traces", world.comm.duplicate)
        self._origin_ns = trace.clock()
        self._offsets = [measure_offsets(self._comm, trace.clock)]
        world.kept[Trace] = trace
        for engine in self._engines():
            if engine.observer is None:
                engine.observer = trace.slice
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.trace.end()
        del self._world.kept[Trace]
        for engine in self._engines():
            if engine.observer == self.trace.slice:
                engine.observer = None
        if kind is None:
            self._offsets.append(measure_offsets(self._comm, self.trace.clock))
            self._write()

    def _engines(self) -> list[Engine]:
        return [default_engine(), *(value for value in self._world.kept.values() if isinstance(value, Engine))]

    def _write(self) -> None:
        comm, trace = self._comm, self.trace
        host = socket.gethostname()
        summaries = comm.allgather_json([host, len(trace.slices), trace.dropped])
        self.num_slices = sum(count for _, count, _ in summaries)
        self.num_dropped = sum(dropped for _, _, dropped in summaries)
        if comm.rank:
            line = np.zeros(5, np.int64)
            comm.irecv(line, 0).wait()
            _send(comm, _pieces(events(trace, comm.rank, host, _aligned(*line.tolist()))))
            return
        output = _Output(self._place)
        try:
            output.write(_pieces(events(trace, 0, host, _aligned(self._origin_ns, 0, 0, 0, 0))))
            for rank, (before, after) in enumerate(zip(*self._offsets, strict=True), 1):
                line = np.array([self._origin_ns, *before[:2], *after[:2]], np.int64)
                comm.isend(line, rank).wait()
                output.write(_receive(comm, rank))
            clocks = [[offset._asdict() for offset in pair] for pair in zip(*self._offsets, strict=True)]
            output.finish({"ranks": comm.size, "dropped": [dropped for _, _, dropped in summaries], "clocks": clocks})
        except BaseException:  # Ctrl-C
            output.drop()
            raise
        self.failure = output.failure
        if self.failure is not None:
            to_stderr(f"hpcdp: cannot write {self.path}: {self.failure.strerror}")


def measure_offsets(comm: Communicator, clock: Callable[[], int]) -> list[Offset]:
    """Return the clock offsets of ranks 1, 2, ... on rank 0, an empty list elsewhere; every rank must call.

    The fastest round trip gives the best estimate: the other clock was read within it, so the error is at most half of
    its duration (Cristian, "Probabilistic clock synchronization", 1989).
    """
    ping, pong = np.zeros(1, np.int64), np.zeros(1, np.int64)
    if comm.rank:
        for _ in range(ROUNDS):
            comm.irecv(ping, 0).wait()
            pong[0] = clock()
            comm.isend(pong, 0).wait()
        return []
    offsets = []
    for other in range(1, comm.size):
        rounds = []
        for _ in range(ROUNDS):
            reply = comm.irecv(pong, other)
            sent_ns = clock()
            comm.isend(ping, other).wait()
            reply.wait()
            rounds.append((clock() - sent_ns, sent_ns, int(pong[0])))
        took_ns, sent_ns, there_ns = min(rounds)
        offsets.append(Offset(there_ns, there_ns - (sent_ns + took_ns // 2), -(-took_ns // 2)))
    return offsets


def _aligned(origin_ns: int, first_ns: int, ahead_ns: int, last_ns: int, ahead_at_last_ns: int) -> Callable[[int], int]:
    """Return a function from a rank's clock to ns since ``origin_ns`` of rank 0, with linear drift in between."""
    span_ns, drift_ns = max(1, last_ns - first_ns), ahead_at_last_ns - ahead_ns
    return lambda time_ns: max(0, time_ns - ahead_ns - (time_ns - first_ns) * drift_ns // span_ns - origin_ns)


def tracks(slices: Iterable[Slice]) -> list[tuple[str, list[Slice]]]:
    """Return the named tracks of a trace, each sorted by time: one per lane, more where slices of a lane overlap.

    A viewer can draw slices of one track only beside or within each other.
    """
    lanes: dict[str, list[Slice]] = defaultdict(list)
    for item in slices:
        lanes[item.lane].append(item)
    named = []
    for lane in sorted(lanes, key=lambda name: (LANES.index(name) if name in LANES else len(LANES), name)):
        rows: list[tuple[list[Slice], list[Slice]]] = []  # the slices of a track, and those still open there
        for item in sorted(lanes[lane], key=lambda other: (other.start_ns, -other.end_ns)):
            track = next((row for row in rows if _fits(item, row[1])), None)
            if track is None:
                track = ([], [])
                rows.append(track)
            track[0].append(item)
            if item.end_ns > item.start_ns:
                track[1].append(item)
        named += [(lane if not number else f"{lane} ({number + 1})", row) for number, (row, _) in enumerate(rows)]
    return named


def _fits(item: Slice, still_open: list[Slice]) -> bool:
    if item.end_ns == item.start_ns:
        return True
    while still_open and still_open[-1].end_ns <= item.start_ns:
        still_open.pop()
    return not still_open or (still_open[-1].nests and item.nests and item.end_ns <= still_open[-1].end_ns)


def events(trace: Trace, rank: int, host: str, aligned: Callable[[int], int]) -> Iterator[str]:
    """Yield the events of one rank as JSON objects, track by track, sorted by time in microseconds since the start."""

    def named(kind: str, tid: int, label: str, place: int) -> Iterator[str]:
        for name, args in ((f"{kind}_name", {"name": label}), (f"{kind}_sort_index", {"sort_index": place})):
            yield json.dumps({"ph": "M", "name": name, "pid": rank, "tid": tid, "args": args})

    yield from named("process", 0, f"rank {rank} on {host}", rank)
    for tid, (label, row) in enumerate(tracks(list(trace.slices))):
        yield from named("thread", tid, label, tid)
        for item in row:
            start, end = aligned(item.start_ns), aligned(item.end_ns)
            shape = f'"X","dur":{_us(end - start)}' if item.end_ns > item.start_ns else '"i","s":"t"'
            args = f',"args":{_json(item.args)}' if item.args else ""
            yield f'{{"ph":{shape},"pid":{rank},"tid":{tid},"ts":{_us(start)},"name":{_quoted(item.name)}{args}}}'
    for count in list(trace.counts):
        if math.isfinite(count.value):  # JSON has no NaN: the curve has a gap
            value = f'{{"value":{float(count.value)!r}}}'
            at = _us(aligned(count.time_ns))
            yield f'{{"ph":"C","pid":{rank},"ts":{at},"name":{_quoted(count.name)},"args":{value}}}'


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


@functools.lru_cache(maxsize=4096)
def _quoted(name: str) -> str:
    return json.dumps(name)


def _json(args: dict[str, Any]) -> str:
    try:
        return json.dumps(args, allow_nan=False, default=str)
    except ValueError:
        return json.dumps({name: str(value) for name, value in args.items()})


def _pieces(lines: Iterable[str]) -> Iterator[bytes]:
    """Join the lines by commas into pieces of about `PIECE_NBYTES`."""
    piece: list[str] = []
    nbytes = 0
    for line in lines:
        piece.append(line)
        nbytes += len(line)
        if nbytes >= PIECE_NBYTES:
            yield ",\n".join(piece).encode()
            piece, nbytes = [], 0
    if piece:
        yield ",\n".join(piece).encode()


def _send(comm: Communicator, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        comm.isend(np.array([len(piece)], np.int64), 0).wait()
        comm.isend(np.frombuffer(piece, np.uint8), 0).wait()
    comm.isend(np.zeros(1, np.int64), 0).wait()


def _receive(comm: Communicator, rank: int) -> Iterator[bytes]:
    while True:
        length = np.zeros(1, np.int64)
        comm.irecv(length, rank).wait()
        if not length[0]:
            return
        piece = np.empty(int(length[0]), np.uint8)
        comm.irecv(piece, rank).wait()
        yield piece.tobytes()


class _Output:
    """The output file, renamed to ``path`` when it is complete. After a failure it discards further data."""

    def __init__(self, path: Path) -> None:
        self.failure: OSError | None = None
        self._path = path
        self._file: BinaryIO | None = None
        self._separator = b""
        self._append(_HEADER)

    def write(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            self._append(self._separator)
            self._append(piece)
            self._separator = b",\n"

    def finish(self, about: dict[str, Any]) -> None:
        self._append(b'\n],"otherData":' + json.dumps(about).encode() + b"}\n")
        if self._file is not None and self.failure is None:
            try:
                self._file.close()
                if self._path.exists() and not _is_trace(self._path):  # created meanwhile, by the run itself
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                os.replace(own_part_of(self._path), self._path)
            except OSError as error:
                self._fail(error)

    def drop(self) -> None:
        """Remove the partial file."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        with contextlib.suppress(OSError):
            own_part_of(self._path).unlink()

    def _append(self, text: bytes) -> None:
        if self.failure is not None:
            return
        try:
            if self._file is None:
                self._file = open(own_part_of(self._path), "wb")  # noqa: SIM115
            self._file.write(text)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.failure = error
        self.drop()
