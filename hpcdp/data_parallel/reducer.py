"""The reducer, which owns buckets, gradient hooks and the state of a step.

The state of every bucket of gradients, and its sum over the ranks.

On CPU a bucket is a row for every rank of the node, in memory that they share; a parameter's gradient is a view of its
own rank's row. Each rank of a node owns a shard of the columns and sums them over the rows; the ranks of a rail then
add up the sums of their nodes. Elsewhere (a device's memory, or a node whose ranks cannot share) a bucket has one row
and every rank is a node of its own; but those on GPUs are summed as `device_sums` says.

Where sums must not depend on the number of ranks, a step has several backward passes; see `virtual_shards`.

With overlap, the last gradient of a bucket launches its reduction on the communication lane while backward goes on;
without, reductions run when the step ends. Both are the same machine, and so the same bits.

Which gradients of a step backward has written, and whether it adds to what they are.

The closing exchange of a step: a few numbers summed over all ranks, every one of which has then left backward.
"""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np

from .. import kernels
from ..collectives import halving_doubling
from ..comm import Communicator, Request, World
from ..comm.communicator import OPERATION_BITS, Steps, make_tag, resolve
from ..comm.shared_memory import LINE_NUMBERS, NodeMemory, PrivateMemory
from ..comm.tasks import ProgressEngine, TaskGroup, run_until_complete
from ..comm.watchdog import WatchedBarrier
from ..compression import Compression
from ..core.arrays import Array, array_namespace, is_cupy, is_half, is_host, words
from ..errors import ConfigError, StaleGradientError
from . import inter_node
from .buckets import Bucket, Layout, Parameter, Slot, State
from .deterministic import VirtualShards
from .gpu_reduction import DeviceSums, streams_of
from .inter_node import Coder, InterNodeReduction
from .overlap import CommunicationLane, OverlapScheduler
from .profiling import BucketTimes

_TAKING = (State.FILLING, State.READY)


class GradReadiness:
    """The gradients that backward writes into buckets.

    Args:
        params: all of them by name, in the model's order.
        buckets: where their gradients are.
        beside: what may still read a bucket of the step before; None without overlap.
    """

    def __init__(
        self, params: Mapping[str, Parameter], buckets: Sequence[Bucket], beside: OverlapScheduler | None
    ) -> None:
        self._params, self._buckets, self._beside = params, buckets, beside
        self._bucket_of = {slot.name: bucket for bucket in buckets for slot in bucket.slots}
        self.num_missing = len(params)
        """Gradients that backward has still to write in this step."""
        self._overwriting: set[str] | None = None
        """While gradients accumulate: the parameters whose gradients backward otherwise overwrites."""
        self._written_before: set[str] = set()
        """Parameters whose gradients earlier virtual shards of this step have."""
        self.are_held = False
        """Whether another backward of the step follows, so that this one launches nothing."""

    def begin(self) -> None:
        """Begin a step: every gradient is to be written anew."""
        self._written_before.clear()
        self._await_all()

    def begin_again(self) -> None:
        """Begin the next virtual shard of the step: every gradient is to be written anew."""
        self._written_before.update(name for name in self._params if not self.is_missing(name))
        self._await_all()

    def _await_all(self) -> None:
        for bucket in self._buckets:
            bucket.missing = bucket.awaited = set(bucket.names)
            bucket.state = State.FILLING
        self.num_missing = len(self._params)

    def note(self, name: str) -> Bucket:
        """The gradient of parameter ``name`` is written. Returns its bucket, which is READY if that was its last.

        Raises:
            StaleGradientError: the bucket is on its way to other ranks, or summed.
        """
        bucket = self._bucket_of[name]
        if bucket.state not in _TAKING:
            beside = ", or make the Trainer with overlap=False" if self._beside is not None else ""
            raise StaleGradientError(
                "backward", where=name, expected="one backward before each step()", got="another one",
                remedy=f"call step() in between, or all but the last within no_sync(){beside}; after a backward that "
                "failed, step(0) on all ranks drops what it wrote",
            )  # fmt: skip
        if name in bucket.missing:
            bucket.missing.remove(name)
            self.num_missing -= 1
        bucket.awaited.discard(name)
        bucket.state = State.FILLING if bucket.awaited else State.READY
        return bucket

    @property
    def missing(self) -> list[str]:
        """Parameters that backward has not written since the last step, in the model's order."""
        if not self.num_missing:
            return []
        return [name for name in self._params if name in self._bucket_of[name].missing]

    @property
    def unused(self) -> list[str]:
        """Parameters that no backward of the step has written, in any virtual shard, in the model's order."""
        return [name for name in self.missing if name not in self._written_before]

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was written or launched since the step began."""
        return self.num_missing == len(self._params) and all(each.state is State.FILLING for each in self._buckets)

    def is_missing(self, name: str) -> bool:
        """Whether backward has still to write the gradient of parameter ``name`` in this step."""
        return name in self._bucket_of[name].missing

    def takes(self, name: str) -> bool:
        """Whether the gradient of parameter ``name`` may still be written in this step."""
        return self._bucket_of[name].state in _TAKING

    def fill_with_zeros(self) -> None:
        """Make gradients that backward has not written zero, so that they add nothing."""
        if not self.num_missing:
            return
        for bucket in self._buckets:
            if bucket.missing and self._beside is not None:
                self._beside.settle(bucket)
            for slot in bucket.slots:
                if slot.name in bucket.missing:
                    bucket.view(slot)[...] = 0
            if bucket.state is State.FILLING:
                bucket.state = State.READY

    def accumulate(self) -> None:
        """From now on backward adds to the gradients, and launches nothing until `launch_again`.

        What it has not written in this step counts as zero; parameters with ``grad_req="null"`` stay without.
        """
        self.are_held = True
        if self._overwriting is None:
            self._overwriting = set()
            self.fill_with_zeros()
        for name, param in self._params.items():
            if param.grad_req == "write":
                self._overwriting.add(name)
                param.grad_req = "add"

    def launch_again(self) -> None:
        """The next backward is the last one of this step, and may launch reductions."""
        self.are_held = False
        for bucket in self._buckets:
            bucket.awaited = set(bucket.names)

    @property
    def accumulating(self) -> bool:
        """Whether backward adds to the gradients."""
        return self._overwriting is not None

    def overwrite(self) -> None:
        """Undo `accumulate`, but where the program has set another ``grad_req`` since."""
        if self._overwriting is not None:
            for name in self._overwriting:
                if self._params[name].grad_req == "add":
                    self._params[name].grad_req = "write"
            self._overwriting = None


CLOSING_OPERATION = (1 << OPERATION_BITS) - 1
"""Its number among those of the buckets' reductions."""

_MARKS = (1 << 20) - 1  # sums of their squares over all ranks are exact in float64


class StepSync:
    """For the steps of one reducer. All ranks must make it together.

    Args:
        world: the ranks.
        comm: all of them, where messages are needed; None: they meet at ``gate``.
        gate: of this node's ranks.
        lane: where messages progress beside others; None: in this thread.
        signature: see `make_tag`.
        name: of these steps among all of the world.
    """

    def __init__(
        self,
        world: World,
        comm: Communicator | None,
        gate: WatchedBarrier,
        lane: CommunicationLane | None,
        signature: int,
        name: str,
    ) -> None:
        self._size = world.size
        self._progress = ProgressEngine.of(world)
        self._comm = comm
        self._gate = gate
        self._lane = lane
        self._signature = signature
        self._counted = name, 0
        self._begun = 0
        self._progress.watchdog.count(name, self._number_of)

    def _number_of(self, item: int) -> int:
        return self._begun

    def tally(self, *numbers: float) -> list[float]:
        """The sums of a few ``numbers`` over all ranks, the same bits on each; all must call with as many, and wait."""
        if self._size == 1:
            return list(numbers)
        self._begun += 1
        with self._progress.watchdog.watching("the closing exchange of a step", counted=self._counted):
            self._progress.finish()  # as before any blocking collective
            if self._comm is None:
                return self._gate.tally(*numbers)
            sums = np.array(numbers, np.float64)
            if self._lane is None:
                run_until_complete(self._machine(sums, self._comm))
            else:
                asked, comm = self._lane.engine.variable("closing exchange"), self._comm
                self._lane.launch(lambda turn: self._machine(sums, comm), [asked], CLOSING_OPERATION, asked.name)
                self._lane.wait(asked)
            return sums.tolist()

    def tally_alike(self, settings: tuple[float, ...], *numbers: float) -> tuple[list[float], bool]:
        """As `tally`; and whether all ranks have passed the same ``settings``, which are numbers as well."""
        mark = float(hash(settings) & _MARKS)
        *sums, marks, squares = self.tally(*numbers, mark, mark * mark)
        return sums, marks * marks == squares * self._size  # exactly where all are the same, and only there

    def _machine(self, sums: np.ndarray, comm: Communicator) -> Steps:
        tag = make_tag(self._signature % comm.signatures, CLOSING_OPERATION)
        yield from halving_doubling.allreduce(sums, resolve("tally", "sum", sums.dtype), comm, tag)


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
        self._watchdog = ProgressEngine.of(world).watchdog
        self.gate = WatchedBarrier(self.memory, self._watchdog, LINE_NUMBERS + more_numbers)
        lane = CommunicationLane.of(world) if self.overlap else None
        self._namespace = array_namespace(*(param.data for param in params))
        self._reduce = kernels.load("reduce")
        serial = world.kept["number of reducers"] = world.kept.get("number of reducers", 0) + 1
        self._signature = zlib.crc32(f"{serial} {layout.digest}".encode())
        self._share_communicators(rail, everyone, between_nodes)
        self.closing = StepSync(world, everyone, self.gate, lane, self._signature, f"steps of trainer {serial}")
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
        self.rail: InterNodeReduction | None = None
        """With whom messages are exchanged; None on one node, and where this rank owns no shard."""
        if rail is not None:
            by_rail = None if self.gpus is not None else compression
            longest = 0 if by_rail is not None or self.gpus is not None else layout.longest_nbytes
            nbytes = inter_node.fitting(world, rail, longest)
            self.rail = InterNodeReduction(rail, self._signature, self.buckets, by_rail, nbytes)
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
        self.beside = None if lane is None else OverlapScheduler(world, self.memory, self.buckets, self.params, lane)
        """What runs beside computation; None without overlap."""
        self.arrivals = GradReadiness(self.params, self.buckets, self.beside)
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
        kernels.load("reduce").sum_of_squares(nothing[0])
        kernels.load("elementwise")

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
                TaskGroup(
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
                TaskGroup([self.gpus.gather(bucket) for bucket in self.buckets]).wait()
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
