"""Reductions and broadcasts of arrays that have one shape on all ranks, blocking and not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .. import kernels
from ..comm import Monoid, Reduction, World
from ..comm.communicator import Quotients, Steps, StepsTo, bounds, refuse_factors, resolve
from ..comm.consistency import Call
from ..comm.progress import Operation, ProgressEngine, all_ended
from ..comm.repeated import SHORT_NBYTES, BoundExchange
from ..comm.watchdog import Watchdog
from ..core.arrays import Array, from_host, is_float, on_device_of
from ..core.checks import number
from ..core.state import refuse_change
from ..errors import UnsupportedError
from . import algorithm_choice, data_movement, ring
from .algorithm_choice import CHOICES, Algorithm, find
from .blocks import offsets
from .data_movement import ArrayT, started
from .staging import (
    accepts_tensors,
    are_plain,
    bring_back,
    bytes_of,
    check_array,
    check_like,
    checked_root,
    errors_of,
    flat,
    movable,
    no_array,
    on_host,
    ranks_of,
    receiver,
    refuse_mask,
    source_of,
    staged_of,
    validation,
    with_tensors,
)

T = TypeVar("T")
_MOVED: Any = object()
"""Replaces the op of collectives that move data without reducing it."""

_MOST_PLANS = 4096
_NO_PLANS: dict[object, Any] = {}


def allreduce(
    x: ArrayT,
    op: str | Monoid = "sum",
    world: World | None = None,
    algorithm: str = "auto",
    out: ArrayT | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> ArrayT:
    """Reduce ``x`` elementwise over all ranks; every rank gets the same bits.

    Every rank must call with the same shape, dtype, op and algorithm, in the same order, from one thread at a time.

    Args:
        x: array of any shape, possibly empty or not contiguous: of NumPy, CuPy, PyTorch, or another kind that converts
            to host memory. A tensor must not require a gradient: see `hpcdp.torch.functional`. Subclasses of NumPy's
            arrays count as plain arrays; masked ones are refused. dtype: float16 or bfloat16 (accumulated in float32),
            float32, float64, complex64 or complex128 (sum and mean), an integer (sums wrap around), or bool (sum and
            max are "or", prod and min are "and").
        op: ``"sum"``, ``"mean"`` (of integers rounded towards zero, in their dtype), ``"min"``, ``"max"``, ``"prod"``,
            or a `Monoid`. A NaN wins min and max.
        world: the ranks; default `hpcdp.init()`.
        algorithm: ``"auto"``, or a name in ``ALGORITHMS["allreduce"]``.
        out: receives the result; x's shape and dtype, on the host or any GPU. Default ``x`` itself, in place.
        prescale: factor of every rank's ``x`` before the reduction, which must be a sum or mean of floats or complex
            numbers. It is rounded to the dtype in which the sum is accumulated.
        postscale: factor of the result, likewise: ``postscale * op(prescale * x)``.

    Returns:
        ``out``, or ``x`` if it is None.

    Raises:
        UnsupportedError: an unknown op or algorithm, or one that does not support this dtype or world; or a factor that
            op or dtype do not have.
        ConfigError: a factor is no finite number.
        MismatchError: the ranks called with different shapes, dtypes, ops, algorithms or factors, or called another
            collective; the same error on every rank.

    Source: Chan et al., "Collective communication: theory, practice, and experience", 2007, section 2.
    """
    world = ranks_of(world)
    repeat = _repeated(world, x, "allreduce", op, algorithm, 0, prescale, postscale)
    if repeat is not None and out is None and repeat(x, x):
        return x
    if not are_plain(x, out):
        return with_tensors(
            allreduce, x=x, op=op, world=world, algorithm=algorithm, out=out, prescale=prescale, postscale=postscale
        )
    plan, staged, target = _in_place("allreduce", world, x, op, algorithm, out, prescale, postscale)
    plan.run(world, flat(staged))
    if staged is not target:
        bring_back(staged, target)
    return target


@accepts_tensors
def iallreduce(
    x: ArrayT,
    op: str | Monoid = "sum",
    world: World | None = None,
    algorithm: str = "auto",
    out: ArrayT | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Operation[ArrayT]:
    """Start an `allreduce`, with the same arguments and errors, and return at once; several may be in progress.

    The first call of its kind in a world waits until all ranks have made it. Every rank must start the same operations
    in the same order. Any number may be in progress. They progress on a
    thread of their own while this one computes, unless MPI lacks THREAD_MULTIPLE; then during ``test()`` and ``wait()``
    of any of them. Neither ``x`` nor ``out`` may be touched before the end. A blocking reduction or broadcast,
    `World.barrier` and `World.split` first complete the operations of their own world.

    With ``algorithm="native"``, which "auto" does not choose here, the order of sums may differ from that of
    `allreduce`, because MPI libraries use other algorithms for nonblocking collectives.

    Returns:
        An operation: ``test()`` returns whether it is complete and never blocks; ``wait()`` blocks until it is and
            returns the result of `allreduce`. Both raise its error.
    """
    world = ranks_of(world)
    begin = _repeated(world, x, "iallreduce", op, algorithm, 0, prescale, postscale)
    if begin is not None and out is None and (operation := begin(lambda: x, None, x, x)) is not None:
        return operation  # type: ignore[no-any-return]
    plan, staged, target = _in_place("iallreduce", world, x, op, algorithm, out, prescale, postscale)

    def then_copied_back() -> StepsTo[ArrayT]:
        yield from plan.machine(world, staged.reshape(-1))
        if staged is not target:
            bring_back(staged, target)
        return target

    return started("iallreduce", then_copied_back(), staged, world)


@validation
def _in_place(
    operation: str,
    world: World,
    x: ArrayT,
    op: str | Monoid,
    algorithm: str,
    out: ArrayT | None,
    prescale: float,
    postscale: float,
) -> tuple[_Plan, np.ndarray, ArrayT]:
    """Return the plan of an allreduce, its working memory with the values of ``x``, and the array of the result."""
    plan = _planned(operation, x, op, algorithm, world, 0, prescale, postscale)
    target = x if out is None else receiver(operation, x, out)
    return plan, staged_of(operation, target), target


def reduce_scatter(
    x: ArrayT,
    op: str | Monoid = "sum",
    world: World | None = None,
    algorithm: str = "auto",
    out: ArrayT | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    splits: Sequence[int] | str | None = None,
) -> ArrayT:
    """Reduce ``x`` elementwise over all ranks and leave every rank its shard.

    Rank r of n gets elements ``N r // n`` to ``N (r + 1) // n`` of the N elements of ``x``, flattened, or whole rows if
    ``splits`` is passed. Every rank must call; errors are those of `allreduce`.

    Args:
        x: as for `allreduce`.
        op: as for `allreduce`.
        world: as for `allreduce`.
        algorithm: ``"auto"``, or a name in ``ALGORITHMS["reduce_scatter"]``.
        out: receives this rank's shard, shape ``(shard elements,)``, or ``(rows, ...)`` with ``splits``, and x's dtype;
            default a new array. If it is a view of ``x`` and ``splits`` is None, then ``x`` is working memory and its
            other elements are undefined afterwards; else ``x`` is unchanged.
        prescale: as for `allreduce`.
        postscale: as for `allreduce`.
        splits: the number of rows of ``x`` for each rank, the same list on all ranks; ``"even"`` for rows ``N r // n``
            to ``N (r + 1) // n`` of N. Uneven parts are padded, or the whole array is reduced if that is less.

    Returns:
        The shard: ``out``, or a new array.
    """
    world = ranks_of(world)
    if splits is None:
        repeat = _repeated(world, x, "reduce_scatter", op, algorithm, 0, prescale, postscale)
        if repeat is not None and repeat(x, result := _new_shard(x, world) if out is None else out):
            return result  # type: ignore[return-value]
    if not are_plain(x, out):
        return with_tensors(
            reduce_scatter,
            x=x,
            op=op,
            world=world,
            algorithm=algorithm,
            out=out,
            prescale=prescale,
            postscale=postscale,
            splits=splits,
        )
    scatter = _scattered("reduce_scatter", world, x, op, algorithm, out, (prescale, postscale), splits)
    scatter.plan.run(world, scatter.work, result=scatter.result)
    return scatter.finish()


@accepts_tensors
def ireduce_scatter(
    x: ArrayT,
    op: str | Monoid = "sum",
    world: World | None = None,
    algorithm: str = "auto",
    out: ArrayT | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    splits: Sequence[int] | str | None = None,
) -> Operation[ArrayT]:
    """Start a `reduce_scatter`, with the same arguments and errors; see `iallreduce`."""
    world = ranks_of(world)
    if splits is None:
        begin = _repeated(world, x, "ireduce_scatter", op, algorithm, 0, prescale, postscale)
        result = _new_shard(x, world) if out is None and begin is not None else out
        if begin is not None and (operation := begin(lambda: result, None, x, result)) is not None:
            return operation  # type: ignore[no-any-return]
    scatter = _scattered("ireduce_scatter", world, x, op, algorithm, out, (prescale, postscale), splits)

    def steps() -> StepsTo[Array]:
        yield from scatter.plan.machine(world, scatter.work, result=scatter.result)
        return scatter.finish()

    return started("ireduce_scatter", steps(), scatter.work, world)


def _new_shard(x: Array, world: World) -> np.ndarray:
    """Return memory for this rank's shard of ``x``."""
    size, n, me = x.size, world.size, world.rank
    return kernels.empty((size * (me + 1) // n - size * me // n,), x.dtype)


class _Scatter:
    """A reduce-scatter: its plan, working memory with the values of ``x``, and memory for the result."""

    def __init__(
        self,
        operation: str,
        world: World,
        x: Array,
        op: str | Monoid,
        algorithm: str,
        out: Array | None,
        factors: tuple[float, float],
        splits: Sequence[int] | str | None,
    ) -> None:
        self._x, self._out, n, me = x, out, world.size, world.rank
        if splits is None:
            self.plan = _planned(operation, x, op, algorithm, world, 0, *factors)
            ends = bounds(x.size, n)
            self._shape: tuple[int, ...] = (ends[me + 1] - ends[me],)
            sizes = None
        else:
            check_array(operation, "x", x)
            rows = data_movement.rows_of_ranks(operation, x.shape, splits, n)
            ends = [end * math.prod(x.shape[1:]) for end in offsets(rows)]
            self._shape = rows[me], *x.shape[1:]
            of = f"{operation} of {tuple(x.shape)} {x.dtype}, splits {rows}"
            sizes = [last - first for first, last in itertools.pairwise(ends)]
        if out is not None:
            check_like(operation, out, self._shape, x.dtype)
        host = on_host(x)
        self.result: np.ndarray | None
        if sizes is None or min(sizes) == max(sizes):
            if sizes is not None:
                self.plan = _planned(operation, x, op, algorithm, world, 0, *factors, of)
            in_place = sizes is None and type(x) is np.ndarray and x.flags.carray and type(out) is np.ndarray
            is_view = in_place and np.shares_memory(x, out)
            is_spared = self.plan.bound is not None and host.flags.carray
            self.work = host.reshape(-1) if is_view or is_spared else np.array(host, order="C").reshape(-1)
            self.result = self._shard = np.empty(ends[me + 1] - ends[me], host.dtype)
        elif algorithm == "auto" and n * max(sizes) > 2 * ends[n]:
            name = "iallreduce" if operation.startswith("i") else "allreduce"
            with errors_of(operation):
                self.plan = _planned(name, x, op, algorithm, world, 0, *factors, of)
            self.work = np.array(host, order="C").reshape(-1)
            self.result, self._shard = None, self.work[ends[me] : ends[me + 1]]
        else:
            flat_x, padded = host.reshape(-1), np.zeros((n, max(sizes)), host.dtype)
            for part, first, size in zip(padded, ends, sizes, strict=False):
                part[:size] = flat_x[first : first + size]
            self.work = padded.reshape(-1)
            self.plan = _planned(operation, self.work, op, algorithm, world, 0, *factors, of)
            self.result = np.empty(max(sizes), host.dtype)
            self._shard = self.result[: sizes[me]]

    def finish(self) -> Array:
        """Return this rank's shard, in ``out`` if there is one."""
        shard = self._shard.reshape(self._shape)
        if self._out is None:
            return from_host(shard if self.result is self._shard else shard.copy(), self._x)
        with on_device_of(self._out):
            self._out[...] = from_host(shard, self._out)
        return self._out


_scattered = validation(_Scatter)


def allgather(x: ArrayT, world: World | None = None, algorithm: str = "auto", out: ArrayT | None = None) -> ArrayT:
    """Gather every rank's ``x`` on all ranks, concatenated along axis 0; every rank must call.

    Args:
        x: as for `allreduce`, or of a complex or bool dtype. Without ``out``, ranks may differ in the length of axis
            0, which may be 0; an array without axes counts as shape ``(1,)``.
        world: the ranks; default `hpcdp.init()`.
        algorithm: ``"auto"``, or a name in ``ALGORITHMS["allgather"]``. Without ``out`` also ``"bruck_allgather"``
            and, on several nodes of which one has several ranks, ``"by_node_allgather"``; all but these and ``"ring"``
            need ``x`` of one shape on all ranks.
        out: receives all, any shape with N elements: rank r's ``x`` becomes elements ``N r // n`` to ``N (r + 1) //
            n``, as `reduce_scatter` leaves them, and may be a view of them. Default a new array.

    Returns:
        ``out``; a new array has all rows, in the order of the ranks.

    Raises:
        UnsupportedError: as `allreduce`, or x has another size than its shard of ``out``.
        MismatchError: ranks differ in dtype, another axis or operation; the same error on every rank.
    """
    if out is None and algorithm not in data_movement.OF_ONE_LENGTH and are_plain(x):
        return data_movement.run("allgather", world, x, algorithm)
    world = ranks_of(world)
    if type(out) is np.ndarray and out.flags.c_contiguous:
        repeat = _repeated(world, flat(out), "allgather", _MOVED, algorithm)  # the ranks' ``out`` may differ in shape
        if repeat is not None and repeat(x, out):
            return out
    if not are_plain(x, out):
        return with_tensors(allgather, x=x, world=world, algorithm=algorithm, out=out)
    plan, host, gathered, shard, out = _gathered("allgather", world, x, algorithm, out)
    if plan.bound is None or not plan.bound(host, gathered):
        shard[...] = host.reshape(-1)
        plan.move(world, flat(gathered))
    if gathered is not out:
        bring_back(gathered, out)
    return out


@accepts_tensors
def iallgather(
    x: ArrayT, world: World | None = None, algorithm: str = "auto", out: ArrayT | None = None
) -> Operation[ArrayT]:
    """Start an `allgather`, with the same arguments and errors; see `iallreduce`."""
    if out is None and algorithm not in data_movement.OF_ONE_LENGTH:
        return data_movement.start("iallgather", world, x, algorithm)
    world = ranks_of(world)
    if type(out) is np.ndarray and out.flags.c_contiguous:
        begin = _repeated(world, flat(out), "iallgather", _MOVED, algorithm)
        if begin is not None and (operation := begin(lambda: out, None, x, out)) is not None:
            return operation  # type: ignore[no-any-return]
    plan, host, gathered, shard, out = _gathered("iallgather", world, x, algorithm, out)
    shard[...] = host.reshape(-1)

    def steps() -> StepsTo[Array]:
        yield from plan.moving(world, flat(gathered))
        if gathered is not out:
            bring_back(gathered, out)
        return out

    return started("iallgather", steps(), gathered, world)


@validation
def _gathered(
    operation: str, world: World, x: Array, algorithm: str, out: Array | None
) -> tuple[_Plan, np.ndarray, np.ndarray, np.ndarray, Array]:
    """Return the plan, ``x`` on the host, ``out`` on the host, its shard for ``x``, and ``out``, new if it is None."""
    host = movable(operation, x)
    if out is None:
        rows, *row = np.atleast_1d(host).shape
        out = from_host(np.empty((world.size * rows, *row), host.dtype), x)
    gathered = staged_of(operation, out, "out")
    plan = _planned(operation, flat(gathered), _MOVED, algorithm, world)
    count, n = gathered.size, world.size
    shard = flat(gathered)[count * world.rank // n : count * (world.rank + 1) // n]
    if shard.size != host.size or gathered.dtype != host.dtype:
        raise UnsupportedError(
            operation, where="out", expected=f"{host.size} {host.dtype} elements for this rank's x",
            got=f"{shard.size} {gathered.dtype}, its shard of {count} over {n} ranks",
        )  # fmt: skip
    return plan, host, gathered, shard, out


def broadcast(x: ArrayT, root: int = 0, world: World | None = None, algorithm: str = "auto") -> ArrayT:
    """Overwrite ``x`` on all ranks with the values of rank ``root``; every rank must call.

    Args:
        x: as for `allreduce`.
        root: the rank whose ``x`` is sent.
        world: the ranks; default `hpcdp.init()`.
        algorithm: ``"auto"``, or a name in ``ALGORITHMS["broadcast"]``.

    Returns:
        ``x``.
    """
    world = ranks_of(world)
    repeat = _repeated(world, x, "broadcast", _MOVED, algorithm, root)
    if repeat is not None and repeat(x, x):
        return x
    if not are_plain(x):
        return with_tensors(broadcast, x=x, root=root, world=world, algorithm=algorithm)
    plan, staged, root = _broadcasting("broadcast", world, x, root, algorithm)
    plan.move(world, flat(staged), root)
    return _received(staged, x, world.rank == root)


@accepts_tensors
def ibroadcast(x: ArrayT, root: int = 0, world: World | None = None, algorithm: str = "auto") -> Operation[ArrayT]:
    """Start a `broadcast`, with the same arguments and errors; see `iallreduce`."""
    world = ranks_of(world)
    begin = _repeated(world, x, "ibroadcast", _MOVED, algorithm, root)
    if begin is not None and (operation := begin(lambda: x, None, x, x)) is not None:
        return operation  # type: ignore[no-any-return]
    plan, staged, root = _broadcasting("ibroadcast", world, x, root, algorithm)

    def steps() -> StepsTo[ArrayT]:
        yield from plan.moving(world, flat(staged), root)
        return _received(staged, x, world.rank == root)

    return started("ibroadcast", steps(), staged, world)


@validation
def _broadcasting(operation: str, world: World, x: Array, root: int, algorithm: str) -> tuple[_Plan, np.ndarray, int]:
    """Return the plan of a broadcast, its working memory, with the values of ``x`` on the root, and the root."""
    root = checked_root(operation, root, world)
    refuse_change(x, "x", operation)  # on all ranks, although the root does not change it
    plan = _planned(operation, x, _MOVED, algorithm, world, root)
    return plan, source_of(x) if world.rank == root else staged_of(operation, x), root


def _received(staged: np.ndarray, x: ArrayT, is_root: bool) -> ArrayT:
    if not is_root and staged is not x:
        bring_back(staged, x)
    return x


def reduce(
    x: ArrayT,
    op: str | Monoid = "sum",
    root: int = 0,
    world: World | None = None,
    algorithm: str = "auto",
    out: ArrayT | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> ArrayT:
    """Reduce ``x`` elementwise over all ranks, for rank ``root`` only; every rank must call.

    Args:
        x: as for `allreduce`.
        op: as for `allreduce`.
        root: the rank that gets the result.
        world: as for `allreduce`.
        algorithm: ``"auto"``, or a name in ``ALGORITHMS["reduce"]``.
        out: receives the result on ``root``, x's shape and dtype; default ``x`` itself. Other ranks change nothing.
        prescale: as for `allreduce`.
        postscale: as for `allreduce`.

    Returns:
        The result on ``root``, ``x`` on other ranks.
    """
    world = ranks_of(world)
    repeat = _repeated(world, x, "reduce", op, algorithm, root, prescale, postscale)
    if repeat is not None:
        target = x if out is None or world.rank != root else out
        if (target is x or (type(target) is np.ndarray and x.shape == target.shape)) and repeat(x, target):
            return target
    if not are_plain(x, out):
        return with_tensors(
            reduce,
            x=x,
            op=op,
            root=root,
            world=world,
            algorithm=algorithm,
            out=out,
            prescale=prescale,
            postscale=postscale,
        )
    plan, staged, target, root = _rooted("reduce", world, x, op, root, algorithm, out, prescale, postscale)
    plan.run(world, flat(staged), root)
    if world.rank == root and staged is not target:
        bring_back(staged, target)
    return target


@accepts_tensors
def ireduce(
    x: ArrayT,
    op: str | Monoid = "sum",
    root: int = 0,
    world: World | None = None,
    algorithm: str = "auto",
    out: ArrayT | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Operation[ArrayT]:
    """Start a `reduce`, with the same arguments and errors; see `iallreduce`."""
    world = ranks_of(world)
    begin = _repeated(world, x, "ireduce", op, algorithm, root, prescale, postscale)
    if begin is not None:
        target = x if out is None or world.rank != root else out
        is_alike = target is x or (type(target) is np.ndarray and x.shape == target.shape)
        if is_alike and (operation := begin(lambda: target, None, x, target)) is not None:
            return operation  # type: ignore[no-any-return]
    plan, staged, target, root = _rooted("ireduce", world, x, op, root, algorithm, out, prescale, postscale)

    def steps() -> StepsTo[ArrayT]:
        yield from plan.machine(world, flat(staged), root)
        if world.rank == root and staged is not target:
            bring_back(staged, target)
        return target

    return started("ireduce", steps(), staged, world)


@validation
def _rooted(
    operation: str,
    world: World,
    x: ArrayT,
    op: str | Monoid,
    root: int,
    algorithm: str,
    out: ArrayT | None,
    prescale: float,
    postscale: float,
) -> tuple[_Plan, np.ndarray, ArrayT, int]:
    """Return the plan of a reduce, its working memory with the values of ``x``, the result's array, and the root."""
    root = checked_root(operation, root, world)
    plan = _planned(operation, x, op, algorithm, world, root, prescale, postscale)
    if out is None:
        refuse_change(x, "x", operation)  # on all ranks, although only the root changes it
    is_root = world.rank == root
    if type(x) is np.ndarray and x.flags.carray and (out is None or not is_root):
        return plan, x if is_root or plan.algorithm.spares_input else x.copy(), x, root
    if is_root:
        target = x if out is None else receiver(operation, x, out)
        return plan, staged_of(operation, target), target, root
    host = np.asarray(on_host(x))
    is_usable = host.flags.c_contiguous and host.flags.aligned
    return plan, host if plan.algorithm.spares_input and is_usable else host.copy(order="C"), x, root


def part_of_group(
    operation: str,
    x: np.ndarray,
    op: str | Monoid,
    world: World,
    algorithm: str = "auto",
    root: int = 0,
    factors: tuple[float, float] = (1.0, 1.0),
    result: np.ndarray | None = None,
) -> Steps:
    """Return a collective as an algorithm, for an operation that runs several.

    The first call of a kind may wait for the other ranks.

    Args:
        operation: the name of a nonblocking function of this module.
        x: shape ``(count,)``; the working memory, and the result unless there is another array for it.
        op: the reduction; ignored by a broadcast.
        world: the ranks.
        algorithm: as for `allreduce`.
        root: the root of a broadcast.
        factors: before and after the reduction.
        result: receives this rank's shard of a reduce-scatter.
    """
    moves = operation == "ibroadcast"
    plan = _planned(operation, x, _MOVED if moves else op, algorithm, world, root, *factors)
    return plan.moving(world, x, root) if moves else plan.machine(world, x, result=result)


@dataclass(slots=True)
class _Plan:
    """A validated kind of call: its algorithm, its reduction, and the values that must agree on all ranks."""

    algorithm: Algorithm
    reduction: Reduction
    call: Call
    bound: Callable[..., Any] | None = None
    """A repeated call as one kernel call, see `repeated.BoundExchange.direct_call`; of a nonblocking collective its
    ``started_call``. None before the first call, and without a kernel.
    """
    has_run: bool = False

    def _bind(self, world: World, *arguments: Any) -> None:
        """Set `bound` after a first call with ``arguments``."""
        if self.has_run or type(self) is not _Plan or not self.algorithm.may_be_bound(world):
            return
        self.has_run = True
        exchange = self.algorithm.bound(world, self.call, *arguments)
        if not self.call.operation.startswith("i"):
            self.bound = None if exchange is None else exchange.direct_call(world, self.call)
        elif isinstance(exchange, BoundExchange):
            self.bound = exchange.started_call(world, self.call, arguments[0].nbytes <= SHORT_NBYTES)

    def run(self, world: World, x: np.ndarray, *root: int, result: np.ndarray | None = None) -> None:
        """Reduce ``x``, shape ``(count,)``, in place, or this rank's shard into ``result``.

        With a ``result``, ``x`` is unchanged if `bound` is set.
        """
        if self.bound is not None:
            if self.bound(x, x if result is None else result):
                return
            x = x if result is None else x.copy()
        if world.size == 1:
            self._of_one(x, result)
            return
        into = () if result is None else (result,)
        self.algorithm.run(world, self.call, x, *into, self.reduction, *root)
        self._bind(world, x, self.reduction, *root)

    def move(self, world: World, x: np.ndarray, *root: int) -> None:
        """Broadcast ``x``, shape ``(count,)``, or complete it with the shards of all ranks."""
        if self.bound is not None and root and self.bound(x, x):
            return
        self.algorithm.run(world, self.call, x, *root)
        self._bind(world, x, *root)

    def machine(self, world: World, x: np.ndarray, *root: int, result: np.ndarray | None = None) -> Steps:
        """Run `run` as a machine."""
        if world.size == 1:
            self._of_one(x, result)
            return
        into = () if result is None else (result,)
        yield from self.algorithm.machine(world, self.call, x, *into, self.reduction, *root)
        self._bind(world, x, self.reduction, *root)

    def moving(self, world: World, x: np.ndarray, *root: int) -> Steps:
        """Run `move` as a machine."""
        if world.size > 1:
            yield from self.algorithm.machine(world, self.call, x, *root)
            self._bind(world, x, *root)

    def _of_one(self, x: np.ndarray, result: np.ndarray | None) -> None:
        if self.reduction.prescale != 1 or self.reduction.postscale != 1:
            self.reduction.finish(self.reduction.widened(x), 1, x if result is None else result)
        elif result is not None:
            result[...] = x


class _PlanOfQuotients(_Plan):
    """The plan of a mean of integers, see `communicator.Quotients`; its reduction is that of sums."""

    def run(self, world: World, x: np.ndarray, *root: int, result: np.ndarray | None = None) -> None:
        """See `_Plan.run`."""
        sums, shards = self._begun(world, x, result)
        for part, shard in zip(sums.parts, shards, strict=True):
            _Plan.run(self, world, part, *root, result=shard)
        self._finish(world, x, root, sums, shards, result)

    def machine(self, world: World, x: np.ndarray, *root: int, result: np.ndarray | None = None) -> Steps:
        """See `_Plan.machine`."""
        sums, shards = self._begun(world, x, result)
        parts = zip(sums.parts, shards, strict=True)
        yield from all_ended([_Plan.machine(self, world, part, *root, result=shard) for part, shard in parts])
        self._finish(world, x, root, sums, shards, result)

    def _begun(
        self, world: World, x: np.ndarray, result: np.ndarray | None
    ) -> tuple[Quotients, list[np.ndarray | None]]:
        sums = Quotients(x, world.size)
        return sums, [None if result is None else np.empty(result.size, part.dtype) for part in sums.parts]

    def _finish(
        self, world: World, x: np.ndarray, root: tuple[int, ...], sums: Quotients, shards: Any, result: Any
    ) -> None:
        if result is not None:
            sums.finish(shards, result)
        elif root in ((), (world.rank,)):
            sums.finish(sums.parts, x)


class _PlanOfBools(_Plan):
    """The plan of a named reduction of bools, as bytes: "or" is their maximum and "and" their minimum."""

    def run(self, world: World, x: np.ndarray, *root: int, result: np.ndarray | None = None) -> None:
        """See `_Plan.run`."""
        _Plan.run(self, world, bytes_of(x), *root, result=None if result is None else bytes_of(result))

    def machine(self, world: World, x: np.ndarray, *root: int, result: np.ndarray | None = None) -> Steps:
        """See `_Plan.machine`."""
        yield from _Plan.machine(self, world, bytes_of(x), *root, result=None if result is None else bytes_of(result))


_BOOLS = {"sum": "max", "max": "max", "prod": "min", "min": "min"}
"""The reductions of bools as bytes."""


def _repeated(
    world: World,
    x: Array,
    operation: str,
    op: str | Monoid,
    algorithm: str,
    root: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Callable[..., Any] | None:
    """Return `_Plan.bound` of an earlier call with equal arguments, for an array of this shape; None without one.

    Its kernel checks whether the arrays are alike in all else.
    """
    if type(x) is not np.ndarray or type(root) is not int:
        return None
    try:
        plans = world.kept.get(CHOICES, _NO_PLANS)
        return plans.get((operation, x.shape, op, algorithm, root, prescale, postscale))  # type: ignore[no-any-return]
    except TypeError:  # an argument of a wrong type: `_planned` raises the error for it
        return None


def _planned(
    operation: str,
    x: Array,
    op: str | Monoid,
    algorithm: str,
    world: World,
    root: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    fact: str = "",
) -> _Plan:
    """Return the cached plan of a call; only the first calls of a world communicate for it.

    All ranks must pass the same ``fact``, which describes the call in errors instead of the shape of ``x``.
    """
    if type(x) is not np.ndarray:
        refuse_mask(operation, "x", x)
    by_monoid = type(op) is not str and isinstance(op, Monoid)
    try:
        name = op.name if by_monoid else op  # type: ignore[union-attr]
        key = operation, x.shape, x.dtype, name, by_monoid, algorithm, root, prescale, postscale, fact
        plan: _Plan | None = world.kept.get(CHOICES, _NO_PLANS).get(key)
    except AttributeError:
        raise no_array(operation, "x", x) from None
    except TypeError:
        checked_factors(operation, prescale, postscale)
        got = f"{op!r} and {algorithm!r}"
        raise UnsupportedError(operation, where="op and algorithm", expected="names", got=got) from None
    if plan is None:
        factors = checked_factors(operation, prescale, postscale)
        with world.meeting(), Watchdog.of(world).watching(operation, x):
            if algorithm == "auto" and not algorithm_choice.is_loaded(world):
                # The choice exchanges node data, so check first that all ranks made this call.
                progress = ProgressEngine.of(world)
                progress.finish()
                progress.calls.agree(_call(operation, x, op, algorithm, root, factors, fact))
            plan = _validated(operation, x, op, algorithm, world, root, factors, fact)
            # Now, because an operation may begin on the lane.
            if plan.algorithm.prepare is not None and world.size > 1:
                ProgressEngine.of(world).prepare(plan.algorithm.prepare, world, plan.call)
            if plan.algorithm.takes_length and x.nbytes >= ring.LONG_NBYTES and world.num_nodes > 1:
                ProgressEngine.of(world).prepare(ring.fit_messages, world, plan.call)
            plans = world.kept.setdefault(CHOICES, {})
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            plans[key] = plan
    if by_monoid:  # the cached plan may be of another function with the same name
        return _Plan(plan.algorithm, resolve(operation, op, x.dtype), plan.call)
    if plan.bound is not None and not fact:
        world.kept[CHOICES][operation, x.shape, op, algorithm, root, prescale, postscale] = plan.bound
    return plan


def checked_factors(operation: str, prescale: float, postscale: float) -> tuple[float, float]:
    """Return the factors as floats; `ConfigError` if one is no finite number."""
    return number(operation, "prescale", prescale), number(operation, "postscale", postscale)


def _validated(
    operation: str,
    x: Array,
    op: str | Monoid,
    algorithm: str,
    world: World,
    root: int,
    factors: tuple[float, float],
    fact: str,
) -> _Plan:
    if not hasattr(x.dtype, "kind"):
        got = f"a {type(x).__name__} of {x.dtype}"
        raise UnsupportedError(operation, where="x", expected="an array of NumPy, CuPy or PyTorch", got=got)
    dtype = np.dtype(x.dtype.str) if x.dtype.kind in "iufbc" else x.dtype
    if not (dtype.kind in "iufbc" or is_float(dtype)) or not dtype.isnative:
        expected = "a native integer, float, complex or bool"
        raise UnsupportedError(operation, where="dtype", expected=expected, got=dtype.str)
    kind, reduction, reduced = _Plan, None, dtype
    if op is not _MOVED:
        refuse_factors(operation, op, dtype, *factors)
        kind, reduction, reduced = _kind_of(operation, op, dtype, factors)
    collective = operation.removeprefix("i")
    nbytes = 1 << (max(x.nbytes, 1) - 1).bit_length()  # one choice per power of two
    blocks = not operation.startswith("i")
    with errors_of(operation):
        chosen = find(collective, algorithm, nbytes, reduced, reduction, world, blocks)
    call = _call(operation, x, op, chosen.name, root, factors, fact)
    return kind(chosen, reduction or resolve(operation, "sum", dtype), call)


def _kind_of(
    operation: str, op: str | Monoid, dtype: np.dtype, factors: tuple[float, float]
) -> tuple[type[_Plan], Reduction, np.dtype]:
    """Return the kind of plan that reduces arrays of ``dtype``, its reduction, and the dtype that this reduces."""
    if op == "mean" and dtype.kind in "iu":
        summed = Quotients.dtype_for(dtype)
        return _PlanOfQuotients, resolve(operation, "sum", summed), summed
    if dtype.kind == "b" and isinstance(op, str) and op in _BOOLS:
        byte = np.dtype(np.uint8)
        return _PlanOfBools, resolve(operation, _BOOLS[op], byte), byte
    return _Plan, resolve(operation, op, dtype, *factors), dtype


def _call(
    operation: str, x: Array, op: str | Monoid, algorithm: str, root: int, factors: tuple[float, float], fact: str
) -> Call:
    """Return the values that must agree on all ranks; ``fact`` replaces the description of ``x``."""
    name = f"Monoid {op.name!r}" if isinstance(op, Monoid) else "" if op is _MOVED else repr(op)
    dtype = getattr(x.dtype, "name", x.dtype)
    of = fact or f"{operation} of {tuple(x.shape)} {dtype}"
    scaled = "" if factors == (1, 1) else f" with prescale {factors[0]!r} and postscale {factors[1]!r}"
    return Call(operation, of, f"op {name}{scaled}", f"algorithm {algorithm!r}", f"root {root}")
