"""A communicator over MPI, by mpi4py's buffer methods.

How a rank ends: the abort of the job by a rank that fails alone, and leaving at the end of the program.

A rank that fails alone ends the whole job, in the way of each MPI library, and names the ranks whose death has made it
fail.

A rank that leaves by `sys.exit` with a status that tells of a failure ends the job, unless all others leave, too.

One that leaves with status 0, or with 75 since the job can go on later, or in a way that is not noted
(`hpcdp.comm.mpi`) waits for the others, which may have much to write; if they wait for it, in a collective, the
watchdog misses it.
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
from collections.abc import Callable, Iterable, Set
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
"""MPICH's mpirun ends at once and drops what a rank on another host has just written, such as why it ends the job."""


def end_job(comm_world: MPI.Intracomm, code: int) -> None:
    """End all processes of the job, which has this status then; of a child made by fork, this process alone."""
    if os.getpid() != _PID:
        os._exit(code)
    for _ in range(_LOOKS if outlives_ranks() else 0):
        with contextlib.suppress(Exception):  # by which it takes in who has died
            comm_world.Iprobe()
        if comm_world.Get_failed().size == comm_world.size - 1:
            os._exit(code)  # mpirun would forget the status of the only one that is left
        time.sleep(_ENDING_NAP_S)
    if _OF_HYDRA in os.environ:
        time.sleep(_HEARD_S)
    comm_world.Abort(code)


_OF_ALL_S = 1.0
"""For so long the other ranks leave it to rank 0 to report an error that every rank raises."""


def abort_when_one_fails(comm_world: MPI.Intracomm, workers: int) -> Callable[[], None]:
    """Make an uncaught exception end the whole job: the other processes would wait for this one for ever.

    Exceptions are also passed to the hooks that were there before, such as those that write a log.

    Returns:
        A function for the end of the program: it ends the job if the program ends by an exception that a later hook
        has taken (rich's and most loggers' call no other hook).
    """
    name = name_of(comm_world.rank, workers)
    earlier, earlier_of_threads = sys.excepthook, threading.excepthook
    is_reported = False
    process = os.getpid()  # a child made by fork has these hooks, too, and must not use MPI

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
            with contextlib.suppress(BaseException):  # of a hook that fails: the job ends all the same
                earlier(kind, error, trace)
        end_job(comm_world, status)  # with MPICH, it ends a little later

    def abort_from_thread(args: threading.ExceptHookArgs) -> None:
        if issubclass(args.exc_type, SystemExit):  # which ends the thread alone
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
        # Others set them as well, such as pytest and IPython, of an exception that no outermost frame has raised.
        is_uncaught = trace is not None and trace.tb_frame.f_back is None and not hasattr(sys, "ps1")
        if is_uncaught and isinstance(error, BaseException) and not is_reported and os.getpid() == process:
            end_job(comm_world, report(type(error), error, trace))

    sys.excepthook = abort
    threading.excepthook = abort_from_thread
    return abort_at_end


def _dead_by(error: BaseException | None, comm_world: MPI.Intracomm) -> list[int]:
    """Whose death an error, or what has led to it, tells of, where the library says so."""

    comm = MpiCommunicator(comm_world)
    while error is not None:
        if isinstance(error, Exception) and comm.takes_note(error):
            return sorted(comm.lost)
        error = error.__cause__ or error.__context__
    return []


GRACE_S = 2.0
"""How much later than the first rank that leaves so the last one may come to its end; then the watchdog has not yet
ended the job for those that wait for it, with a status of its own."""
_END_NAP_S = 0.001


def wait_for_all_to_leave(comm_world: MPI.Intracomm, workers: int) -> None:
    """Make this process wait for all others when it ends, as MPI_Finalize does, but not Open MPI's under srun; or end
    the job as an uncaught exception does, where its status tells of a failure. All processes must call.

    Before that this rank ends what it has under way, such as a checkpoint, and others have `GRACE_S` to end, too: those
    that have all failed alike end as they would.
    """
    if outlives_ranks():  # a barrier of all never ends when one has died, and who survives decides
        return
    comm = comm_world.Dup()
    record_exit_status()  # also where hpcdp was imported before a launcher's variables were set

    def leave(*_: object) -> None:
        if MPI.Is_finalized():
            return
        all_leave = comm.Ibarrier()
        deadline = time.monotonic() + GRACE_S
        while not all_leave.Test():
            if exit_status() not in (0, os.EX_TEMPFAIL) and time.monotonic() > deadline:
                name = name_of(comm_world.rank, workers)
                report_directly(f"{name} has left with status {exit_status()}, and others go on")
                end_job(comm_world, exit_status())
                return  # with MPICH, which ends the process a little later
            time.sleep(_END_NAP_S)

    atexit.register(leave)  # before what a world registers, and so called after that; engines end later still
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=leave), None)  # see `starting`


MAX_ELEMENTS = 2**30
"""Arrays are passed to MPI in pieces of at most this many elements: Open MPI 5's Bcast fails at 2^31."""

_TESTS_A_LOOK = 1 << 9
"""After so many tests in vain, some 0.3 ms of spinning or 60 ms of naps, a receive looks for what else has come. Where
ranks outnumber cores a turn may take milliseconds."""

_TESTS_AT_ONCE = 100
"""Before a rank that waits lets others have its core, some 15 us: where each has one, the message may come by then."""

_SPIN_S, _NAP_S = 1e-3, 2e-3
"""Of ranks that agree on something: how long one spins for the others, and the longest of the naps that follow."""

_BY_TREE_NBYTES = 1 << 20
"""So much of all ranks is gathered by sums along a tree; more would be sent as often as it has levels."""

_MOST_UNUSED = 64
"""Communicators made of one, until garbage is collected to see which of them nobody holds any more."""

_OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "prod": MPI.PROD}
_DEATHS = MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING

P = ParamSpec("P")
T = TypeVar("T")


def _in_our_words(operation: str, error: MPI.Exception) -> Exception:
    """What to raise for an error of MPI's: messages that do not fit come of ranks that disagree."""
    if error.Get_error_class() not in (MPI.ERR_TRUNCATE, MPI.ERR_COUNT):
        return error
    return MismatchError(
        operation,
        expected="the same sizes and dtypes on all ranks",
        got=f"the MPI library's {error.Get_error_string()}",
        remedy="call it alike, and in the same order, on all ranks",
    )


def _explained(native: Callable[P, T]) -> Callable[P, T]:
    """A collective of MPI's own, with its word for messages that do not fit put as ours."""

    @functools.wraps(native)
    def explained(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return native(*args, **kwargs)
        except MPI.Exception as error:
            raise _in_our_words(native.__name__.removeprefix("native_"), error) from error

    return explained


class MpiRequest:
    """A request of MPI; the array is kept alive until it is complete."""

    __slots__ = ("_request", "_x")

    def __init__(self, request: MPI.Request, x: np.ndarray) -> None:
        self._request = request
        self._x = x

    def test(self) -> bool:
        try:
            return bool(self._request.Test())
        except MPI.Exception as error:
            raise _in_our_words("request", error) from error

    def wait(self) -> None:
        for _ in range(_TESTS_AT_ONCE):
            if self.test():
                return
        while not self.test():
            os.sched_yield()  # not in C, where Ctrl-C could not end it


class MpiReceive:
    """A receive of MPI. Whoever waits looks now and then whether the sender does something else."""

    __slots__ = ("_comm", "_request", "_source", "_tag", "_tests", "_users", "_x")

    def __init__(self, comm: MPI.Comm, x: np.ndarray, source: int, tag: int, users: Set[int] = frozenset()) -> None:
        self._users = users
        self._request = comm.Irecv(words(x), source, tag)
        self._comm, self._x, self._source, self._tag = comm, x, source, tag
        self._tests = 0

    def test(self) -> bool:
        if self._request.Test():
            return True
        self._tests += 1
        if self._tests % _TESTS_A_LOOK == 0:
            self._look()
        return False

    def wait(self) -> None:
        while not self.test():
            os.sched_yield()

    def _look(self) -> None:
        status = MPI.Status()
        found = self._comm.Iprobe(self._source, MPI.ANY_TAG, status)
        if found and disagree(self._tag, status.Get_tag(), self._users):
            raise disagreement(self._source)


class Pieces:
    """The requests of an array that went in several pieces."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = list(requests)

    def test(self) -> bool:
        while self._requests and self._requests[-1].test():
            self._requests.pop()
        return not self._requests

    def wait(self) -> None:
        for request in self._requests:
            request.wait()


class _Lease:
    """An MPI communicator or window, and what was made of it, until no Python object of this rank holds it.

    It is freed by `MpiCommunicator.release`, together with all of its ranks.
    """

    __slots__ = ("holder", "made", "resource", "unused_limit")

    def __init__(self, resource: MPI.Comm | MPI.Win, holder: object) -> None:
        self.resource = resource
        self.holder = weakref.ref(holder) if holder is not None else None
        """The object that holds the resource; what was made of the resource holds this object."""
        self.made: list[_Lease] = []
        """In the same order on all ranks, since all make them together."""
        self.unused_limit = _MOST_UNUSED

    @property
    def is_unused(self) -> bool:
        return self.holder is None or self.holder() is None

    def free(self) -> None:
        for each in self.made:
            each.free()
        if self.resource not in (MPI.COMM_NULL, MPI.WIN_NULL):
            self.resource.Free()


class _WindowMemory:
    """The memory of an MPI window, as NumPy takes it; keeps the communicator of its ranks alive."""

    def __init__(self, window: MPI.Win, holder: MpiCommunicator) -> None:
        self._holder = holder
        memory: Any = window.Shared_query(0)[0]
        self._block = np.frombuffer(memory, np.uint8)
        self.__array_interface__ = self._block.__array_interface__


class MpiCommunicator:
    """The ranks of an MPI communicator (see `Communicator`).

    MPI libraries have a limited number of communicators (MPICH: 2048), and freeing one takes all of its ranks, which
    drop their last reference at different times. So each communicator lists those made of it, and when another one is
    made, its ranks compare which of them none of them holds any more, and free those.

    Args:
        comm: an intra-communicator that nothing else uses.
        source: the one that it was made of.
    """

    def __init__(self, comm: MPI.Intracomm, source: MpiCommunicator | None = None) -> None:
        self.mpi = comm
        self._source = source
        self._lease = _Lease(comm, self)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.users: set[int] = set()
        self.lost: set[int] = set()
        # Of the world: libraries need not know it of other communicators, and Open MPI does not.
        self.signatures = (int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) + 1) >> LANE_BITS + OPERATION_BITS

    def barrier(self) -> None:
        self.mpi.Barrier()

    def isend(self, x: np.ndarray, dest: int, tag: int = 0) -> Request:
        if x.size <= MAX_ELEMENTS:
            return MpiRequest(self.mpi.Isend(words(x), dest, tag), x)
        return Pieces(self.isend(piece, dest, tag) for piece in _pieces(x))

    def irecv(self, x: np.ndarray, source: int, tag: int = 0) -> Request:
        if x.size <= MAX_ELEMENTS:
            return MpiReceive(self.mpi, x, source, tag, self.users)
        return Pieces(self.irecv(piece, source, tag) for piece in _pieces(x))

    def isend_whole(self, x: np.ndarray, dest: int, tag: int) -> Request:
        return MpiRequest(self.mpi.Isend([x, MPI.BYTE], dest, tag), x)

    def irecv_up_to(self, x: np.ndarray, source: int, tag: int) -> Request:
        return MpiRequest(self.mpi.Irecv([x, MPI.BYTE], source, tag), x)

    def swap(self, x: np.ndarray, received: np.ndarray, peer: int, tag: int) -> None:
        incoming = self.mpi.Irecv([received, MPI.BYTE], peer, tag)
        outgoing = self.mpi.Isend([x, MPI.BYTE], peer, tag)
        for request in (incoming, outgoing):
            for _ in range(_TESTS_AT_ONCE):
                if request.Test():
                    break
            else:
                MpiRequest(request, x).wait()

    def takes_note(self, error: Exception) -> bool:
        if not isinstance(error, MPI.Exception) or error.Get_error_class() not in _DEATHS:
            return False
        self.mpi.Ack_failed()  # messages of whomever can be looked for again
        failed = self.mpi.Get_failed()
        self.lost = set(failed.Translate_ranks(None, self.mpi.Get_group()))
        return True

    def irecv_any(self, tag: int) -> tuple[int, np.ndarray, Request] | None:
        status = MPI.Status()
        try:
            message = self.mpi.Improbe(MPI.ANY_SOURCE, tag, status)
        except MPI.Exception as error:
            if not self.takes_note(error):
                raise
            message = None
        if message is None:
            return None
        x = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        return status.Get_source(), x, MpiRequest(message.Irecv([x, MPI.BYTE]), x)

    @_explained
    def native_allreduce(self, x: np.ndarray, op: str) -> None:
        resolve("allreduce", op, x.dtype)
        wide = reducible(x)
        if wide is not x:
            self.native_allreduce(wide, op)
            narrow(wide, x)
            return
        if x.dtype.kind not in "iuf" or not x.dtype.isnative:
            raise UnsupportedError("allreduce", where="dtype", expected="a native integer or float", got=x.dtype.str)
        nan = self._nan_on_any_rank(x) if op in ("min", "max") and x.dtype.kind == "f" else None
        for piece in _pieces(x):
            self.mpi.Allreduce(MPI.IN_PLACE, piece, _OPS[op])
        if nan is not None:
            x[nan] = np.nan
        if op == "mean":
            x /= x.dtype.type(self.size)

    def _nan_on_any_rank(self, x: np.ndarray) -> np.ndarray | None:
        """Where some rank has a NaN, which MPI's own minimum and maximum may drop; None where there is none at all."""
        nan = np.isnan(x)
        anywhere = np.array([nan.any()], np.uint8)
        self.mpi.Allreduce(MPI.IN_PLACE, anywhere, MPI.MAX)
        if not anywhere[0]:
            return None
        for piece in _pieces(nan.view(np.uint8)):
            self.mpi.Allreduce(MPI.IN_PLACE, piece, MPI.MAX)
        return nan

    def native_iallreduce(self, x: np.ndarray, op: str) -> Request:
        return Pieces(MpiRequest(self.mpi.Iallreduce(MPI.IN_PLACE, piece, _OPS[op]), x) for piece in _pieces(x))

    @_explained
    def native_reduce_scatter(self, x: np.ndarray, out: np.ndarray, op: str) -> None:
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
        for piece in _pieces(words(x)):
            self.mpi.Bcast(piece, root)

    def duplicate(self) -> MpiCommunicator:
        self.release()
        return self._made(self.mpi.Dup())

    def split(self, color: int | None) -> MpiCommunicator | None:
        """The ranks that pass the same ``color``, in their order here; None for None. Every rank must call."""
        self.release()
        made = self.mpi.Split(MPI.UNDEFINED if color is None else color, self.rank)
        if made == MPI.COMM_NULL:
            self._lease.made.append(_Lease(made, None))
            return None
        return self._made(made)

    def split_by_machine(self) -> MpiCommunicator:
        """The ranks of this machine, in their order here; every rank must call."""
        self.release()
        return self._made(self.mpi.Split_type(MPI.COMM_TYPE_SHARED, self.rank))

    def _made(self, comm: Any) -> MpiCommunicator:
        made = MpiCommunicator(comm, self)
        self._lease.made.append(made._lease)
        return made

    def window(self, nbytes: int) -> np.ndarray:
        """``nbytes`` zeroed bytes of an MPI window, shared by these ranks, which have one machine; all must call."""
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
        """Free what was made of this communicator and no rank holds any more; every rank must call.

        A rank that keeps its reference keeps the communicator on all ranks, and nobody waits for it.
        """
        lease, made = self._lease, self._lease.made
        if not made:
            return
        if len(made) >= lease.unused_limit:  # alike on all ranks
            gc.collect()  # objects that refer to each other, such as what an exception has seen, live until then
        unused = np.array([each.is_unused for each in made], np.uint8)
        _doze(self.mpi.Iallreduce(MPI.IN_PLACE, unused, MPI.MIN))
        lease.made = [each for each, free in zip(made, unused, strict=True) if not free]
        lease.unused_limit = max(_MOST_UNUSED, 2 * len(lease.made))
        for each, free in zip(made, unused, strict=True):
            if free:
                each.free()

    def allgather_json(self, value: Any) -> list[Any]:
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = text.size
        _doze(self.mpi.Iallreduce(MPI.IN_PLACE, lengths, MPI.SUM))
        ends = np.cumsum(lengths)
        gathered = np.zeros(int(ends[-1]), np.uint8)
        gathered[ends[self.rank] - text.size : ends[self.rank]] = text
        # Along a tree, where Open MPI's Iallgather connects each rank to every other one, with a descriptor for each.
        if gathered.size <= _BY_TREE_NBYTES:
            _doze(self.mpi.Iallreduce(MPI.IN_PLACE, gathered, MPI.SUM))
        else:
            self.mpi.Allgatherv(MPI.IN_PLACE, [gathered, lengths])  # all are here
        return [json.loads(gathered[end - n : end].tobytes()) for n, end in zip(lengths, ends, strict=True)]

    def broadcast_json(self, value: Any) -> Any:
        """Return rank 0's ``value`` (what JSON can carry); every rank must call."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        length = np.array([text.size], np.int64)
        _doze(self.mpi.Ibcast(length, 0))
        text = text.copy() if self.rank == 0 else np.empty(int(length[0]), np.uint8)
        _doze(self.mpi.Ibcast(text, 0))
        return json.loads(text.tobytes())

    def largest(self, *numbers: int) -> list[int]:
        """Return the maximum over all ranks of each number; every rank must call."""
        found = np.array(numbers, np.int64)
        _doze(self.mpi.Iallreduce(MPI.IN_PLACE, found, MPI.MAX))
        return found.tolist()  # type: ignore[no-any-return]

    def count_before(self, counts: bool) -> tuple[int, int]:
        """Return how many ranks before this one count, and how many of all ranks; every rank must call."""
        before, total = np.zeros(1, np.int64), np.array([counts], np.int64)
        _doze(self.mpi.Iexscan(np.array([counts], np.int64), before, MPI.SUM))
        _doze(self.mpi.Iallreduce(MPI.IN_PLACE, total, MPI.SUM))
        return int(before[0]) if self.rank > 0 else 0, int(total[0])  # MPI leaves rank 0's undefined

    def give_up(self, refused: Any) -> None:
        """In a child made by fork: let ``refused`` take the place of MPI, also in what was made of this one."""
        self.mpi = refused
        for each in self._lease.made:
            made = None if each.holder is None else each.holder()
            if isinstance(made, MpiCommunicator):
                made.give_up(refused)

    def abort(self, code: int) -> None:
        end_job(MPI.COMM_WORLD, code)  # of a part of the job, a library may end that part alone


def _doze(request: MPI.Request) -> None:
    """Wait for ranks that may be seconds behind, and leave them the core: a spinning rank slows those it waits for."""
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
