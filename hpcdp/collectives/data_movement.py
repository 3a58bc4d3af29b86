"""Collectives that move data of any size: allgather, gather, scatter, alltoall, and a nonblocking barrier.

Arrays differ between ranks in the length of axis 0 only. All ranks first compare their calls and exchange these lengths
(`Calls.gather`), and then move the blocks (`blocks`), in the memory of a node or by messages.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..comm import World
from ..comm.communicator import Steps, StepsTo, bounds
from ..comm.consistency import Call
from ..comm.tasks import Operation, ProgressEngine
from ..comm.watchdog import Watchdog
from ..core.arrays import Array, dtype_name, dtype_of_char, from_host, in_kind_of_sender, kind_number
from ..core.checks import described
from ..errors import UnsupportedError
from . import blocks as block_algorithms
from . import intra_node
from .blocks import Blocks, offsets
from .staging import accepts_tensors, bring_back, bytes_of, check_like, checked_root, kind_of_call, movable, ranks_of

T = TypeVar("T")

_SHORT_NBYTES = 1 << 10
"""The longest blocks of one size that `blocks.bruck` moves: they travel several times, in fewer messages."""
_SHORT_TOTAL_NBYTES = 64 << 10
"""The largest result of an allgather for which fewer messages (`blocks.bruck_allgather`) cost less than the copies."""
_JOINED_NBYTES = 32 << 10
"""The longest blocks that `blocks.by_node` joins with others of their node: longer ones do not wait for latency."""
_MOST_AXES = 64
"""The most axes of a NumPy array."""


@accepts_tensors
def gather(x: Array, root: int = 0, world: World | None = None, out: Array | None = None) -> Array | None:
    """Gather every rank's ``x`` on rank ``root``, concatenated along axis 0; every rank must call.

    Args:
        x: an array of NumPy, CuPy or PyTorch, of any integer, float, complex or bool dtype. Ranks may differ in the
            length of axis 0, which may be 0. A number counts as shape ``(1,)``.
        root: the rank that receives.
        world: the ranks; default `hpcdp.init()`.
        out: on ``root`` the array that receives all rows; default a new one.

    Returns:
        On ``root`` ``out``, or a new array of x's kind; on other ranks None.

    Raises:
        UnsupportedError: ``x`` is no such array, or ``root`` no rank.
        MismatchError: ranks differ in dtype, another axis, root or operation; the same error on every rank.
    """
    return run("gather", world, x, root, out)


@accepts_tensors
def igather(x: Array, root: int = 0, world: World | None = None, out: Array | None = None) -> Operation[Array | None]:
    """Start a `gather`, whose arguments and errors it has; ``wait()`` returns its result."""
    return start("igather", world, x, root, out)


@accepts_tensors
def scatter(
    x: Array | None,
    root: int = 0,
    world: World | None = None,
    splits: Sequence[int] | None = None,
    out: Array | None = None,
) -> Array:
    """Send each rank its rows of the array ``x`` of rank ``root``; every rank must call.

    Args:
        x: on ``root`` an array as for `gather`, with at least one axis. Other ranks pass None: they need to know
            neither shape nor dtype.
        root: the rank that sends.
        world: the ranks; default `hpcdp.init()`.
        splits: on ``root`` the number of rows for each rank; default as even as possible: rank r of n gets rows ``N r
            // n`` to ``N (r + 1) // n`` of N.
        out: receives this rank's rows; default a new array.

    Returns:
        ``out``, or a new array: on ``root`` of x's kind, on other ranks in host memory; a tensor there, too, if ``x``
            is one and the rank has imported PyTorch.

    Raises:
        UnsupportedError: ``x`` or ``splits`` is not valid on ``root``; on every rank.
        MismatchError: ranks differ in root or operation; the same error on every rank.
    """
    return run("scatter", world, x, root, splits, out)


@accepts_tensors
def iscatter(
    x: Array | None,
    root: int = 0,
    world: World | None = None,
    splits: Sequence[int] | None = None,
    out: Array | None = None,
) -> Operation[Array]:
    """Start a `scatter`, whose arguments and errors it has; ``wait()`` returns its result."""
    return start("iscatter", world, x, root, splits, out)


@accepts_tensors
def alltoall(
    x: Array, splits: Sequence[int] | None = None, world: World | None = None, out: Array | None = None
) -> Any:
    """Send each rank its rows of ``x`` and receive this rank's rows of every other ``x``; every rank must call.

    Args:
        x: an array as for `gather`, with at least one axis: the rows for rank 0, then for rank 1, and so on.
        splits: the number of rows for each rank, their sum the length of axis 0; may differ between ranks. Default
            equal numbers, and then x has the same shape on all ranks. All ranks pass splits, or none.
        world: the ranks; default `hpcdp.init()`.
        out: receives the rows; it shares no memory with ``x``. Default a new array.

    Returns:
        ``out``, or a new array of x's kind: the received rows in the order of the ranks. With ``splits`` a pair: the
            array, and the number of rows received from each rank, shape ``(n,)``, int64.

    Raises:
        UnsupportedError: the rows do not divide evenly, or ``splits`` does not fit x.
        MismatchError: ranks differ in dtype, another axis or operation; the same error on every rank.
    """
    return run("alltoall", world, x, splits, out)


@accepts_tensors
def ialltoall(
    x: Array, splits: Sequence[int] | None = None, world: World | None = None, out: Array | None = None
) -> Operation[Any]:
    """Start an `alltoall`, whose arguments and errors it has; ``wait()`` returns its result."""
    return start("ialltoall", world, x, splits, out)


def barrier(world: World | None = None) -> None:
    """Block until every rank has called it; see `World.barrier`."""
    ranks_of(world).barrier()


def ibarrier(world: World | None = None) -> Operation[None]:
    """Start a barrier, which is complete when every rank has started it; every rank must call."""
    return start("ibarrier", world, None)


def run(name: str, world: World | None, x: Any, *others: Any) -> Any:
    """Run an operation of this module, or an allgather, to its end; return its result."""
    world = ranks_of(world)
    return run_exchange(_EXCHANGES[name](name, world, x, *others), world, x)


def start(name: str, world: World | None, x: Any, *others: Any) -> Operation[Any]:
    """Start an operation of this module, or an allgather, by the name of its nonblocking function."""
    world = ranks_of(world)
    return start_exchange(_EXCHANGES[name.removeprefix("i")](name, world, x, *others), world, x)


def started(name: str, steps: StepsTo[T], x: object, world: World) -> Operation[T]:
    """Start the steps of a nonblocking operation; the first steps of a world may wait for the other ranks."""
    with Watchdog.of(world).watching(name, x):
        return ProgressEngine.of(world).start(name, steps, x)


def run_exchange(exchange: Exchange, world: World, x: object) -> Any:
    """Run an exchange to its end; return its result."""
    name = exchange.call.operation
    with world.meeting() if world.meetings else contextlib.nullcontext(), Watchdog.of(world).watching(name, x):
        return ProgressEngine.of(world).run(name, _steps_of(exchange, world), x)


def start_exchange(exchange: Exchange, world: World, x: object) -> Operation[Any]:
    """Start an exchange; the first one of a world waits for the other ranks."""
    name = exchange.call.operation
    with Watchdog.of(world).watching(name, x):
        steps = _steps_of(exchange, world)
    return ProgressEngine.of(world).start(name, steps, x)


Move = Callable[[str, Blocks], Steps]
"""``move(algorithm, blocks)`` moves the blocks; the algorithm is that of ranks that do not share memory."""


@dataclass(frozen=True)
class Exchange:
    """A validated call of one rank: what all ranks compare, the counts that they exchange, and what follows."""

    call: Call
    counts: Sequence[int]
    then: Callable[[np.ndarray, Move], StepsTo[Any]]
    """``then(counts, move)`` continues with the counts of all ranks, shape ``(n, k)``."""


def _steps_of(exchange: Exchange, world: World) -> StepsTo[Any]:
    """Return the steps of an exchange; the first call of a world blocks until every rank has called."""
    progress, call = ProgressEngine.of(world), exchange.call
    shares = world.size > 1 and intra_node.can_share(world)
    progress.prepare(intra_node.prepare if shares else block_algorithms.nodes_of, world, call)
    tag = 0

    def move(algorithm: str, blocks: Blocks) -> Steps:
        blocks.keep_own(world.rank)
        if shares:
            yield from intra_node.exchange(blocks, world, call)
        else:
            yield from block_algorithms.ALGORITHMS[algorithm](blocks, world, tag)

    def steps() -> StepsTo[Any]:
        nonlocal tag
        # In the first step, during which no other thread starts an operation: the tag is that of this call.
        counts = np.array(exchange.counts, np.int64)
        gathering = progress.calls.gather(call, counts, lambda counts: exchange.then(counts, move))
        tag = progress.tag(call.signature)
        return (yield from gathering)

    return steps()


def allgather_exchange(name: str, world: World, x: Array, *facts: str) -> Exchange:
    """Return the exchange of an allgather; all ranks must pass the same ``facts``."""
    host = np.atleast_1d(movable(name, x))
    row, rank = host.shape[1:], world.rank

    def then(counts: np.ndarray, move: Move) -> StepsTo[Array]:
        rows = counts[:, 0].tolist()
        out = np.empty((sum(rows), *row), host.dtype)
        ends = [end * row_nbytes(row, host.dtype) for end in offsets(rows)]
        parts = bytes_of(out)
        parts[ends[rank] : ends[rank + 1]] = bytes_of(host)
        yield from moved_parts(parts, ends, rank, move)
        return from_host(out, x)

    return Exchange(_call(name, host, *facts), [len(host)], then)


def moved_parts(parts: np.ndarray, ends: Sequence[int], rank: int, move: Move) -> Steps:
    """Complete the parts of all ranks; arguments as for `blocks.allgather_blocks`."""
    is_broadcast = sum(first < last for first, last in itertools.pairwise(ends)) == 1
    is_short = ends[-1] <= _SHORT_TOTAL_NBYTES
    algorithm = "tree" if is_broadcast else "bruck_allgather" if is_short else "ring"
    return move(algorithm, block_algorithms.allgather_blocks(parts, ends, rank))


def gather_exchange(name: str, world: World, x: Array, root: int, out: Array | None) -> Exchange:
    """Return the exchange of a gather; arguments as for `gather`."""
    root = checked_root(name, root, world)
    host = np.atleast_1d(movable(name, x))
    row, rank = host.shape[1:], world.rank

    def then(counts: np.ndarray, move: Move) -> StepsTo[Array | None]:
        rows = counts[:, 0]
        sizes = (rows * row_nbytes(row, host.dtype)).tolist()
        receiver = _Receiver(name, out if rank == root else None, (rows.sum() * (rank == root), *row), host.dtype)
        yield from move("direct", block_algorithms.gather_blocks(bytes_of(host), receiver.data, sizes, rank, root))
        return receiver.result(x) if rank == root else None

    return Exchange(_call(name, host, f"root {root}"), [len(host)], then)


def scatter_exchange(
    name: str, world: World, x: Array | None, root: int, splits: Sequence[int] | None, out: Array | None
) -> Exchange:
    """Return the exchange of a scatter; arguments as for `scatter`."""
    root = checked_root(name, root, world)
    n, rank = world.size, world.rank
    host: np.ndarray = np.empty(0, np.uint8)
    failure: UnsupportedError | None = None
    counts: list[int] = [0] * (n + 2 + _MOST_AXES)
    if rank == root:
        try:
            host, rows = _divided(name, x, splits, n)
            header = [*rows, ord(host.dtype.char), kind_number(kind_of_call())]
            counts[: n + 1 + host.ndim] = [*header, *(axis + 1 for axis in host.shape[1:])]
        except UnsupportedError as error:  # the others wait for this rank
            failure = error

    def then(all_counts: np.ndarray, move: Move) -> StepsTo[Array]:
        numbers: list[int] = all_counts[root].tolist()
        rows, char, kind, sizes = numbers[:n], numbers[n], numbers[n + 1], numbers[n + 2 :]
        if not char:
            raise failure or UnsupportedError(name, where=f"x on rank {root}", expected="an array", got="no valid one")
        dtype, row = dtype_of_char(chr(char)), tuple(int(size) - 1 for size in sizes if size)
        nbytes = [count * row_nbytes(row, dtype) for count in rows]
        receiver = _Receiver(name, out, (rows[rank], *row), dtype)
        yield from move("direct", block_algorithms.scatter_blocks(bytes_of(host), receiver.data, nbytes, rank, root))
        return receiver.result(x) if rank == root else in_kind_of_sender(kind, receiver.result(host))

    return Exchange(Call(name, name, f"root {root}"), counts, then)


def alltoall_exchange(name: str, world: World, x: Array, splits: Sequence[int] | None, out: Array | None) -> Exchange:
    """Return the exchange of an alltoall; arguments as for `alltoall`."""
    n, rank = world.size, world.rank
    host, rows = _divided(name, x, splits, n)
    if splits is None and len(host) % n:
        raise UnsupportedError(
            name, where="x", expected=f"a multiple of {n} rows, one part for each rank", got=f"{len(host)} rows",
            remedy="pass splits=, the number of rows for each rank",
        )  # fmt: skip
    row, is_even = host.shape[1:], splits is None

    def then(counts: np.ndarray, move: Move) -> StepsTo[Any]:
        received_rows = len(host) if is_even else int(counts[:, rank].sum())
        receiver = _Receiver(name, out, (received_rows, *row), host.dtype)
        sent, received = bytes_of(host), receiver.data
        if is_even:
            blocks = block_algorithms.even_alltoall_blocks(sent, received, n, rank)
        else:
            blocks = block_algorithms.alltoall_blocks(sent, received, counts * row_nbytes(row, host.dtype), rank)
        yield from move(_alltoall_algorithm(world, blocks), blocks)
        result = receiver.result(x)
        return result if is_even else (result, counts[:, rank].copy())

    call = _call(name, host, f"{len(host)} rows each" if is_even else "splits")
    return Exchange(call, [] if is_even else rows, then)


def _alltoall_algorithm(world: World, blocks: Blocks) -> str:
    """Return the algorithm of an alltoall by messages; the same on every rank."""
    longest = blocks.ends[1] if blocks.sizes is None else int(blocks.sizes.max())
    if 1 < world.num_nodes < world.size and longest <= _JOINED_NBYTES:
        return "by_node"
    return "bruck" if blocks.sizes is None and longest <= _SHORT_NBYTES else "pairwise"


def _ibarrier(name: str, world: World, x: None) -> Exchange:
    return comparison(Call(name))


def comparison(call: Call) -> Exchange:
    """Return an exchange that only compares the calls of all ranks."""

    def then(counts: np.ndarray, move: Move) -> StepsTo[None]:
        yield from ()

    return Exchange(call, [], then)


_EXCHANGES: dict[str, Callable[..., Exchange]] = {
    "allgather": allgather_exchange,
    "gather": gather_exchange,
    "scatter": scatter_exchange,
    "alltoall": alltoall_exchange,
    "barrier": _ibarrier,
}


class _Receiver:
    """The memory that receives the rows of an operation: ``out`` itself if possible, else new memory on the host."""

    def __init__(self, operation: str, out: Array | None, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._out = out
        if out is not None:
            check_like(operation, out, shape, dtype)
        is_host = type(out) is np.ndarray and out.flags.carray
        self._host: np.ndarray = out if is_host else np.empty(shape, dtype)  # type: ignore[assignment]
        self.data = bytes_of(self._host)

    def result(self, x: Array) -> Array:
        """Return ``out``, or a new array of the kind of ``x``."""
        if self._out is None:
            return from_host(self._host, x)
        if self._out is not self._host:
            bring_back(self._host, self._out)
        return self._out


def _call(name: str, x: np.ndarray, *facts: str) -> Call:
    return _call_of(name, x.shape[1:], dtype_name(x.dtype), facts)


@functools.lru_cache(1 << 10)
def _call_of(name: str, row: tuple[int, ...], dtype: str, facts: tuple[str, ...]) -> Call:
    return Call(name, f"{name} of {rows_named(row, dtype)}", *facts)


def rows_named(row: tuple[int, ...], dtype: str) -> str:
    """Return what ranks must agree on in an array of any number of rows."""
    return f"({', '.join(['rows', *map(str, row)])}) {dtype}"


def row_nbytes(row: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the bytes of a row of this shape."""
    return math.prod(row) * dtype.itemsize


def _divided(name: str, x: Array | None, splits: Sequence[int] | None, n: int) -> tuple[np.ndarray, list[int]]:
    """Return ``x`` on the host and the number of its rows for each rank."""
    host = movable(name, x)
    return host, rows_of_ranks(name, host.shape, splits, n)


def rows_of_ranks(name: str, shape: tuple[int, ...], splits: Sequence[int] | str | None, n: int) -> list[int]:
    """Return the number of rows for each of ``n`` ranks of an array of ``shape``.

    They are as even as possible if ``splits`` is None or ``"even"``.

    Raises:
        UnsupportedError: the array has no axis, or ``splits`` does not fit it.
    """
    if not shape:
        raise UnsupportedError(name, where="x", expected="an array with at least one axis", got="a number")
    if splits is None or (isinstance(splits, str) and splits == "even"):
        return [last - first for first, last in itertools.pairwise(bounds(shape[0], n))]
    expected = f"{n} numbers of rows, one for each rank, with the sum {shape[0]}"
    try:
        rows = [operator.index(rows) for rows in splits]  # type: ignore[arg-type]
    except TypeError:
        raise UnsupportedError(name, where="splits", expected=expected, got=described(splits)) from None
    if len(rows) != n or min(rows) < 0 or sum(rows) != shape[0]:
        raise UnsupportedError(name, where="splits", expected=expected, got=described(rows))
    return rows
