"""Collectives that move data of any size: allgather, gather, scatter, alltoall, and a nonblocking barrier.

Arrays differ between ranks in the length of axis 0 only. All ranks first compare their calls and exchange these lengths
(`Calls.gather`), and then move the blocks (`blocks`), in the memory of a node or by messages.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..comm import World
from ..comm.communicator import StepsTo, bounds
from ..comm.consistency import Call
from ..comm.tasks import Operation, ProgressEngine
from ..comm.watchdog import Watchdog
from ..core.arrays import BFLOAT16, Array, dtype_of, from_host
from ..core.checks import described
from ..errors import UnsupportedError
from . import blocks as block_algorithms
from . import intra_node
from .blocks import Blocks, offsets
from .staging import accepts_tensors, bytes_of, checked_root, movable, ranks_of

T = TypeVar("T")

_SHORT_NBYTES = 1 << 10
"""The longest blocks of one size that `blocks.bruck` moves: they travel several times, in fewer messages."""
_MOST_AXES = 64
"""The most axes of a NumPy array."""


@accepts_tensors
def gather(x: Array, root: int = 0, world: World | None = None) -> Array | None:
    """Gather every rank's ``x`` on rank ``root``, concatenated along axis 0; every rank must call.

    Args:
        x: an array of NumPy, CuPy or PyTorch, of any integer, float, complex or bool dtype. Ranks may differ in the
            length of axis 0, which may be 0. A number counts as shape ``(1,)``.
        root: the rank that receives.
        world: the ranks; default `hpcdp.init()`.

    Returns:
        On ``root`` a new array of x's kind, on other ranks None.

    Raises:
        UnsupportedError: ``x`` is no such array, or ``root`` no rank.
        MismatchError: ranks differ in dtype, another axis, root or operation; the same error on every rank.
    """
    return run("gather", world, x, root)


@accepts_tensors
def igather(x: Array, root: int = 0, world: World | None = None) -> Operation[Array | None]:
    """Start a `gather`, whose arguments and errors it has; ``wait()`` returns its result."""
    return start("igather", world, x, root)


@accepts_tensors
def scatter(x: Array | None, root: int = 0, world: World | None = None, splits: Sequence[int] | None = None) -> Array:
    """Send each rank its rows of the array ``x`` of rank ``root``; every rank must call.

    Args:
        x: on ``root`` an array as for `gather`, with at least one axis. Other ranks pass None: they need to know
            neither shape nor dtype.
        root: the rank that sends.
        world: the ranks; default `hpcdp.init()`.
        splits: on ``root`` the number of rows for each rank; default as even as possible: rank r of n gets rows ``N r
            // n`` to ``N (r + 1) // n`` of N.

    Returns:
        A new array, this rank's rows; on ``root`` of x's kind, on other ranks in host memory.

    Raises:
        UnsupportedError: ``x`` or ``splits`` is not valid on ``root``; on every rank.
        MismatchError: ranks differ in root or operation; the same error on every rank.
    """
    return run("scatter", world, x, root, splits)


@accepts_tensors
def iscatter(
    x: Array | None, root: int = 0, world: World | None = None, splits: Sequence[int] | None = None
) -> Operation[Array]:
    """Start a `scatter`, whose arguments and errors it has; ``wait()`` returns its result."""
    return start("iscatter", world, x, root, splits)


@accepts_tensors
def alltoall(x: Array, splits: Sequence[int] | None = None, world: World | None = None) -> Any:
    """Send each rank its rows of ``x`` and receive this rank's rows of every other ``x``; every rank must call.

    Args:
        x: an array as for `gather`, with at least one axis: the rows for rank 0, then for rank 1, and so on.
        splits: the number of rows for each rank, their sum the length of axis 0; may differ between ranks. Default
            equal numbers, and then x has the same shape on all ranks. All ranks pass splits, or none.
        world: the ranks; default `hpcdp.init()`.

    Returns:
        A new array of x's kind, the received rows in the order of the ranks. With ``splits`` a pair: the array, and the
            number of rows received from each rank, shape ``(n,)``, int64.

    Raises:
        UnsupportedError: the rows do not divide evenly, or ``splits`` does not fit x.
        MismatchError: ranks differ in dtype, another axis or operation; the same error on every rank.
    """
    return run("alltoall", world, x, splits)


@accepts_tensors
def ialltoall(x: Array, splits: Sequence[int] | None = None, world: World | None = None) -> Operation[Any]:
    """Start an `alltoall`, whose arguments and errors it has; ``wait()`` returns its result."""
    return start("ialltoall", world, x, splits)


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
    with world.meeting(), Watchdog.of(world).watching(name, x):
        return ProgressEngine.of(world).run(name, _steps_of(exchange, world), x)


def start_exchange(exchange: Exchange, world: World, x: object) -> Operation[Any]:
    """Start an exchange; the first one of a world waits for the other ranks."""
    name = exchange.call.operation
    with Watchdog.of(world).watching(name, x):
        steps = _steps_of(exchange, world)
    return ProgressEngine.of(world).start(name, steps, x)


Move = Callable[[str, Blocks], StepsTo[np.ndarray]]
"""``move(algorithm, blocks)`` moves the blocks and returns the received bytes; the algorithm is one of messages, for
ranks that do not share memory."""


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
    if shares and intra_node.prepare not in progress.prepared:
        progress.finish()
        progress.calls.agree(call)
        intra_node.prepare(world)
        progress.prepared.add(intra_node.prepare)

    def move(algorithm: str, blocks: Blocks) -> StepsTo[np.ndarray]:
        blocks.keep_own(world.rank)
        if shares:
            yield from intra_node.exchange(blocks, world, call)
        else:
            yield from block_algorithms.ALGORITHMS[algorithm](blocks, world.comm, tag)
        return blocks.received

    steps = progress.calls.gather(call, np.array(exchange.counts, np.int64), lambda counts: exchange.then(counts, move))
    tag = progress.tag(call.signature)
    return steps


def allgather_bytes(name: str, message: np.ndarray, world: World, *facts: str) -> np.ndarray:
    """Return the concatenated messages of all ranks, of shape ``(nbytes,)``, uint8; every rank must call."""
    return run_exchange(_allgather(name, world, message, *facts), world, message)  # type: ignore[no-any-return]


def _allgather(name: str, world: World, x: Array, *facts: str) -> Exchange:
    host = np.atleast_1d(movable(name, x))
    row, rank = host.shape[1:], world.rank

    def then(counts: np.ndarray, move: Move) -> StepsTo[Array]:
        rows = counts[:, 0].tolist()
        out = np.empty((sum(rows), *row), host.dtype)
        ends = [end * _nbytes(row, host.dtype) for end in offsets(rows)]
        parts = bytes_of(out)
        parts[ends[rank] : ends[rank + 1]] = bytes_of(host)
        is_broadcast = sum(first < last for first, last in itertools.pairwise(ends)) == 1
        yield from move("tree" if is_broadcast else "ring", block_algorithms.allgather_blocks(parts, ends, rank))
        return from_host(out, x)

    return Exchange(_call(name, host, *facts), [len(host)], then)


def _gather(name: str, world: World, x: Array, root: int) -> Exchange:
    root = checked_root(name, root, world)
    host = np.atleast_1d(movable(name, x))
    row, rank = host.shape[1:], world.rank

    def then(counts: np.ndarray, move: Move) -> StepsTo[Array | None]:
        rows = counts[:, 0]
        sizes = (rows * _nbytes(row, host.dtype)).tolist()
        received = yield from move("direct", block_algorithms.gather_blocks(bytes_of(host), sizes, rank, root))
        return from_host(received.view(host.dtype).reshape(rows.sum(), *row), x) if rank == root else None

    return Exchange(_call(name, host, f"root {root}"), [len(host)], then)


def _scatter(name: str, world: World, x: Array | None, root: int, splits: Sequence[int] | None) -> Exchange:
    root = checked_root(name, root, world)
    n, rank = world.size, world.rank
    host: np.ndarray = np.empty(0, np.uint8)
    failure: UnsupportedError | None = None
    counts: list[int] = [0] * (n + 1 + _MOST_AXES)
    if rank == root:
        try:
            host, rows = _divided(name, x, splits, n)
            counts[: n + host.ndim] = [*rows, ord(host.dtype.char), *(axis + 1 for axis in host.shape[1:])]
        except UnsupportedError as error:  # the others wait for this rank
            failure = error

    def then(all_counts: np.ndarray, move: Move) -> StepsTo[Array]:
        numbers: list[int] = all_counts[root].tolist()
        rows, kind, sizes = numbers[:n], numbers[n], numbers[n + 1 :]
        if not kind:
            raise failure or UnsupportedError(name, where=f"x on rank {root}", expected="an array", got="no valid one")
        dtype, row = (
            dtype_of(chr(kind) if chr(kind) != "E" else BFLOAT16),
            tuple(int(size) - 1 for size in sizes if size),
        )
        nbytes = [count * _nbytes(row, dtype) for count in rows]
        received = yield from move("direct", block_algorithms.scatter_blocks(bytes_of(host), nbytes, rank, root))
        out = received.view(dtype).reshape(rows[rank], *row)
        return from_host(out, x) if rank == root else out

    return Exchange(Call(name, name, f"root {root}"), counts, then)


def _alltoall(name: str, world: World, x: Array, splits: Sequence[int] | None) -> Exchange:
    n, rank = world.size, world.rank
    host, rows = _divided(name, x, splits, n)
    if splits is None and len(host) % n:
        raise UnsupportedError(
            name, where="x", expected=f"a multiple of {n} rows, one part for each rank", got=f"{len(host)} rows",
            remedy="pass splits=, the number of rows for each rank",
        )  # fmt: skip
    row, is_even = host.shape[1:], splits is None

    def then(counts: np.ndarray, move: Move) -> StepsTo[Any]:
        sizes = np.tile(rows, (n, 1)) if is_even else counts
        blocks = block_algorithms.alltoall_blocks(bytes_of(host), sizes * _nbytes(row, host.dtype), rank)
        received = yield from move("bruck" if is_even and blocks.ends[1] <= _SHORT_NBYTES else "pairwise", blocks)
        out = from_host(received.view(host.dtype).reshape(sizes[:, rank].sum(), *row), x)
        return out if is_even else (out, counts[:, rank].copy())

    call = _call(name, host, f"{len(host)} rows each" if is_even else "splits")
    return Exchange(call, [] if is_even else rows, then)


def _ibarrier(name: str, world: World, x: None) -> Exchange:
    def then(counts: np.ndarray, move: Move) -> StepsTo[None]:
        yield from ()

    return Exchange(Call(name), [], then)


_EXCHANGES: dict[str, Callable[..., Exchange]] = {
    "allgather": _allgather, "gather": _gather, "scatter": _scatter, "alltoall": _alltoall, "barrier": _ibarrier,
}  # fmt: skip


def _call(name: str, x: np.ndarray, *facts: str) -> Call:
    row = "".join(f", {size}" for size in x.shape[1:])
    return Call(name, f"{name} of (rows{row}) {x.dtype.name}", *facts)


def _nbytes(row: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(row) * dtype.itemsize


def _divided(name: str, x: Array | None, splits: Sequence[int] | None, n: int) -> tuple[np.ndarray, list[int]]:
    """Return ``x`` on the host and the number of its rows for each rank."""
    host = movable(name, x)
    if host.ndim == 0:
        raise UnsupportedError(name, where="x", expected="an array with at least one axis", got="a number")
    if splits is None:
        limits = bounds(len(host), n)
        return host, [last - first for first, last in itertools.pairwise(limits)]
    expected = f"{n} numbers of rows, one for each rank, with the sum {len(host)}"
    try:
        rows = [operator.index(rows) for rows in splits]
    except TypeError:
        raise UnsupportedError(name, where="splits", expected=expected, got=described(splits)) from None
    if len(rows) != n or min(rows) < 0 or sum(rows) != len(host):
        raise UnsupportedError(name, where="splits", expected=expected, got=described(rows))
    return host, rows
