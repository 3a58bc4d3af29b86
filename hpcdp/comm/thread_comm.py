"""N ranks as threads of one process, for tests: the same protocol, and every message counted."""

from __future__ import annotations

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
from .communicator import Request, Traffic, disagree, disagreement, name_of, reduce_in_order, resolve, split
from .consistency import compare_exchanges
from .shared_memory import patience_for, raise_failure
from .world import World

T = TypeVar("T")


class _Job:
    """What all thread ranks of a run share: one lock, and whether a rank has failed."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.failed: str | None = None
        self._conditions: weakref.WeakSet[threading.Condition] = weakref.WeakSet()

    def condition(self) -> threading.Condition:
        """One more under the lock; whoever waits for it is released when a rank fails."""
        made = threading.Condition(self.lock)
        with self.lock:
            self._conditions.add(made)
        return made

    def wait_for(self, ready: Callable[[], bool], condition: threading.Condition) -> None:
        condition.wait_for(lambda: self.failed is not None or ready())
        self.check(ready)

    def check(self, ready: Callable[[], bool]) -> bool:
        """Whether what somebody waits for is there; raises where it will not come any more."""
        done = ready()
        if self.failed is not None and not done:
            raise WorldAborted("wait", got=self.failed)
        return done

    def fail(self, reason: str) -> None:
        with self.lock:
            self.failed = self.failed or reason
            for condition in tuple(self._conditions):
                condition.notify_all()


class _Group:
    """The meeting place of one communicator's ranks."""

    def __init__(self, job: _Job, size: int) -> None:
        self.job = job
        self.size = size
        self.met = job.condition()
        self.arrived = [job.condition() for _ in range(size)]
        """A message for this rank: the others sleep on."""
        self.mail: dict[tuple[int, int], dict[int, deque[np.ndarray]]] = defaultdict(dict)
        """By source and destination: messages that nobody has received, by tag."""
        self.meetings: dict[int, dict[int, Any]] = defaultdict(dict)
        self.users: set[int] = set()


class _Sent:
    """A message that has arrived, or whose arrival is no longer the sender's affair."""

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Receive:
    def __init__(self, group: _Group, key: tuple[int, int, int], x: np.ndarray, exact: bool = True) -> None:
        self._group, self._key, self._x, self._exact, self._done = group, key, x, exact, False

    def test(self) -> bool:
        with self._group.job.lock:
            return self._group.job.check(self._take)

    def wait(self) -> None:
        with self._group.job.lock:
            self._group.job.wait_for(self._take, self._group.arrived[self._key[1]])

    def _take(self) -> bool:
        source, dest, tag = self._key
        boxes = self._group.mail[source, dest]
        if not self._done and tag in boxes:
            message = boxes[tag].popleft()
            if not boxes[tag]:
                del boxes[tag]
            if not self._exact and message.nbytes < self._x.nbytes:
                self._x = self._x[: message.nbytes]
            if message.nbytes != self._x.nbytes:
                expected = f"{self._x.nbytes} bytes"
                raise MismatchError("receive", where=f"from {source}, tag {tag}", expected=expected, got=message.nbytes)
            self._x.reshape(-1)[...] = message.view(self._x.dtype)
            self._done = True
        if not self._done and any(disagree(tag, other, self._group.users) for other in boxes):
            raise disagreement(source)
        return self._done


class _Meeting:
    """An allreduce for which every rank leaves its array, and which is complete when all have."""

    def __init__(self, group: _Group, number: int, rank: int, x: np.ndarray, op: str) -> None:
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
    """One thread rank's end of a group (see `Communicator`)."""

    signatures = 1 << 16

    def __init__(self, group: _Group, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self.traffic = Traffic()
        self.users = group.users
        self.lost: set[int] = set()
        self._group = group
        self._meetings = 0

    def meet(self, value: T) -> list[T]:
        """Every rank's ``value`` itself, not a copy, by rank; every rank must call."""
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
        self.meet(None)

    def isend(self, x: np.ndarray, dest: int, tag: int = 0) -> _Sent:
        self.traffic.messages += 1
        self.traffic.nbytes += x.nbytes
        with self._group.job.lock:
            self._group.mail[self.rank, dest].setdefault(tag, deque()).append(x.reshape(-1).copy())
            self._group.arrived[dest].notify_all()
        return _Sent()

    def irecv(self, x: np.ndarray, source: int, tag: int = 0) -> _Receive:
        return _Receive(self._group, (source, self.rank, tag), x)

    def isend_whole(self, x: np.ndarray, dest: int, tag: int) -> Request:
        return self.isend(x, dest, tag)

    def irecv_up_to(self, x: np.ndarray, source: int, tag: int) -> _Receive:
        return _Receive(self._group, (source, self.rank, tag), x, exact=False)

    def swap(self, x: np.ndarray, received: np.ndarray, peer: int, tag: int) -> None:
        self.isend(x, peer, tag)
        self.irecv_up_to(received, peer, tag).wait()

    def takes_note(self, error: Exception) -> bool:
        return False

    def irecv_any(self, tag: int) -> tuple[int, np.ndarray, _Sent] | None:
        with self._group.job.lock:
            self._group.job.check(lambda: False)
            for source in range(self.size):
                boxes = self._group.mail[source, self.rank]
                if tag in boxes:
                    message = boxes[tag].popleft()
                    if not boxes[tag]:
                        del boxes[tag]
                    return source, message.view(np.uint8), _Sent()
        return None

    def native_allreduce(self, x: np.ndarray, op: str) -> None:
        x[...] = self._reduced(x, op)

    def _reduced(self, x: np.ndarray, op: str) -> np.ndarray:
        reduction = resolve("native", op, x.dtype)
        return reduce_in_order(self.meet(x.copy()), reduction)

    def native_iallreduce(self, x: np.ndarray, op: str) -> _Meeting:
        number, self._meetings = self._meetings, self._meetings + 1
        return _Meeting(self._group, number, self.rank, x, op)

    def native_reduce_scatter(self, x: np.ndarray, out: np.ndarray, op: str) -> None:
        out[...] = split(self._reduced(x, op), self.size)[self.rank]

    def native_reduce(self, x: np.ndarray, op: str, root: int) -> None:
        reduced = self._reduced(x, op)
        if self.rank == root:
            x[...] = reduced

    def native_allgather(self, out: np.ndarray) -> None:
        parts = split(out, self.size)
        for part, sent in zip(parts, self.meet(parts[self.rank].copy()), strict=True):
            part[...] = sent

    def native_broadcast(self, x: np.ndarray, root: int) -> None:
        sent = self.meet(x.copy() if self.rank == root else None)[root]
        if sent is not None:
            x[...] = sent

    def duplicate(self) -> ThreadCommunicator:
        group = self.meet(_Group(self._group.job, self.size) if self.rank == 0 else None)[0]
        assert group is not None
        return ThreadCommunicator(group, self.rank)

    def allgather_json(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self.meet(json.dumps(value))]

    def abort(self, code: int) -> None:
        self._group.job.fail(f"rank {self.rank} aborted with code {code}")


class ThreadMemory:
    """`NodeMemory` of ranks that are threads: any array."""

    def __init__(self, comm: ThreadCommunicator, job: _Job, patience: np.ndarray) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.patience = patience
        self.failure: HpcdpError | None = None
        self._comm = comm
        self._job = job

    def alloc(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        block = self._comm.meet(np.zeros(shape, dtype) if self.rank == 0 else None)[0]
        assert block is not None
        return block

    def check(self) -> None:
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
    """Call ``fn(world)`` on ``n`` ranks at once, each a thread of this process; and let servers run beside them.

    Args:
        n: the number of ranks.
        fn: what each rank does; its world's communicators are `ThreadCommunicator` with a ``traffic``.
        ranks_per_node: ranks on each (virtual) node, the last one may have fewer; or those of every node, n together;
            all on one node when None. A number counts servers, too, in the world of all; in a list they are one node.
        num_servers: so many further threads are servers: the ranks' worlds have a `World.whole`.
        serve: what each server does, with the world of all; it must end when the ranks have (`roles.ENDED`).

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        BaseException: what the first rank or server to fail raised; the others are released with `WorldAborted`.
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
        except BaseException as error:  # handed to the caller, whatever it is
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
    """Return the world of one rank, this process, which communicates with nobody."""
    return _worlds(_Job(), [1])[0]


def _node_sizes(n: int, ranks_per_node: int | Sequence[int] | None) -> list[int]:
    if isinstance(ranks_per_node, Sequence):
        sizes = list(ranks_per_node)
    else:
        per_node = n if ranks_per_node is None else ranks_per_node
        sizes = [min(per_node, n - first) for first in range(0, n, per_node)] if per_node > 0 else []
    if not sizes or min(sizes) < 1 or sum(sizes) != n:
        raise ConfigError(
            "threads.run", expected="at least 1 rank, and 1 rank a node", got=f"{n} and {ranks_per_node} a node"
        )
    return sizes


def _worlds(
    job: _Job, sizes: list[int], places_on_machine: Sequence[int] | None = None, fields: Sequence[dict[str, Any]] = ()
) -> list[World]:
    """The worlds of all ranks; ``fields`` are further ones of `World`, for each rank."""
    n = sum(sizes)
    if places_on_machine is None:
        places_on_machine = range(n)
    everyone, calls = _Group(job, n), _Group(job, n)
    nodes = [_Group(job, size) for size in sizes]
    num_rails = min(sizes)
    rails = [_Group(job, len(sizes)) for _ in range(num_rails)]
    cores = len(os.sched_getaffinity(0))
    worlds = []
    places = [(node, local_rank) for node, size in enumerate(sizes) for local_rank in range(size)]
    for rank, (node, local_rank) in enumerate(places):
        comm, node_comm = ThreadCommunicator(everyone, rank), ThreadCommunicator(nodes[node], local_rank)
        worlds.append(
            World(
                rank=rank,
                size=n,
                local_rank=local_rank,
                local_size=sizes[node],
                node=node,
                num_nodes=len(sizes),
                num_rails=num_rails,
                comm=comm,
                call_comm=ThreadCommunicator(calls, rank),
                node_comm=node_comm,
                rail_comm=ThreadCommunicator(rails[local_rank], node) if local_rank < num_rails else None,
                node_memory=ThreadMemory(node_comm, job, patience_for(n, cores)),
                library="threads",
                cores=cores,
                place=places_on_machine[rank],
                divide=partial(_part_of, job, comm, node, places_on_machine[rank]),
                **(fields[rank] if fields else {}),
            )
        )
        compare_exchanges(worlds[-1])
    return worlds


def _part_of(job: _Job, comm: ThreadCommunicator, node: int, place: int, color: int, **fields: Any) -> World:
    """This rank's world among those that pass the same color; the first of these makes it for all."""
    met = comm.meet((color, node, place, fields))
    members = {rank: found[1:] for rank, found in enumerate(met) if found[0] == color}
    sizes = [*Counter(node for node, *_ in members.values()).values()]
    places, theirs = [place for _, place, _ in members.values()], [each for *_, each in members.values()]
    first = min(members)
    made = comm.meet(_worlds(job, sizes, places, theirs) if comm.rank == first else None)[first]
    assert made is not None
    return made[list(members).index(comm.rank)]
