"""The public collectives: checks of arguments, and staging of arrays for the algorithms.

The algorithms work on flat host arrays. GPU arrays are staged in pinned host memory, which a GPU reads and writes
several times as fast as pageable memory. CuPy caches it; ``cupy.get_default_pinned_memory_pool().free_all_blocks()``
frees it.
"""

from __future__ import annotations

import operator
from typing import Any, TypeVar

import numpy as np

from ..comm import Monoid, Reduction, Request, World, init
from ..comm.communicator import Quotients, Steps, bounds, resolve
from ..comm.consistency import Call
from ..comm.tasks import ProgressEngine
from ..comm.watchdog import Watchdog
from ..core.arrays import Array, array_namespace, copied_to_host, from_host, is_cupy, is_float, on_device_of, to_host
from ..core.devices import Device, Streams, to_device_of
from ..core.state import refuse_change
from ..errors import UnsupportedError
from . import registry
from .registry import CHOICES, Algorithm, find


def to_host_memory(x: Array) -> np.ndarray:
    """Return a contiguous copy of ``x`` in host memory, pinned if ``x`` is contiguous on a GPU."""
    if not _is_quick(x):
        return np.asarray(copied_to_host(x), order="C")
    streams = Streams(Device.of(x))
    host = streams.pinned(x.nbytes).view(np.dtype(x.dtype)).reshape(x.shape)
    _copy(streams, host, x)
    return host


def on_host(x: Array) -> np.ndarray:
    """Return ``x`` in host memory, see `arrays.to_host`; a GPU array is copied to pinned memory."""
    return to_host_memory(x) if is_cupy(x) else to_host(x)


def bring_back(host: np.ndarray, target: Array) -> None:
    """Copy ``host`` to ``target``, an array on any device."""
    if _is_quick(target):
        _copy(Streams(Device.of(target)), target, host)
    else:
        with on_device_of(target):
            target[...] = from_host(host, target)


def _is_quick(x: Array) -> bool:
    return is_cupy(x) and x.size > 0 and x.flags.c_contiguous


def _copy(streams: Streams, target: Array, source: Array) -> None:
    """Copy and wait, because CuPy reuses pinned memory without regard to streams once an array is freed."""
    stream = streams.current()
    streams.copy_async(target, source, stream)
    streams.synchronize(stream)


ArrayT = TypeVar("ArrayT", bound=Array)
"""The type of an array that a function takes and returns."""
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
) -> ArrayT:
    """Reduce ``x`` elementwise over all ranks; every rank gets the same bits.

    Every rank must call with the same shape, dtype, op and algorithm, in the same order, from one thread at a time.

    Args:
        x: array of any shape, possibly empty or not contiguous: NumPy, CuPy, or another kind that converts to host
            memory. dtype: float16 or bfloat16 (accumulated in float32), float32, float64, or an integer (sums wrap
            around).
        op: ``"sum"``, ``"mean"`` (of integers rounded towards zero, in their dtype), ``"min"``, ``"max"``, ``"prod"``,
            or a `Monoid`. A NaN wins min and max.
        world: the ranks; default `hpcdp.init()`.
        algorithm: ``"auto"``, or a name in ``ALGORITHMS["allreduce"]``.
        out: receives the result; x's shape and dtype, on the host or any GPU. Default ``x`` itself, in place.

    Returns:
        ``out``, or ``x`` if it is None.

    Raises:
        UnsupportedError: an unknown op or algorithm, or one that does not support this dtype or world.
        MismatchError: the ranks called with different shapes, dtypes, ops or algorithms, or called another collective;
            the same error on every rank.

    Source: Chan et al., "Collective communication: theory, practice, and experience", 2007, section 2.
    """
    world = _ranks(world)
    plan = _planned("allreduce", x, op, algorithm, world)
    target = x if out is None else _receiver("allreduce", x, out)
    is_plain = type(target) is np.ndarray and target.flags.carray
    if is_plain:
        refuse_change(target, "x", "allreduce")
        if plan.takes_quotients:
            plan.run(world, _flat(target))
        elif world.size > 1:
            plan.algorithm.run(world, plan.call, _flat(target), plan.reduction)
        return target
    staged = _staged("allreduce", target)
    if world.size > 1:
        plan.run(world, staged.reshape(-1))
    bring_back(staged, target)
    return target


def iallreduce(
    x: Array,
    op: str | Monoid = "sum",
    world: World | None = None,
    algorithm: str = "auto",
    out: Array | None = None,
) -> Request:
    """Start an `allreduce` and return at once; several may be in progress.

    Every rank must start the same ones in the same order. They progress during ``test()``, which never blocks, and
    ``wait()`` of any of them. Neither ``x`` nor ``out`` may be touched before the end. A blocking collective,
    `World.barrier` and `World.split` first complete those of their own world, while those of other worlds do not
    progress.

    With the algorithm "native", which "auto" may choose, the order of sums may differ from that of `allreduce`, because
    MPI libraries use other algorithms for nonblocking collectives.

    Args:
        x: as for `allreduce`.
        op: as for `allreduce`.
        world: as for `allreduce`.
        algorithm: as for `allreduce`.
        out: as for `allreduce`.

    Returns:
        A request: ``test()`` returns whether the result is complete, ``wait()`` blocks until it is.

    Raises:
        UnsupportedError: as `allreduce`.
        MismatchError: as `allreduce`.
    """
    world = _ranks(world)
    plan = _planned("iallreduce", x, op, algorithm, world)
    target = x if out is None else _receiver("iallreduce", x, out)
    staged = _staged("iallreduce", target)

    def then_copied_back() -> Steps:
        if world.size > 1:
            yield from plan.machine(world, staged.reshape(-1))
        if staged is not target:
            bring_back(staged, target)

    with Watchdog.of(world).watching("iallreduce", staged):  # an algorithm's first call may wait for other ranks
        return ProgressEngine.of(world).start(then_copied_back(), staged)


def reduce_scatter(
    x: Array,
    op: str | Monoid = "sum",
    world: World | None = None,
    algorithm: str = "auto",
    out: Array | None = None,
) -> Array:
    """Reduce ``x`` elementwise over all ranks and leave every rank its shard.

    Rank r of n gets elements ``N r // n`` to ``N (r + 1) // n`` of the N elements of ``x``, flattened. Every rank must
    call; errors are those of `allreduce`.

    Args:
        x: as for `allreduce`.
        op: as for `allreduce`.
        world: as for `allreduce`.
        algorithm: ``"auto"``, or a name in ``ALGORITHMS["reduce_scatter"]``.
        out: receives this rank's shard, shape ``(shard elements,)`` and x's dtype; default a new array. If it is a view
            of ``x``, then ``x`` is working memory and its other elements are undefined afterwards; else ``x`` is
            unchanged.

    Returns:
        ``out``.
    """
    world = _ranks(world)
    plan = _planned("reduce_scatter", x, op, algorithm, world)
    ends = bounds(x.size, world.size)
    count = ends[world.rank + 1] - ends[world.rank]
    host = on_host(x)
    result = np.empty(count, host.dtype)
    if out is not None:
        _check_like("reduce_scatter", out, (count,), x)
    in_place = type(x) is np.ndarray and x.flags.carray and type(out) is np.ndarray and np.shares_memory(x, out)
    work = host if in_place else np.array(host, order="C")
    if world.size > 1:
        plan.run(world, work.reshape(-1), result=result)
    else:
        result[...] = work.reshape(-1)
    if out is None:
        return from_host(result, x)
    with on_device_of(out):
        out[...] = from_host(result, out)
    return out


def allgather(
    x: Array,
    world: World | None = None,
    algorithm: str = "auto",
    out: Array | None = None,
) -> Array:
    """Gather every rank's ``x`` on all ranks; every rank must call.

    Args:
        x: as for `allreduce`; the same shape on every rank, unless ``out`` is given.
        world: the ranks; default `hpcdp.init()`.
        algorithm: ``"auto"``, or a name in ``ALGORITHMS["allgather"]``.
        out: receives all, any shape with N elements: rank r's ``x`` becomes elements ``N r // n`` to ``N (r + 1) //
            n``, as `reduce_scatter` leaves them, and may be a view of them. Default a new array.

    Returns:
        ``out``; a new array has the shape ``(n, *x.shape)``.

    Raises:
        UnsupportedError: as `allreduce`, or x has another size than its shard of ``out``.
    """
    world = _ranks(world)
    if type(x) is np.ndarray:
        host = x
    else:
        _check_array("allgather", "x", x)
        array_namespace(x)
        host = on_host(x)
    if out is None:
        gathered = np.empty((world.size, *host.shape), host.dtype)
        gathered[world.rank] = host
    else:
        gathered = _staged("allgather", out, "out")
        _own_shard(gathered, host, world)[...] = host.reshape(-1)
    # With ``out`` the ranks' x may differ in size, and their ``out`` in shape.
    plan = _planned("allgather", gathered if out is None else _flat(gathered), _MOVED, algorithm, world)
    plan.algorithm.run(world, plan.call, _flat(gathered))
    if out is None:
        return from_host(gathered, x)
    if gathered is not out:
        bring_back(gathered, out)
    return out


def _own_shard(gathered: np.ndarray, x: np.ndarray, world: World) -> np.ndarray:
    count, n = gathered.size, world.size
    shard = _flat(gathered)[count * world.rank // n : count * (world.rank + 1) // n]
    if shard.size != x.size or gathered.dtype != x.dtype:
        raise UnsupportedError(
            "allgather", where="out", expected=f"{x.size} {x.dtype} elements for this rank's x",
            got=f"{shard.size} {gathered.dtype}, its shard of {gathered.size} over {world.size} ranks",
        )  # fmt: skip
    return shard


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
    world = _ranks(world)
    root = _checked_root("broadcast", root, world)
    refuse_change(x, "x", "broadcast")  # on the root, too: else it would wait for the others
    plan = _planned("broadcast", x, _MOVED, algorithm, world, root)
    if type(x) is np.ndarray and x.flags.carray:
        plan.algorithm.run(world, plan.call, _flat(x), root)
        return x
    receives = world.rank != root
    staged = _staged("broadcast", x) if receives and _is_writeable(x) else _source(x)
    plan.algorithm.run(world, plan.call, _flat(staged), root)
    if receives:
        _check_writeable("broadcast", "x", x)  # not before: the root, whose x may be read-only, waits for all
        if staged is not x:
            bring_back(staged, x)
    return x


def reduce(
    x: ArrayT,
    op: str | Monoid = "sum",
    root: int = 0,
    world: World | None = None,
    algorithm: str = "auto",
    out: ArrayT | None = None,
) -> ArrayT:
    """Reduce ``x`` elementwise over all ranks, for rank ``root`` only; every rank must call.

    Args:
        x: as for `allreduce`.
        op: as for `allreduce`.
        root: the rank that gets the result.
        world: as for `allreduce`.
        algorithm: ``"auto"``, or a name in ``ALGORITHMS["reduce"]``.
        out: receives the result on ``root``, x's shape and dtype; default ``x`` itself. Other ranks change nothing.

    Returns:
        The result on ``root``, ``x`` on other ranks.
    """
    world = _ranks(world)
    root = _checked_root("reduce", root, world)
    plan = _planned("reduce", x, op, algorithm, world, root)
    if out is None:
        refuse_change(x, "x", "reduce")  # on all ranks, although only the root changes it
    target, is_root = x, world.rank == root
    if type(x) is np.ndarray and x.flags.carray and (out is None or not is_root):
        staged = x if is_root or plan.algorithm.spares_input else x.copy()
    elif is_root:
        target = x if out is None else _receiver("reduce", x, out)
        staged = _staged("reduce", target)
    else:
        host = np.asarray(on_host(x))
        is_usable = host.flags.c_contiguous and host.flags.aligned
        staged = host if plan.algorithm.spares_input and is_usable else host.copy(order="C")
    if plan.takes_quotients:
        plan.run(world, _flat(staged), root)
    else:
        plan.algorithm.run(world, plan.call, _flat(staged), plan.reduction, root)
    if is_root and staged is not target:
        bring_back(staged, target)
    return target


def _ranks(world: World | None) -> World:
    if world is None:
        return init()
    if not isinstance(world, World):
        raise UnsupportedError("collective", where="world", expected="a World, see hpcdp.init()", got=repr(world))
    return world


class _Plan:
    """A validated kind of call: its algorithm, its reduction, and the values that must agree on all ranks.

    Args:
        algorithm: the algorithm that runs.
        reduction: the elementwise reduction; that of sums for a mean of integers.
        call: the values that are compared over the ranks.
        takes_quotients: whether it is a mean of integers, see `communicator.Quotients`.
    """

    __slots__ = ("algorithm", "call", "reduction", "takes_quotients")

    def __init__(self, algorithm: Algorithm, reduction: Reduction, call: Call, takes_quotients: bool) -> None:
        self.algorithm, self.reduction, self.call = algorithm, reduction, call
        self.takes_quotients = takes_quotients

    def run(self, world: World, x: np.ndarray, *root: int, result: np.ndarray | None = None) -> None:
        """Reduce ``x``, shape ``(count,)``, in place, or this rank's shard into ``result``."""
        if not self.takes_quotients:
            into = () if result is None else (result,)
            self.algorithm.run(world, self.call, x, *into, self.reduction, *root)
            return
        sums = Quotients(x, world.size)
        if result is None:
            for part in sums.parts:
                self.algorithm.run(world, self.call, part, self.reduction, *root)
            if root in ((), (world.rank,)):
                sums.finish(sums.parts, x)
            return
        shards = [np.empty(result.size, part.dtype) for part in sums.parts]
        for part, shard in zip(sums.parts, shards, strict=True):
            self.algorithm.run(world, self.call, part, shard, self.reduction)
        sums.finish(shards, result)

    def machine(self, world: World, x: np.ndarray) -> Steps:
        """Return a machine that reduces ``x``, shape ``(count,)``, in place."""
        if not self.takes_quotients:
            return self.algorithm.machine(world, self.call, x, self.reduction)
        sums = Quotients(x, world.size)
        machines = [self.algorithm.machine(world, self.call, part, self.reduction) for part in sums.parts]

        def steps() -> Steps:
            for machine in machines:
                yield from machine
            sums.finish(sums.parts, x)

        return steps()


def _planned(operation: str, x: Array, op: str | Monoid, algorithm: str, world: World, root: int = 0) -> _Plan:
    """Return the cached plan of a call; only the first calls of a world communicate for it."""
    if type(x) is not np.ndarray:
        _refuse_mask(operation, "x", x)
    by_monoid = type(op) is not str and isinstance(op, Monoid)
    try:
        key = (operation, x.shape, x.dtype, op.name if by_monoid else op, by_monoid, algorithm, root)  # type: ignore[union-attr]
        plan: _Plan | None = world.kept.get(CHOICES, _NO_PLANS).get(key)
    except AttributeError:
        raise UnsupportedError(operation, where="x", expected="an array", got=type(x).__name__) from None
    except TypeError:
        got = f"{op!r} and {algorithm!r}"
        raise UnsupportedError(operation, where="op and algorithm", expected="names", got=got) from None
    if plan is None:
        with world.meeting(), Watchdog.of(world).watching(operation, x):
            if algorithm == "auto" and not registry.is_loaded(world):
                # The choice exchanges node data, so check first that all ranks made this call.
                progress = ProgressEngine.of(world)
                progress.finish()
                progress.calls.agree(_call(operation, x, op, algorithm, root))
            plan = _validated(operation, x, op, algorithm, world, root)
            plans = world.kept.setdefault(CHOICES, {})
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            plans[key] = plan
    if by_monoid:  # the cached plan may be of another function with the same name
        return _Plan(plan.algorithm, resolve(operation, op, x.dtype), plan.call, False)
    return plan


def _validated(operation: str, x: Array, op: str | Monoid, algorithm: str, world: World, root: int) -> _Plan:
    if not hasattr(x.dtype, "kind"):
        got = f"a {type(x).__name__} of {x.dtype}"
        remedy = "pass x.numpy() for a PyTorch tensor in host memory"
        raise UnsupportedError(operation, where="x", expected="an array of NumPy or CuPy", got=got, remedy=remedy)
    moved = op is _MOVED
    known = "iufbc" if moved else "iuf"  # data that is only moved may be complex or bool, too
    dtype = np.dtype(x.dtype.str) if x.dtype.kind in known else x.dtype
    if not (dtype.kind in known or is_float(dtype)) or not dtype.isnative:
        expected = "a native integer or float" + (", complex or bool" if moved else "")
        raise UnsupportedError(operation, where="dtype", expected=expected, got=dtype.str)
    takes_quotients = op == "mean" and dtype.kind in "iu"
    summed = Quotients.dtype_for(dtype) if takes_quotients else dtype
    reduction = resolve(operation, "sum" if moved or takes_quotients else op, summed)
    collective = operation.removeprefix("i")
    nbytes = 1 << x.nbytes.bit_length() >> 1  # one choice per power of two
    chosen = find(collective, algorithm, nbytes, summed, None if moved else reduction, world)
    return _Plan(chosen, reduction, _call(operation, x, op, chosen.name, root), takes_quotients)


def _call(operation: str, x: Array, op: str | Monoid, algorithm: str, root: int) -> Call:
    """Return the values that must agree on all ranks."""
    name = op.name if isinstance(op, Monoid) else "" if op is _MOVED else op
    dtype = getattr(x.dtype, "name", x.dtype)
    of = f"{operation} of {tuple(x.shape)} {dtype}"
    return Call(operation, of, f"op {name!r}", f"algorithm {algorithm!r}", f"root {root}")


def _checked_root(operation: str, root: int, world: World) -> int:
    if type(root) is int and 0 <= root < world.size:
        return root
    try:
        rank = -1 if isinstance(root, bool) else operator.index(root)
    except TypeError:
        rank = -1
    if not 0 <= rank < world.size:
        raise UnsupportedError(operation, where="root", expected=f"a rank, 0 to {world.size - 1}", got=repr(root))
    return rank


def _check_like(operation: str, out: Array, shape: tuple[int, ...], x: Array) -> None:
    _check_array(operation, "out", out)
    if tuple(out.shape) != shape or out.dtype != x.dtype:
        got = f"{tuple(out.shape)} {out.dtype}"
        raise UnsupportedError(operation, where="out", expected=f"{shape} {x.dtype} as x", got=got)
    _check_writeable(operation, "out", out)


def _check_array(operation: str, where: str, x: Array) -> None:
    if not hasattr(x, "dtype"):
        raise UnsupportedError(operation, where=where, expected="an array", got=type(x).__name__)
    _refuse_mask(operation, where, x)


def _refuse_mask(operation: str, where: str, x: Array) -> None:
    if isinstance(x, np.ma.MaskedArray):
        raise UnsupportedError(operation, where=where, expected="an array without a mask", got="a masked array")


def _is_writeable(x: Array) -> bool:
    return bool(getattr(getattr(x, "flags", None), "writeable", True))


def _check_writeable(operation: str, where: str, x: Array) -> None:
    if not _is_writeable(x):
        got = "a number" if isinstance(x, np.generic) else "a read-only array"
        raise UnsupportedError(operation, where=where, expected="a writeable array", got=got)
    refuse_change(x, where, operation)


def _receiver(operation: str, x: Array, out: Array) -> Array:
    _check_like(operation, out, tuple(x.shape), x)
    with on_device_of(out):
        out[...] = to_device_of(x, out)
    return out


def _flat(x: np.ndarray) -> np.ndarray:
    return x if x.ndim == 1 else x.reshape(-1)


def _source(x: Array) -> np.ndarray:
    """Return ``x`` as a contiguous, writeable host array, which MPI requires even for sending."""
    host = on_host(x)
    return host if host.flags.carray else np.array(host, order="C")


def _staged(operation: str, target: Array, where: str = "x") -> np.ndarray:
    """Return ``target`` itself if it is a contiguous, aligned and writeable host array, else a copy in one."""
    if type(target) is np.ndarray and target.flags.carray:
        refuse_change(target, where, operation)
        return target
    _check_array(operation, where, target)
    _check_writeable(operation, where, target)
    return to_host_memory(target)
