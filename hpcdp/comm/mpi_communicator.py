"""A communicator over MPI, by mpi4py's buffer methods, and how a rank leaves or aborts the job.

Importing this module starts MPI unless `startup` has prepared it, so only `startup` imports it, late.

A rank that fails alone ends the whole job, in the way of each MPI library, and names the ranks whose death caused the
failure. A rank that leaves by `sys.exit` with a failure status ends the job unless all others leave too. A rank that
leaves with status 0, with 75 (the job can resume later), or in a way that is not recorded waits for the others, which
may have much to write. If they wait for it in a collective, the watchdog reports it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import numpy as np
from mpi4py import MPI

from ..core.arrays import words
from ..core.environment import exit_status, outlives_ranks, record_exit_status
from ..errors import HpcdpError, MismatchError, Terminated, UnsupportedError, report_directly
from .communicator import (
    LANE_BITS,
    OPERATION_BITS,
    Request,
    Swapping,
    disagree,
    disagreement,
    name_of,
    narrow,
    reducible,
    resolve,
    split,
)

_PID = os.getpid()
_LOOKS, _ENDING_NAP_S = 50, 0.01
_OF_HYDRA, _HEARD_S = "PMI_RANK", 0.2
"""A variable of MPICH's mpirun, which ends at once and drops recent output of ranks on other hosts; a delay for it."""


def end_job(comm_world: MPI.Intracomm, code: int) -> None:
    """End all processes of the job with the status ``code``; in a child made by fork, this process only."""
    if os.getpid() != _PID:
        os._exit(code)
    for _ in range(_LOOKS if outlives_ranks() else 0):
        with contextlib.suppress(Exception):  # a probe lets the library detect dead ranks
            comm_world.Iprobe()
        if comm_world.Get_failed().size == comm_world.size - 1:
            os._exit(code)  # mpirun would lose the status of the last rank
        time.sleep(_ENDING_NAP_S)
    if _OF_HYDRA in os.environ:
        time.sleep(_HEARD_S)
    comm_world.Abort(code)


_OF_ALL_S = 1.0
"""Seconds that other ranks leave the report of an error on every rank to rank 0."""


def abort_when_one_fails(comm_world: MPI.Intracomm, workers: int) -> Callable[[], None]:
    """Make an uncaught exception end the whole job, because other processes would wait for this one forever.

    Exceptions are also passed to the previous hooks, such as those that write a log.

    Returns:
        A function to call at the end of the program. It ends the job if an uncaught exception was handled by a later
            hook (rich's and most loggers' call no other hook).
    """
    name = name_of(comm_world.rank, workers)
    earlier, earlier_of_threads = sys.excepthook, threading.excepthook
    is_reported = False
    process = os.getpid()  # a child made by fork has these hooks too, but must not use MPI

    def report(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> int:
        """Report the exception, and return the status of the job."""
        nonlocal is_reported
        is_reported = True
        if issubclass(kind, KeyboardInterrupt):
            terminated = issubclass(kind, Terminated)
            report_directly(f"{name}: {'ended by SIGTERM' if terminated else 'interrupted'}")
            return 128 + (signal.SIGTERM if terminated else signal.SIGINT)
        if isinstance(error, HpcdpError) and error.is_on_every_rank and comm_world.rank:
            time.sleep(_OF_ALL_S)  # rank 0 reports it for all, and ends the job
        text = "".join(traceback.format_exception(kind, error, trace))
        text += "".join(f"{name_of(rank, workers)} has died\n" for rank in _dead_by(error, comm_world))
        report_directly(f"{name} failed:\n{text}")
        return 1

    def abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != process:
            earlier(kind, error, trace)
            return
        status = report(kind, error, trace)
        if earlier is not sys.__excepthook__ and status == 1:
            with contextlib.suppress(BaseException):  # the job ends even if the hook fails
                earlier(kind, error, trace)
        end_job(comm_world, status)  # with MPICH this process ends a little later

    def abort_from_thread(args: threading.ExceptHookArgs) -> None:
        if issubclass(args.exc_type, SystemExit):  # ends only the thread
            return
        if os.getpid() != process:
            earlier_of_threads(args)
            return
        status = report(args.exc_type, args.exc_value, args.exc_traceback)
        if earlier_of_threads is not threading.__excepthook__ and status == 1:
            with contextlib.suppress(BaseException):
                earlier_of_threads(args)
        end_job(comm_world, status)

    def abort_at_end() -> None:
        error, trace = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
        # pytest and IPython set them too, for exceptions that did not reach the outermost frame.
        is_uncaught = trace is not None and trace.tb_frame.f_back is None and not hasattr(sys, "ps1")
        if is_uncaught and isinstance(error, BaseException) and not is_reported and os.getpid() == process:
            end_job(comm_world, report(type(error), error, trace))

    sys.excepthook = abort
    threading.excepthook = abort_from_thread
    return abort_at_end


def _dead_by(error: BaseException | None, comm_world: MPI.Intracomm) -> list[int]:
    """Return the ranks whose death an error, or a cause of it, reports."""
    comm = MpiCommunicator(comm_world)
    while error is not None:
        if isinstance(error, Exception) and comm.takes_note(error):
            return sorted(comm.lost)
        error = error.__cause__ or error.__context__
    return []


GRACE_S = 2.0
"""Seconds that the last rank may leave after the first; shorter than the watchdog, which would end the job with a
status of its own.
"""
_END_NAP_S = 0.001


def wait_for_all_to_leave(comm_world: MPI.Intracomm, workers: int) -> None:
    """Make this process wait for all others at its end, or end the job if it exits with a failure status.

    All processes must call. MPI_Finalize waits too, but not Open MPI's under srun. Before the wait this rank completes
    its work, such as a checkpoint. Others have `GRACE_S` to end too, so that ranks that all fail alike end as they
    would.
    """
    if outlives_ranks():  # a barrier never ends after a death, and the survivors decide
        return
    comm = comm_world.Dup()
    record_exit_status()  # again, in case hpcdp was imported before the launcher's variables were set

    has_left = False

    def leave(*_: object) -> None:
        nonlocal has_left
        if has_left or MPI.Is_finalized():
            return
        all_leave = comm.Ibarrier()
        deadline = time.monotonic() + GRACE_S
        while not all_leave.Test():
            if exit_status() not in (0, os.EX_TEMPFAIL) and time.monotonic() > deadline:
                name = name_of(comm_world.rank, workers)
                report_directly(f"{name} has left with status {exit_status()} before the others; the job ends now")
                end_job(comm_world, exit_status())
                return  # MPICH ends the process a little later
            time.sleep(_END_NAP_S)
        has_left = True

    atexit.register(leave)  # registered first, so it runs after the world's functions, and before engines end
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=leave), None)  # see `startup._end_before_mpi`


MAX_ELEMENTS = 2**30
"""The maximum number of elements in one MPI call: Open MPI 5's Bcast fails at 2^31."""

_TESTS_A_LOOK = 1 << 9
"""Failed tests after which a receive probes for other messages: 0.3 ms of spinning or 60 ms of naps. If ranks outnumber
cores, a test may take milliseconds.
"""

_TESTS_AT_ONCE = 100
"""Tests before a waiting rank yields its core, some 15 us: with a core per rank the message may arrive by then."""

_TESTS_OF_A_SWAP = 1000
"""Tests of a swap of messages before its caller waits in the usual way, some 0.3 ms with yields."""

_SPIN_S, _NAP_S = 1e-3, 2e-3
"""Seconds that a rank spins for others in an agreement, and the longest of the naps that follow."""

_BY_TREE_NBYTES = 1 << 20
"""The most bytes that are gathered by sums along a tree, which send them once per level."""

_MOST_UNUSED = 64
"""Communicators derived from one before garbage is collected to find unreferenced ones."""

_OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "prod": MPI.PROD}
_DEATHS = MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING

P = ParamSpec("P")
T = TypeVar("T")


def _in_our_words(operation: str, error: MPI.Exception) -> Exception:
    """Return the error to raise for an MPI error: messages that do not fit mean that ranks disagree."""
    if error.Get_error_class() not in (MPI.ERR_TRUNCATE, MPI.ERR_COUNT):
        return error
    return MismatchError(
        operation, expected="the same sizes and dtypes on all ranks",
        got=f"the MPI library's {error.Get_error_string()}",
        remedy="call it with the same arguments, and in the same order, on all ranks",
    )  # fmt: skip


def _explained(native: Callable[P, T]) -> Callable[P, T]:
    """Wrap a native collective so that messages that do not fit raise a `MismatchError`."""

    @functools.wraps(native)
    def explained(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return native(*args, **kwargs)
        except MPI.Exception as error:
            raise _in_our_words(native.__name__.removeprefix("native_"), error) from error

    return explained


class MpiRequest:
    """A request of MPI; it keeps the array alive until it is complete."""

    __slots__ = ("_request", "_x")

    def __init__(self, request: MPI.Request, x: object) -> None:
        self._request = request
        self._x = x

    def test(self) -> bool:
        """Return whether the request is complete; turn truncation into a `MismatchError`."""
        try:
            return bool(self._request.Test())
        except MPI.Exception as error:
            raise _in_our_words("request", error) from error

    def wait(self) -> None:
        """Block until the request is complete; spin first, then yield the core."""
        for _ in range(_TESTS_AT_ONCE):
            if self.test():
                return
        while not self.test():
            os.sched_yield()  # a blocking call in C could not be interrupted by Ctrl-C


class MpiReceive:
    """A receive of MPI that probes from time to time for a message of another call."""

    __slots__ = ("_comm", "_request", "_source", "_tag", "_tests", "_users", "_x")

    def __init__(self, comm: MPI.Comm, x: np.ndarray, source: int, tag: int, users: Set[int] = frozenset()) -> None:
        self._users = users
        self._request = comm.Irecv(words(x), source, tag)
        self._comm, self._x, self._source, self._tag = comm, x, source, tag
        self._tests = 0

    def test(self) -> bool:
        """Return whether the message is here; probe for another call's message from time to time."""
        if self._request.Test():
            return True
        self._tests += 1
        if self._tests % _TESTS_A_LOOK == 0:
            self._look()
        return False

    def wait(self) -> None:
        """Block until the message is here."""
        while not self.test():
            os.sched_yield()

    def _look(self) -> None:
        status = MPI.Status()
        is_here = self._comm.Iprobe(self._source, MPI.ANY_TAG, status)
        if is_here and disagree(self._tag, status.Get_tag(), self._users):
            raise disagreement(self._source)


class Pieces:
    """The requests of an array that was sent in several pieces."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = list(requests)

    def test(self) -> bool:
        """Return whether all pieces are complete."""
        while self._requests and self._requests[-1].test():
            self._requests.pop()
        return not self._requests

    def wait(self) -> None:
        """Block until all pieces are complete."""
        for request in self._requests:
            request.wait()


class _Lease:
    """An MPI communicator or window and everything derived from it, until this rank no longer references it.

    `MpiCommunicator.release` frees it together with the other ranks.
    """

    __slots__ = ("holder", "made", "resource", "unused_limit")

    def __init__(self, resource: MPI.Comm | MPI.Win, holder: object) -> None:
        self.resource = resource
        self.holder = weakref.ref(holder) if holder is not None else None
        """The Python object that owns the resource; objects derived from the resource reference it."""
        self.made: list[_Lease] = []
        """Resources derived from this one, in the same order on all ranks, which make them together."""
        self.unused_limit = _MOST_UNUSED

    @property
    def is_unused(self) -> bool:
        return self.holder is None or self.holder() is None

    def free(self) -> None:
        for lease in self.made:
            lease.free()
        if self.resource not in (MPI.COMM_NULL, MPI.WIN_NULL):
            self.resource.Free()


class _WindowMemory:
    """The memory of an MPI window as an array interface; keeps the communicator of its ranks alive."""

    def __init__(self, window: MPI.Win, holder: MpiCommunicator) -> None:
        self._holder = holder
        memory: Any = window.Shared_query(0)[0]
        self._block = np.frombuffer(memory, np.uint8)
        self.__array_interface__ = self._block.__array_interface__


class MpiCommunicator:
    """The ranks of an MPI communicator, which nothing else uses (see `Communicator`).

    MPI libraries have a limited number of communicators (MPICH: 2048). Freeing one is collective, but ranks drop their
    last references at different times. So each communicator lists those derived from it. When another one is derived,
    its ranks compare which of them no rank references any more, and free those.
    """

    def __init__(self, comm: MPI.Intracomm, source: MpiCommunicator | None = None) -> None:
        self.mpi = comm
        self._source = source
        self._lease = _Lease(comm, self)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.lost: set[int] = set()
        self._subsets: dict[tuple[int, ...], MpiCommunicator] = {}
        # The attribute of the world: libraries need not set it on other communicators, and Open MPI does not.
        tags = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) + 1
        self.signatures = (tags >> LANE_BITS + OPERATION_BITS) - 1 or 1
        self.users = {self.signatures}

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self.mpi.Barrier()

    def isend(self, x: np.ndarray, dest: int, tag: int = 0) -> Request:
        """See `Messages.isend`; more than `MAX_ELEMENTS` go in several messages."""
        if x.size <= MAX_ELEMENTS:
            return MpiRequest(self.mpi.Isend(words(x), dest, tag), x)
        return Pieces(self.isend(piece, dest, tag) for piece in _pieces(x))

    def irecv(self, x: np.ndarray, source: int, tag: int = 0) -> Request:
        """See `Messages.irecv`; more than `MAX_ELEMENTS` come in several messages."""
        if x.size <= MAX_ELEMENTS:
            return MpiReceive(self.mpi, x, source, tag, self.users)
        return Pieces(self.irecv(piece, source, tag) for piece in _pieces(x))

    def isend_whole(self, x: np.ndarray, dest: int, tag: int) -> Request:
        """See `Communicator.isend_whole`."""
        return MpiRequest(self.mpi.Isend([x, MPI.BYTE], dest, tag), x)

    def irecv_up_to(self, x: np.ndarray, source: int, tag: int) -> Request:
        """See `Communicator.irecv_up_to`."""
        return MpiRequest(self.mpi.Irecv([x, MPI.BYTE], source, tag), x)

    def swapper(
        self, parts: Sequence[np.ndarray], received: np.ndarray | None, peer: int, lost: Callable[[], object] = list
    ) -> Callable[[int], Swapping | None]:
        """See `Communicator.swapper`; what does not change from call to call is prepared here."""
        isend, irecv = self.mpi.Isend, self.mpi.Irecv
        sent = [[part, part.size, MPI.BYTE] for part in parts]
        place = None if received is None else [received, received.size, MPI.BYTE]

        def swap(tag: int) -> Swapping | None:
            outgoing = [isend(part, peer, tag) for part in sent]  # first: they travel while the receive is posted
            incoming = None if place is None else arrived(irecv(place, peer, tag))
            while outgoing and outgoing[-1].Test():
                outgoing.pop()
            return None if incoming is None and not outgoing else unfinished(incoming, outgoing)

        def swap_of_one(tag: int) -> Swapping | None:
            outgoing = isend(part, peer, tag)
            receive = irecv(place, peer, tag)
            test = receive.Test
            try:
                for _ in at_once:
                    if test():
                        break
            except BaseException:
                give_up(receive)
                raise
            incoming = arrived(receive) if receive else None
            is_sent = outgoing.Test()
            return None if is_sent and incoming is None else unfinished(incoming, [] if is_sent else [outgoing])

        def arrived(receive: MPI.Request) -> MPI.Request | None:
            """Return None when the message is here, or ``receive`` after a while."""
            try:
                for tests in range(_TESTS_OF_A_SWAP):
                    if receive.Test():
                        return None
                    if tests > _TESTS_AT_ONCE:
                        os.sched_yield()
            except BaseException:  # also Ctrl-C
                give_up(receive)
                raise
            return receive

        def give_up(receive: MPI.Request) -> None:
            """End a receive, which would take a later message for its own."""
            if receive:
                status = MPI.Status()
                receive.Cancel()
                receive.Wait(status)  # soon: no message has come, or it is on its way
                if status.Is_cancelled():
                    return
            lost()

        def unfinished(incoming: MPI.Request | None, outgoing: Sequence[MPI.Request]) -> Swapping:
            waits = () if incoming is None else (MpiRequest(incoming, received),)
            cancel = list if incoming is None else functools.partial(give_up, incoming)
            return Swapping(waits, [MpiRequest(request, parts) for request in outgoing], cancel)

        if len(sent) != 1 or place is None:
            return swap
        part, at_once = sent[0], range(_TESTS_AT_ONCE)
        return swap_of_one

    def takes_note(self, error: Exception) -> bool:
        """See `Communicator.takes_note`; uses ULFM's acknowledgment of failed processes."""
        if not isinstance(error, MPI.Exception) or error.Get_error_class() not in _DEATHS:
            return False
        self.mpi.Ack_failed()  # allows receives from any source again
        failed = self.mpi.Get_failed()
        self.lost = set(failed.Translate_ranks(None, self.mpi.Get_group()))
        return True

    def irecv_any(self, tag: int, source: int | None = None) -> tuple[int, np.ndarray, Request] | None:
        """See `Communicator.irecv_any`; uses a matched probe (MPI_Mprobe)."""
        status = MPI.Status()
        try:
            message = self.mpi.Improbe(MPI.ANY_SOURCE if source is None else source, tag, status)
        except MPI.Exception as error:
            if not self.takes_note(error) or source is not None:
                raise
            message = None
        if message is None:
            return None
        x = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        return status.Get_source(), x, MpiRequest(message.Irecv([x, MPI.BYTE]), x)

    @_explained
    def native_allreduce(self, x: np.ndarray, op: str) -> None:
        """See `Communicator.native_allreduce`; MPI_Allreduce, on every rank NaN wins a minimum or maximum."""
        resolve("allreduce", op, x.dtype)
        wide = reducible(x)
        if wide is not x:
            self.native_allreduce(wide, op)
            narrow(wide, x)
            return
        if x.dtype.kind not in "iufc" or not x.dtype.isnative:
            expected = "a native integer, float or complex"
            raise UnsupportedError("allreduce", where="dtype", expected=expected, got=x.dtype.str)
        nan = self._nan_on_any_rank(x) if op in ("min", "max") and x.dtype.kind == "f" else None
        for piece in _pieces(x):
            self.mpi.Allreduce(MPI.IN_PLACE, piece, _OPS[op])
        if nan is not None:
            x[nan] = np.nan
        if op == "mean":
            x /= x.dtype.type(self.size)

    def _nan_on_any_rank(self, x: np.ndarray) -> np.ndarray | None:
        """Return where some rank has a NaN, which MPI's minimum and maximum may drop; None if there is none."""
        nan = np.isnan(x)
        anywhere = np.array([nan.any()], np.uint8)
        self.mpi.Allreduce(MPI.IN_PLACE, anywhere, MPI.MAX)
        if not anywhere[0]:
            return None
        for piece in _pieces(nan.view(np.uint8)):
            self.mpi.Allreduce(MPI.IN_PLACE, piece, MPI.MAX)
        return nan

    def native_iallreduce(self, x: np.ndarray, op: str) -> Request:
        """See `Communicator.native_iallreduce`."""
        return Pieces(MpiRequest(self.mpi.Iallreduce(MPI.IN_PLACE, piece, _OPS[op]), x) for piece in _pieces(x))

    @_explained
    def native_reduce_scatter(self, x: np.ndarray, out: np.ndarray, op: str) -> None:
        """See `Communicator.native_reduce_scatter`; a reduce per rank where MPI_Reduce_scatter cannot do it."""
        if x.size > MAX_ELEMENTS or reducible(x[:0]).dtype != x.dtype or (op in ("min", "max") and x.dtype.kind == "f"):
            for owner, part in enumerate(split(x.copy(), self.size)):
                self.native_reduce(part, op, owner)
                if owner == self.rank:
                    out[...] = part
            return
        counts = [part.size for part in split(x, self.size)]
        self.mpi.Reduce_scatter(x, out, counts, _OPS[op])
        if op == "mean":
            out /= out.dtype.type(self.size)

    @_explained
    def native_reduce(self, x: np.ndarray, op: str, root: int) -> None:
        """See `Communicator.native_reduce`."""
        wide = reducible(x)
        if wide is not x:
            self.native_reduce(wide, op, root)
            if self.rank == root:
                narrow(wide, x)
            return
        nan = self._nan_on_any_rank(x) if op in ("min", "max") and x.dtype.kind == "f" else None
        for piece in _pieces(x):
            self.mpi.Reduce(MPI.IN_PLACE if self.rank == root else piece, piece, _OPS[op], root)
        if self.rank != root:
            return
        if nan is not None:
            x[nan] = np.nan
        if op == "mean":
            x /= x.dtype.type(self.size)

    @_explained
    def native_allgather(self, out: np.ndarray) -> None:
        """See `Communicator.native_allgather`."""
        if out.size > MAX_ELEMENTS:
            for owner, part in enumerate(split(out, self.size)):
                self.native_broadcast(part, owner)
        elif out.size % self.size:
            counts = [part.size for part in split(out, self.size)]
            self.mpi.Allgatherv(MPI.IN_PLACE, [words(out), counts])
        else:
            self.mpi.Allgather(MPI.IN_PLACE, words(out))

    @_explained
    def native_broadcast(self, x: np.ndarray, root: int) -> None:
        """See `Communicator.native_broadcast`."""
        for piece in _pieces(words(x)):
            self.mpi.Bcast(piece, root)

    def duplicate(self) -> MpiCommunicator:
        """See `Communicator.duplicate`."""
        self.release()
        return self._made(self.mpi.Dup())

    def split(self, color: int | None) -> MpiCommunicator | None:
        """Return the ranks that pass the same ``color``, in their order here; None for None. Every rank must call."""
        self.release()
        made = self.mpi.Split(MPI.UNDEFINED if color is None else color, self.rank)
        if made == MPI.COMM_NULL:
            self._lease.made.append(_Lease(made, None))
            return None
        return self._made(made)

    def subset(self, ranks: tuple[int, ...]) -> MpiCommunicator:
        """Return the communicator of ``ranks``, in this order; they call, and no others.

        It is made once for these ranks and kept, because freeing it takes all of its ranks, and other ranks of this
        communicator do not know of it.
        """
        subset = self._subsets.get(ranks)
        if subset is None:
            group = self.mpi.Get_group().Incl(ranks)
            subset = self._subsets[ranks] = MpiCommunicator(self.mpi.Create_group(group), self)
        vars(subset).pop("allgather_json", None)  # that of an earlier world of these ranks
        return subset

    def split_by_machine(self) -> MpiCommunicator:
        """Return the ranks of this machine, in their order here; every rank must call."""
        self.release()
        return self._made(self.mpi.Split_type(MPI.COMM_TYPE_SHARED, self.rank))

    def _made(self, comm: Any) -> MpiCommunicator:
        made = MpiCommunicator(comm, self)
        self._lease.made.append(made._lease)
        return made

    def window(self, nbytes: int) -> np.ndarray:
        """Return ``nbytes`` zeroed bytes of an MPI window shared by these ranks of one machine; all must call."""
        self.release()
        window = MPI.Win.Allocate_shared(nbytes if self.rank == 0 else 0, 1, comm=self.mpi)
        memory = _WindowMemory(window, self)
        self._lease.made.append(_Lease(window, memory))
        block = np.asarray(memory)
        if self.rank == 0:
            block[:] = 0
        self.barrier()
        return block

    def release(self) -> None:
        """Free derived communicators that no rank references any more; every rank must call.

        A rank that keeps its reference keeps the communicator on all ranks; nothing waits for it.
        """
        lease, made = self._lease, self._lease.made
        if not made:
            return
        if len(made) >= lease.unused_limit:  # equal on all ranks
            gc.collect()  # frees communicators in reference cycles, such as those of an exception's frames
        unused = np.array([derived.is_unused for derived in made], np.uint8)
        _doze(self.mpi.Iallreduce(MPI.IN_PLACE, unused, MPI.MIN))
        lease.made = [derived for derived, free in zip(made, unused, strict=True) if not free]
        lease.unused_limit = max(_MOST_UNUSED, 2 * len(lease.made))
        for derived, free in zip(made, unused, strict=True):
            if free:
                derived.free()

    def allgather_json(self, value: Any) -> list[Any]:
        """See `Communicator.allgather_json`; sums along a tree up to `_BY_TREE_NBYTES`."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = text.size
        _doze(self.mpi.Iallreduce(MPI.IN_PLACE, lengths, MPI.SUM))
        ends = np.cumsum(lengths)
        gathered = np.zeros(int(ends[-1]), np.uint8)
        gathered[ends[self.rank] - text.size : ends[self.rank]] = text
        # A sum along a tree, because Open MPI's Iallgather connects each rank to every other, one descriptor each.
        if gathered.size <= _BY_TREE_NBYTES:
            _doze(self.mpi.Iallreduce(MPI.IN_PLACE, gathered, MPI.SUM))
        else:
            self.mpi.Allgatherv(MPI.IN_PLACE, [gathered, lengths])  # blocks briefly: all ranks are here
        return [json.loads(gathered[end - n : end].tobytes()) for n, end in zip(lengths, ends, strict=True)]

    def broadcast_json(self, value: Any) -> Any:
        """Return rank 0's ``value``, sent as JSON; every rank must call."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        length = np.array([text.size], np.int64)
        _doze(self.mpi.Ibcast(length, 0))
        text = text.copy() if self.rank == 0 else np.empty(int(length[0]), np.uint8)
        _doze(self.mpi.Ibcast(text, 0))
        return json.loads(text.tobytes())

    def largest(self, *numbers: int) -> list[int]:
        """Return the maximum over all ranks of each number; every rank must call."""
        maxima = np.array(numbers, np.int64)
        _doze(self.mpi.Iallreduce(MPI.IN_PLACE, maxima, MPI.MAX))
        return maxima.tolist()  # type: ignore[no-any-return]

    def count_before(self, counts: bool) -> tuple[int, int]:
        """Return the number of true ``counts`` on lower ranks and on all ranks; every rank must call."""
        before, total = np.zeros(1, np.int64), np.array([counts], np.int64)
        _doze(self.mpi.Iexscan(np.array([counts], np.int64), before, MPI.SUM))
        _doze(self.mpi.Iallreduce(MPI.IN_PLACE, total, MPI.SUM))
        return int(before[0]) if self.rank > 0 else 0, int(total[0])  # MPI leaves rank 0's result undefined

    def give_up(self, refused: Any) -> None:
        """Replace MPI by ``refused`` in a child made by fork, also in derived communicators."""
        self.mpi = refused
        for subset in self._subsets.values():
            subset.give_up(refused)
        for lease in self._lease.made:
            derived = None if lease.holder is None else lease.holder()
            if isinstance(derived, MpiCommunicator):
                derived.give_up(refused)

    def abort(self, code: int) -> None:
        """See `Communicator.abort`."""
        end_job(MPI.COMM_WORLD, code)  # aborting a sub-communicator may end only its ranks


def _doze(request: MPI.Request) -> None:
    """Wait for ranks that may be seconds behind with naps: a spinning rank would slow those it waits for."""
    began = time.perf_counter()
    while not request.Test():
        waited = time.perf_counter() - began
        if waited > _SPIN_S:
            time.sleep(min(waited / 16, _NAP_S))


def _pieces(x: np.ndarray) -> list[np.ndarray]:
    if x.size <= MAX_ELEMENTS:
        return [x]
    flat = x.reshape(-1)  # a view: callers pass contiguous arrays
    return [flat[start : start + MAX_ELEMENTS] for start in range(0, flat.size, MAX_ELEMENTS)]
