"""The reducer, which owns the gradient buckets, the hooks that fill them, and the state of a step.

When backward has written the last gradient of a bucket, the bucket is ready. A `BucketReduction` reduces it, and a
`Scheduler` decides when: while backward runs, or at the end of the step. Both run the same tasks, with the same bits.

`StepSync` is the closing exchange of a step: a few numbers summed over all ranks. When it is complete, every rank has
left backward.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial

import numpy as np

from ..collectives import halving_doubling
from ..collectives.staging import errors_of
from ..comm import Communicator, World
from ..comm.communicator import OPERATION_BITS, Steps, make_tag, resolve
from ..comm.progress import ProgressEngine, run_until_complete
from ..comm.shared_memory import LINE_NUMBERS, NodeMemory, PrivateMemory
from ..comm.watchdog import WatchedBarrier
from ..compression import Compression
from ..core.arrays import Array, is_cupy, is_host
from ..errors import ConfigError, StaleGradientError, warn
from .bucket_layout import Accumulation, Bucket, Layout, ParameterLike, State
from .cpu_reduction import BucketReduction, HierarchicalReduction, ReductionRanks, SharedMemoryReduction
from .deterministic import DeterministicReduction
from .gpu_reduction import GpuReduction, streams_of
from .overlap import BucketTimes, CommunicationLane, OverlapScheduler, Scheduler

_WRITABLE = (State.FILLING, State.READY)
"""States of a bucket in which backward may write its gradients."""

CLOSING_OPERATION = (1 << OPERATION_BITS) - 1
"""Operation number of the closing exchange; the reductions of buckets have the numbers of the buckets."""

CLOSING = "the closing exchange of a step"
"""Its name in reports of ranks that do not come to it."""

_MARKS = (1 << 20) - 1  # sums of their squares over all ranks are exact in float64


class StepSync:
    """The closing exchanges of one reducer's steps. All ranks must make it together.

    Args:
        world: the ranks.
        comm: all ranks, where messages are needed; None: the exchange uses ``gate``.
        gate: barrier of this node's ranks.
        lane: the lane on which messages progress; None: in this thread.
        signature: see `make_tag`.
        name: the name of these steps for the watchdog, unique in the world.
        operation: the name of the exchange in reports.
    """

    def __init__(
        self,
        world: World,
        comm: Communicator | None,
        gate: WatchedBarrier,
        lane: CommunicationLane | None,
        signature: int,
        name: str,
        operation: str = CLOSING,
    ) -> None:
        self._operation = operation
        self._size = world.size
        self._world = weakref.ref(world)
        self._progress = ProgressEngine.of(world)
        self._signature = signature
        self._run: Callable[[Steps], None] = run_until_complete if lane is None else partial(_run_on_lane, lane)
        self._exchange = gate.tally if comm is None else partial(self._allreduce, comm)
        self._counted = name, 0
        self._begun = 0
        self._progress.watchdog.count(name, self._number_of)

    def _number_of(self, item: int) -> int:
        return self._begun

    def tally(self, *numbers: float) -> list[float]:
        """Return the sums of a few ``numbers`` over all ranks, the same bits on each; blocks until all have called.

        Every rank must call, with the same count of numbers.

        Raises:
            HpcdpError: the world is closed, or an exception has ended an earlier exchange halfway; see `World.abandon`.
        """
        if self._size == 1:
            return list(numbers)
        if (world := self._world()) is not None and world.is_closed:
            with errors_of(self._operation.partition(" (")[0]):
                world.barrier()  # raises why
        self._begun += 1
        with self._progress.watchdog.watching(self._operation, counted=self._counted):
            self._progress.finish()  # as before any blocking collective
            return self._exchange(*numbers)

    def _allreduce(self, comm: Communicator, *numbers: float) -> list[float]:
        sums = np.array(numbers, np.float64)
        tag = make_tag(self._signature % comm.signatures, CLOSING_OPERATION)
        self._run(halving_doubling.allreduce(sums, resolve("tally", "sum", sums.dtype), comm, tag))
        return sums.tolist()

    def tally_alike(self, settings: tuple[float, ...], *numbers: float) -> tuple[list[float], bool]:
        """Return the sums of `tally`, and whether all ranks have passed the same ``settings``."""
        mark = float(hash(settings) & _MARKS)
        *sums, marks, squares = self.tally(*numbers, mark, mark * mark)
        return sums, marks * marks == squares * self._size  # exactly where all are the same, and only there


def _run_on_lane(lane: CommunicationLane, steps: Steps) -> None:
    ended = lane.engine.variable("closing exchange")
    lane.launch(lambda turn: steps, [ended], CLOSING_OPERATION, ended.name)
    lane.wait(ended)


def choose_reduction(
    params: Sequence[ParameterLike],
    layout: Layout,
    world: World,
    signature: int,
    compression: Compression | None = None,
    virtual_shards: int | None = None,
    sharded: bool = False,
    more_numbers: int = 0,
) -> BucketReduction:
    """Make the reduction that suits the parameters' device, the ranks and the settings; every rank must call.

    ``signature`` is the reducer's, see `make_tag`; for the other arguments see `Reducer`.
    """
    on_host = all(is_host(param.data) for param in params)
    on_gpu = not on_host and all(is_cupy(param.data) for param in params)
    if on_gpu and world.size > 1:
        between_nodes, everyone = shared_comms(world, "reducers", signature, world.rail_comm, world.comm)
        return GpuReduction(params, layout, world, everyone, between_nodes, signature, compression, sharded)
    if on_gpu:
        streams_of(params)  # elsewhere buckets would be on another GPU, and with them the parameters
    is_shared = on_host and not (compression is not None and compression.inside_nodes)
    memory: NodeMemory = world.node_memory if is_shared else PrivateMemory()
    gate = WatchedBarrier(memory, ProgressEngine.of(world).watchdog, LINE_NUMBERS + more_numbers)
    rail: Communicator | None = None
    comm: Communicator | None = None
    if memory.size < world.size:
        between = world.rail_comm if is_shared else world.comm
        rail, comm = shared_comms(world, "reducers", signature, between, world.comm)
    ranks = ReductionRanks(world, gate, memory, world.num_rails if is_shared else 1, comm, rail, signature)
    if virtual_shards is not None:
        return DeterministicReduction(ranks, params, virtual_shards)
    if memory.size == world.size:
        return SharedMemoryReduction(ranks, params)
    return HierarchicalReduction(ranks, params, compression)


def shared_comms(
    world: World, users: str, signature: int, rail: Communicator | None, everyone: Communicator
) -> tuple[Communicator | None, Communicator]:
    """Return duplicates of a rail and of all ranks that all ``users`` of a world share; every rank must call.

    ``signature`` is the caller's, see `make_tag`.
    """

    def shared(comm: Communicator) -> Communicator:  # MPICH has only 2048 communicators
        duplicate: Communicator = world.keep((users, id(comm)), comm.duplicate)
        duplicate.users.add(signature % duplicate.signatures)
        return duplicate

    duplicates = None if rail is None else shared(rail), shared(everyone)
    world.barrier()  # before any rank sends what another would take for a mistake
    return duplicates


class Reducer:
    """The buckets of a model's gradients, the hooks that fill them, and the state of a step.

    All ranks must make it together, with the same layout.

    Args:
        params: parameters whose ``grad`` and ``grad_hook`` it takes over.
        layout: the place of each gradient.
        world: the ranks.
        overlap: launch reductions while backward runs. None: if messages are needed, and threads may send them.
        compression: how messages are compressed. None: not at all.
        virtual_shards: number of pieces of a global batch, for the same sums on any number of ranks. All arrays must be
            on the host, and ``compression`` None. None: one piece a rank.
        sharded: reduce each shard for its owner alone also on GPUs, as in memory that ranks share.
        more_numbers: how many numbers may be added to those of a step's closing exchange.
        closing: the name of that exchange in reports of ranks that do not come to it.
    """

    def __init__(
        self,
        params: Sequence[ParameterLike],
        layout: Layout,
        world: World,
        overlap: bool | None = None,
        compression: Compression | None = None,
        virtual_shards: int | None = None,
        sharded: bool = False,
        more_numbers: int = 0,
        closing: str = CLOSING,
    ) -> None:
        if len(layout.counts) > CLOSING_OPERATION:
            expected = f"at most {CLOSING_OPERATION} buckets"
            raise ConfigError("Reducer", where="layout", expected=expected, got=len(layout.counts),
                              remedy="pass a larger bucket_cap_mb")  # fmt: skip
        self.layout = layout
        self.world = world
        serial = world.kept["number of reducers"] = world.kept.get("number of reducers", 0) + 1
        signature = zlib.crc32(f"{serial} {layout.digest}".encode())
        self.reduction = reduction = choose_reduction(
            params, layout, world, signature, compression, virtual_shards, sharded, more_numbers
        )
        """Strategy that allocates and reduces the buckets."""
        self.memory = reduction.memory
        """Memory that the ranks with rows in the same buckets share."""
        self.on_one_node = self.memory.size == world.size
        """True if all ranks share the memory of the buckets, so that no message is needed."""
        if compression is not None and not reduction.sends_messages and world.rank == 0 and world.size > 1:
            warn(
                f"compression {compression.codec.name} changes nothing on one node, whose ranks send no messages; pass "
                "inside_nodes=on to compress there"
            )
        self.overlap = world.concurrent and (overlap or (overlap is None and not self.on_one_node))
        """True if reductions are launched while backward runs."""
        self.updates_later = (
            self.overlap and not reduction.orders_by_stream and all(hasattr(param, "data_hook") for param in params)
        )
        """True if updates may run after the end of a step, because readers of a parameter wait for its update."""
        lane = CommunicationLane.of(world) if self.overlap else None
        steps = f"steps of trainer {serial}"
        sync = StepSync(world, reduction.comm, reduction.gate, lane, signature, steps, closing)
        self.tally, self.tally_alike = sync.tally, sync.tally_alike
        """See `StepSync`. The exchange is complete when all ranks have left backward."""
        self.barrier = reduction.gate.barrier
        """Blocks until all ranks of `memory` have called it."""
        self.buckets = reduction.allocate(layout)
        self.params = {param.name: param for param in params}
        self.scheduler = Scheduler(reduction, self.buckets)
        """Scheduler of reductions and updates."""
        if lane is not None:
            self.scheduler = OverlapScheduler(world, reduction, self.buckets, self.params, lane)
        self.is_counted, self.copies = reduction.is_counted, reduction.copies
        """See `BucketReduction`, also for the next attributes."""
        self.keeps_unsent, self.is_deterministic = reduction.keeps_unsent, reduction.is_deterministic
        self.own_virtual_shards, self.way = reduction.own_virtual_shards, reduction.way
        self.residual, self.node_nbytes = reduction.residual, reduction.node_nbytes
        self.rescale_unsent = reduction.rescale_unsent
        self.sums_rows = reduction.sums_rows and not self.overlap
        """True if gradients are summed over the rows of the buckets, without messages, after all have left backward."""
        self.watch: Callable[[], object] = lambda: None
        """Callback within backward for each gradient that is written."""
        self.holds_sums = False
        """True if every rank's row of every bucket is the sum over all ranks."""
        self.num_missing = len(params)
        """Number of gradients that backward has still to write in this step."""
        self._written_before: set[str] = set()
        """Parameters whose gradients earlier virtual shards of this step have written."""
        self._is_held = False
        """True if another backward of the step follows, so that this one launches nothing."""
        self._accumulation = Accumulation(self.params)
        self._bucket_of = {slot.name: self.buckets[slot.bucket] for slot in layout.slots}
        self._hooks: dict[int, Callable[[ParameterLike], None]] = {}
        for param, slot in zip(params, layout.slots, strict=True):
            bucket = self.buckets[slot.bucket]
            param.grad = bucket.view(slot)
            param.grad_hook = self._hooks[id(param)] = partial(self._written, bucket, slot.name)

    @property
    def virtual_shard(self) -> int:
        """The virtual shard whose gradients are written now."""
        return self.reduction.virtual_shard

    @property
    def is_first_backward(self) -> bool:
        """True if the current backward is the first one of this rank's virtual shards in the step."""
        return self.virtual_shard == self.own_virtual_shards.start

    @property
    def is_last_backward(self) -> bool:
        """True if the current backward is the last one of this rank's virtual shards in the step."""
        return self.reduction.is_last_backward

    @property
    def is_accumulating(self) -> bool:
        """True if backward adds to the gradients, from `accumulate` until `reset`."""
        return self._accumulation.is_on

    @property
    def nbytes(self) -> int:
        """Bytes of gradients and of sums that this rank holds."""
        return sum(bucket.mine.nbytes for bucket in self.buckets) + self.reduction.nbytes

    # Hooks of the parameters

    def _written(self, bucket: Bucket, name: str, param: ParameterLike) -> None:
        """Note a written gradient; launch its bucket if that was the last one.

        Args:
            bucket: the bucket of the gradient.
            name: the name of the parameter in `params`.
            param: the parameter, or a slice of it, which has another name.

        Raises:
            StaleGradientError: the bucket is launched or reduced.
        """
        self.reduction.written(bucket, name, param)
        if bucket.state not in _WRITABLE:
            without = ", or make the Trainer with overlap=False" if self.overlap else ""
            raise StaleGradientError(
                "backward", where=name, expected="one backward before each step()", got="a second backward",
                remedy=f"call step() in between, or all but the last within no_sync(){without}; after a backward that "
                "failed, call step(0) on all ranks to drop its gradients",
            )  # fmt: skip
        if name in bucket.missing:
            bucket.missing.remove(name)
            self.num_missing -= 1
        bucket.awaited.discard(name)
        bucket.state = State.FILLING if bucket.awaited else State.READY
        self.watch()
        if bucket.state is State.READY and self.overlap and not self._is_held and self.is_last_backward:
            self.scheduler.launch(bucket)

    def takes(self, param: ParameterLike) -> bool:
        """Return whether the hook of ``param`` is this reducer's."""
        return param.grad_hook is not None and param.grad_hook is self._hooks.get(id(param))

    def let_go(self) -> None:
        """Remove the hooks from the parameters: later backwards write gradients for this rank alone."""
        for param in self.params.values():
            if self.takes(param):
                param.grad_hook = None
        self.scheduler.let_go()

    def launching(self, leaves: Sequence[ParameterLike]) -> list[ParameterLike]:
        """Return those of ``leaves``, in the order of their gradients, whose hooks launch a bucket."""
        numbers = {id(param): slot.bucket for param, slot in zip(self.params.values(), self.layout.slots, strict=True)}
        own = filter(self.takes, leaves if self.overlap else ())
        return list({numbers[id(leaf)]: leaf for leaf in own}.values())

    # State of a step

    def reset(self) -> None:
        """Begin a step, in which backward writes every gradient anew."""
        self.scheduler.begin_step()
        self._written_before.clear()
        self._await_all()
        self.holds_sums = False
        self.reduction.begin_step()
        self._accumulation.end()

    def next_virtual_shard(self) -> None:
        """Add up this virtual shard's gradients, and begin the next one, in which every gradient is written anew."""
        self.fill_with_zeros()
        for bucket in self.buckets:
            self.reduction.end_backward(bucket)
        self.reduction.next_backward()
        self._written_before.update(name for name in self.params if not self.is_missing(name))
        self._await_all()

    def _await_all(self) -> None:
        for bucket in self.buckets:
            bucket.missing = bucket.awaited = set(bucket.names)
            bucket.state = State.FILLING
        self.num_missing = len(self.params)

    @property
    def missing(self) -> list[str]:
        """Parameters that backward has not written since the last step, in the model's order."""
        if not self.num_missing:
            return []
        return [name for name in self.params if name in self._bucket_of[name].missing]

    @property
    def unused(self) -> list[str]:
        """Parameters that no backward of the step has written, in any virtual shard, in the model's order."""
        return [name for name in self.missing if name not in self._written_before]

    @property
    def is_untouched(self) -> bool:
        """True if nothing was written or launched since the step began."""
        return self.num_missing == len(self.params) and all(bucket.state is State.FILLING for bucket in self.buckets)

    def is_missing(self, name: str) -> bool:
        """Return whether backward has still to write the gradient of parameter ``name`` in this step."""
        return name in self._bucket_of[name].missing

    def is_writable(self, name: str) -> bool:
        """Return whether the gradient of parameter ``name`` may still be written in this step."""
        return self._bucket_of[name].state in _WRITABLE

    def fill_with_zeros(self) -> None:
        """Set gradients that backward has not written to zero."""
        if not self.num_missing:
            return
        for bucket in self.buckets:
            if bucket.missing:
                self.scheduler.settle(bucket)
            for slot in bucket.slots:
                if slot.name in bucket.missing:
                    bucket.view(slot)[...] = 0
            if bucket.state is State.FILLING:
                bucket.state = State.READY

    def accumulate(self) -> None:
        """Let backward add to the gradients, and launch nothing, until `launch_again`.

        Gradients that are not written in this step become zero.
        """
        self._is_held = True
        if not self._accumulation.is_on:
            self.fill_with_zeros()
        self._accumulation.begin()

    def launch_again(self) -> None:
        """Let the next backward, which is the last one of this step, launch reductions."""
        self._is_held = False
        for bucket in self.buckets:
            bucket.awaited = set(bucket.names)

    # Reductions

    def keep_unsent(self, names: Set[str]) -> None:
        """Send nothing in this step of the unused parameters ``names``; call before their buckets are launched."""
        self.reduction.keep_unsent(names)

    def launch_rest(self) -> None:
        """Launch the buckets that backward has not launched; gradients that it has not written count as zero.

        Without overlap nothing is sent, but other ranks may sum this rank's gradients from now on.
        """
        if self.num_missing and not self._accumulation.is_on:
            self.fill_with_zeros()
        for bucket in self.buckets:
            if bucket.state in _WRITABLE:
                self.scheduler.launch(bucket)

    def reduce_shards(self) -> None:
        """Sum this rank's shard of every bucket over all ranks of the world, in place in its own row.

        Every rank must call. Without overlap, all must have left backward.
        """
        self.scheduler.reduce()

    def reduce_everywhere(self) -> None:
        """Make every rank's row of every bucket the sum over all ranks; every rank must call, after backward."""
        self.scheduler.reduce_everywhere()
        self.barrier()
        self.holds_sums = True

    def reduce_shard(self, bucket: Bucket) -> None:
        """Sum this rank's shard of one bucket, as `reduce_shards` does for all; only where `sums_rows`."""
        self.reduction.reduce([bucket])

    def drop(self) -> None:
        """Reduce and ignore the sums, after `launch_rest`; every rank must call, after backward.

        Compression keeps a residual of these gradients for later sums. So barriers keep gradients of an earlier step
        and of the next backward out of it; in other steps the update has such barriers. Without compression nothing is
        left of these sums.
        """
        if self.keeps_unsent and not self.overlap:
            self.fill_with_zeros()
            self.barrier()
        self.reduce_shards()
        if self.keeps_unsent:
            self.barrier()

    # Updates

    def update_later(self, bucket: Bucket, update: Callable[[], None]) -> None:
        """Run ``update()``, which updates this rank's parameters, when the bucket is reduced; see `updates_later`."""
        assert isinstance(self.scheduler, OverlapScheduler)
        self.scheduler.update_later(bucket, update)

    def settle(self) -> None:
        """Wait for all updates under way."""
        self.scheduler.settle_all()

    def gather_parameters(self, flats: Sequence[Array]) -> None:
        """Copy each shard of the parameters from its owner to the node's other ranks; every rank must call.

        Overwrites gradients on GPUs. Parameters in shared memory exist once, so nothing is copied.

        Args:
            flats: the parameters of each bucket, of which this rank has updated its shard.
        """
        self.reduction.gather_parameters(self.buckets, flats)
        self.barrier()

    # Times of a step

    @property
    def bucket_times(self) -> Sequence[BucketTimes]:
        """Times of each bucket in the last finished step; empty without overlap."""
        return self.scheduler.times

    def count_waits(self, waited: Callable[[int, int], None]) -> None:
        """Call ``waited(begin_ns, end_ns)`` after each wait of this rank's computation for an update."""
        self.scheduler.waited = waited

    def measure_waits_on_gpu(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """Enter a context ``waiting()`` around each wait of the GPU's stream for other ranks."""
        self.reduction.waiting = waiting
