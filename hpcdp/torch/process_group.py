"""The backend "hpcdp" of torch.distributed: a process group whose operations are those of `hpcdp.collectives`.

`create` is called by ``torch.distributed.init_process_group`` and ``new_group``. Every group is a world of its own,
made by its members alone. Each method implements the c10d operation of its name; ``torch.distributed``, DDP, FSDP and
compiled programs call them. Operations progress on the progress lane of their world, and in the thread that waits for
them; their `Work` unpacks the result when it is complete.

CUDA tensors go to a ProcessGroupNCCL that the group makes for itself. If ranks share a GPU, which NCCL refuses, they
are reduced by `hpcdp.collectives`.

Source: torch/csrc/distributed/c10d (ProcessGroup.hpp, PyProcessGroup.hpp, init.cpp) of PyTorch 2.13.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame

from .. import collectives
from ..collectives import Monoid, data_movement, intra_node
from ..collectives.staging import tell
from ..comm import World, init
from ..comm.communicator import wait_for
from ..comm.progress import YIELDS, Operation, ProgressEngine
from ..comm.watchdog import Watchdog
from ..core.arrays import Array, kinds
from ..errors import ConfigError, HpcdpError, TimeLimitError, UnsupportedError, interrupts
from ..torch_backend import NAME
from .tensors import is_lazy, resolved

P = ParamSpec("P")
T = TypeVar("T")

_Ops = dist.ReduceOp.RedOpType
_REDUCTIONS: dict[Any, str | Monoid] = {
    _Ops.SUM: "sum", _Ops.AVG: "mean", _Ops.PREMUL_SUM: "sum", _Ops.PRODUCT: "prod", _Ops.MIN: "min", _Ops.MAX: "max",
    _Ops.BAND: Monoid(np.bitwise_and, name="bitwise and"), _Ops.BOR: Monoid(np.bitwise_or, name="bitwise or"),
    _Ops.BXOR: Monoid(np.bitwise_xor, name="bitwise xor"),
}  # fmt: skip
_COMPLETIONS, _TIMEOUTS = "torch futures", "torch timeouts"
_THREADS = {_COMPLETIONS: 8, _TIMEOUTS: 1}
"""Lanes of a group, and their threads: callbacks of futures may wait for other operations; timeouts end in order."""

_SPINS, _LOOK_S = 5, 0.01
"""Polls in the kernels by the thread that waits for a work, before it leaves the work to the lane, and seconds between
later tests, which tell the watchdog that somebody waits.
"""

_PATIENT = timedelta(minutes=5)
"""The shortest timeout that is left to the watchdog where nobody waits for a work itself."""

Finish = Callable[[Any], object]
"""A function that copies the result of an operation to the caller's tensors."""


def create(opts: Any, _backend_options: Any = None) -> ProcessGroup:
    """Return the process group of the ranks in ``opts``; its members must call, with the same ranks, and no others.

    Args:
        opts: c10d's ``DistributedBackendOptions``. An empty ``global_ranks_in_group`` means all ranks.

    Raises:
        ConfigError: rank and size of c10d are not those of MPI.
    """
    world = init()
    ranks = list(opts.global_ranks_in_group) or list(range(world.size))
    if (opts.group_rank, opts.group_size) != (ranks.index(world.rank) if world.rank in ranks else -1, len(ranks)):
        raise ConfigError(
            "init_process_group", where="rank, world_size",
            expected=f"rank {world.rank} of {world.size}, as MPI numbers this process",
            got=f"rank {opts.group_rank} of {opts.group_size}",
            remedy="start the program with mpirun, srun or `hpcdp launch`, and drop rank= and world_size=",
        )  # fmt: skip
    world = world.subset(ranks)
    # The first operations of a world block until all ranks have called; a timeout or async_op needs ones that do not.
    collectives.iallreduce(np.zeros(1, np.float32), world=world).wait()
    collectives.ibarrier(world).wait()
    return ProcessGroup(world, opts.group_rank, opts.store, opts.timeout, opts.group_id)


def _never_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function``, which torch.compile skips with all that it calls.

    `torch.compiler.disable` does the same, but imports the compiler, for seconds.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    if hasattr(eval_frame, "_FrameExecStrategy"):  # of PyTorch 2.8
        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)  # type: ignore[attr-defined]
    return function


class Work(dist._Work):  # type: ignore[misc]
    """An operation that was started, and what must be done with its results.

    Args:
        operations: the operations of hpcdp that make it up.
        result: the tensors that it writes.
        finish: copies results to ``result``; called once, with the result of the last operation, when all are complete.
        timeout: limits `wait` by default.
        group: its group; None if there are no operations.
    """

    _error: BaseException | None = None
    _is_over = False
    _future: torch.futures.Future[None] | None = None
    _returned: torch.futures.Future[list[torch.Tensor]] | None = None

    def __init__(
        self,
        operations: Sequence[Operation[Any]],
        result: Sequence[torch.Tensor],
        finish: Finish | None = None,
        timeout: timedelta = timedelta(0),
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self._operations, self._finish, self._timeout = operations, finish, timeout
        self._result, self._group = list(result), group
        self._lock = threading.Lock()
        for operation in operations:
            if not operation.is_over:
                break
        else:
            self._error = self._outcome()
            self._is_over = True
            return
        self._ended = threading.Lock()  # released at the end; an Event takes 6 us to make
        self._ended.acquire()
        self._missing = len(operations)
        for operation in operations:
            operation.add_done_callback(self._count)

    def _count(self) -> None:
        with self._lock:
            self._missing -= 1
            if self._missing or self._is_over:
                return
        self._end(self._outcome())

    def _outcome(self) -> BaseException | None:
        """Copy the results of the operations, which are over; return the error, if any."""
        try:
            for operation in self._operations:
                operation.has_ended()
            if self._finish is not None:
                self._finish(self._operations[-1].value)
        except BaseException as error:
            return error
        return None

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._is_over:
                return  # after its timeout
            self._error = error
            self._is_over = True
            future = self._future
        if future is not None:
            for operation in self._operations:
                operation.unwatch()
        self._ended.release()
        if future is not None and self._group is not None:
            # Callbacks of the future may wait for other operations, which the lane must advance.
            self._group.push(_COMPLETIONS, functools.partial(future.set_result, None))

    def _unwrapped(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise _as_runtime_error(self._error)
        return self._result

    def _ends_within(self, seconds: float) -> bool:
        """Block until the end, at most ``seconds``; return whether it has come."""
        if not self._ended.acquire(timeout=seconds):
            return False
        self._ended.release()
        return True

    def _limit(self, deadline: float) -> None:
        """End with an error at ``deadline``; for futures, which have no timeout."""
        if not self._ends_within(max(0.0, deadline - time.monotonic())):
            self._end(self._late(self._operations[0], self._timeout.total_seconds()))

    @staticmethod
    def _late(operation: Operation[Any], limit_s: float) -> TimeLimitError:
        return TimeLimitError(
            "wait", expected=f"the end of {operation.call[0]} before the timeout of {limit_s:g} s", got="no end",
            remedy="see whether all ranks of the group have called it",
        )  # fmt: skip

    @_never_compiled
    def is_completed(self) -> bool:
        """Return whether the operation is over, also by an error; never block."""
        if not self._is_over:
            for operation in self._operations:
                try:
                    operation.test()
                except BaseException as error:
                    if interrupts(error):
                        raise
                    continue  # raised by `wait`
        return self._is_over

    def is_success(self) -> bool:
        """Return whether the operation is complete without an error."""
        return self._is_over and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None."""
        return self._error

    @_never_compiled
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operation is complete; return True.

        Raises:
            RuntimeError: the operation failed, or has lasted longer than ``timeout`` or the group's timeout.
        """
        if not self._is_over:
            limit_s = (timeout if timeout > timedelta(0) else self._timeout).total_seconds()
            deadline = time.monotonic() + limit_s if limit_s > 0 else None
            for operation in self._operations:
                self._wait_for(operation, deadline, limit_s)
            while not self._is_over:  # another thread completed the last operation, and is unpacking it
                self._ends_within(_LOOK_S)
        if self._error is not None:
            raise _as_runtime_error(self._error)
        return True

    def _wait_for(self, operation: Operation[Any], deadline: float | None, limit_s: float) -> None:
        def test() -> bool:
            if operation.test():
                return True
            if deadline is not None and time.monotonic() > deadline:
                raise self._late(operation, limit_s)
            return False

        try:
            world = None if self._group is None else self._group.world
            if world is not None and world.concurrent and world.num_nodes == 1:
                progress = ProgressEngine.of(world)
                for _ in range(_SPINS):
                    if operation.is_over:
                        return
                    progress.spin(operation)
                # Polling here would take turns with the lane, which advances the operation without the GIL.
                while not self._ends_within(_LOOK_S) and not test():
                    pass
            else:
                wait_for(test, YIELDS)
        except Exception as error:
            if interrupts(error):
                raise
            if not operation.is_over:
                raise _as_runtime_error(error) from None
            return  # of the operation; `_count` keeps it

    @_never_compiled
    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the written tensors."""
        with self._lock:
            if self._returned is None:
                self._future = torch.futures.Future()
                # C++ sees the error of a callback, but not one that Python sets.
                self._returned = self._future.then(self._unwrapped)
                if self._is_over:
                    self._future.set_result(None)
                    return self._returned
                for operation in self._operations:  # C++, as in DDP's backward, waits for a future without testing them
                    operation.watch()
                if self._group is not None and timedelta(0) < self._timeout < _PATIENT:
                    deadline = time.monotonic() + self._timeout.total_seconds()
                    self._group.push(_TIMEOUTS, functools.partial(self._limit, deadline))
            return self._returned

    def result(self) -> list[torch.Tensor]:
        """Return the written tensors, once the operation is complete."""
        return self._result

    def synchronize(self) -> None:
        """Block until the operation is complete."""
        self.wait()

    def source_rank(self) -> int:
        """Return the sender of the tensor that ``recv`` from any rank has received."""
        return int(self._operations[0].value[1])

    _source_rank = source_rank


def _as_runtime_error(error: BaseException) -> BaseException:
    """Return ``error`` as the RuntimeError that c10d's callers catch."""
    if isinstance(error, RuntimeError) or not isinstance(error, Exception):
        return error
    wrapped = RuntimeError(str(error))
    wrapped.__cause__ = error
    return wrapped


def _check_size(operation: str, where: str, expected: int, got: int, unit: str = "elements") -> None:
    if expected != got:
        raise UnsupportedError(operation, where=where, expected=f"{expected} {unit}", got=f"{got} {unit}")


def _operation(method: Callable[..., Work], of_all: bool = True) -> Callable[..., Any]:
    """Return a method that hands CUDA tensors to NCCL where that is possible.

    If it is an operation ``of_all`` ranks, wrong arguments on some ranks are an error of all.
    """

    @functools.wraps(method)
    def run(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tensor = _first_tensor(args) if args else _first_tensor(list(kwargs.values()))
        if tensor is not None and tensor.is_cuda:
            group = self.nccl_group(tensor.device)
            if group is not None:
                return getattr(group, method.__name__)(*args, **kwargs)
        try:
            return method(self, *args, **kwargs)
        except HpcdpError as error:  # wrong arguments
            if of_all:
                tell(self.world, error)
            if isinstance(error, RuntimeError):
                raise
            raise RuntimeError(str(error)) from error

    return _never_compiled(run)


_message = functools.partial(_operation, of_all=False)


def _first_tensor(values: Sequence[Any]) -> torch.Tensor | None:
    for value in values:
        if type(value) is list or type(value) is tuple:
            if (tensor := _first_tensor(value)) is not None:
                return tensor
        elif isinstance(value, torch.Tensor):
            return value
    return None


class ProcessGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group of torch.distributed over MPI; made by `create`.

    Args:
        world: its ranks, a world of this group alone.
        rank: the rank of this process in the group.
        store: c10d's store of the group.
        timeout: the timeout of its operations.
        name: its name.
    """

    def __init__(self, world: World, rank: int, store: Any, timeout: timedelta, name: str) -> None:
        super().__init__(rank, world.size)
        self.world = world
        self._store, self._timeout, self._name, self._desc = store, timeout, str(name), "undefined"
        self._nccl: dict[torch.device, Any] = {}
        self._lanes: set[str] = set()
        self._lock = threading.Lock()
        self._apart_nbytes = max(intra_node.direct_nbytes(world), _APART_NBYTES)
        Watchdog.of(world).allow(timeout.total_seconds())

    # Properties and methods that c10d calls.

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return NAME

    name = _get_backend_name = getBackendName

    def getRank(self) -> int:
        """Return the rank of this process in the group."""
        return self.world.rank

    def getSize(self) -> int:
        """Return the number of ranks."""
        return self.world.size

    @property
    def group_name(self) -> str:
        """The name that c10d gave the group."""
        return self._name

    def getGroupName(self) -> str:
        """Return `group_name`."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set `group_name`."""
        self._name = name

    _set_group_name = setGroupName

    @property
    def group_desc(self) -> str:
        """The description that c10d gave the group."""
        return self._desc

    def getGroupDesc(self) -> str:
        """Return `group_desc`."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Set `group_desc`."""
        self._desc = desc

    _set_group_desc = setGroupDesc

    def get_group_store(self) -> Any:
        """Return c10d's store of the group."""
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cuda" and (group := self.nccl_group(device)) is not None:
            return group
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations."""
        self._timeout = timeout
        Watchdog.of(self.world).allow(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        progress, deadline = ProgressEngine.of(self.world), time.monotonic() + self._timeout.total_seconds()

        def is_done() -> bool:
            return progress.advance_all() or not progress.has_collectives or time.monotonic() > deadline

        wait_for(is_done, YIELDS)

    def shutdown(self) -> None:
        """End the group: complete its operations, and release its communicators, memory and threads.

        It waits as long as the group's timeout, not for messages, and not while an exception unwinds the program.
        """
        for group in self._nccl.values():
            if group is not None:
                group.shutdown()
        if not self.world.is_closed:
            if sys.exc_info()[0] is None:
                self._wait_for_pending_works()
            self.world.close()

    def abort(self) -> None:
        """End the group at once."""
        for group in self._nccl.values():
            if group is not None:
                group.abort()

    def nccl_group(self, device: torch.device) -> Any:
        """Return the ProcessGroupNCCL of a GPU; None if NCCL is missing or ranks share a GPU. All ranks must call."""
        if device not in self._nccl:
            own = f"{device.index if device.index is not None else torch.cuda.current_device()}"
            gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            places = collectives.allgather_object([self.world.node, gpus, own], self.world)
            is_shared = len({tuple(place) for place in places}) < self.world.size
            if is_shared or not dist.is_nccl_available():
                self._nccl[device] = None
            else:
                store = dist.PrefixStore(f"hpcdp/{self._name}/nccl", self._store)
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                self._nccl[device] = dist.ProcessGroupNCCL(store, self.world.rank, self.world.size, options)
        return self._nccl[device]

    # Reductions.

    @_operation
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Reduce each tensor elementwise over all ranks, in place."""
        tensors = _listed(tensors)
        if any(tensor.is_sparse for tensor in tensors):
            return self._sparse_allreduce(tensors, opts)
        op, factor = _reduction(opts, tensors)
        if len(tensors) > 1:
            return self.allreduce_coalesced(tensors, opts)
        array, finish = _target(tensors[0])
        return self._run("allreduce", opts, tensors, finish, array, op, self.world, prescale=factor)

    @_operation
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        """Reduce several tensors elementwise over all ranks, in place, as one operation."""
        op, factor = _reduction(opts, tensors)
        arrays, finishes = zip(*(_target(tensor) for tensor in tensors), strict=True)
        finish = _all_of(finishes)
        return self._run("grouped_allreduce", opts, tensors, finish, list(arrays), op, self.world, prescale=factor)

    def _sparse_allreduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Work:
        """Sum sparse tensors: gather the indices and values of all ranks, and coalesce them; blocking."""
        if _reduction(opts, []) != ("sum", 1.0):
            raise UnsupportedError("all_reduce", where="op", expected="SUM for a sparse tensor", got=str(opts.reduceOp))
        for tensor in tensors:
            own = tensor.detach().coalesce()
            indices = collectives.allgather(own.indices().t().contiguous().numpy(), self.world)
            values = collectives.allgather(_array(own.values()), self.world)
            total = torch.sparse_coo_tensor(
                torch.from_numpy(indices).t(), _tensor(values), own.shape, check_invariants=False
            ).coalesce()
            with torch.no_grad():
                tensor.copy_(total)
        return Work([], tensors)

    @_operation
    def reduce(self, tensors: Any, opts: Any = None, *others: Any, root: int = 0, op: Any = None) -> Work:
        """Reduce a tensor elementwise over all ranks, in place on the root; elsewhere it is unchanged."""
        tensors, root = _listed(tensors), _root(opts, root)
        (tensor,) = tensors
        reduction, factor = _reduction(op or (others[0] if others else opts), tensors)
        array, finish = _target(tensor)
        return self._run("reduce", opts, tensors, finish, array, reduction, root, self.world, prescale=factor)

    @_operation
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Reduce tensors elementwise over all ranks, the r-th on rank r only."""
        (output,) = _listed(outputs)
        tensors = _inner(inputs)
        op, factor = _reduction(opts, tensors)
        _check_size("reduce_scatter", "the list", self.world.size, len(tensors), "tensors")
        _check_size("reduce_scatter", "output", tensors[self.world.rank].numel(), output.numel())
        sizes = [tensor.numel() for tensor in tensors]
        splits = sizes if len(set(sizes)) > 1 else None
        x, (out, finish) = _joined(tensors), _target(output)
        return self._run(
            "reduce_scatter", opts, [output], finish, x, op, self.world, out=out, prescale=factor, splits=splits
        )

    @_operation
    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Work:
        """Reduce a tensor elementwise over all ranks; its r-th part on rank r only."""
        op, factor = _reduction(opts, [x])
        _check_size("reduce_scatter_single", "input", output.numel() * self.world.size, x.numel())
        out, finish = _target(output)
        return self._run("reduce_scatter", opts, [output], finish, _flat(x), op, self.world, out=out, prescale=factor)

    _reduce_scatter_base = reduce_scatter_single

    @_operation
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        """Run `reduce_scatter_single` for several tensors."""
        return self._together([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Movements.

    @_operation
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int = 0) -> Work:
        """Overwrite a tensor on all ranks with that of the root."""
        tensors, root = _listed(tensors), _root(opts, root)
        if len(tensors) > 1:
            return self._together([self.broadcast([tensor], opts) for tensor in tensors])
        array, finish = _target(tensors[0], moves=True)
        return self._run("broadcast", opts, tensors, finish, array, root, self.world)

    @_operation
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Gather the tensors of all ranks on every rank; they may differ in size."""
        (tensor,) = _listed(inputs)
        targets = _inner(outputs)
        _check_size("all_gather", "the list", self.world.size, len(targets), "tensors")
        _check_size(
            "all_gather", "the tensor of this rank in the list", tensor.numel(), targets[self.world.rank].numel()
        )
        x = _flat(tensor, moves=True)
        if all(map(self._is_apart, targets)):
            places, finish = _in_place(targets)
            own = places[self.world.rank]
            positions, out = _positions(places, own.data_ptr()), _flat(own, moves=True)
            if tensor.data_ptr() != own.data_ptr() and _overlaps(tensor, places):
                x = x.copy()  # the other ranks write there
            return self._move("allgather_list", opts, targets, finish, x, positions, out=out)
        if len({target.numel() for target in targets}) > 1:
            return self._run("allgather", opts, targets, lambda gathered: _scatter_to(gathered, targets), x, self.world)
        out = _adjacent(targets)
        if out is None:
            gathered = np.empty(x.size * self.world.size, x.dtype)
            return self._run(
                "allgather", opts, targets, lambda _: _scatter_to(gathered, targets), x, self.world, out=gathered
            )
        return self._run("allgather", opts, targets, None, x, self.world, out=out)

    @_operation
    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Work:
        """Gather the tensors of all ranks, of one shape, one after another in ``output``."""
        _check_size("all_gather_single", "output", x.numel() * self.world.size, output.numel())
        out, finish = _target(output, moves=True)
        return self._run("allgather", opts, [output], finish, _flat(x, moves=True), self.world, out=out)

    _allgather_base = all_gather_single

    @_operation
    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        """Run `all_gather_single` for several tensors."""
        return self._together([self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_operation
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        """Gather several tensors of all ranks: ``outputs[r][i]`` receives the i-th tensor of rank r."""
        return self._together([self.allgather([[row[i] for row in outputs]], [x], opts) for i, x in enumerate(inputs)])

    @_operation
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *, root: int = 0) -> Work:
        """Gather the tensors of all ranks on the root; they may differ in size."""
        root = _root(opts, root)
        (tensor,) = _listed(inputs)
        targets = _inner(outputs) if self.world.rank == root else []
        if targets:
            _check_size("gather", "the list", self.world.size, len(targets), "tensors")
            _check_size("gather", "the tensor of this rank in the list", tensor.numel(), targets[root].numel())
        x, is_apart = _flat(tensor, moves=True), [self._is_apart(target) for target in targets]
        if not any(is_apart):
            unpack = (lambda gathered: _scatter_to(gathered, targets)) if targets else None
            return self._run("gather", opts, targets, unpack, x, root, self.world)
        places, finish = _in_place(targets)
        if tensor.data_ptr() != places[root].data_ptr() and _overlaps(tensor, places):
            x = x.copy()  # the other ranks write there
        if all(is_apart):
            positions, out = _positions(places, places[root].data_ptr()), _flat(places[root], moves=True)
        else:
            joined = [target for target, apart in zip(targets, is_apart, strict=True) if not apart]
            count = sum(target.numel() for target in joined)
            memory = np.empty(max(count, 1), x.dtype)  # an empty array may have no address
            if is_apart[root]:
                _copy(x, targets[root])
            positions, out = _positions(places, memory.ctypes.data), memory[:count]
            for rank, apart in enumerate(is_apart):
                positions[rank] *= apart
            finish = _all_of([finish, lambda gathered: _scatter_to(gathered, joined)])
        return self._move("gather", opts, targets, finish, x, root, positions, out=out)

    @_operation
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *, root: int = 0) -> Work:
        """Send each rank its tensor of the root's list; they may differ in size."""
        root = _root(opts, root)
        (output,) = _listed(outputs)
        tensors = _inner(inputs) if self.world.rank == root else []
        out, finish = _target(output, moves=True)
        if not tensors:
            return self._run("scatter", opts, [output], finish, None, root, self.world, None, out)
        _check_size("scatter", "the list", self.world.size, len(tensors), "tensors")
        splits, x = [tensor.numel() for tensor in tensors], _adjacent(tensors)
        apart = [rank for rank, tensor in enumerate(tensors) if self._is_apart(tensor)]
        shares = len({tensor.data_ptr() for tensor in tensors}) < len(tensors) or _overlaps(output, tensors)
        if x is not None or not apart or shares:
            x = _joined(tensors, moves=True) if x is None else x
            return self._run("scatter", opts, [output], finish, x, root, self.world, splits, out)
        sources, _ = _in_place(tensors)
        base = sources[root if root in apart else apart[0]]
        if root not in apart:
            output.detach().copy_(tensors[root].detach().reshape(output.shape))
            out, finish = out[:0], None
        finish = _all_of([finish, lambda _: sources])  # other ranks read them until then
        positions = _positions(sources, base.data_ptr())[: len(sources)]
        return self._move("scatter", opts, [output], finish, _flat(base, moves=True), root, splits, positions, out=out)

    @_operation
    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> Work:
        """Send the r-th tensor to rank r, and receive one of each rank; they may differ in size."""
        splits, expected = [tensor.numel() for tensor in inputs], [tensor.numel() for tensor in outputs]
        x = _joined(inputs, moves=True)

        def finish(moved: tuple[Array, np.ndarray]) -> None:
            for rank, (size, got) in enumerate(zip(expected, moved[1].tolist(), strict=True)):
                _check_size("all_to_all", f"output_tensor_list[{rank}]", got, size)
            _scatter_to(moved[0], outputs)

        return self._run("alltoall", opts, outputs, finish, x, splits, self.world)

    @_operation
    def all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        """Send rows to every rank, and receive theirs; the splits count rows along axis 0."""
        n = self.world.size
        if input_splits or output_splits:
            rows = _sent(x, moves=True)
            splits = list(input_splits) or [len(rows) // n] * n
            received = list(output_splits) or [len(output) // n] * n

            def finish(moved: tuple[Array, np.ndarray]) -> None:
                if moved[1].tolist() != received:
                    raise UnsupportedError(
                        "all_to_all_single", where="output_split_sizes", expected=f"{moved[1].tolist()}, as sent",
                        got=received,
                    )  # fmt: skip
                _copy(moved[0], output)

            return self._run("alltoall", opts, [output], finish, rows, splits, self.world)
        if x.numel() % n or x.numel() != output.numel():
            raise UnsupportedError(
                "all_to_all_single", where="input", expected=f"a multiple of {n} elements, as output has",
                got=f"{x.numel()} elements, and {output.numel()} in output",
            )  # fmt: skip
        out, copied = _target(output, moves=True)
        return self._run("alltoall", opts, [output], copied, _flat(x, moves=True), None, self.world, out)

    alltoall_base = all_to_all_single

    @_message
    def send(self, tensors: Any, dest: int, tag: int = 0) -> Work:
        """Send a tensor to rank ``dest`` of the group."""
        (tensor,) = _listed(tensors)
        operation = collectives.isend(_flat(tensor, moves=True), dest, tag, self.world)
        return Work([operation], [tensor], None, self._timeout, self)

    @_message
    def recv(self, tensors: Any, source: int | None, tag: int = 0) -> Work:
        """Receive a tensor of rank ``source`` of the group, in place."""
        (tensor,) = _listed(tensors)
        out, finish = _target(tensor, moves=True)
        operation = collectives.irecv(out, source, tag, self.world)
        return Work([operation], [tensor], finish, self._timeout, self)

    @_message
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive a tensor of any rank of the group, in place."""
        return self.recv(tensors, None, tag)  # type: ignore[no-any-return]

    @_never_compiled
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Complete when every rank has called."""
        return self._run("barrier", opts, [], None, self.world)

    # Execution.

    def _is_apart(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor``, of a list, moves by itself, because joining it with others would take longer."""
        return tensor.nbytes >= self._apart_nbytes and not tensor.is_cuda

    def _run(
        self, name: str, opts: Any, result: Sequence[torch.Tensor], finish: Finish | None, /, *args: Any, **kwargs: Any
    ) -> Work:
        """Start the function ``name`` of `hpcdp.collectives`; ranks that block and ranks that do not call alike.

        Args:
            name: the blocking function.
            opts: c10d's options: ``timeout`` counts, and ``asyncOp``, without which the caller waits at once.
            result: the tensors of the work's future.
            finish: called at the end with the function's result.
            args: those of the function.
            kwargs: those of the function.
        """
        return self._start(getattr(collectives, f"i{name}"), opts, result, finish, *args, **kwargs)

    def _move(
        self, name: str, opts: Any, result: Sequence[torch.Tensor], finish: Finish | None, /, *args: Any, out: Array
    ) -> Work:
        """Start a movement of arrays in a list, by the name of its exchange; see `_run`."""
        start = functools.partial(data_movement.start, f"i{name}", self.world)
        return self._start(start, opts, result, finish, *args, out=out)

    def _start(
        self,
        start: Callable[..., Operation[Any]],
        opts: Any,
        result: Sequence[torch.Tensor],
        finish: Finish | None,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Work:
        limit = getattr(opts, "timeout", timedelta(0))
        progress = ProgressEngine.of(self.world)
        progress.is_awaited = not getattr(opts, "asyncOp", True)
        try:
            operation = start(*args, **kwargs)
        finally:
            progress.is_awaited = False
        return Work([operation], result, finish, limit if limit > timedelta(0) else self._timeout, self)

    def _together(self, works: Sequence[Work]) -> Work:
        operations = [operation for work in works for operation in work._operations]
        result = [tensor for work in works for tensor in work._result]
        # The callbacks of `works` were added first, so these do not wait for what this thread has to do.
        return Work(operations, result, lambda _: _wait_for_all(works), self._timeout, self)

    def push(self, lane: str, call: Callable[[], object]) -> None:
        """Run ``call`` on a thread of its own, which may block."""
        engine = self.world.engine
        with self._lock:
            if lane not in self._lanes:
                engine.add_lane(lane, threads=_THREADS[lane])
                self._lanes.add(lane)
        engine.push(call, lane=lane)


def _wait_for_all(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _all_of(calls: Sequence[Finish | None]) -> Finish | None:
    present = [call for call in calls if call is not None]

    def run(value: Any) -> None:
        for call in present:
            call(value)

    return run if present else None


def _in_place(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Finish | None]:
    """Return tensors with contiguous values in memory for ``tensors``, and the function that copies them back."""
    places = [resolved(tensor if tensor.is_contiguous() else tensor.detach().contiguous()) for tensor in tensors]
    copied = [pair for pair in zip(tensors, places, strict=True) if pair[0] is not pair[1]]

    def copy_back(_: Any) -> None:
        for tensor, place in copied:
            tensor.detach().copy_(place)

    return places, copy_back if copied else None


def _positions(places: Sequence[torch.Tensor], address: int) -> list[int]:
    """Return the positions of tensors after an address, in bytes, and then their numbers of elements."""
    return [place.data_ptr() - address for place in places] + [place.numel() for place in places]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses between which the elements of a tensor lie."""
    memory: Any = tensor if tensor.is_contiguous() else tensor.untyped_storage()
    return memory.data_ptr(), memory.data_ptr() + (tensor.nbytes if memory is tensor else memory.nbytes())


def _overlaps(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    """Return whether a tensor may overlap one of others."""
    first, last = _extent(tensor)
    return any(first < end and begin < last for begin, end in map(_extent, others))


_APART_NBYTES = 256 << 10
"""The shortest tensors of a list that move one by one: joining shorter ones takes less time than that."""


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _inner(tensors: Any) -> Sequence[torch.Tensor]:
    """Return the list of tensors that c10d passes in a list, or without one."""
    return tensors[0] if isinstance(tensors[0], (list, tuple)) else tensors


def _root(opts: Any, root: int) -> int:
    """Return the root in c10d's options, which may be the root itself; ``root`` if they have none."""
    return int(getattr(opts, "rootRank", opts if isinstance(opts, int) else root))


def _reduction(opts: Any, tensors: Sequence[torch.Tensor]) -> tuple[str | Monoid, float]:
    """Return the operation in c10d's options, or of a ReduceOp itself, and the factor of PREMUL_SUM."""
    for tensor in tensors:
        if tensor.dtype in _MOVED_AS_BYTES:
            expected, remedy = "a dtype of at least 16 bits", "convert it for the reduction"
            raise UnsupportedError("all_reduce", where="dtype", expected=expected, got=str(tensor.dtype), remedy=remedy)
    op = getattr(opts, "reduceOp", opts)
    if op is None:
        return "sum", 1.0
    kind = getattr(op, "op", op)
    if kind not in _REDUCTIONS:
        raise UnsupportedError("all_reduce", where="op", expected="an operation of torch.distributed", got=str(op))
    factor = 1.0
    if type(_REDUCTIONS[kind]) is not str and any(x.is_floating_point() or x.is_complex() for x in tensors):
        raise UnsupportedError("all_reduce", where="op", expected="an operation of floats", got=f"{kind.name}, of bits")
    if kind == _Ops.PREMUL_SUM:
        factor = float(op.factor() if callable(op.factor) else op.factor)
    return _REDUCTIONS[kind], factor


_MOVED_AS_BYTES = {
    dtype for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if (dtype := getattr(torch, name, None)) is not None
}  # fmt: skip
_KIND = kinds[torch.Tensor]


def _array(tensor: torch.Tensor, moves: bool = False) -> Array:
    """Return an array over the memory of ``tensor``; if it is only moved, of bytes for dtypes that NumPy lacks."""
    if moves and tensor.dtype in _MOVED_AS_BYTES:
        tensor = tensor.detach().view(torch.uint8)
    elif tensor.requires_grad:
        tensor = tensor.detach()
    assert _KIND is not None
    return _KIND.as_array("torch.distributed", "tensor", tensor)


def _tensor(array: Array) -> torch.Tensor:
    assert _KIND is not None
    return _KIND.of_array(array)  # type: ignore[no-any-return]


def _sent(tensor: torch.Tensor, moves: bool = False) -> Array:
    return _array(tensor if tensor.is_contiguous() else tensor.detach().contiguous(), moves)


def _flat(tensor: torch.Tensor, moves: bool = False) -> Array:
    """Return the elements of ``tensor``, shape ``(count,)``; a copy unless it is contiguous."""
    return _sent(tensor, moves).reshape(-1)


def _target(tensor: torch.Tensor, moves: bool = False) -> tuple[Array, Finish | None]:
    """Return an array that an operation may change for ``tensor``, and the function that copies it back, if needed.

    The array has shape ``(count,)``, because c10d compares the tensors of ranks by their counts, not by their shapes.
    """
    source = resolved(tensor if tensor.is_contiguous() else tensor.detach().contiguous())
    array = _array(source, moves).reshape(-1)
    return array, None if source is tensor else lambda _: tensor.detach().copy_(source)


def _joined(tensors: Sequence[torch.Tensor], moves: bool = False) -> Array:
    """Return the elements of all tensors one after another, shape ``(count,)``; a copy unless they are contiguous."""
    joined = _adjacent(tensors)
    if joined is None:
        joined = _flat(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]), moves)
    return joined


def _adjacent(tensors: Sequence[torch.Tensor]) -> Array | None:
    """Return the elements of contiguous tensors that follow each other in memory; None for others."""
    first = tensors[0]
    end = first.data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or is_lazy(tensor) or tensor.data_ptr() != end or tensor.dtype != first.dtype:
            return None
        end += tensor.nbytes
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():
        return None
    count = sum(tensor.numel() for tensor in tensors)
    return _flat(first.detach().as_strided((count,), (1,)), moves=first.dtype in _MOVED_AS_BYTES)


def _copy(array: Array, tensor: torch.Tensor) -> None:
    values = _tensor(array)
    if values.dtype != tensor.dtype:  # moved as bytes
        values = values.view(tensor.dtype)
    tensor.detach().copy_(values.view(tensor.shape))


def _scatter_to(array: Array, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the elements of ``array``, shape ``(count,)``, to tensors one after another."""
    _check_size("torch.distributed", "the output list", array.size, sum(tensor.numel() for tensor in tensors))
    first = 0
    for tensor in tensors:
        count = tensor.numel()
        _copy(array[first : first + count], tensor)
        first += count
