"""The interface of a communicator: messages, reductions, tags, steps, and roles of ranks.

MPI ranks (`mpi_communicator`) and thread ranks (`thread_comm`) follow the same protocol.

An algorithm is a generator, `Steps`: it starts the messages of a stage, yields their requests, and is resumed when all
of them are complete. `progress` runs many of them in one thread. The processes of a job are workers, followed by
servers, if there are any.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable, Generator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ..core.arrays import Array, is_float, is_half
from ..core.checks import choices
from ..errors import LaunchError, MismatchError, UnsupportedError

OPS = ("sum", "mean", "min", "max", "prod")
"""The names of the reductions."""


@dataclass(frozen=True)
class Monoid:
    """A user-defined reduction, e.g. ``Monoid(np.logaddexp, -np.inf, "log-sum-exp")``.

    Args:
        function: takes two arrays of one shape and dtype and returns their elementwise reduction, changing neither. It
            must be associative and commutative, because algorithms reduce in different orders.
        identity: the neutral element, with which a rank without data can fill its array; reductions do not use it.
        name: the name in messages; the same on all ranks.

    Raises:
        UnsupportedError: ``function`` cannot be called.
    """

    function: Callable[[np.ndarray, np.ndarray], np.ndarray]
    identity: float | None = None
    name: str = "monoid"

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UnsupportedError(
                "Monoid", where="function", expected="a function of two arrays", got=repr(self.function)
            )


@dataclass(frozen=True)
class Reduction:
    """The reduction of two arrays into one; made by `resolve`.

    16-bit floats are accumulated in float32 and rounded once. A mean is a sum that is divided when it is complete. The
    result is ``postscale * reduction(prescale * x)``, both factors rounded to the accumulator's dtype.
    """

    name: str
    into: Callable[[np.ndarray, np.ndarray], None]
    """``into(total, x)`` reduces ``x`` into ``total``, in place."""
    named: bool = True
    """True if ``name`` is one of `OPS`."""
    prescale: float = 1.0
    postscale: float = 1.0

    def of_partial_results(self) -> Reduction:
        """Return the reduction for partial results: without factors, and the sum for a mean."""
        return _NAMED["sum"] if self.named and self.name in ("sum", "mean") else self

    def widened(self, x: np.ndarray) -> np.ndarray:
        """Return ``prescale * x`` in the accumulator's dtype: ``x`` itself, or a copy if they differ."""
        wide = x.astype(np.float32) if x.dtype.itemsize == 2 and is_half(x) else x
        if self.prescale == 1:
            return wide
        product = np.empty_like(x) if wide is x else wide
        _multiply(wide, self.prescale, product)
        return product

    def factors(self, n: int) -> tuple[float, float, float]:
        """Return what to multiply inputs by, and to divide the sum over ``n`` ranks by and multiply it by.

        A power of two divides by its reciprocal, which gives the same bits in less time.
        """
        divisor = n if self.named and self.name == "mean" else 1
        if divisor & (divisor - 1) == 0:
            return self.prescale, 1.0, self.postscale / divisor
        return self.prescale, float(divisor), self.postscale

    def finish(self, total: np.ndarray, n: int, out: np.ndarray) -> None:
        """Write the reduction over ``n`` ranks from its accumulator ``total`` to ``out``, which may be ``total``."""
        _, divisor, factor = self.factors(n)
        scaled = out if out.dtype == total.dtype else total
        if divisor != 1:
            numbers = real_numbers(total)
            np.divide(numbers, numbers.dtype.type(divisor), out=real_numbers(scaled))
            total = scaled
        if factor != 1:
            _multiply(total, factor, scaled)
            total = scaled
        if out is not total:
            narrow(total, out)


def real_numbers(x: Array) -> Array:
    """Return ``x``, contiguous, with complex numbers viewed as pairs of floats; no copy."""
    return x.view(x.real.dtype) if x.dtype.kind == "c" else x


@np.errstate(over="ignore", invalid="ignore")  # as sums: raising here would end one rank alone
def _multiply(x: Array, factor: float, out: Array) -> None:
    numbers = real_numbers(x)
    np.multiply(numbers, numbers.dtype.type(factor), out=real_numbers(out))


_UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


def _by(ufunc: np.ufunc) -> Callable[[np.ndarray, np.ndarray], None]:
    @np.errstate(over="ignore", invalid="ignore")  # as MPI does; raising here would end one rank alone
    def into(total: np.ndarray, x: np.ndarray) -> None:
        ufunc(total, x, out=total)

    return into


def _by_monoid(monoid: Monoid) -> Callable[[np.ndarray, np.ndarray], None]:
    def into(total: np.ndarray, x: np.ndarray) -> None:
        reduced = np.asarray(monoid.function(total, x))
        if reduced.shape != total.shape or not np.can_cast(reduced.dtype, total.dtype, "same_kind"):
            raise UnsupportedError(
                "reduction", where=f"op={monoid.name!r}",
                expected=f"a function that returns shape {total.shape} and {total.dtype}, as its arguments have",
                got=f"{reduced.shape} and {reduced.dtype}",
            )  # fmt: skip
        total[...] = reduced

    return into


_NAMED = {name: Reduction(name, _by(ufunc)) for name, ufunc in _UFUNCS.items()}

MERGED = Reduction("merged", lambda total, x: np.bitwise_or(total, x, total), named=False)  # type: ignore[arg-type, return-value]
"""Merges integers of which all ranks but one have zeros."""


def resolve(
    operation: str, op: str | Monoid, dtype: np.dtype, prescale: float = 1.0, postscale: float = 1.0
) -> Reduction:
    """Return the reduction called ``op`` for arrays of ``dtype``, with factors before and after it.

    Raises:
        UnsupportedError: the reduction is unknown, or not defined for the dtype; for means of integers see `Quotients`.
    """
    if isinstance(op, Monoid):
        return Reduction(op.name, _by_monoid(op), named=False)
    if not isinstance(op, str) or op not in OPS:
        raise UnsupportedError(operation, where="op", expected=f"{choices(OPS)}, or a Monoid", got=repr(op))
    if op == "mean" and not is_float(dtype) and dtype.kind != "c":
        raise UnsupportedError(
            operation, where="op", expected="numbers for op='mean'", got=dtype.name, remedy="use op='sum'"
        )
    if dtype.kind == "c" and op not in ("sum", "mean"):
        raise UnsupportedError(operation, where="op", expected=f"sum or mean for {dtype.name}", got=repr(op))
    if prescale == 1 and postscale == 1:
        return _NAMED[op]
    return replace(_NAMED[op], prescale=prescale, postscale=postscale)


def refuse_factors(operation: str, op: str | Monoid, dtype: np.dtype, prescale: float, postscale: float) -> None:
    """Raise `UnsupportedError` for a factor other than 1, except of sums and means of floats or complex numbers."""
    if op in ("sum", "mean") and (is_float(dtype) or dtype.kind == "c"):
        return
    for where, factor in (("prescale", prescale), ("postscale", postscale)):
        if factor != 1:
            name = op.name if isinstance(op, Monoid) else op
            raise UnsupportedError(
                operation, where=where, expected="1 unless x is of floats and op a sum or mean",
                got=f"{factor:g} for op={name!r} of {dtype.name}",
            )  # fmt: skip


class Quotients:
    """Means of integers, rounded towards zero, from sums of integers that do not overflow.

    Integers of up to 32 bits are summed in 64 bits. The sum of 64-bit integers may need more, so their quotients by the
    number of ranks and their remainders are summed separately.

    Args:
        x: this rank's array, any shape.
        n: the number of ranks.
    """

    def __init__(self, x: np.ndarray, n: int) -> None:
        self._n = n
        self.parts: list[np.ndarray] = [*divmod(x, x.dtype.type(n))] if x.dtype.itemsize == 8 else [x.astype(np.int64)]
        """The arrays to sum over the ranks."""

    @staticmethod
    def dtype_for(dtype: np.dtype) -> np.dtype:
        """Return the dtype of the `parts` of arrays of ``dtype``."""
        return dtype if dtype.itemsize == 8 else np.dtype(np.int64)

    def finish(self, sums: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Write the means to ``out``; ``sums`` are the summed `parts`, or the same pieces of them."""
        floor, remainder = divmod(sums[-1], sums[-1].dtype.type(self._n))
        if len(sums) == 2:
            floor += sums[0]
        floor += ((floor < 0) & (remainder != 0)).astype(floor.dtype)
        out[...] = floor


def reducible(x: np.ndarray) -> np.ndarray:
    """Return ``x`` in a dtype that MPI libraries reduce correctly: itself, or a copy to `narrow` afterwards.

    MPI has no 16-bit floats, which are reduced in float32. Open MPI 5's sums of 8- and 16-bit integers saturate instead
    of wrapping around.
    """
    if is_half(x):
        return x.astype(np.float32)
    if x.dtype.kind in "iu" and x.dtype.itemsize < 4:
        return x.astype(np.int32)
    return x


def narrow(wide: np.ndarray, out: np.ndarray) -> None:
    """Write the accumulator ``wide`` to ``out``."""
    with np.errstate(over="ignore"):  # 16-bit floats overflow to infinity, which the caller may check
        out[...] = wide


def reduce_in_order(inputs: Sequence[np.ndarray], op: Reduction) -> np.ndarray:
    """Return the reduction of one array per rank, in rank order, in the accumulator's dtype."""
    total = op.widened(inputs[0])
    total = total.copy() if total is inputs[0] else total
    for other in inputs[1:]:
        op.into(total, op.widened(other))
    op.finish(total, len(inputs), total)
    return total


LANE_BITS, OPERATION_BITS = 6, 9
"""A tag is ``signature << 15 | operation << 6 | lane``; MPI guarantees the lower 15 bits, most libraries have 31."""


def make_tag(signature: int, operation: int, lane: int = 0) -> int:
    """Return the tag of one lane of an operation's messages.

    Args:
        signature: a hash of what all ranks must agree on. Messages of ranks that disagree never match, because a
            message that is longer than its receive expects may overwrite memory (Open MPI 5 between processes of one
            machine).
        operation: a number that distinguishes concurrent operations, below ``2 ** OPERATION_BITS``.
        lane: below ``2 ** LANE_BITS``.
    """
    return (signature << OPERATION_BITS | operation) << LANE_BITS | lane


def disagree(expected: int, got: int, users: Set[int] = frozenset()) -> bool:
    """Return whether two tags belong to one operation that ranks have called differently; see `Communicator.users`."""
    signatures = LANE_BITS + OPERATION_BITS
    same_operation = (expected ^ got) >> LANE_BITS & (1 << OPERATION_BITS) - 1 == 0
    return same_operation and expected >> signatures != got >> signatures and got >> signatures not in users


def disagreement(source: int) -> MismatchError:
    """Return the error for a message of the same operation of rank ``source`` with another signature."""
    return MismatchError(
        "receive", where=f"from rank {source} of this communicator",
        expected="a message of the same collective, size, dtype, op and algorithm", got="a message of another call",
        remedy="call collectives alike, and in the same order, on all ranks",
    )  # fmt: skip


class Request(Protocol):
    """A message in progress."""

    def test(self) -> bool:
        """Return whether it is complete; never block."""
        ...

    def wait(self) -> None:
        """Block until it is complete; Ctrl-C ends the wait."""
        ...


class _Complete:
    """A request that was complete at once."""

    def test(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return."""


COMPLETE = _Complete()


class Messages(Protocol):
    """The messages between ranks that collective algorithms need. Arrays are contiguous."""

    rank: int
    size: int

    def isend(self, x: Array, dest: int, tag: int = 0) -> Request:
        """Send ``x`` to ``dest``; ``x`` must not change before the request is complete."""
        ...

    def irecv(self, x: Array, source: int, tag: int = 0) -> Request:
        """Receive into ``x`` from ``source``, which must have sent as many bytes.

        Waiting raises MismatchError if ``source`` sent a different message of this operation: see `make_tag`.
        """
        ...


class Swapping(NamedTuple):
    """Messages in progress, of `Communicator.swapper`."""

    incoming: Sequence[Request]
    outgoing: Sequence[Request]
    """These may need that the peer receives all of them, so a second part is received before they are waited for."""
    cancel: Callable[[], object] = list
    """Gives up the receive, after an exception during a wait; see ``lost`` of `Communicator.swapper`."""


class Communicator(Messages, Protocol):
    """A group of ranks that exchange messages.

    Arrays are NumPy's; with CUDA-aware messages (`agree_on_cuda_aware_mpi`) `isend` and `irecv` take CuPy's too. No
    pending GPU work may then write to a sent array or use a receive buffer, and received data are valid when the
    request is complete.
    """

    signatures: int
    """The number of different signatures that the tags of operations can carry. The next one is that of messages
    between two ranks, see `collectives.point_to_point`.
    """
    lost: set[int]
    """Ranks that the library has reported dead; always empty if the library ends the job instead."""
    users: set[int]
    """Signatures of users that share the communicator, each with concurrent operations; at first only `signatures`, for
    messages between two ranks. A message of another user is not taken for one of an operation that its sender called
    differently.
    """

    def barrier(self) -> None:
        """Block until every rank has called it."""
        ...

    def isend_whole(self, x: np.ndarray, dest: int, tag: int) -> Request:
        """Send ``x``, dtype uint8, to ``dest`` in one message, for `irecv_up_to`."""
        ...

    def irecv_up_to(self, x: np.ndarray, source: int, tag: int) -> Request:
        """Receive into ``x``, dtype uint8, from ``source``, which may have sent fewer bytes."""
        ...

    def swapper(
        self, parts: Sequence[np.ndarray], received: np.ndarray | None, peer: int, lost: Callable[[], object] = list
    ) -> Callable[[int], Swapping | None]:
        """Return a function ``swap(tag)`` that sends messages to ``peer`` and receives one from it.

        Args:
            parts: the messages to send, dtype uint8.
            received: the memory of the message to receive, dtype uint8, which may be shorter; None for none.
            peer: the other rank.
            lost: called if an exception ends the receive after all when the message has come: nobody else receives it.

        Returns:
            The function; it returns what is not complete after a short while, None if all is.
        """
        ...

    def takes_note(self, error: Exception) -> bool:
        """Return whether an error of the library reports dead ranks; if so, add them to `lost`."""
        ...

    def irecv_any(self, tag: int, source: int | None = None) -> tuple[int, np.ndarray, Request] | None:
        """Start to receive the next message with a tag, from any rank or from ``source``; never block.

        Returns:
            The sender, the receive buffer (dtype uint8) and the request; None if there is no message. Messages of one
                rank arrive in order.
        """
        ...

    def native_allreduce(self, x: np.ndarray, op: str) -> None:
        """Reduce ``x`` in place over all ranks with the library's own collective; every rank must call."""
        ...

    def native_iallreduce(self, x: np.ndarray, op: str) -> Request:
        """Start the library's own allreduce of ``x`` in place; all ranks must start theirs in one order.

        It supports no mean, no 16-bit floats and no 8-bit integers. The library decides whether a NaN wins a minimum.
        """
        ...

    def native_reduce_scatter(self, x: np.ndarray, out: np.ndarray, op: str) -> None:
        """Reduce ``x`` over all ranks, rank r's part of it (see `split`) into its ``out``; every rank must call."""
        ...

    def native_reduce(self, x: np.ndarray, op: str, root: int) -> None:
        """Reduce ``x`` over all ranks, in place on ``root`` only; every rank must call."""
        ...

    def native_allgather(self, out: np.ndarray) -> None:
        """Complete ``out``, in which every rank has written its part (see `split`); every rank must call."""
        ...

    def native_broadcast(self, x: np.ndarray, root: int) -> None:
        """Overwrite ``x`` on all ranks with that of ``root``; every rank must call."""
        ...

    def duplicate(self) -> Communicator:
        """Return a communicator of the same ranks with separate messages; every rank must call."""
        ...

    def allgather_json(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, by rank; every rank must call. Values are sent as JSON, never pickled."""
        ...

    def abort(self, code: int) -> None:
        """End every rank of the job at once with this exit code."""
        ...


@dataclass
class Traffic:
    """Counts of the messages and bytes that a thread rank has sent through a communicator."""

    messages: int = 0
    nbytes: int = 0


def exchange_of(comm: Communicator) -> Callable[[Any], list[Any]]:
    """Return the present ``comm.allgather_json`` for another function to wrap; it does not keep ``comm`` alive."""
    own = vars(comm).get("allgather_json")
    return own or type(comm).allgather_json.__get__(weakref.proxy(comm))  # type: ignore[no-any-return]


def join_parts(x: np.ndarray, comm: Communicator) -> None:
    """Complete ``x``, contiguous, in place; each rank has written different elements and left the others zero.

    Every rank must call. The result is exact: the elements are summed as integers, of which all but one are 0.
    """
    comm.native_allreduce(x.view(f"u{x.dtype.itemsize}"), "sum")


def bounds(count: int, n: int) -> list[int]:
    """Return the ``n + 1`` limits of ``n`` nearly equal parts of ``count`` elements."""
    return [count * part // n for part in range(n + 1)]


def split(flat: Array, n: int) -> list[Array]:
    """Return ``n`` nearly equal parts of ``flat``, shape ``(count,)``, as views."""
    ends = bounds(flat.size, n)
    return [flat[first:last] for first, last in itertools.pairwise(ends)]


T = TypeVar("T")

Steps = Generator[Sequence[Request], None, None]
"""A resumable algorithm; each yielded stage is the list of requests that must be complete before it continues."""

StepsTo = Generator[Sequence[Request], None, T]
"""A part of an algorithm, which returns a value to the rest of it."""

_YIELDS, _NAP_S = 10, 50e-6


class PolledRequest:
    """A request that is complete when ``test()`` returns true.

    A lone waiter tests ``spins`` times, then yields its core ``yields`` times, and then naps between tests.
    """

    def __init__(self, test: Callable[[], bool], yields: int = _YIELDS, spins: int = 0) -> None:
        self.test = test
        self._yields, self._spins = yields, spins

    def wait(self) -> None:
        """Block until the condition is true."""
        for _ in range(self._spins):
            if self.test():
                return
        wait_for(self.test, self._yields)


def wait_for(test: Callable[[], bool], yields: int = _YIELDS) -> None:
    """Poll ``test()`` until it is true: first without naps, then with naps, which leave the core to others."""
    idle = 0
    while not test():
        idle += 1
        if idle < yields:
            os.sched_yield()
        else:
            time.sleep(_NAP_S)


ENDED = 3
"""The tag of the empty message by which a worker tells each server that it has ended, on the communicator of all."""

_REMEDY = (
    "mpirun -n 4 python train.py : -n 2 python -m hpcdp.kvstore.serve, or hpcdp launch -n 4 -s 2 -- python train.py"
)


def count_workers(serve: Sequence[bool]) -> int:
    """Return the number of workers, which precede the servers.

    Args:
        serve: whether each process is a server, by rank.

    Raises:
        LaunchError: there is no worker, or a server precedes one.
    """
    workers = list(serve).count(False)
    if workers == 0:
        got = "1 server alone" if len(serve) == 1 else f"{len(serve)} servers alone"
        raise LaunchError("init", expected="workers, and servers behind them", got=got, remedy=_REMEDY)
    if any(serve[:workers]):
        server = list(serve).index(True)
        worker = list(serve).index(False, server)
        got = f"a server as rank {server} and a worker as rank {worker}"
        raise LaunchError("init", expected="all workers before the servers", got=got, remedy=_REMEDY)
    return workers


def name_of(rank: int, workers: int) -> str:
    """Return a process's name in messages, given its rank among all processes."""
    return f"rank {rank} of {workers}" if rank < workers else f"server {rank - workers} (rank {rank})"


def short_name_of(rank: int, workers: int) -> str:
    """Return `name_of`, without the number of workers."""
    return f"rank {rank}" if rank < workers else name_of(rank, workers)


def tell_servers(comm: Communicator, num_servers: int) -> None:
    """Tell all servers that this worker has ended (`ENDED`): they end when all workers have."""
    for server in range(comm.size - num_servers, comm.size):
        comm.isend(np.empty(0, np.uint8), server, ENDED).wait()
