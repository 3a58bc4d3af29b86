"""The state of every bucket of gradients, and its sum over the ranks.

On CPU a bucket is a row for every rank of the node, in memory that they share; a parameter's gradient is a view of its
own rank's row. Each rank of a node owns a shard of the columns and sums them over the rows; the ranks of a rail then
add up the sums of their nodes. Elsewhere (a device's memory, or a node whose ranks cannot share) a bucket has one row
and every rank is a node of its own; but those on GPUs are summed as `device_sums` says.

Where sums must not depend on the number of ranks, a step has several backward passes; see `virtual_shards`.

With overlap, the last gradient of a bucket launches its reduction on the communication lane while backward goes on;
without, reductions run when the step ends. Both are the same machine, and so the same bits.
"""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np

from .. import kernels
from ..arrays import Array, array_namespace, is_cupy, is_half, is_host, words
from ..collectives.progress import Progress, Steps, Together
from ..comm import Communicator, Request, World
from ..comm.shared import LINE_NUMBERS, NodeMemory, PrivateMemory
from ..comm.watchdog import WatchedGate
from ..compression import Compression
from ..errors import ConfigError
from . import message_length
from .arrivals import Arrivals
from .beside import Beside
from .bucket import Bucket, Parameter, State
from .buckets import Layout, Slot
from .closing import CLOSING_OPERATION, ClosingExchange
from .critical_path import BucketTimes
from .device_sums import DeviceSums, streams_of
from .lane import Lane
from .rail import Coder, Rail
from .virtual_shards import VirtualShards


class Reducer:
    """The buckets of a model's parameters. All ranks must make it together, with the same layout.

    Args:
        params: parameters whose ``grad`` and ``grad_hook`` it takes over.
        layout: where each of them goes.
        world: the ranks.
        overlap: launch reductions while backward runs. None: where messages are needed, and threads may send them.
        compression: how messages are compressed. None: not at all.
        virtual_shards: into how many pieces global batches are cut, for sums alike on any number of ranks, all of whose
            arrays are on the host; not with ``compression``. None: one a rank.
        sharded: sum on GPUs, too, each shard for its owner in the node alone, as in memory that ranks share.
        more_numbers: so many numbers may be added to the few that a step's closing exchange has anyway.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        layout: Layout,
        world: World,
        overlap: bool | None = None,
        compression: Compression | None = None,
        virtual_shards: int | None = None,
        sharded: bool = False,
        more_numbers: int = 0,
    ) -> None:
        self.layout = layout
        self.world = world
        on_host = all(is_host(param.data) for param in params)
        shares = on_host and not (compression is not None and compression.inside_nodes)
        if world.size == 1 and params and all(is_cupy(param.data) for param in params):
            streams_of(params)  # elsewhere buckets would be on another GPU, and with them the parameters
        self.memory: NodeMemory = world.node_memory if shares else PrivateMemory()
        together = self.memory is world.node_memory
        self.num_shards = world.num_rails if together else 1
        self.on_one_node = self.memory.size == world.size
        """Whether all ranks share the memory of the buckets, so that no message is needed."""
        on_gpus = not self.on_one_node and all(is_cupy(param.data) for param in params)
        self.keeps_unsent = compression is not None and not self.on_one_node
        """Whether compression keeps what it has not sent of a step for later ones."""
        self._unsent: dict[int, list[Slot]] = {}
        """By bucket the parameters of which nothing is to be sent in this step: see `Coder`."""
        rail = self._duplicate(world.rail_comm if together else world.comm)
        between_nodes = self._duplicate(world.rail_comm) if on_gpus else None
        self.is_counted = self.on_one_node or (rail is not None and rail.rank == 0)
        """Whether this rank's shards count in sums over all shards: each node holds the same, and the first counts."""
        everyone = self._duplicate(world.comm)
        self.overlap = world.concurrent and (overlap or (overlap is None and not self.on_one_node))
        """Whether reductions are launched while backward runs."""
        self.updates_later = (
            self.overlap and not on_gpus and all(hasattr(param, "data_hook") for param in params)
        )  # on GPUs they are given to the stream of the next forward, and nobody waits
        """Whether updates may go on when a step has ended, because who reads a parameter will wait for its own."""
        self._watchdog = Progress.of(world).watchdog
        self.gate = WatchedGate(self.memory, self._watchdog, LINE_NUMBERS + more_numbers)
        lane = Lane.of(world) if self.overlap else None
        self._namespace = array_namespace(*(param.data for param in params))
        self._reduce = kernels.load("reduce")
        serial = world.kept["number of reducers"] = world.kept.get("number of reducers", 0) + 1
        self._signature = zlib.crc32(f"{serial} {layout.digest}".encode())
        self._share_communicators(rail, everyone, between_nodes)
        self.closing = ClosingExchange(world, everyone, self.gate, lane, self._signature)
        if len(layout.counts) > CLOSING_OPERATION:
            expected = f"at most {CLOSING_OPERATION} buckets"
            raise ConfigError("Reducer", where="layout", expected=expected, got=len(layout.counts),
                              remedy="make bucket_cap_mb larger")  # fmt: skip
        self.gpus: DeviceSums | None = None
        """How buckets on GPUs are summed."""
        if on_gpus and everyone is not None:
            self.gpus = DeviceSums(
                params, layout, world, everyone, between_nodes, self._signature, compression, sharded
            )
        self.copies = (1, 0) if rail is None else (rail.size, rail.rank)
        """How many ranks sum this rank's shards, and which of them it is."""
        if self.gpus is not None and sharded:
            self.copies = self.gpus.copies
            self.is_counted = self.copies[1] == 0
        sends_nothing = self.on_one_node if self.gpus is None else self.gpus.on_one_node
        if compression is not None and sends_nothing and world.rank == 0 and world.size > 1:
            warnings.warn(
                f"compression {compression.codec.name} changes nothing on one node, whose ranks send no messages; with "
                "inside_nodes=on they do",
                stacklevel=4,
            )
        self.buckets = [self._make_bucket(number) for number in range(len(layout.counts))]
        for kind in {words(each.mine).dtype for each in self.buckets if is_half(each.mine) and is_host(each.mine)}:
            self._compile_for_halves(kind)
        self.rail: Rail | None = None
        """With whom messages are exchanged; None on one node, and where this rank owns no shard."""
        if rail is not None:
            by_rail = None if self.gpus is not None else compression
            longest = 0 if by_rail is not None or self.gpus is not None else layout.longest_nbytes
            nbytes = message_length.fitting(world, rail, longest)
            self.rail = Rail(rail, self._signature, self.buckets, by_rail, nbytes)
        self.virtual_shards: VirtualShards | None = None
        if virtual_shards is not None:
            self.virtual_shards = VirtualShards(virtual_shards, world, self.memory, self.buckets, self.rail)
        self.params = {param.name: param for param in params}
        self._hooks: dict[int, Callable[[Parameter], None]] = {}
        for param, slot in zip(params, layout.slots, strict=True):
            param.grad = self.buckets[slot.bucket].view(slot)
            param.grad_hook = self._hooks[id(param)] = partial(self._written, slot.name)
        self.watch: Callable[[], None] | None = None
        """Called for each gradient that is written, within its backward."""
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Makes a context for what waits for other ranks; on a GPU its stream does."""
        self.holds_sums = False
        """Whether every rank's row of every bucket is the sum over all ranks."""
        self.beside = None if lane is None else Beside(world, self.memory, self.buckets, self.params, lane)
        """What runs beside computation; None without overlap."""
        self.arrivals = Arrivals(self.params, self.buckets, self.beside)
        """Which gradients backward has written in this step."""
        if self.beside is not None:
            world.endings.add(self.settle)  # a rank that left earlier would leave others waiting

    @property
    def coder(self) -> Coder | None:
        """What encodes this rank's part of the buckets for other nodes; None where it sends nothing."""
        return self.rail if self.gpus is None else self.gpus.codes

    def _duplicate(self, comm: Communicator | None) -> Communicator | None:
        """One for all reducers of a world: MPICH has 2048 of them."""
        if comm is None or self.on_one_node:
            return None
        return self.world.keep(("reducers", id(comm)), comm.duplicate)

    def _share_communicators(self, *comms: Communicator | None) -> None:
        for comm in comms:
            if comm is not None:
                comm.users.add(self._signature % comm.signatures)
        if not self.on_one_node:
            self.world.barrier()  # before any rank sends what another would take for a mistake

    def _make_bucket(self, number: int) -> Bucket:
        count, dtype = self.layout.counts[number], self.layout.dtypes[number]
        if self.gpus is not None:
            rows, shard = self.gpus.rows(number), self.gpus.shard(number)
        else:
            n, owns_some = self.memory.size, self.memory.rank < self.num_shards
            rows = self.memory.alloc((n, count), dtype) if n > 1 else self._namespace.zeros((1, count), dtype=dtype)
            shard = self.layout.shard(number, self.num_shards, self.memory.rank) if owns_some else (0, 0)
        slots = [slot for slot in self.layout.slots if slot.bucket == number]
        return Bucket(number, slots, rows, self.memory.rank, shard)

    def _compile_for_halves(self, kind: np.dtype) -> None:
        """Not in the first step, for which all ranks wait."""
        nothing = np.zeros((1, 1), kind)
        self._reduce.combine_into(nothing, 0, 0, 0, self._reduce.SUM)
        kernels.load("norms").sum_of_squares(nothing[0])
        kernels.load("cast")

    def _written(self, name: str, param: Parameter) -> None:
        """Of the parameter that had this name when it was taken over; the parameters of a part have others."""
        if self.virtual_shards is not None and param.grad_req == "add":
            raise ConfigError(
                "backward", where=name, expected="grad_req='write' with reproducible=True", got="grad_req='add'"
            )
        bucket = self.arrivals.note(name)
        if self.watch is not None:
            self.watch()
        if self.gpus is not None:
            self.gpus.written(bucket)
        if bucket.state is State.READY and self.overlap and not self._another_follows:
            bucket.ready_ns = time.perf_counter_ns()
            self._launch(bucket)

    def takes(self, param: Parameter) -> bool:
        """Whether it alone is told when the gradient of ``param`` is written."""
        return param.grad_hook is not None and param.grad_hook is self._hooks.get(id(param))

    def let_go(self) -> None:
        """Leave the parameters: from now on backward writes their gradients for this rank alone."""
        for param in self.params.values():
            if self.takes(param):
                param.grad_hook = None
        if self.beside is not None:
            self.beside.let_go()

    def launching(self, leaves: Sequence[Parameter]) -> list[Parameter]:
        """Of ``leaves``, whose gradients are written in this order, those with which buckets are launched."""
        numbers = {id(param): slot.bucket for param, slot in zip(self.params.values(), self.layout.slots, strict=True)}
        ours = filter(self.takes, leaves if self.overlap else ())
        return list({numbers[id(leaf)]: leaf for leaf in ours}.values())

    @property
    def _another_follows(self) -> bool:
        """Whether this is not the last backward of the step, so that it launches nothing."""
        return self.arrivals.are_held or (self.virtual_shards is not None and not self.virtual_shards.is_last)

    @property
    def sums_rows(self) -> bool:
        """Whether gradients are summed over the rows of the buckets, without messages, when all have left backward."""
        return self.on_one_node and not self.overlap and self.virtual_shards is None

    def reset(self) -> None:
        """Begin a step: every gradient is to be written anew."""
        if self.beside is not None:
            self.beside.begin_step()
        self.arrivals.begin()
        self._unsent = {}
        self.holds_sums = False
        if self.virtual_shards is not None:
            self.virtual_shards.begin()

    def next_virtual_shard(self) -> None:
        """Keep this virtual shard's gradients, and begin the next one: every gradient is to be written anew."""
        assert self.virtual_shards is not None
        self.arrivals.fill_with_zeros()
        for bucket in self.buckets:
            self.virtual_shards.take(bucket)
        self.virtual_shards.next()
        self.arrivals.begin_again()

    def _launch(self, bucket: Bucket) -> None:
        assert self.beside is not None
        if self.virtual_shards is not None:
            self.virtual_shards.take(bucket)
        if self.gpus is not None:
            self.gpus.filled(bucket)
        self.beside.launch(bucket, partial(self._reduction, bucket, self._unsent.get(bucket.number, ())))

    def keep_unsent(self, names: Set[str]) -> None:
        """Send nothing in this step of parameters that no rank has used; before buckets with them are launched."""
        for bucket in self.buckets if names and self.keeps_unsent else ():
            slots = [slot for slot in bucket.slots if slot.name in names]
            if slots:
                self._unsent[bucket.number] = slots

    def launch_rest(self) -> None:
        """Launch what backward has not: buckets with gradients that it does not write, which count as zero.

        Without overlap nothing is launched, but from now on this rank's gradients may be summed.
        """
        if self.virtual_shards is not None and not self.overlap:
            for bucket in self.buckets:
                self.virtual_shards.take(bucket)
        if self.overlap:
            if not self.arrivals.accumulating:
                self.arrivals.fill_with_zeros()
            for bucket in self.buckets:
                if bucket.state in (State.FILLING, State.READY):
                    bucket.ready_ns = time.perf_counter_ns()
                    self._launch(bucket)

    def _reduction(self, bucket: Bucket, unsent: Sequence[Slot], turn: Request | None) -> Steps:
        """Sum this rank's shard over all ranks of the world, in place in its own row; the node's have filled theirs."""
        if self.virtual_shards is not None:
            yield from self.virtual_shards.sum(bucket, turn)
        elif self.gpus is not None:
            yield from self.gpus.sum(bucket, turn, unsent)
        else:
            self.sum_shard(bucket)
            if self.rail is not None:
                yield from self.rail.sum(bucket, turn, unsent)
        bucket.state = State.REDUCED
        bucket.done_ns = time.perf_counter_ns()

    def sum_shard(self, bucket: Bucket, row: int | None = None) -> None:
        """Sum this rank's shard over the node's ranks into ``row``, default its own."""
        first, last = bucket.shard
        if self.memory.size > 1 and last > first:
            row = self.memory.rank if row is None else row
            self._reduce.combine_into(bucket.words, first, last, row, self._reduce.SUM)

    def reduce_shards(self) -> None:
        """Sum this rank's shard of every bucket over all ranks of the world, in place in its own row.

        Every rank must call. Without overlap, all must have left backward.
        """
        with self.waiting():
            self._reduce_shards()

    def drop(self) -> None:
        """Reduce for nobody, after `launch_rest`; every rank must call, outside of backward.

        What compression does not send of these gradients is part of later sums, so it must not see others: neither
        those that an earlier step has left, nor those of the next backward. An update, or a look at sums, would hold
        the node's ranks together. Without compression nothing is left of these sums, whatever they are.
        """
        if self.keeps_unsent and not self.overlap:
            self.arrivals.fill_with_zeros()
            self.gate.barrier()
        self.reduce_shards()
        if self.keeps_unsent:
            self.gate.barrier()

    def _reduce_shards(self) -> None:
        if self.beside is not None:
            for bucket in reversed(self.buckets):
                self.beside.wait(bucket)
        elif self.sums_rows:
            for bucket in self.buckets:
                self.sum_shard(bucket)
                bucket.state = State.REDUCED
        else:
            if self.gpus is not None:
                for bucket in self.buckets:
                    self.gpus.filled(bucket)
            with self._watchdog.watching("reduction", self._unreduced):
                Together(
                    [self._reduction(bucket, self._unsent.get(bucket.number, ()), None) for bucket in self.buckets]
                ).wait()
        if self.gpus is not None:
            for bucket in self.buckets:
                self.gpus.summed(bucket)
        if self.virtual_shards is not None:
            self.gate.barrier()  # owners add up in the memory of other ranks, which those will write in the next step

    def _unreduced(self) -> str:
        first, *others = [bucket for bucket in self.buckets if bucket.state is not State.REDUCED] or self.buckets
        return first.described() + (f" and {len(others)} more" if others else "")

    @property
    def times(self) -> list[BucketTimes]:
        """When the buckets of the last step that is over were ready, launched and done; empty without overlap."""
        return [] if self.beside is None else self.beside.times

    def settle(self) -> None:
        """Wait for all updates under way."""
        if self.beside is not None:
            self.beside.settle_all()

    def shards(self) -> Iterator[tuple[Bucket, Array]]:
        """Every bucket and this rank's shard of it, a view of shape ``(n,)``."""
        for bucket in self.buckets:
            yield bucket, bucket.mine[slice(*bucket.shard)]

    def reduce_everywhere(self) -> None:
        """Make every rank's row of every bucket the sum over all ranks; every rank must call, outside of backward."""
        if self.sums_rows:
            for bucket in self.buckets:
                self.sum_shard(bucket, self._reduce.EVERY_ROW)
                bucket.state = State.REDUCED
        else:
            self.reduce_shards()
            self._gather_on_gpus()
            for bucket, shard in self.shards():
                for other in range(self.memory.size):
                    if other != self.memory.rank:
                        bucket.rows[other, slice(*bucket.shard)] = shard
        self.gate.barrier()
        self.holds_sums = True

    def _gather_on_gpus(self) -> None:
        """Bring shards of buckets on GPUs from their owners to the node's other ranks, where those have them not."""
        if self.gpus is None or not self.gpus.sharded:
            return
        with self.waiting():
            for bucket in self.buckets:
                self.gpus.filled(bucket)
            with self._watchdog.watching("allgather", lambda: "shards on GPUs"):
                Together([self.gpus.gather(bucket) for bucket in self.buckets]).wait()
            for bucket in self.buckets:
                self.gpus.summed(bucket)

    def share(self, flats: Sequence[Array]) -> None:
        """Bring each shard of the parameters from its owner to the node's other ranks; every rank must call.

        It overwrites the gradients on GPUs; of others nothing is left to do, which have the parameters once.

        Args:
            flats: the parameters of each bucket, of which this rank has updated its shard.
        """
        if self.gpus is not None and self.gpus.sharded:
            for (_, shard), bucket, flat in zip(self.shards(), self.buckets, flats, strict=True):
                shard[...] = flat[slice(*bucket.shard)]
            self._gather_on_gpus()
            for bucket, flat in zip(self.buckets, flats, strict=True):
                first, last = bucket.shard
                flat[:first], flat[last:] = bucket.mine[:first], bucket.mine[last:]
        self.gate.barrier()
