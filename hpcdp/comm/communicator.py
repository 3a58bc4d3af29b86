"""The interface of a communicator: messages, reductions, tags and roles of ranks.

What a communicator can do: the protocol that MPI ranks and thread ranks both follow.

Reductions: the named ones and a user's own.

Work under way: machines that are resumed when what they wait for has come.

A machine is a generator. It starts what a stage needs, yields the requests for it, and is resumed when all of them are
complete. `hpcdp.comm.tasks` runs them, many at a time in one thread.

Who works and who serves: the processes of a job are workers, and behind them the servers, if there are some.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable, Generator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from ..core.arrays import Array, is_float, is_half
from ..errors import LaunchError, MismatchError, UnsupportedError

OPS = ("sum", "mean", "min", "max", "prod")
"""The names of the reductions."""


@dataclass(frozen=True)
class Monoid:
    """A user's own reduction, e.g. ``Monoid(np.logaddexp, -np.inf, "log-sum-exp")``.

    Args:
        function: takes two arrays of one shape and dtype and returns their reduction, element by element, changing
            neither. It must be associative and commutative: algorithms reduce in orders of their own.
        identity: reduces with any x to x: what a rank without data can fill its array with, as reductions do not.
        name: for messages; the same on all ranks.

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
    """What algorithms do with two arrays that meet. Made by `resolve`.

    Floats of 16 bits are accumulated in float32 and rounded once; a mean is a sum, divided when it is complete.
    """

    name: str
    into: Callable[[np.ndarray, np.ndarray], None]
    """``into(total, x)`` reduces ``x`` into ``total``, in place."""
    named: bool = True
    """Whether ``name`` is one of `OPS`."""

    def without_mean(self) -> Reduction:
        """The reduction of parts of which the mean is still to be taken."""
        return _NAMED["sum"] if self.name == "mean" and self.named else self

    def widened(self, x: np.ndarray) -> np.ndarray:
        """``x`` in its accumulator's dtype: itself, or a copy where that is another."""
        return x.astype(np.float32) if x.dtype.itemsize == 2 and is_half(x) else x

    def finish(self, total: np.ndarray, n: int, out: np.ndarray) -> None:
        """Write the reduction over ``n`` ranks from its accumulator ``total`` to ``out``, which may be ``total``."""
        if self.name == "mean" and self.named:
            np.divide(total, total.dtype.type(n), out=total)
        if out is not total:
            narrow(total, out)


_UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


def _by(ufunc: np.ufunc) -> Callable[[np.ndarray, np.ndarray], None]:
    @np.errstate(over="ignore", invalid="ignore")  # as in memory and by MPI; to raise here would end one rank alone
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


def resolve(operation: str, op: str | Monoid, dtype: np.dtype) -> Reduction:
    """The reduction called ``op`` for arrays of ``dtype``.

    Raises:
        UnsupportedError: an unknown one, or a mean of integers, for which see `Quotients`; it names what is valid.
    """
    if isinstance(op, Monoid):
        return Reduction(op.name, _by_monoid(op), named=False)
    if not isinstance(op, str) or op not in OPS:
        raise UnsupportedError(operation, where="op", expected=" or ".join([*OPS, "a Monoid"]), got=repr(op))
    if op == "mean" and not is_float(dtype) and dtype.kind != "c":
        raise UnsupportedError(
            operation, where="op", expected="a float dtype for op='mean'", got=dtype.name, remedy="use op='sum'"
        )
    return _NAMED[op]


class Quotients:
    """Means of integers, rounded towards zero, by sums of other integers that do not overflow.

    Integers of up to 32 bits are summed in 64. Of those of 64 bits the sum may need more, so the quotients by the
    number of ranks and the remainders are summed apart.

    Args:
        x: this rank's, any shape.
        n: the number of ranks.
    """

    def __init__(self, x: np.ndarray, n: int) -> None:
        self._n = n
        self.parts: list[np.ndarray] = [*divmod(x, x.dtype.type(n))] if x.dtype.itemsize == 8 else [x.astype(np.int64)]
        """What is to be summed over the ranks."""

    @staticmethod
    def dtype_for(dtype: np.dtype) -> np.dtype:
        """Return the dtype of the `parts` of arrays of ``dtype``."""
        return dtype if dtype.itemsize == 8 else np.dtype(np.int64)

    def finish(self, sums: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Write the means to ``out``, of which ``sums`` are the summed `parts`, or the same pieces of them."""
        floor, remainder = divmod(sums[-1], sums[-1].dtype.type(self._n))
        if len(sums) == 2:
            floor += sums[0]
        floor += ((floor < 0) & (remainder != 0)).astype(floor.dtype)
        out[...] = floor


def reducible(x: np.ndarray) -> np.ndarray:
    """``x`` in a dtype whose reductions MPI libraries do right: itself, or a copy that is narrowed when it is done.

    MPI has no floats of 16 bits, which are reduced in float32; Open MPI 5's sums of integers of 8 and 16 bits saturate
    where they should wrap around.
    """
    if is_half(x):
        return x.astype(np.float32)
    if x.dtype.kind in "iu" and x.dtype.itemsize < 4:
        return x.astype(np.int32)
    return x


def narrow(wide: np.ndarray, out: np.ndarray) -> None:
    """Write ``wide`` to ``out``, of which it is the accumulator."""
    with np.errstate(over="ignore"):  # of 16 bits: to an infinity, which whoever cares will look for
        out[...] = wide


def reduce_in_order(inputs: Sequence[np.ndarray], op: Reduction) -> np.ndarray:
    """The reduction of one array from every rank, in the order of the ranks; it has the accumulator's dtype."""
    total = op.widened(inputs[0])
    total = total.copy() if total is inputs[0] else total
    for other in inputs[1:]:
        op.into(total, other)
    op.finish(total, len(inputs), total)
    return total


LANE_BITS, OPERATION_BITS = 6, 9
"""A tag is ``signature << 15 | operation << 6 | lane``; MPI guarantees the lower 15 bits, most libraries have 31."""


def make_tag(signature: int, operation: int, lane: int = 0) -> int:
    """The tag of one lane of the messages of one operation.

    Args:
        signature: what all ranks must agree on, hashed: messages of ranks that do not agree never meet, since a message
            that is longer than its receiver expects may overwrite memory (Open MPI 5 between processes of one machine).
        operation: a number that tells operations under way from each other, below ``2 ** OPERATION_BITS``.
        lane: below ``2 ** LANE_BITS``.
    """
    return (signature << OPERATION_BITS | operation) << LANE_BITS | lane


def disagree(expected: int, got: int, users: Set[int] = frozenset()) -> bool:
    """Whether two tags are of one operation, called by ranks that do not agree about it.

    Args:
        expected, got: the tags.
        users: see `Communicator.users`.
    """
    signatures = LANE_BITS + OPERATION_BITS
    same_operation = (expected ^ got) >> LANE_BITS & (1 << OPERATION_BITS) - 1 == 0
    return same_operation and expected >> signatures != got >> signatures and got >> signatures not in users


def disagreement(source: int) -> MismatchError:
    """What is raised where rank ``source`` sent something of the same operation, but with another signature."""
    return MismatchError(
        "receive",
        where=f"from rank {source} of this communicator",
        expected="a message of the same collective, size, dtype, op and algorithm",
        got="one that differs in some of them",
        remedy="call collectives alike, and in the same order, on all ranks",
    )


class Request(Protocol):
    """A message under way."""

    def test(self) -> bool:
        """Whether it is complete; never blocks."""
        ...

    def wait(self) -> None:
        """Block until it is complete; Ctrl-C ends the wait."""
        ...


class Messages(Protocol):
    """What algorithms of collectives need: messages between some ranks. Arrays are contiguous."""

    rank: int
    size: int

    def isend(self, x: Array, dest: int, tag: int = 0) -> Request:
        """Send ``x`` to ``dest``; ``x`` must not change before the request is complete."""
        ...

    def irecv(self, x: Array, source: int, tag: int = 0) -> Request:
        """Receive into ``x`` from ``source``, which must have sent as many bytes.

        Waiting raises MismatchError where it sent something else of this operation: see `make_tag`.
        """
        ...


class Communicator(Messages, Protocol):
    """A group of ranks that exchange messages.

    Arrays are NumPy's; where `cuda_aware.agreed` says so `isend` and `irecv` take CuPy's, too. No work on the GPU may
    then still write to what is sent, or use what is to be received into, and what comes is there when the request is
    complete.
    """

    signatures: int
    """How many different signatures its tags can carry."""
    lost: set[int]
    """Ranks of which the library has told that they have died; always empty where it ends the job instead."""
    users: set[int]
    """Signatures of those who share it, each with operations of its own under way; empty where there is one user. A
    message of another one's is not taken for one of an operation that its sender has called differently."""

    def barrier(self) -> None:
        """Block until every rank has called it."""
        ...

    def isend_whole(self, x: np.ndarray, dest: int, tag: int) -> Request:
        """Send ``x``, dtype uint8, to ``dest`` in one message, as `irecv_up_to` receives it."""
        ...

    def irecv_up_to(self, x: np.ndarray, source: int, tag: int) -> Request:
        """Receive into ``x``, dtype uint8, from ``source``, which may have sent fewer bytes."""
        ...

    def swap(self, x: np.ndarray, received: np.ndarray, peer: int, tag: int) -> None:
        """Send ``x`` to ``peer``, which calls it as well, and receive at most ``received`` from it; dtype uint8."""
        ...

    def takes_note(self, error: Exception) -> bool:
        """Whether an error of the library's tells that ranks have died; they are among the `lost` then."""
        ...

    def irecv_any(self, tag: int) -> tuple[int, np.ndarray, Request] | None:
        """Begin to receive the next message of a tag, whoever has sent it; None where none has come; never blocks.

        Returns:
            Its sender, where its bytes go (dtype uint8), and the request. One rank's messages come in their order.
        """
        ...

    def native_allreduce(self, x: np.ndarray, op: str) -> None:
        """Reduce ``x`` in place over all ranks with the library's own collective; every rank must call."""
        ...

    def native_iallreduce(self, x: np.ndarray, op: str) -> Request:
        """Start the library's own allreduce of ``x`` in place; all ranks must start theirs in one order.

        No mean, nothing of 16 bits and no integers of 8; whether a NaN wins a minimum is the library's affair.
        """
        ...

    def native_reduce_scatter(self, x: np.ndarray, out: np.ndarray, op: str) -> None:
        """Reduce ``x`` over all ranks, rank r's part of it (see `split`) into its ``out``; every rank must call."""
        ...

    def native_reduce(self, x: np.ndarray, op: str, root: int) -> None:
        """Reduce ``x`` over all ranks, in place on ``root`` and nowhere else; every rank must call."""
        ...

    def native_allgather(self, out: np.ndarray) -> None:
        """Complete ``out``, in which every rank has written its part (see `split`); every rank must call."""
        ...

    def native_broadcast(self, x: np.ndarray, root: int) -> None:
        """Overwrite ``x`` on all ranks with that of ``root``; every rank must call."""
        ...

    def duplicate(self) -> Communicator:
        """The same ranks, whose messages never meet those of this communicator; every rank must call."""
        ...

    def allgather_json(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (what JSON can carry; nothing is pickled), by rank; every rank must call."""
        ...

    def abort(self, code: int) -> None:
        """End every rank of the job at once with this exit code."""
        ...


@dataclass
class Traffic:
    """What a rank has sent through a communicator of thread ranks."""

    messages: int = 0
    nbytes: int = 0


def exchange_of(comm: Communicator) -> Callable[[Any], list[Any]]:
    """Return ``comm.allgather_json`` as it is now, to be wrapped by another one; it does not keep ``comm`` alive."""
    own = vars(comm).get("allgather_json")
    return own or type(comm).allgather_json.__get__(weakref.proxy(comm))  # type: ignore[no-any-return]


def join_parts(x: np.ndarray, comm: Communicator) -> None:
    """Complete ``x``, contiguous, in place, of which each rank has written other elements and left the rest zero.

    Every rank must call. To the bit: taken for whole numbers, of which all but one are 0, they have an exact sum.
    """
    comm.native_allreduce(x.view(f"u{x.dtype.itemsize}"), "sum")


def bounds(count: int, n: int) -> list[int]:
    """Where ``n`` nearly equal parts of ``count`` elements begin, and where the last ends: ``n + 1`` numbers."""
    return [count * part // n for part in range(n + 1)]


def split(flat: Array, n: int) -> list[Array]:
    """``n`` nearly equal parts of ``flat``, shape ``(count,)``: views."""
    ends = bounds(flat.size, n)
    return [flat[first:last] for first, last in itertools.pairwise(ends)]


T = TypeVar("T")

Steps = Generator[Sequence[Request], None, None]
"""A machine; each item is a stage: the requests that must be complete before it goes on."""

StepsTo = Generator[Sequence[Request], None, T]
"""A part of a machine, which returns something to the rest of it."""

_YIELDS, _NAP_S = 10, 50e-6


class PolledRequest:
    """That ``test()`` has become true: a request for what is no message.

    Args:
        yields: how often who waits for it alone asks before it naps; more where it comes soon.
    """

    def __init__(self, test: Callable[[], bool], yields: int = _YIELDS) -> None:
        self.test = test
        self._yields = yields

    def wait(self) -> None:
        """Block until it has."""
        wait_for(self.test, self._yields)


def wait_for(test: Callable[[], bool], yields: int = _YIELDS) -> None:
    """Call ``test()`` until it is true: at once for a while, then after naps, which leave the core to others."""
    idle = 0
    while not test():
        idle += 1
        if idle < yields:
            os.sched_yield()
        else:
            time.sleep(_NAP_S)


ENDED = 3
"""The tag of the empty message to each server, on the communicator of all, by which a worker says that it has ended."""

_REMEDY = (
    "mpirun -n 4 python train.py : -n 2 python -m hpcdp.kvstore.serve, or hpcdp launch -n 4 -s 2 -- python train.py"
)


def count_workers(serve: Sequence[bool]) -> int:
    """How many processes are workers, those behind them being servers.

    Args:
        serve: whether each process is a server, by rank.

    Raises:
        LaunchError: there is no worker, or a server comes before one.
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
    """What a process is called in messages, by its rank among all."""
    return f"rank {rank} of {workers}" if rank < workers else f"server {rank - workers} (rank {rank})"


def short_name_of(rank: int, workers: int) -> str:
    """As `name_of`, of a worker without how many there are."""
    return f"rank {rank}" if rank < workers else name_of(rank, workers)


def tell_servers(comm: Communicator, num_servers: int) -> None:
    """Say on the communicator of all that this worker has ended (`ENDED`): the servers end when all workers have."""
    for server in range(comm.size - num_servers, comm.size):
        comm.isend(np.empty(0, np.uint8), server, ENDED).wait()
