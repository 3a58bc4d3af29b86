"""N ranks as threads of one process, for tests: the same protocol, with every message counted."""

from __future__ import annotations

import itertools
import json
import os
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..core.environment import enter_replica_of_thread
from ..errors import ConfigError, HpcdpError, MismatchError, WorldAborted
from .communicator import (
    COMPLETE,
    Request,
    Swapping,
    Traffic,
    disagree,
    disagreement,
    name_of,
    reduce_in_order,
    resolve,
    split,
)
from .consistency import compare_exchanges
from .node_messages import Mailbox, words_for
from .shared_memory import patience_for, raise_failure
from .world import World

T = TypeVar("T")


class _Job:
    """The shared state of a run's thread ranks: one lock, and whether a rank has failed."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.failed: str | None = None
        self._conditions: weakref.WeakSet[threading.Condition] = weakref.WeakSet()

    def condition(self) -> threading.Condition:
        """Return a new condition under the lock; its waiters are woken when a rank fails."""
        made = threading.Condition(self.lock)
        with self.lock:
            self._conditions.add(made)
        return made

    def wait_for(self, ready: Callable[[], bool], condition: threading.Condition) -> None:
        condition.wait_for(lambda: self.failed is not None or ready())
        self.check(ready)

    def check(self, ready: Callable[[], bool]) -> bool:
        """Return whether an awaited event has happened; raise if it cannot happen any more."""
        done = ready()
        if self.failed is not None and not done:
            raise WorldAborted("wait", got=self.failed)
        return done

    def fail(self, reason: str) -> None:
        with self.lock:
            self.failed = self.failed or reason
            for condition in tuple(self._conditions):
                condition.notify_all()


class _ThreadGroup:
    """The mailboxes and meetings of one communicator's ranks."""

    def __init__(self, job: _Job, size: int) -> None:
        self.job = job
        self.size = size
        self.met = job.condition()
        self.arrived = [job.condition() for _ in range(size)]
        """One condition per rank, so that a message wakes its receiver alone."""
        self.mail: dict[tuple[int, int], dict[int, deque[np.ndarray]]] = defaultdict(dict)
        """Messages not received yet, by source and destination, then by tag."""
        self.posted: dict[tuple[int, int, int], deque[weakref.ref[_ThreadReceive]]] = defaultdict(deque)
        """Receives without a message yet, by source, destination and tag, in the order in which they were started."""
        self.meetings: dict[int, dict[int, Any]] = defaultdict(dict)
        self.users = {ThreadCommunicator.signatures}
        self._subsets: dict[tuple[int, ...], _ThreadGroup] = {}

    def subset(self, ranks: tuple[int, ...]) -> _ThreadGroup:
        """Return the group of some of the ranks, the same one for each of them."""
        with self.job.lock:
            return self._subsets.setdefault(ranks, _ThreadGroup(self.job, len(ranks)))


class _ThreadReceive:
    def __init__(self, group: _ThreadGroup, key: tuple[int, int, int], x: np.ndarray, exact: bool = True) -> None:
        self._group, self._key, self._x, self._exact, self._done = group, key, x, exact, False
        self._failure: MismatchError | None = None
        with group.job.lock:
            group.posted[key].append(weakref.ref(self))

    def test(self) -> bool:
        with self._group.job.lock:
            return self._group.job.check(self._take)

    def wait(self) -> None:
        with self._group.job.lock:
            self._group.job.wait_for(self._take, self._group.arrived[self._key[1]])

    def _take(self) -> bool:
        source, dest, tag = self._key
        boxes, posted = self._group.mail[source, dest], self._group.posted[self._key]
        while not self._done and tag in boxes:
            receive = posted.popleft()()  # the first that was started, as in MPI, not the first that is tested
            if receive is not None:
                receive._fill(boxes[tag].popleft())
                if not boxes[tag]:
                    del boxes[tag]
        if self._failure is not None:
            raise self._failure
        if not self._done and any(disagree(tag, other, self._group.users) for other in boxes):
            raise disagreement(source)
        return self._done

    def _fill(self, message: np.ndarray) -> None:
        self._done = True
        if not self._exact and message.nbytes < self._x.nbytes:
            self._x = self._x[: message.nbytes]
        if message.nbytes != self._x.nbytes:
            where, expected = f"from {self._key[0]}, tag {self._key[2]}", f"{self._x.nbytes} bytes"
            self._failure = MismatchError("receive", where=where, expected=expected, got=message.nbytes)
            return
        self._x.reshape(-1)[...] = message.view(self._x.dtype)


class _Meeting:
    """An allreduce to which every rank adds its array, complete when all have."""

    def __init__(self, group: _ThreadGroup, number: int, rank: int, x: np.ndarray, op: str) -> None:
        self._group, self._x, self._op = group, x, resolve("native", op, x.dtype)
        with group.job.lock:
            self._inputs = group.meetings[number]
            self._inputs[rank] = x.copy()
            if len(self._inputs) == group.size:
                group.meetings.pop(number)
                group.met.notify_all()

    def test(self) -> bool:
        if not self._group.job.check(self._complete):
            return False
        self._x[...] = reduce_in_order([self._inputs[rank] for rank in range(self._group.size)], self._op)
        return True

    def wait(self) -> None:
        with self._group.job.lock:
            self._group.job.wait_for(self._complete, self._group.met)
        self.test()

    def _complete(self) -> bool:
        return len(self._inputs) == self._group.size


class ThreadCommunicator:
    """One thread rank's part of a group (see `Communicator`)."""

    signatures = 1 << 16

    def __init__(self, group: _ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self.traffic = Traffic()
        self.users = group.users
        self.lost: set[int] = set()
        self._group = group
        self._subsets: dict[tuple[int, ...], ThreadCommunicator] = {}
        self._meetings = 0

    def meet(self, value: T) -> list[T]:
        """Return every rank's ``value`` itself, not a copy, by rank; every rank must call."""
        number, self._meetings = self._meetings, self._meetings + 1
        job, meetings = self._group.job, self._group.meetings
        with job.lock:
            meeting = meetings[number]
            meeting[self.rank] = value
            if len(meeting) == self.size:
                self._group.met.notify_all()
            job.wait_for(lambda: len(meeting) == self.size, self._group.met)
            meetings.pop(number, None)
            return [meeting[rank] for rank in range(self.size)]

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self.meet(None)

    def isend(self, x: np.ndarray, dest: int, tag: int = 0) -> Request:
        """See `Messages.isend`."""
        self.traffic.messages += 1
        self.traffic.nbytes += x.nbytes
        with self._group.job.lock:
            self._group.mail[self.rank, dest].setdefault(tag, deque()).append(x.reshape(-1).copy())
            self._group.arrived[dest].notify_all()
        return COMPLETE  # the message is copied

    def irecv(self, x: np.ndarray, source: int, tag: int = 0) -> _ThreadReceive:
        """See `Messages.irecv`."""
        return _ThreadReceive(self._group, (source, self.rank, tag), x)

    def isend_whole(self, x: np.ndarray, dest: int, tag: int) -> Request:
        """See `Communicator.isend_whole`."""
        return self.isend(x, dest, tag)

    def irecv_up_to(self, x: np.ndarray, source: int, tag: int) -> _ThreadReceive:
        """See `Communicator.irecv_up_to`."""
        return _ThreadReceive(self._group, (source, self.rank, tag), x, exact=False)

    def swapper(
        self, parts: Sequence[np.ndarray], received: np.ndarray | None, peer: int, lost: Callable[[], object] = list
    ) -> Callable[[int], Swapping | None]:
        """See `Communicator.swapper`; no exception comes here while a message arrives."""

        def swap(tag: int) -> Swapping | None:
            for part in parts:
                self.isend(part, peer, tag)
            return None if received is None else Swapping([self.irecv_up_to(received, peer, tag)], ())

        return swap

    def takes_note(self, error: Exception) -> bool:
        """See `Communicator.takes_note`."""
        return False

    def irecv_any(self, tag: int, source: int | None = None) -> tuple[int, np.ndarray, Request] | None:
        """See `Communicator.irecv_any`."""
        with self._group.job.lock:
            self._group.job.check(lambda: False)
            for sender in range(self.size) if source is None else (source,):
                boxes = self._group.mail[sender, self.rank]
                if tag in boxes:
                    message = boxes[tag].popleft()
                    if not boxes[tag]:
                        del boxes[tag]
                    return sender, message.view(np.uint8), COMPLETE
        return None

    def native_allreduce(self, x: np.ndarray, op: str) -> None:
        """See `Communicator.native_allreduce`."""
        x[...] = self._reduced(x, op)

    def _reduced(self, x: np.ndarray, op: str) -> np.ndarray:
        reduction = resolve("native", op, x.dtype)
        return reduce_in_order(self.meet(x.copy()), reduction)

    def native_iallreduce(self, x: np.ndarray, op: str) -> _Meeting:
        """See `Communicator.native_iallreduce`."""
        number, self._meetings = self._meetings, self._meetings + 1
        return _Meeting(self._group, number, self.rank, x, op)

    def native_reduce_scatter(self, x: np.ndarray, out: np.ndarray, op: str) -> None:
        """See `Communicator.native_reduce_scatter`."""
        out[...] = split(self._reduced(x, op), self.size)[self.rank]

    def native_reduce(self, x: np.ndarray, op: str, root: int) -> None:
        """See `Communicator.native_reduce`."""
        reduced = self._reduced(x, op)
        if self.rank == root:
            x[...] = reduced

    def native_allgather(self, out: np.ndarray) -> None:
        """See `Communicator.native_allgather`."""
        parts = split(out, self.size)
        for part, sent in zip(parts, self.meet(parts[self.rank].copy()), strict=True):
            part[...] = sent

    def native_broadcast(self, x: np.ndarray, root: int) -> None:
        """See `Communicator.native_broadcast`."""
        sent = self.meet(x.copy() if self.rank == root else None)[root]
        if sent is not None:
            x[...] = sent

    def duplicate(self) -> ThreadCommunicator:
        """See `Communicator.duplicate`."""
        group = self.meet(_ThreadGroup(self._group.job, self.size) if self.rank == 0 else None)[0]
        assert group is not None
        return ThreadCommunicator(group, self.rank)

    def subset(self, ranks: tuple[int, ...]) -> ThreadCommunicator:
        """Return the communicator of ``ranks``, in this order; they call, and no others."""
        subset = self._subsets.get(ranks)
        if subset is None:
            subset = self._subsets[ranks] = ThreadCommunicator(self._group.subset(ranks), ranks.index(self.rank))
        return subset

    def allgather_json(self, value: Any) -> list[Any]:
        """See `Communicator.allgather_json`."""
        return [json.loads(text) for text in self.meet(json.dumps(value))]

    def abort(self, code: int) -> None:
        """See `Communicator.abort`."""
        self._group.job.fail(f"rank {self.rank} aborted with code {code}")


class ThreadMemory:
    """`NodeMemory` of ranks that are threads: ordinary arrays."""

    def __init__(self, comm: ThreadCommunicator, job: _Job, patience: np.ndarray) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.patience = patience
        self.failure: HpcdpError | None = None
        self.meanwhile: Callable[[], object] = list
        self._comm = comm
        self._job = job

    def alloc(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """See `NodeMemory.alloc`."""
        block = self._comm.meet(np.zeros(shape, dtype) if self.rank == 0 else None)[0]
        assert block is not None
        return block

    def check(self) -> None:
        """See `NodeMemory.check`; also raises `WorldAborted` when a rank has failed."""
        self.meanwhile()
        if self.failure is not None:
            raise_failure(self)
        self._job.check(lambda: False)


def run(
    n: int,
    fn: Callable[[World], T],
    ranks_per_node: int | Sequence[int] | None = None,
    num_servers: int = 0,
    serve: Callable[[World], object] = lambda whole: None,
) -> list[T]:
    """Call ``fn(world)`` on ``n`` thread ranks of this process at once, with servers beside them if asked.

    Args:
        n: the number of ranks.
        fn: the program of a rank; its world's communicators are `ThreadCommunicator` with a ``traffic``.
        ranks_per_node: the ranks of each (virtual) node, of which the last one may have fewer; or a list of all nodes'
            ranks, n together; None: one node. A number also counts servers, in the world of all processes; with a list
            they form one node.
        num_servers: the number of further threads that are servers; the ranks' worlds then have a `World.whole`.
        serve: the program of a server, called with the world of all processes; it must end when the ranks have
            (`communicator.ENDED`).

    Returns:
        The results of ``fn``, by rank.

    Raises:
        BaseException: the exception of the first rank or server to fail; the others get `WorldAborted`.
    """
    job = _Job()
    worlds = _worlds(job, _node_sizes(n, ranks_per_node))
    if num_servers:
        per_node = [*ranks_per_node, num_servers] if isinstance(ranks_per_node, Sequence) else ranks_per_node
        wholes = _worlds(job, _node_sizes(n + num_servers, per_node))
        wholes = [replace(whole, num_servers=num_servers, divide=None) for whole in wholes]
        worlds = [replace(world, whole=whole) for world, whole in zip(worlds, wholes[:n], strict=True)] + wholes[n:]
    results: list[Any] = [None] * len(worlds)
    failures: list[BaseException] = []

    def one_rank(rank: int) -> None:
        enter_replica_of_thread(worlds[rank].rank)
        try:
            results[rank] = (fn if rank < n else serve)(worlds[rank])
            worlds[rank].finish()
        except BaseException as error:  # raised again in the caller
            error.add_note(f"raised on thread {name_of(rank, n)}")
            failures.append(error)
            job.fail(f"{name_of(rank, n)} raised {type(error).__name__}")

    threads = [
        threading.Thread(target=one_rank, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(len(worlds))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for world in worlds:
        world.end()
    if failures:
        raise next((error for error in failures if not isinstance(error, WorldAborted)), failures[0])
    return results[:n]


def alone() -> World:
    """Return the world of one rank, this process."""
    return _worlds(_Job(), [1])[0]


def _node_sizes(n: int, ranks_per_node: int | Sequence[int] | None) -> list[int]:
    if isinstance(ranks_per_node, Sequence):
        sizes = list(ranks_per_node)
    else:
        per_node = n if ranks_per_node is None else ranks_per_node
        sizes = [min(per_node, n - first) for first in range(0, n, per_node)] if per_node > 0 else []
    if not sizes or min(sizes) < 1 or sum(sizes) != n:
        raise ConfigError(
            "thread_comm.run", expected="at least 1 rank, and 1 rank a node", got=f"{n} and {ranks_per_node} a node"
        )
    return sizes


def _worlds(
    job: _Job, sizes: list[int], places_on_machine: Sequence[int] | None = None, fields: Sequence[dict[str, Any]] = ()
) -> list[World]:
    """Return the worlds of all ranks; ``fields`` are further fields of `World`, for each rank."""
    n = sum(sizes)
    if places_on_machine is None:
        places_on_machine = range(n)
    everyone, calls = _ThreadGroup(job, n), _ThreadGroup(job, n)
    nodes = [_ThreadGroup(job, size) for size in sizes]
    num_rails = min(sizes)
    rails = [_ThreadGroup(job, len(sizes)) for _ in range(num_rails)]
    cores = len(os.sched_getaffinity(0))
    worlds = []
    places = [(node, local_rank) for node, size in enumerate(sizes) for local_rank in range(size)]
    mail = [np.zeros(words_for(size), np.int32) for size in sizes]
    firsts = list(itertools.accumulate(sizes, initial=0))
    for rank, (node, local_rank) in enumerate(places):
        comm, node_comm = ThreadCommunicator(everyone, rank), ThreadCommunicator(nodes[node], local_rank)
        world = World(
            rank=rank, size=n, local_rank=local_rank, local_size=sizes[node], node=node, num_nodes=len(sizes),
            num_rails=num_rails, comm=comm, call_comm=ThreadCommunicator(calls, rank), node_comm=node_comm,
            rail_comm=ThreadCommunicator(rails[local_rank], node) if local_rank < num_rails else None,
            node_memory=ThreadMemory(node_comm, job, patience_for(n, cores)), library="threads", cores=cores,
            place=places_on_machine[rank], divide=partial(_part_of, job, comm, node, places_on_machine[rank]),
            **(fields[rank] if fields else {}),
        )  # fmt: skip
        compare_exchanges(world)
        ranks = range(firsts[node], firsts[node + 1])
        world.kept[Mailbox] = Mailbox(world.node_memory, mail[node], ranks, len(sizes) == 1, cores >= n)
        worlds.append(world)
    return worlds


def _part_of(
    job: _Job, comm: ThreadCommunicator, node: int, place: int, color: int | Sequence[int], **fields: Any
) -> World:
    """Return this rank's world of those that pass the same color or ranks; the first of these ranks makes all."""
    if not isinstance(color, int):
        comm, color = comm.subset(tuple(color)), 0
    everyone = comm.meet((color, node, place, fields))
    members = {rank: others[1:] for rank, others in enumerate(everyone) if others[0] == color}
    sizes = [*Counter(node for node, *_ in members.values()).values()]
    places, all_fields = [place for _, place, _ in members.values()], [fields for *_, fields in members.values()]
    first = min(members)
    worlds = comm.meet(_worlds(job, sizes, places, all_fields) if comm.rank == first else None)[first]
    assert worlds is not None
    return worlds[list(members).index(comm.rank)]
