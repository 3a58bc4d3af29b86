"""``dist_async``, a store over the ranks of a world in which each push takes effect immediately and alone.

Every key, or part of a large one, has a server: one of the workers, or a separate process. On the server's node, ranks
apply their pushes themselves in shared memory, under the key's lock (`server_keys.ShmValue`). Ranks of other nodes
send requests to the server (`server_loop`). The number of other pushes between a worker's pull and its push is the
staleness, which can be bounded (`server_keys.Delay`).

Source: Dean et al., "Large scale distributed deep networks", 2012, section 4.1 (asynchronous stochastic gradient
descent with servers); Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server",
2013, for the bound; Recht et al., "Hogwild!", 2011, for updates in shared memory, which are atomic here.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..comm import World
from ..comm.communicator import Steps
from ..comm.consistency import require_same
from ..comm.progress import ProgressEngine, run_until_complete
from ..comm.thread_comm import ThreadCommunicator
from ..comm.watchdog import nobody
from ..compression import Compression
from ..core.arrays import Array
from ..core.state import Part, Sharded
from ..data_parallel.overlap import COMMUNICATION, CommunicationLane, SendPriority
from ..engine import Variable
from ..errors import ConfigError
from ..optim import Optimizer, Schedule
from .arguments import Entry, Key, PullHandle, can_wait, checked_integer, merged
from .client import Transfer, WorkerKeyState
from .server_keys import AWAY, BACK, Requests, Table, no_updater, require_same_by_name
from .server_loop import NO_STATE, VALUE, Message, MessageKind, Server
from .store import WorldStore, residuals_of
from .updaters import ByOptimizer, Function, Rate, Updater, name_of, rate_of


class AsyncStore(WorldStore):
    """A store of kind ``dist_async``; every worker must make it, and its keys, and pushes and pulls independently.

    Args:
        kind: name of the kind.
        world: the workers; `World.whole` may have servers after them.
        staleness: number of pushes of a key by which a worker may lead the slowest one, at least 1; None: unbounded.
        replay: a seed that orders the operations of all workers, one after another, so that a run can be repeated bit
            for bit. For debugging on thread ranks.

    Raises:
        ConfigError: the world has several nodes, and only the main thread may send messages; or a replay of processes.
    """

    def __init__(self, kind: str, world: World, staleness: int | None = None, replay: int | None = None) -> None:
        group = world if world.whole is None else world.whole
        if (group.num_nodes > 1 or group.size > world.size) and not group.concurrent:
            raise ConfigError("kvstore", where=kind, expected="an MPI library with MPI_THREAD_MULTIPLE", got="less")
        self._of_group = CommunicationLane.of(group)
        super().__init__(kind, world, self._of_group.engine, COMMUNICATION)
        self._own: dict[Key, WorkerKeyState] = {}
        self._sent_schedule: Schedule | None = None
        """Schedule of this worker's learning rate that servers have."""
        self._watchdog = ProgressEngine.of(world).watchdog
        with world.meeting():
            self._begin(group, staleness, replay)
        self._dropped = weakref.finalize(self, _let_go, self._transfer, self._replay, world.rank)
        self._dropped.atexit = False
        world.endings.add(self._leave)
        if staleness is not None or self._replay is not None:
            world.meetings.add(self._aside)

    def _let_go(self) -> None:
        super()._let_go()
        vars(self).update(_transfer=self._world.comm)

    def _begin(self, group: World, staleness: int | None, replay: int | None) -> None:
        """Make the table, the server and the transfers; every worker must call."""
        world, has_servers = self._world, group.size > self._world.size
        self._replay = Replay.of(world, replay)
        self._own_servers = range(world.size, group.size)
        number = group.kept["async stores"] = group.kept.get("async stores", 0) + 1
        self._number = number
        self._server = Server.of(group, has_servers) if has_servers else None
        self._command("store", workers=world.size, staleness=staleness)
        self._table = Table(group, world.size, staleness)
        if len(set(self._table.homes)) > 1:
            self._server = Server.of(group, has_servers)
        if self._server is not None:
            self._server.serve(number, Requests(self._table))
            self._table.strangers = self._server.comm
        if self._replay is not None:
            self._shared = self._replay.share(world, self._table)
        self._transfer = Transfer(self._table, number, self._server, world.rank)
        group.comm.barrier()

    def _command(self, do: str, **arguments: Any) -> None:
        """Send servers a collective command, which all workers execute now."""
        if self._server is not None and self.rank == 0:
            text = json.dumps({"do": do, "store": self._number, **arguments})
            for dest in self._own_servers:
                self._server.ask(dest, Message.of_text(MessageKind.COMMAND, text)).wait()

    def _make(self, values: dict[Key, Array]) -> None:
        self._check_new(values)
        described = [(key, tuple(value.shape), value.dtype.str) for key, value in values.items()]
        self._command("make", described=described)
        self._table.make(described, [np.array(value, order="C") for value in values.values()])
        for key in values:
            item = self._table.items[key]
            like = np.broadcast_to(np.zeros((), item.dtype), item.shape)
            self._entries[key] = Entry(key, like, self._engine.variable(f"key {key!r}"))
            self._own[key] = WorkerKeyState(item)
            self._own[key].compress(self._compression)

    def _assign(self, values: dict[Key, Array]) -> None:
        self._check_assigned(values)
        self._command("assign", keys=list(values))
        self._table.overwrite(list(values), [np.array(value, order="C") for value in values.values()])

    def set_updater(self, updater: Function) -> None:
        """See `KVStore.set_updater`."""
        with self._changing_updater():
            super().set_updater(updater)

            def checked() -> Updater:
                if self._table.group.num_servers:
                    require_same_by_name(updater)
                return self._updater

            self._install({"function": name_of(updater)}, checked)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """See `KVStore.set_optimizer`."""
        with self._changing_updater():
            super().set_optimizer(optimizer)
            self._install({"optimizer": optimizer.config()}, lambda: self._updater)

    @contextlib.contextmanager
    def _changing_updater(self) -> Iterator[None]:
        """Synchronize the workers for a new updater in this context; a refused one leaves the last one in place."""
        before = self._updater
        try:
            with self._world.meeting():
                yield
        except BaseException:
            self._updater = before
            raise

    def _install(self, described: dict[str, Any], find: Callable[[], Updater]) -> None:
        self._settle()
        self._command("update", described=described)
        self._table.find_updater(find)
        self._sent_schedule = self._table.schedule

    def _compress(self, compression: Compression | None) -> None:
        settings = "" if compression is None else str(compression)
        self._settle()  # pushes under way are decoded with the settings that encoded them
        require_same(self._world.comm, "set_gradient_compression", [settings], "pass the same on all ranks")
        self._check_codable(compression)
        self._command("compress", settings=settings)
        self._table.compress(compression)
        self._compression = compression
        for own in self._own.values():
            own.compress(compression)

    def _push(self, entry: Entry, arrays: list[Array], priority: int) -> None:
        self._push_and_pull(entry, arrays, None, priority)

    def _pushpull(self, entry: Entry, arrays: list[Array], targets: list[Any], priority: int) -> None:
        if any(can_wait(target) for target in targets):
            super()._pushpull(entry, arrays, targets, priority)
            return
        self._push_and_pull(entry, arrays, targets[0], priority)
        self._wait_for(entry, entry.variable)
        for further in targets[1:]:
            further[...] = targets[0]

    def _push_and_pull(self, entry: Entry, arrays: list[Array], out: Array | None, priority: int) -> None:
        """Push, and copy the key's new value to ``out``, now or in an engine task."""
        if self._table.updater is None:
            raise no_updater("push")
        own, rate = self._own[entry.key], self._rate()
        entry.count(None if own.codes is None else own.codes.sent_nbytes)
        if self._replay is not None:
            with self._replay.turn(self.rank, lambda: self._may_push_anywhere(entry.key)):
                run_until_complete(self._transfer.push(own, merged(arrays).reshape(-1), rate, out, None))
        elif self._is_quick(own) and self._engine.hold(entry.variable):
            failure: BaseException | None = None
            try:
                value = arrays[0] if len(arrays) == 1 and arrays[0].flags.carray else merged(arrays)
                with self._watching(f"push of {entry.variable.name}"):  # a stopped rank may hold the lock
                    run_until_complete(self._transfer.push(own, value.reshape(-1), rate, out, None))
            except BaseException as error:
                failure = error
                raise
            finally:
                self._engine.release(entry.variable, failure)
        else:
            value = merged(arrays).reshape(-1)

            def steps(turn: SendPriority) -> Steps:
                yield from self._transfer.push(own, value, rate, out, turn)  # keeps the store alive: see `_let_go`

            self._of_group.launch(steps, [entry.variable], priority, f"push of {entry.variable.name}")

    def pass_over(self, key: Key) -> None:
        """Count a push for the staleness bound without pushing, because this worker has nothing for the key this time.

        Raises:
            ConfigError: there is no such key.
        """
        entry = self._entry("pass_over", key)
        item = self._own[entry.key].item
        if self._table.staleness is None:
            return
        if self._replay is not None:
            with self._replayed():
                self._transfer.pass_over(item)
            return

        def steps(turn: SendPriority) -> Steps:
            yield [turn]
            self._transfer.pass_over(item)

        self._of_group.launch(steps, [entry.variable], 0, f"pass over {entry.variable.name}")

    def _rate(self) -> Rate:
        """Return the current learning rate, after sending servers a new schedule; NaN without an optimizer."""
        if not isinstance(self._updater, ByOptimizer):
            return math.nan
        rate = rate_of(self._updater.optimizer)
        if isinstance(rate, Schedule) and rate != self._sent_schedule:
            self._transfer.send_schedule(rate)
            self._sent_schedule = copy.deepcopy(rate)
        return rate

    def _is_quick(self, own: WorkerKeyState) -> bool:
        """Return whether a push needs no other process, so that it takes no longer than a copy for a later task."""
        item = own.item
        return self._updater.by_parts and not item.in_order and item.cells[0] is not None and self._may_push(own)

    def _may_push(self, own: WorkerKeyState) -> bool:
        cell = own.item.cells[0]
        return cell is None or self._table.may_go_on(cell, self.rank)

    def _may_push_anywhere(self, key: Key) -> bool:
        """As `_may_push`, for a key on any node, of which thread ranks see all."""
        cells = (table.items[key].cells[0] for table in self._shared)
        return all(self._table.may_go_on(cell, self.rank) for cell in cells if cell is not None)

    def _pull(self, entry: Entry, place: Array, priority: int, rows: np.ndarray | None = None) -> PullHandle:
        own, versions = self._own[entry.key], list[int]()
        is_near = not own.item.in_order and own.item.cells[0] is not None
        if self._replay is not None or (is_near and self._engine.hold(entry.variable, unless_spoilt=True)):
            try:
                with self._replayed(), self._watching(f"pull of {entry.variable.name}"):
                    run_until_complete(self._transfer.pull(own, place, rows, versions, None))
            finally:
                if self._replay is None:
                    self._engine.release(entry.variable)
            return PullHandle(lambda: None, place, lambda: versions[0])
        variable = self._engine.variable(f"pull of {entry.key!r}")

        def steps(turn: SendPriority) -> Steps:
            return self._transfer.pull(own, place, rows, versions, turn)

        self._of_group.launch(steps, [variable], priority, variable.name, [entry.variable])
        return PullHandle(lambda: self._wait_for(entry, variable), place, lambda: versions[0])

    def _replayed(self) -> AbstractContextManager[None]:
        if self._replay is None:
            return contextlib.nullcontext()
        return self._replay.turn(self.rank, lambda: True)

    def take(self, key: Key, count: int = 1) -> int:
        """Return the integer of a key of one int64, and add ``count`` to it atomically.

        Workers can take task numbers 0, 1, 2, ... from such a key, so that faster workers do more.

        Raises:
            ConfigError: there is no such key, it is not one int64, or ``count`` is not an integer.
        """
        count = checked_integer("take", "count", count)
        own = self._own[self._entry("take", key).key]
        with self._replayed():
            return self._transfer.take(own.item, count)

    def _meet(self) -> None:
        """Wait for all workers, and reset all clocks."""
        super()._meet()
        self._transfer.set_clocks(0)
        self._world.comm.barrier()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Wait for own pushes, and exclude this worker from the staleness bound in this context."""
        with contextlib.nullcontext() if self._replay is None else self._replay.meeting(self.rank):
            self._settle()
            self._transfer.set_clocks(AWAY)
            try:
                yield
            finally:
                self._transfer.set_clocks(BACK)

    def _wait_for(self, entry: Entry, variable: Variable) -> None:
        with self._watching(f"wait for {variable.name}"):
            self._of_group.wait(variable)

    def _watching(self, operation: str) -> AbstractContextManager[None]:
        return self._watchdog.watching(operation, behind=nobody)  # ranks may be in different calls

    def _leave(self) -> None:
        """End this worker's use of the store at the end of its program, so that no worker waits for it."""
        self._settle()
        self._dropped.detach()  # a finalizer without atexit does not run when Python ends
        _let_go(self._transfer, self._replay, self.rank)

    def _num_dead(self, timeout_s: float) -> int:
        return self._transfer.num_dead(timeout_s)

    def statistics(self) -> dict[str, float]:
        """Return statistics of this worker's pushes.

        Returns:
            ``pushes``; ``staleness_mean`` and ``staleness_max``: number of other workers' pushes between this worker's
            last pull of a key and its push; ``waited_s``: seconds of waiting for slower workers; ``sent_nbytes``: bytes
            sent to other nodes, answers included.
        """
        counted = self._transfer.statistics
        return {
            "pushes": counted.pushes,
            "staleness_mean": counted.staleness_sum / max(1, counted.pushes),
            "staleness_max": counted.staleness_max,
            "waited_s": counted.waited_s,
            "sent_nbytes": 0 if self._server is None else self._server.sent_nbytes,
        }

    def _values_of(self, entry: Entry) -> Sharded:
        return self._transfer.held(self._own[entry.key], VALUE)

    def _states_of(self, entry: Entry, rule: ByOptimizer) -> dict[str, Sharded | Array]:
        names = sorted(rule.optimizer.state_names())
        return {name: self._transfer.held(self._own[entry.key], which) for which, name in enumerate(names)}

    def _updates_of(self, entry: Entry, rule: ByOptimizer) -> int:
        return self._transfer.read_state(self._own[entry.key].item, NO_STATE)[1]

    def _residuals_of(self, entry: Entry) -> list[Part]:
        return residuals_of(self._own[entry.key].codes)

    def _put(self, entry: Entry, values: Any, states: Mapping[str, Any], updates: int | None) -> None:
        item = self._own[entry.key].item
        self._transfer.write(item, VALUE, values)
        for which, name in enumerate(sorted(states)):
            self._transfer.write(item, which, states[name])
        if updates is not None and self.rank == 0:
            self._transfer.write_steps(item, updates)

    def _renew(self, rule: ByOptimizer, config: dict[str, Any]) -> None:
        super()._renew(rule, config)
        self._install({"optimizer": config}, lambda: self._updater)


def _let_go(transfer: Transfer, replay: Replay | None, worker: int) -> None:
    """Release other workers when the program drops a store or ends, and mark this worker as ended instead of dead.

    This must follow the last push, which would restart the worker's clock and block others forever.
    """
    transfer.leave()
    if replay is not None:
        replay.end(worker)


_FAILURE_CHECK_S = 0.2
"""Seconds between two checks whether another worker has failed."""


class Replay:
    """A seeded order of the operations of thread workers; use `of`.

    Args:
        world: the world of one of the workers.
    """

    def __init__(self, world: World) -> None:
        self._random = np.random.default_rng()
        self._check = world.node_memory.check
        self._stores = [0] * world.size
        """Number of stores of each worker."""
        self._away: set[int] = set()
        self._asking: dict[int, Callable[[], bool]] = {}
        self._chosen: int | None = None
        self._changed = threading.Condition()

    @classmethod
    def of(cls, world: World, seed: int | None) -> Replay | None:
        """Return the one of all asynchronous stores of ``world``, which the first seed makes; every rank must call.

        Raises:
            ConfigError: the workers are processes, or there are servers.
        """
        replay: Replay | None = world.kept.get(cls)
        if seed is None:
            return replay
        if not isinstance(world.comm, ThreadCommunicator) or world.whole is not None:
            got = f"{world.library} ranks" if world.whole is None else "a world with servers"
            raise ConfigError(
                "kvstore", where="replay", expected="thread ranks, by hpcdp.comm.thread_comm.run", got=got
            )
        if replay is None:
            made: list[Replay | None] = world.comm.meet(cls(world) if world.rank == 0 else None)
            replay = world.kept[cls] = made[0]
            assert replay is not None
        if world.rank == 0:
            replay._random = np.random.default_rng(seed)
        return replay

    def share(self, world: World, table: Table) -> list[Table]:
        """Register a store of each worker, and return all workers' tables of it, for the clocks of all keys."""
        assert isinstance(world.comm, ThreadCommunicator)
        with self._changed:
            self._stores[world.rank] += 1
        return world.comm.meet(table)

    @contextlib.contextmanager
    def turn(self, worker: int, may_act: Callable[[], bool]) -> Iterator[None]:
        """Wait for this worker's turn, in which no other acts; it does not come before ``may_act()``."""
        with self._changed:
            self._asking[worker] = may_act
            self._choose()
            while self._chosen != worker:
                self._changed.wait(_FAILURE_CHECK_S)
                self._check()
        try:
            yield
        finally:
            with self._changed:
                self._chosen = None
                self._choose()

    @contextlib.contextmanager
    def meeting(self, worker: int) -> Iterator[None]:
        """Exclude this worker, which waits for all others, from the order in this context; all workers must enter."""
        with self._changed:
            self._away.add(worker)
            self._choose()
        try:
            yield
        finally:
            with self._changed:
                self._away.discard(worker)

    def end(self, worker: int) -> None:
        """Unregister a store of this worker, which leaves the order after its last one."""
        with self._changed:
            self._stores[worker] -= 1
            self._choose()

    def _choose(self) -> None:
        active = {worker for worker, stores in enumerate(self._stores) if stores} - self._away
        if self._chosen is None and active and active <= self._asking.keys():
            able = [worker for worker in sorted(self._asking) if self._asking[worker]()]
            if able:
                self._chosen = able[int(self._random.integers(len(able)))]
                del self._asking[self._chosen]
                self._changed.notify_all()
