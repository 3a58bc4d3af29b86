"""Collectives that move data of any size: allgather, gather, scatter, alltoall, and a nonblocking barrier.

Arrays differ between ranks in the length of axis 0 only. All ranks first compare their calls and exchange these lengths
(`Exchange.counts`), and then move the blocks (`blocks`), in the memory of a node or by messages.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np

from .. import kernels
from ..comm import World
from ..comm.communicator import StepsTo, bounds
from ..comm.consistency import FIRST_CALLS, Call, Calls
from ..comm.message_rounds import form_of
from ..comm.progress import Operation, ProgressEngine
from ..comm.repeated import SHORT_NBYTES, repeated_moves
from ..comm.watchdog import Watchdog
from ..core.arrays import Array, dtype_name, dtype_of_char, from_host, in_kind_of_sender, kind_number
from ..core.checks import choices, described
from ..errors import MismatchError, UnsupportedError, cut_in_middle, printable
from . import algorithm_choice, intra_node
from . import blocks as block_algorithms
from .blocks import BlockLayout, Blocks, offsets
from .staging import (
    accepts_tensors,
    apart,
    are_plain,
    bring_back,
    bytes_of,
    check_array,
    check_like,
    check_writeable,
    checked_root,
    movable,
    present,
    ranks_of,
    validation,
    with_tensors,
)

ArrayT = TypeVar("ArrayT", bound=Array)
"""The kind of arrays that a call takes and returns."""
T = TypeVar("T")


def _unchanged(received: Any) -> Any:
    return received


def _none(_: Any) -> None:
    return None


OF_ONE_LENGTH = [
    name for name in algorithm_choice.ALGORITHMS["allgather"] if name not in algorithm_choice.MOVEMENTS["allgatherv"]
]
"""The algorithms of an allgather whose arrays may not differ in the length of axis 0."""
_MOST_AXES = 64
"""The most axes of a NumPy array."""


def gather(x: ArrayT, root: int = 0, world: World | None = None, out: ArrayT | None = None) -> ArrayT | None:
    """Gather every rank's ``x`` on rank ``root``, concatenated along axis 0; every rank must call.

    Args:
        x: an array of NumPy, CuPy or PyTorch, of any integer, float, complex or bool dtype. Ranks may differ in the
            length of axis 0, which may be 0. An array without axes counts as shape ``(1,)``.
        root: the rank that receives.
        world: the ranks; default `hpcdp.init()`.
        out: on ``root`` the array that receives all rows; default a new one.

    Returns:
        On ``root`` ``out``, or a new array of x's kind; on other ranks None.

    Raises:
        UnsupportedError: ``x`` is no such array, or ``root`` no rank.
        MismatchError: ranks differ in dtype, another axis, root or operation; the same error on every rank.
    """
    if not are_plain(x, out):
        return with_tensors(gather, x=x, root=root, world=world, out=out)
    return run("gather", world, x, root, None, out=out)


@accepts_tensors
def igather(
    x: ArrayT, root: int = 0, world: World | None = None, out: ArrayT | None = None
) -> Operation[ArrayT | None]:
    """Start a `gather`, with the same arguments and errors; ``wait()`` returns its result."""
    return start("igather", world, x, root, None, out=out)


@overload
def scatter(
    x: None, root: int = 0, world: World | None = None, splits: Sequence[int] | None = None, out: None = None
) -> Array: ...
@overload
def scatter(
    x: ArrayT | None,
    root: int = 0,
    world: World | None = None,
    splits: Sequence[int] | None = None,
    out: ArrayT | None = None,
) -> ArrayT: ...
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
    if not are_plain(x, out):
        return with_tensors(scatter, x=x, root=root, world=world, splits=splits, out=out)
    return run("scatter", world, x, root, splits, None, out=out)


@overload
def iscatter(
    x: None, root: int = 0, world: World | None = None, splits: Sequence[int] | None = None, out: None = None
) -> Operation[Array]: ...
@overload
def iscatter(
    x: ArrayT | None,
    root: int = 0,
    world: World | None = None,
    splits: Sequence[int] | None = None,
    out: ArrayT | None = None,
) -> Operation[ArrayT]: ...
@accepts_tensors
def iscatter(
    x: Array | None,
    root: int = 0,
    world: World | None = None,
    splits: Sequence[int] | None = None,
    out: Array | None = None,
) -> Operation[Array]:
    """Start a `scatter`, with the same arguments and errors; ``wait()`` returns its result."""
    return start("iscatter", world, x, root, splits, None, out=out)


@overload
def alltoall(
    x: ArrayT, splits: None = None, world: World | None = None, out: ArrayT | None = None, algorithm: str = "auto"
) -> ArrayT: ...
@overload
def alltoall(
    x: ArrayT,
    splits: Sequence[int] | np.ndarray,
    world: World | None = None,
    out: ArrayT | None = None,
    algorithm: str = "auto",
) -> tuple[ArrayT, np.ndarray]: ...
def alltoall(
    x: Array,
    splits: Sequence[int] | np.ndarray | None = None,
    world: World | None = None,
    out: Array | None = None,
    algorithm: str = "auto",
) -> Any:
    """Send each rank its rows of ``x`` and receive this rank's rows of every other ``x``; every rank must call.

    Args:
        x: an array as for `gather`, with at least one axis: the rows for rank 0, then for rank 1, and so on.
        splits: the number of rows for each rank, their sum the length of axis 0; may differ between ranks. Default
            equal numbers, and then x has the same shape on all ranks. All ranks pass splits, or none.
        world: the ranks; default `hpcdp.init()`.
        out: receives the rows; may overlap ``x``, which is copied then. Default a new array.
        algorithm: ``"auto"``, or how messages move the rows, also between ranks that share memory: ``"pairwise"``,
            ``"bruck"`` (without ``splits``), or ``"by_node"`` (on several nodes of which one has several ranks).

    Returns:
        ``out``, or a new array of x's kind: the received rows in the order of the ranks. With ``splits`` a pair: the
            array, and the number of rows received from each rank, shape ``(n,)``, int64.

    Raises:
        UnsupportedError: the rows do not divide evenly, ``splits`` does not fit x, or the algorithm cannot run here.
        MismatchError: ranks differ in dtype, another axis, algorithm or operation; the same error on every rank.
    """
    if not are_plain(x, out):
        return with_tensors(alltoall, x=x, splits=splits, world=world, out=out, algorithm=algorithm)
    return run("alltoall", world, x, splits, algorithm, out=out)


@overload
def ialltoall(
    x: ArrayT, splits: None = None, world: World | None = None, out: ArrayT | None = None, algorithm: str = "auto"
) -> Operation[ArrayT]: ...
@overload
def ialltoall(
    x: ArrayT,
    splits: Sequence[int] | np.ndarray,
    world: World | None = None,
    out: ArrayT | None = None,
    algorithm: str = "auto",
) -> Operation[tuple[ArrayT, np.ndarray]]: ...
@accepts_tensors
def ialltoall(
    x: Array,
    splits: Sequence[int] | np.ndarray | None = None,
    world: World | None = None,
    out: Array | None = None,
    algorithm: str = "auto",
) -> Operation[Any]:
    """Start an `alltoall`, with the same arguments and errors; ``wait()`` returns its result."""
    return start("ialltoall", world, x, splits, algorithm, out=out)


def barrier(world: World | None = None) -> None:
    """Block until every rank has called it; see `World.barrier`."""
    ranks_of(world).barrier()


def ibarrier(world: World | None = None) -> Operation[None]:
    """Start a barrier, which is complete when every rank has started it; every rank must call."""
    return start("ibarrier", world, None)


def run(name: str, world: World | None, x: Any, *arguments: Any, out: Array | None = None) -> Any:
    """Run an operation of this module, or an allgather, to its end; return its result.

    A repeated call of equal arrays is one kernel call inside a node, and short messages with little work around them
    elsewhere, as long as the ranks' counts are the same.
    """
    world = ranks_of(world)
    key = _key_of(name, x, arguments)
    again: _Again | None = None if key is None else world.kept.get(_remember, _NOTHING).get(key)
    if again is not None and (result := again(world, x, arguments, out)) is not _USUALLY:
        return result
    exchange = _checked_exchange_of(name, world, x, arguments, out)
    result = run_exchange(exchange, world, x)
    if key is not None:
        _remember(key, exchange, world, x)
    return result


def _remember(key: object, exchange: Exchange, world: World, x: np.ndarray | None) -> None:
    """Let calls with a key repeat an exchange of ``x`` that has ended."""
    if exchange.moved is None:
        return
    known: dict[object, _Again | None] = world.keep(_remember, dict)
    if getattr(known.get(key), "form", None) == form_of(exchange.moved[0]):
        return  # this call was one that the repeated one cannot make, such as one of an array that is not contiguous
    if len(known) >= _MOST_REPEATED:
        known.clear()
    known[key] = _again_of(exchange, world, x)


def start(name: str, world: World | None, x: Any, *arguments: Any, out: Array | None = None) -> Operation[Any]:
    """Start an operation of this module, or an allgather, by the name of its nonblocking function.

    A repeated call inside a node begins by one kernel call, as in `run`, if it is short or its caller waits at once.
    """
    world = ranks_of(world)
    key = _key_of(name, x, arguments)
    again: _Again | None = None if key is None else world.kept.get(_remember, _NOTHING).get(key)
    if again is not None and (operation := again(world, x, arguments, out)) is not _USUALLY:
        return operation  # type: ignore[no-any-return]
    exchange = _checked_exchange_of(name, world, x, arguments, out)
    operation = start_exchange(exchange, world, x)
    if key is not None and again is None and exchange.shares(world):
        operation.add_done_callback(lambda: _remember(key, exchange, world, x))
    return operation


_NOTHING: dict[object, Any] = {}
_MOST_REPEATED = 4096


_PLAIN = frozenset([int, str, type(None)])
"""Types of arguments of which equal values ask for the same."""


def _key_of(name: str, x: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return what calls must have in common to move alike; None if that is unknown."""
    if type(x) is np.ndarray:
        shape, dtype = x.shape, x.dtype
    elif x is None:
        shape = dtype = None
    else:
        return None
    for value in arguments:
        if type(value) not in _PLAIN:
            if type(value) is not list:
                return None
            return name, shape, dtype, *(tuple(value) if type(value) is list else value for value in arguments)
    return name, shape, dtype, arguments


_USUALLY = object()
"""In place of a result: the call must be made in the usual way."""


_Again = Callable[[World, Any, tuple[Any, ...], Any], Any]
"""``again(world, x, arguments, out)`` makes a call that moves what an earlier one has moved, with the arguments of
`run`; it returns the result, or `_USUALLY`.
"""


def _again_by_kernels(moved: Moved, call: Callable[[Any, Any], bool]) -> _Again:
    """Return a repeated call whose exchange is a ``call`` as `BoundExchange.direct_call` returns it."""
    shape, dtype, finish, has_result = moved.shape, moved.dtype, moved.finish, moved.finish is not _none
    is_finished = finish is _unchanged

    def again(world: World, x: Any, arguments: tuple[Any, ...], out: Any) -> Any:
        received = None if not has_result else kernels.empty(shape, dtype) if out is None else out  # `Moved.memory`
        if not call(x, received):
            return _USUALLY
        return received if is_finished else finish(received)

    return again


def _again_started(name: str, moved: Moved, begin: Callable[..., Operation[Any] | None]) -> _Again:
    """Return a repeated nonblocking call whose exchange is one kernel call."""

    def again(world: World, x: Any, arguments: tuple[Any, ...], out: Any) -> Any:
        received = moved.memory(out)

        def usual(ticket: int) -> StepsTo[Any]:
            return _Movement(_exchange_of(name, world, x, arguments, out), world).steps(ticket=ticket)

        operation = begin(lambda: moved.finish(received), usual, x, received)
        return _USUALLY if operation is None else operation

    return again


def _exchange_of(name: str, world: World, x: Any, arguments: tuple[Any, ...], out: Any) -> Exchange:
    """Return the exchange of a call of the function ``name``."""
    return _EXCHANGES[name.removeprefix("i")](name, world, x, *arguments, out)


@validation
def _checked_exchange_of(name: str, world: World, x: Any, arguments: tuple[Any, ...], out: Any) -> Exchange:
    """Return `_exchange_of`, after all checks that do not depend on the other ranks."""
    exchange = _exchange_of(name, world, x, arguments, out)
    if exchange.out is not None:
        check_array(name, "out", exchange.out)
        check_writeable(name, "out", exchange.out)
    return exchange


def _with_data(numbers: np.ndarray, sent: np.ndarray, inline_nbytes: int) -> np.ndarray:
    """Return ``numbers`` followed by ``inline_nbytes`` bytes, in which the data ``sent`` are if they fit."""
    k = numbers.size
    joined = np.zeros(k + inline_nbytes // 8, np.int64)
    joined[:k] = numbers
    if sent.size <= inline_nbytes:
        joined[k:].view(np.uint8)[: sent.size] = sent
    return joined


def _again_of(exchange: Exchange, world: World, x: np.ndarray | None) -> _Again | None:
    """Return the repetition of an exchange of ``x`` that has ended; None if that would save nothing."""
    if exchange.moved is None:
        return None
    counts, moved = exchange.moved
    call, name = exchange.call, exchange.call.operation
    sent = None if x is None or not exchange.sent.size else (x.dtype, x.size, None)
    received = None if moved.finish is _none else (moved.dtype, math.prod(moved.shape), moved.shape)
    if exchange.shares(world):
        bound = intra_node.bound_exchange(exchange.counts, counts, moved.layout, (sent, received), world, call)
        if bound is None:
            return None
        if name.startswith("i"):
            longest = max(exchange.sent.size, math.prod(moved.shape) * moved.dtype.itemsize)
            return _again_started(name, moved, bound.started_call(world, call, longest <= SHORT_NBYTES))
        return _again_by_kernels(moved, bound.direct_call(world, call))
    planned = exchange.plan(counts) if exchange.knows_all and Calls.of(world).number >= FIRST_CALLS else None
    if planned is None or planned.sizes is None:
        return None
    routes, kept = block_algorithms.routed(planned.sizes, planned.layout, world.rank)
    rounds = repeated_moves(world, call, routes, kept, sent, received, -1, form_of(counts))
    if rounds is None:
        return None
    again = _again_by_kernels(moved, rounds.direct_call(world, call))
    again.form = form_of(counts)  # type: ignore[attr-defined]
    return again


_NO_BYTES = np.empty(0, np.uint8)


def started(name: str, steps: StepsTo[T], x: object, world: World, after: Operation[Any] | None = None) -> Operation[T]:
    """Start the steps of a nonblocking operation; the first steps of a world may wait for the other ranks.

    Steps ``after`` another operation begin when it has ended, see `ProgressEngine.start`.
    """
    with Watchdog.of(world).watching(name, x):
        return ProgressEngine.of(world).start(name, steps, x, after=after)


def run_exchange(exchange: Exchange, world: World, x: object) -> Any:
    """Run an exchange to its end; return its result."""
    name = exchange.call.operation
    with world.meeting() if world.meetings else contextlib.nullcontext(), Watchdog.of(world).watching(name, x):
        progress = ProgressEngine.of(world)
        return progress.run(name, _Movement(exchange, world).steps(blocks=not progress.active.running), x)


def start_exchange(exchange: Exchange, world: World, x: object) -> Operation[Any]:
    """Start an exchange; the first one of a world waits for the other ranks."""
    name = exchange.call.operation
    with Watchdog.of(world).watching(name, x):
        steps = _Movement(exchange, world).steps()
    return ProgressEngine.of(world).start(name, steps, x)


@dataclass(frozen=True)
class Moved:
    """The movement of an exchange on one rank, once the counts of all ranks are known."""

    layout: BlockLayout
    algorithm: str
    """The algorithm, in `blocks.ALGORITHMS`, of ranks that do not share memory."""
    shape: tuple[int, ...]
    """The shape of the received array."""
    dtype: np.dtype
    finish: Callable[[Any], Any] = _unchanged
    """Makes the result from the received array; keeps no array."""
    sizes: np.ndarray | None = None
    """Shape ``(n, n)``: the bytes that each rank sends to each, or shape ``(n,)``: to all alike; None if unknown."""

    def memory(self, out: Any) -> Any:
        """Return the memory for what is received, perhaps an ``out`` that does not fit; None without a result."""
        if self.finish is _none:
            return None
        return kernels.empty(self.shape, self.dtype) if out is None else out


@dataclass
class Exchange:
    """A validated call of one rank."""

    call: Call
    """The values that all ranks compare."""
    counts: Sequence[int]
    """The numbers that the ranks exchange; as many on every rank."""
    plan: Callable[[np.ndarray], Moved | None]
    """``plan(counts)`` returns what is moved, given the counts of all ranks, shape ``(n, k)``; None for nothing."""
    sent: np.ndarray
    """Shape ``(nbytes,)``, uint8: this rank's data."""
    plan_of_messages: Callable[[int, np.ndarray, np.ndarray | None], Moved] | None = None
    """Replaces ``plan`` between nodes if rank r alone needs this rank's ``counts[r]``, given the largest of all counts
    and the results of `blocks.counts_by_node`.
    """
    prepare: Callable[[World], object] = _none
    """Gathers what the algorithms between nodes need to know of all ranks; called once in a world."""
    like: Array | None = None
    """The array whose kind the received array gets; default NumPy's."""
    out: Array | None = None
    """The array that receives."""
    algorithm: str = "auto"
    """The requested algorithm; another than ``"auto"`` keeps to messages."""
    moved: tuple[np.ndarray, Moved] | None = None
    """The counts of all ranks and what was moved, after the end."""
    knows_all: bool = False
    """True after the end if this rank knows the counts of all ranks."""

    def shares(self, world: World) -> bool:
        """Return whether the data move in the memory of a node."""
        return self.algorithm == "auto" and world.size > 1 and intra_node.can_share(world)


_INLINE_NBYTES, _INLINE_NBYTES_OF_ALL, _LEAST_INLINE_NBYTES = 512, 1 << 10, 64
"""The most data that a rank sends along with its counts, if it does not share memory with all others, and that all do;
with more ranks than leave the least for each, none.
"""


def _inline_nbytes(exchange: Exchange, world: World) -> int:
    """Return the bytes of data that each rank sends along with its counts; equal on all ranks."""
    if exchange.algorithm != "auto" or world.size == 1:
        return 0
    inline_nbytes = min(_INLINE_NBYTES, _INLINE_NBYTES_OF_ALL // world.size) // 8 * 8
    return inline_nbytes if inline_nbytes >= _LEAST_INLINE_NBYTES else 0


class _Movement:
    """An exchange in progress; the first one of a world blocks until every rank has made its own."""

    def __init__(self, exchange: Exchange, world: World) -> None:
        self._exchange, self._world, self._progress = exchange, world, ProgressEngine.of(world)
        self._shares = exchange.shares(world)
        self._inline_nbytes = 0 if self._shares else _inline_nbytes(exchange, world)
        self._tag = 0
        self._progress.prepare(intra_node.prepare if self._shares else exchange.prepare, world, exchange.call)

    def steps(self, blocks: bool = False, ticket: int | None = None) -> StepsTo[Any]:
        """Return the steps of the exchange; with ``blocks`` the first one waits for what other ranks send first.

        With a ``ticket`` the exchange has begun in the memory of the node.
        """
        # In the first step, during which no other thread starts an operation: the tag is that of this call.
        exchange, calls, call = self._exchange, self._progress.calls, self._exchange.call
        counts = np.array(exchange.counts, np.int64)
        if self._inline_nbytes:
            numbers = _with_data(np.append(counts, exchange.sent.size), exchange.sent, self._inline_nbytes)
            if blocks:
                return (yield from self.continued(calls.gather_now(call, numbers)))
            gathering = calls.gather(call, numbers, self._move_gathered)
        elif self._shares:
            calls.number += ticket is None
            gathering = intra_node.gather(call, counts, exchange.sent, self._move_counted, self._world, ticket)
        elif exchange.plan_of_messages is not None:
            gathering = calls.largest(call, max(exchange.counts), self._move_messages)
        else:
            gathering = calls.gather(call, counts, self._move_counted)
        self._tag = self._progress.tag(call.signature)
        return (yield from gathering)

    def continued(self, gathered: np.ndarray) -> StepsTo[Any]:
        """Return the steps after the numbers of all ranks have been gathered."""
        self._tag = self._progress.tag(self._exchange.call.signature)
        return self._move_gathered(gathered)

    def _move_counted(self, counts: np.ndarray) -> StepsTo[Any]:
        return (yield from self._move(counts, self._exchange.plan(counts)))

    def _move_messages(self, largest: int) -> StepsTo[Any]:
        counts = np.array(self._exchange.counts, np.int64)
        counts, passed_on = yield from block_algorithms.counts_by_node(counts, self._world, self._tag)
        assert self._exchange.plan_of_messages is not None
        return (yield from self._move(counts, self._exchange.plan_of_messages(largest, counts, passed_on)))

    def _move_gathered(self, gathered: np.ndarray) -> StepsTo[Any]:
        exchange, k = self._exchange, len(self._exchange.counts)
        counts, nbytes = gathered[:, :k].copy(), gathered[:, k]
        exchange.knows_all = True
        if int(nbytes.max()) <= self._inline_nbytes:
            data = gathered.view(np.uint8)[:, 8 * (k + 1) :]
            return (yield from self._move(counts, exchange.plan(counts), data))
        if exchange.plan_of_messages is None:
            return (yield from self._move(counts, exchange.plan(counts)))
        passed_on = block_algorithms.passed_on_of(counts, self._world)
        moved = exchange.plan_of_messages(int(counts.max()), counts[:, self._world.rank].copy(), passed_on)
        return (yield from self._move(counts, moved))

    def _move(self, counts: np.ndarray, moved: Moved | None, data: np.ndarray | None = None) -> StepsTo[Any]:
        """Move the blocks, or copy them from the ``data`` of all ranks; return the result."""
        if moved is None:
            return None
        exchange, world = self._exchange, self._world
        receiver = _Receiver(exchange.call.operation, exchange.out, moved.shape, moved.dtype)
        blocks = Blocks(moved.layout, exchange.sent, receiver.data)
        if data is not None:
            blocks.fill(data)
        elif self._shares:
            yield from intra_node.exchange(blocks, world, exchange.call)
        else:
            blocks.keep_own(world.rank)
            yield from block_algorithms.ALGORITHMS[moved.algorithm](blocks, world, self._tag)
        exchange.moved = counts, moved
        return moved.finish(receiver.result(exchange.like))


def allgather_exchange(name: str, world: World, x: Array, algorithm: str, out: Array | None, *facts: str) -> Exchange:
    """Return the exchange of an allgather; all ranks must pass the same ``facts``."""
    _check_algorithm(name, algorithm, algorithm_choice.movements("allgatherv", world), OF_ONE_LENGTH)
    host = np.atleast_1d(movable(name, x))
    row, dtype = host.shape[1:], host.dtype

    def plan(counts: np.ndarray) -> Moved:
        rows = counts[:, 0].tolist()
        ends = [end * row_nbytes(row, dtype) for end in offsets(rows)]
        sizes = np.diff(ends)
        return Moved(*parts_of_all(ends, world, algorithm), (sum(rows), *row), dtype, sizes=sizes)

    call = _call(name, host, *facts, *_algorithm_named(algorithm))
    sent = bytes_of(apart(host, out))
    return Exchange(call, [len(host)], plan, sent, prepare=prepare_choice, like=x, out=out, algorithm=algorithm)


def _check_algorithm(name: str, algorithm: str, usable: Sequence[str], also_valid: Sequence[str] = ()) -> None:
    if algorithm not in ("auto", *usable):
        expected = choices(["auto", *usable, *also_valid])
        raise UnsupportedError(name, where="algorithm", expected=expected, got=repr(algorithm))


def _algorithm_named(algorithm: str) -> list[str]:
    """Return what ranks must agree on in the argument ``algorithm``."""
    return [] if algorithm == "auto" else [f"algorithm {algorithm!r}"]


def prepare_choice(world: World) -> None:
    """Gather the facts about all ranks that the choice and the algorithms need; every rank must call."""
    if world.size > 1:
        algorithm_choice.topology(world)
        algorithm_choice.machine(world)
    if 1 < world.num_nodes < world.size:
        block_algorithms.nodes_of(world)


def parts_of_all(ends: Sequence[int], world: World, algorithm: str = "auto") -> tuple[BlockLayout, str]:
    """Return the layout and algorithm by which all ranks get the parts of all, whose ``n + 1`` limits are ``ends``."""
    if algorithm == "auto" and sum(first < last for first, last in itertools.pairwise(ends)) == 1:
        algorithm = "tree"
    elif algorithm == "auto":
        algorithm = algorithm_choice.choose_movement("allgatherv", ends[-1], world)
    return block_algorithms.allgather_layout(ends, world.rank), algorithm


def gather_exchange(
    name: str, world: World, x: Array, root: int, places: list[int] | None, out: Array | None
) -> Exchange:
    """Return the exchange of a gather; arguments as for `gather`.

    ``places``, on ``root``, are those of a list of arrays: for each rank the position, in bytes after the beginning of
    ``out``, at which it writes its rows, and then for each rank the number of its rows. Rows whose position is 0 follow
    each other in ``out``. Others have at least `intra_node.direct_nbytes` bytes.
    """
    root = checked_root(name, root, world)
    host = np.atleast_1d(movable(name, x))
    row, rank, n, dtype = host.shape[1:], world.rank, world.size, host.dtype
    most_places = 2 * n if intra_node.can_share(world) else 0

    def plan(counts: np.ndarray) -> Moved:
        rows, at, expected = counts[:, 0], counts[root, 1 : n + 1], counts[root, n + 1 :]
        sizes = (rows * row_nbytes(row, dtype)).tolist()
        finish = _unchanged if rank == root else _none
        if not at.any():
            layout = block_algorithms.gather_layout(sizes, rank, root)
            shape, of_pairs = (int(rows.sum()) * (rank == root), *row), np.zeros((n, n), np.int64)
            of_pairs[:, root] = sizes
            return Moved(layout, "direct", shape, dtype, finish, of_pairs)
        _check_rows(name, rows, expected, root)
        layout = block_algorithms.written_layout(sizes, rank, {root: at.tolist()})
        return Moved(layout, "direct", (int(rows[at == 0].sum()) * (rank == root), *row), dtype, finish)

    out = out if rank == root else None
    counts = [len(host), *(places or [0] * most_places)]
    return Exchange(_call(name, host, f"root {root}"), counts, plan, bytes_of(apart(host, out)), like=x, out=out)


def allgather_list_exchange(name: str, world: World, x: Array, places: list[int], out: Array) -> Exchange:
    """Return the exchange of an allgather to a list of arrays, of ranks that share memory.

    Each rank receives at ``places`` as the root in `gather_exchange`, its own rows in ``out``.
    """
    host = np.atleast_1d(movable(name, x))
    row, rank, n, dtype = host.shape[1:], world.rank, world.size, host.dtype

    def plan(counts: np.ndarray) -> Moved:
        rows, at, expected = counts[:, 0], counts[:, 1 : n + 1].tolist(), counts[:, n + 1 :]
        for receiver in range(n):
            _check_rows(name, rows, expected[receiver], receiver)
        sizes = (rows * row_nbytes(row, dtype)).tolist()
        return Moved(block_algorithms.written_layout(sizes, rank, dict(enumerate(at))), "direct", host.shape, dtype)

    return Exchange(_call(name, host), [len(host), *places], plan, bytes_of(host), out=out)


def _check_rows(name: str, rows: np.ndarray, expected: np.ndarray, receiver: int) -> None:
    """Raise on every rank if a list of arrays on rank ``receiver`` is not of the numbers of ``rows`` of all ranks."""
    for rank in np.flatnonzero(rows != expected)[:1].tolist():
        raise MismatchError(
            name, where=f"array {rank} of the list on rank {receiver}", expected=f"{rows[rank]} rows, as it sends",
            got=f"{expected[rank]} rows",
        )  # fmt: skip


def scatter_exchange(
    name: str,
    world: World,
    x: Array | None,
    root: int,
    splits: Sequence[int] | None,
    places: list[int] | None,
    out: Array | None,
) -> Exchange:
    """Return the exchange of a scatter; arguments as for `scatter`.

    ``places``, on ``root``, are those of a list of arrays, of ranks that share memory: for each rank the position, in
    bytes after the beginning of ``x``, of its ``splits[rank]`` rows. ``x``, of at least `intra_node.direct_nbytes`
    bytes, is one of the arrays; if it is not the one of ``root``, that one is not moved.
    """
    root = checked_root(name, root, world)
    n, rank = world.size, world.rank
    host: np.ndarray = _NO_BYTES
    failure: UnsupportedError | None = None
    counts: list[int] = [0] * (n + 2 + _MOST_AXES)
    at: list[int] = [0] * (n if intra_node.can_share(world) else 0)
    if rank == root:
        try:
            if places is None:
                host, rows = _divided(name, x, splits, n)
            else:
                host, rows, at = movable(name, x), list(splits or ()), places
            header = [*rows, ord(host.dtype.char), kind_number(present.kind)]
            counts[: n + 1 + host.ndim] = [*header, *(axis + 1 for axis in host.shape[1:])]
        except UnsupportedError as error:  # the others wait for this rank
            failure = error
            counts[n + 2 : n + 2 + _MOST_AXES] = _numbers_of(error)

    def plan(all_counts: np.ndarray) -> Moved:
        numbers: list[int] = all_counts[root].tolist()
        rows, char, kind, sizes = numbers[:n], numbers[n], numbers[n + 1], numbers[n + 2 : n + 2 + _MOST_AXES]
        if not char:
            raise failure or _refusal_of(name, numbers[n + 2 : n + 2 + _MOST_AXES], root)
        dtype, row = dtype_of_char(chr(char)), tuple(int(size) - 1 for size in sizes if size)
        finish = _unchanged if rank == root else functools.partial(in_kind_of_sender, kind)
        of_ranks, places = [count * row_nbytes(row, dtype) for count in rows], numbers[n + 2 + _MOST_AXES :]
        if not any(places):
            layout, of_pairs = block_algorithms.scatter_layout(of_ranks, rank, root), np.zeros((n, n), np.int64)
            of_pairs[root] = of_ranks
            return Moved(layout, "direct", (rows[rank], *row), dtype, finish, of_pairs)
        if places[root]:
            of_ranks[root] = rows[root] = 0
        layout = block_algorithms.read_layout(of_ranks, rank, root, places)
        return Moved(layout, "direct", (rows[rank], *row), dtype, finish)

    call = Call(name, name, f"root {root}")
    sent = bytes_of(host if places else apart(host, out))
    return Exchange(call, [*counts, *at], plan, sent, like=x if rank == root else None, out=out)


_MOST_LETTERS = 120
"""The length of a part of an error that the root of a scatter sends with its counts."""


def _numbers_of(error: UnsupportedError) -> list[int]:
    """Return the parts of an error as the lengths of axes, of which there are none."""
    parts = [cut_in_middle(printable(str(part)), _MOST_LETTERS) for part in (error.where, error.expected, error.got)]
    text = "\0".join(parts).encode("ascii", "replace")
    return np.frombuffer(text.ljust(8 * _MOST_AXES, b"\0"), np.int64).tolist()  # type: ignore[no-any-return]


def _refusal_of(name: str, numbers: list[int], root: int) -> UnsupportedError:
    """Return the error of the root whose `_numbers_of` these are."""
    where, expected, got, *_ = np.array(numbers, np.int64).tobytes().decode("ascii", "replace").split("\0")
    return UnsupportedError(name, where=f"{where} on rank {root}", expected=expected, got=got)


def alltoall_exchange(
    name: str, world: World, x: Array, splits: Sequence[int] | None, algorithm: str, out: Array | None
) -> Exchange:
    """Return the exchange of an alltoall; arguments as for `alltoall`."""
    n, rank = world.size, world.rank
    usable = algorithm_choice.movements("alltoall", world, splits is None)
    _check_algorithm(name, algorithm, usable)
    host, rows = _divided(name, x, splits, n)
    if splits is None and len(host) % n:
        raise UnsupportedError(
            name, where="x", expected=f"a multiple of {n} rows, one part for each rank", got=f"{len(host)} rows",
            remedy="pass splits=, the number of rows for each rank",
        )  # fmt: skip
    length, row, dtype = len(host), host.shape[1:], host.dtype

    width = row_nbytes(row, dtype)

    def moved_by(nbytes: int) -> str:
        if algorithm != "auto":
            return algorithm
        return algorithm_choice.choose_movement("alltoall", nbytes, world, splits is None)

    def plan_of_even(counts: np.ndarray) -> Moved:
        layout = block_algorithms.even_alltoall_layout(length * width, n, rank)
        sizes = np.full((n, n), length * width // n)
        return Moved(layout, moved_by(length * width), (length, *row), dtype, sizes=sizes)

    def plan(counts: np.ndarray) -> Moved:
        layout = block_algorithms.alltoall_layout(counts * width, rank)
        return planned(int(counts.max()), counts[:, rank].copy(), layout, counts * width)

    def plan_of_messages(largest: int, received: np.ndarray, carried: np.ndarray | None) -> Moved:
        passed_on = None if carried is None else carried * width
        sent = [count * width for count in rows]
        layout = block_algorithms.layout_of_messages(sent, (received * width).tolist(), passed_on)
        return planned(largest, received, layout)

    def planned(largest: int, received: np.ndarray, layout: BlockLayout, sizes: np.ndarray | None = None) -> Moved:
        moved = moved_by(n * largest * width)
        return Moved(layout, moved, (int(received.sum()), *row), dtype, lambda x: (x, received.copy()), sizes)

    sent = bytes_of(apart(host, out))
    if splits is None:
        call = _call(name, host, f"{length} rows each", *_algorithm_named(algorithm))
        return Exchange(call, [], plan_of_even, sent, prepare=prepare_choice, like=x, out=out, algorithm=algorithm)
    call = _call(name, host, "splits", *_algorithm_named(algorithm))
    return Exchange(call, rows, plan, sent, plan_of_messages, prepare_choice, x, out, algorithm)


def barrier_exchange(name: str, world: World, x: None, out: None) -> Exchange:
    """Return the exchange of a barrier, which moves nothing."""
    layout = block_algorithms.scatter_layout([0] * world.size, world.rank, 0)
    moved = Moved(layout, "direct", (0,), np.dtype(np.uint8), _none)
    return Exchange(Call(name), [], lambda _: moved, _NO_BYTES)


def comparison(call: Call) -> Exchange:
    """Return an exchange that only compares the calls of all ranks."""
    return Exchange(call, [], _none, _NO_BYTES)


_EXCHANGES: dict[str, Callable[..., Exchange]] = {
    "allgather": allgather_exchange,
    "allgather_list": allgather_list_exchange,
    "gather": gather_exchange,
    "scatter": scatter_exchange,
    "alltoall": alltoall_exchange,
    "barrier": barrier_exchange,
}


class _Receiver:
    """The memory that receives the rows of an operation: ``out`` itself if possible, else new memory on the host.

    An ``out`` that does not fit is an error at the end, because the other ranks, which send to it, do not know of it.
    """

    def __init__(self, operation: str, out: Array | None, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._out, self._operation = out, operation
        fits = type(out) is np.ndarray and (out.shape, out.dtype) == (shape, dtype) and out.flags.carray
        self._host: np.ndarray = out if fits else kernels.empty(shape, dtype)  # type: ignore[assignment]
        self.data = bytes_of(self._host)

    def result(self, like: Array | None) -> Array:
        """Return ``out``, or a new array of the kind of ``like``."""
        if self._out is None:
            return self._host if like is None else from_host(self._host, like)
        try:
            check_like(self._operation, self._out, self._host.shape, self._host.dtype)
        except UnsupportedError as error:
            error.is_settled = True
            raise
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
