"""Horovod's collectives on PyTorch tensors, over those of hpcdp.

Every ``..._async`` function starts an operation and returns a `Handle` for `poll` and `synchronize`. Functions without
it wait, and have gradients, with Horovod's scales: the gradient of a sum is the sum of the gradients, and those of an
allgather or broadcast are averaged.

Common arguments:
    name: ignored; operations are matched by their order.
    op: `Sum`, `Average` (the default), `Min`, `Max` or `Product`.
    average: Horovod's older form of ``op``: True for `Average`, False for `Sum`.
    prescale_factor: multiplies what this rank passes.
    postscale_factor: multiplies the result.
    process_set: the ranks; default all.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .. import collectives
from ..collectives.staging import errors_of
from ..comm import World
from ..comm.progress import Operation
from ..core.checks import described, instance
from ..errors import ConfigError, MismatchError, UnsupportedError, type_named
from ..torch import functional
from . import ProcessSet, global_process_set


class ReduceOp(enum.Enum):
    """A reduction over ranks; its value is hpcdp's name of it."""

    AVERAGE = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "prod"
    ADASUM = "adasum"


Average, Sum, Min, Max = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX
Product, Adasum = ReduceOp.PRODUCT, ReduceOp.ADASUM

_HALVES = (torch.float16, torch.bfloat16)
_SHORT_NBYTES = 256
"""The length of an announcement in bytes; a longer one follows in a message of its own."""
_HEADER = np.dtype(np.int32)


class _NoCompression:
    """Send tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is sent, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return a result in the dtype of what was passed to `compress`."""
        return tensor if context is None else tensor.to(context)


class _Fp16Compression(_NoCompression):
    """Send floats as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is sent, and what `decompress` needs."""
        return (tensor.half(), tensor.dtype) if tensor.is_floating_point() else (tensor, None)


class Compressions:
    """The encodings of tensors that are sent."""

    none = _NoCompression
    fp16 = _Fp16Compression


class Handle:
    """An operation in progress.

    Args:
        name: the function of Horovod that errors name.
        operation: the operation of hpcdp.
        finish: makes the result from that of the operation.
    """

    def __init__(self, name: str, operation: Operation[Any], finish: Callable[[Any], Any]) -> None:
        self._name, self._operation = name, operation
        self._finish: Callable[[Any], Any] | None = finish
        self._result: Any = None

    def poll(self) -> bool:
        """Return whether the operation is complete; never block."""
        with errors_of(self._name):
            return self._finish is None or self._operation.test()

    def wait(self) -> Any:
        """Block until the operation is complete, and return its result."""
        if self._finish is not None:
            with torch.no_grad(), errors_of(self._name):
                self._result = self._finish(self._operation.wait())
            self._finish = None
        return self._result


def _require_tensor(operation: str, tensor: object, where: str = "tensor") -> None:
    """Raise `UnsupportedError` unless ``tensor`` is one of PyTorch."""
    if not isinstance(tensor, torch.Tensor):
        function = operation.removesuffix("_").removesuffix("_async").replace("reducescatter", "reduce_scatter")
        is_array = hasattr(tensor, "dtype") and hasattr(collectives, function)
        raise UnsupportedError(
            operation, where=where, expected="a tensor of PyTorch", got=type_named(tensor),
            remedy=f"pass torch.as_tensor({where})" + f", or call hpcdp.{function}, which takes arrays" * is_array,
        )  # fmt: skip


def _require_tensors(operation: str, tensors: object) -> None:
    """Raise `UnsupportedError` unless ``tensors`` is a list of tensors of PyTorch."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence) or not tensors:
        expected, got = "a list of tensors of PyTorch, at least one", described(tensors)
        raise UnsupportedError(operation, where="tensors", expected=expected, got=got)
    for i, tensor in enumerate(tensors):
        _require_tensor(operation, tensor, f"tensors[{i}]")


def poll(handle: Handle) -> bool:
    """Return whether an operation is complete; never block."""
    return instance("poll", "handle", handle, Handle, "the result of an _async function").poll()


def synchronize(handle: Any) -> Any:
    """Block until an operation is complete, and return its result."""
    return handle() if callable(handle) else handle.wait()


def allreduce_async(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Start the reduction of ``tensor``, which stays as it is; the result is a new tensor."""
    _require_tensor("allreduce_async", tensor)
    return allreduce_async_(tensor.detach().clone(), average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Start the reduction of ``tensor`` in place."""
    _require_tensor("allreduce_async_", tensor)
    how = reduction_named("allreduce", op, average)
    before, after, within = _factors([tensor], how, prescale_factor, postscale_factor)
    _scale_(tensor, before)
    return _start("allreduce", [tensor], process_set, op=how, **within, finish=lambda result: _scale_(result, after))


def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compressions.none,
    op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """Return the reduction of ``tensor``, which stays as it is."""
    _require_tensor("allreduce", tensor)
    compressed, context = compression.compress(tensor)

    def reduced(x: torch.Tensor) -> torch.Tensor:
        return allreduce_async(x, average, name, op, prescale_factor, postscale_factor, process_set).wait()  # type: ignore[no-any-return]

    def pulled_back(gradient: torch.Tensor) -> torch.Tensor:
        if reduction_named("allreduce", op, average) not in (Sum.value, Average.value):
            raise UnsupportedError("backward", expected="an allreduce by Sum or Average", got=str(op))
        return allreduce(gradient, average, name, Compressions.none, op, prescale_factor, postscale_factor, process_set)

    result = _WithGradient.apply(compressed, reduced, pulled_back)  # type: ignore[no-untyped-call]
    return compression.decompress(result, context)  # type: ignore[no-any-return]


def allreduce_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """Reduce ``tensor`` in place, and return it."""
    _require_tensor("allreduce_", tensor)
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return handle.wait()  # type: ignore[no-any-return]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
    op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Start the reduction of all ``tensors``, which stay as they are, as one operation."""
    _require_tensors("grouped_allreduce_async", tensors)
    copies = [tensor.detach().clone() for tensor in tensors]
    return grouped_allreduce_async_(copies, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
    op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Start the reduction of all ``tensors`` in place, as one operation."""
    _require_tensors("grouped_allreduce_async_", tensors)
    how = reduction_named("grouped_allreduce", op, average)
    before, after, within = _factors(tensors, how, prescale_factor, postscale_factor)
    for tensor in tensors:
        _scale_(tensor, before)
    return _start(
        "grouped_allreduce",
        list(tensors),
        process_set,
        op=how,
        **within,
        finish=lambda results: [_scale_(result, after) for result in results],
    )


def grouped_allreduce(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
    compression: Any = Compressions.none, op: ReduceOp | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the reductions of all ``tensors``, which stay as they are."""
    _require_tensors("grouped_allreduce", tensors)
    if _needs_gradient(*tensors):
        return [
            allreduce(tensor, average, name, compression, op, prescale_factor, postscale_factor, process_set)
            for tensor in tensors
        ]
    compressed, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    handle = grouped_allreduce_async(compressed, average, name, op, prescale_factor, postscale_factor, process_set)
    return [compression.decompress(*pair) for pair in zip(handle.wait(), contexts, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
    op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:  # fmt: skip
    """Reduce all ``tensors`` in place, and return them."""
    _require_tensors("grouped_allreduce_", tensors)
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return handle.wait()  # type: ignore[no-any-return]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None = None, op: ReduceOp | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """Start the sum or average of sparse tensors, and return a function that waits and returns a sparse tensor."""
    _require_tensor("sparse_allreduce_async", tensor)
    how = reduction_named("sparse_allreduce", op, None)
    if how not in (Sum.value, Average.value):
        raise UnsupportedError("sparse_allreduce", where="op", expected="Sum or Average", got=str(op))
    indices = allgather_async(tensor._indices().t().contiguous(), name, process_set)
    values = allgather_async(tensor._values(), name, process_set)

    def wait() -> torch.Tensor:
        gathered = values.wait() / (process_set.size() if how == Average.value else 1)
        return torch.sparse_coo_tensor(indices.wait().t(), gathered, tensor.shape, check_invariants=True)

    return wait


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start the concatenation of every rank's rows; ranks may differ in the length of axis 0."""
    _require_tensor("allgather_async", tensor)
    return _start("allgather", [tensor.detach()], process_set)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return every rank's rows, concatenated."""
    _require_tensor("allgather", tensor)
    if _needs_gradient(tensor):
        return functional.allgather(_averaged_gradient(tensor, process_set), process_set.world)
    return allgather_async(tensor, name, process_set).wait()  # type: ignore[no-any-return]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start the concatenations of all ``tensors`` as one operation."""
    _require_tensors("grouped_allgather_async", tensors)
    return _start("grouped_allgather", [tensor.detach() for tensor in tensors], process_set)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return the concatenation of every rank's rows for each of ``tensors``."""
    _require_tensors("grouped_allgather", tensors)
    if _needs_gradient(*tensors):
        return [allgather(tensor, name, process_set) for tensor in tensors]
    return grouped_allgather_async(tensors, name, process_set).wait()  # type: ignore[no-any-return]


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start the broadcast of rank ``root_rank``'s ``tensor``, which stays as it is, to new tensors."""
    _require_tensor("broadcast_async", tensor)
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start the broadcast of rank ``root_rank``'s ``tensor``, in place; the rank is numbered among all ranks."""
    _require_tensor("broadcast_async_", tensor)
    return _start("broadcast", [tensor], process_set, root=process_set.rank_of(root_rank))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return rank ``root_rank``'s ``tensor``."""
    _require_tensor("broadcast", tensor)
    if _needs_gradient(tensor):
        x = _averaged_gradient(tensor, process_set)
        return functional.broadcast(x, process_set.rank_of(root_rank), process_set.world)
    return broadcast_async(tensor, root_rank, name, process_set).wait()  # type: ignore[no-any-return]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite ``tensor`` with that of rank ``root_rank``, and return it."""
    _require_tensor("broadcast_", tensor)
    return broadcast_async_(tensor, root_rank, name, process_set).wait()  # type: ignore[no-any-return]


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start the exchange of rows: the first ``splits[0]`` of ``tensor`` for rank 0, and so on.

    The result is a tensor, and with ``splits`` a pair: the tensor, and the numbers of rows received from each rank.
    """
    _require_tensor("alltoall_async", tensor)
    return _start(
        "alltoall",
        [tensor.detach()],
        process_set,
        splits=_rows(splits),
        finish=lambda result: result if splits is None else (result[0], result[1].to(torch.int32)),
    )


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Exchange rows, and return the result of `alltoall_async`."""
    _require_tensor("alltoall", tensor)
    if _needs_gradient(tensor):
        result = functional.alltoall(tensor, _rows(splits), process_set.world)
        return result if splits is None else (result[0], result[1].to(torch.int32))
    return alltoall_async(tensor, splits, name, process_set).wait()


def reducescatter_async(
    tensor: torch.Tensor, name: str | None = None, op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Handle:  # fmt: skip
    """Start the reduction of ``tensor``, of which every rank gets its rows; the first ranks get one more if uneven."""
    _require_tensor("reducescatter_async", tensor)
    how = reduction_named("reducescatter", op, None)
    rows = _even_rows(tensor, process_set.size())
    before, after, within = _factors([tensor], how, prescale_factor, postscale_factor)
    scaled = _scale_(tensor.detach().clone(), before) if before != 1 else tensor.detach()
    return _start(
        "reduce_scatter",
        [scaled],
        process_set,
        op=how,
        rows=rows,
        **within,
        finish=lambda result: _scale_(result, after),
    )


def reducescatter(
    tensor: torch.Tensor, name: str | None = None, compression: Any = Compressions.none, op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """Return this rank's rows of the reduction of ``tensor``, which stays as it is."""
    _require_tensor("reducescatter", tensor)
    compressed, context = compression.compress(tensor)
    share = prescale_factor * postscale_factor * (process_set.size() if op is Sum else 1)

    def reduced(x: torch.Tensor) -> torch.Tensor:
        return reducescatter_async(x, name, op, process_set, prescale_factor, postscale_factor).wait()  # type: ignore[no-any-return]

    def pulled_back(gradient: torch.Tensor) -> torch.Tensor:
        if op not in (Sum, Average):
            raise UnsupportedError("backward", expected="a reducescatter by Sum or Average", got=str(op))
        return allgather(gradient * share, name, process_set)

    result = _WithGradient.apply(compressed, reduced, pulled_back)  # type: ignore[no-untyped-call]
    return compression.decompress(result, context)  # type: ignore[no-any-return]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Handle]:  # fmt: skip
    """Start a `reducescatter_async` for each of ``tensors``."""
    _require_tensors("grouped_reducescatter_async", tensors)
    return [reducescatter_async(tensor, name, op, process_set, prescale_factor, postscale_factor) for tensor in tensors]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor], name: str | None = None, compression: Any = Compressions.none,
    op: ReduceOp = Average, process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the `reducescatter` of each of ``tensors``."""
    _require_tensors("grouped_reducescatter", tensors)
    return [
        reducescatter(tensor, name, compression, op, process_set, prescale_factor, postscale_factor)
        for tensor in tensors
    ]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the set has called it."""
    _start("barrier", [], process_set).wait()


def join(device: Any = -1) -> int:
    """Take part in the operations of other ranks with zeros until all ranks have joined; every rank must call.

    Others may call functions of this module without gradients meanwhile, but `allreduce` with one, and
    `DistributedOptimizer`. They must not broadcast or gather objects, parameters or states.

    Args:
        device: ignored; the zeros lie in host memory.

    Returns:
        The rank that joined last.
    """
    return _announcements(global_process_set.world).join(_take_part)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of rank ``root_rank``, of the kinds of `hpcdp.broadcast_object`: nothing is pickled."""
    return collectives.broadcast_object(obj, process_set.rank_of(root_rank), process_set.world)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, of the kinds of `hpcdp.broadcast_object`: nothing is pickled."""
    return collectives.allgather_object(obj, process_set.world)


_STARTERS: dict[str, Callable[..., Operation[Any]]] = {
    "allreduce": lambda xs, world, op, **factors: collectives.iallreduce(xs[0], op, world, **factors),
    "grouped_allreduce": lambda xs, world, op, **factors: collectives.igrouped_allreduce(xs, op, world, **factors),
    "allgather": lambda xs, world: collectives.iallgather(xs[0], world),
    "grouped_allgather": lambda xs, world: collectives.igrouped_allgather(xs, world),
    "broadcast": lambda xs, world, root: collectives.ibroadcast(xs[0], root, world),
    "alltoall": lambda xs, world, splits: collectives.ialltoall(xs[0], splits, world),
    "reduce_scatter": lambda xs, world, op, rows, **factors: collectives.ireduce_scatter(
        xs[0], op, world, splits=rows, **factors
    ),
    "barrier": lambda xs, world: collectives.ibarrier(world),
}
"""``start(tensors, world, **arguments)`` by operation."""

_UNEVEN = ("allgather", "grouped_allgather")
"""Operations in which ranks may differ in the length of axis 0."""


def _unchanged(result: Any) -> Any:
    return result


def _start(
    kind: str,
    tensors: list[torch.Tensor],
    process_set: ProcessSet,
    finish: Callable[[Any], Any] = _unchanged,
    **arguments: Any,
) -> Handle:
    """Start an operation, and announce it to ranks that have joined if it is one of all ranks."""
    world = process_set.world
    if process_set is global_process_set:
        shapes = [[0, *x.shape[1:]] if kind in _UNEVEN else [*x.shape] for x in tensors]
        dtypes = [str(x.dtype).removeprefix("torch.") for x in tensors]
        alike = {**arguments, "splits": arguments.get("splits") is not None}  # ranks differ in splits
        _announcements(world).announce({"kind": kind, "shapes": shapes, "dtypes": dtypes, "arguments": alike})
    name = "reducescatter" if kind == "reduce_scatter" else kind
    with torch.no_grad(), errors_of(name):  # parameters may be changed in place
        return Handle(name, _STARTERS[kind](tensors, world, **arguments), finish)


def _take_part(event: dict[str, Any]) -> None:
    """Run an operation that other ranks have announced, with zeros, or with no rows."""
    world, kind = global_process_set.world, event["kind"]
    arguments = dict(event["arguments"])
    has_splits = arguments.pop("splits")
    if arguments.get("root") == world.rank:
        raise ConfigError(
            "join", where=kind, expected="a root that has not joined", got=f"rank {world.rank}, which has",
            remedy="call join() on the root last",
        )  # fmt: skip
    if kind == "alltoall":
        arguments["splits"] = [0] * world.size if has_splits else None
    pairs = zip(event["shapes"], event["dtypes"], strict=True)
    zeros = [torch.zeros([0, *shape[1:]] if has_splits else shape, dtype=getattr(torch, name)) for shape, name in pairs]
    _STARTERS[kind](zeros, world, **arguments).wait()


class Announcements:
    """The announcements of one world's operations to ranks that have run out of data and joined.

    Before each operation on all ranks, a rank announces it by a short sum that it does not wait for. A joined rank,
    which announces nothing, waits for the sum and then takes part in the operation with zeros. If nobody has announced
    anything, all ranks have joined.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0

    def announce(self, event: dict[str, Any]) -> None:
        """Announce an operation of this rank; every rank that has not joined must call, with the same event."""
        if self._world.size > 1:
            self._count += 1
            text = json.dumps(event).encode()
            short, long = _messages_of(text)
            collectives.iallreduce(short, "max", self._world)
            if long.size:
                collectives.iallreduce(long, "max", self._world)

    def join(self, take_part: Callable[[dict[str, Any]], object]) -> int:
        """Call ``take_part`` with each event of other ranks until all have joined; return the last rank that joined."""
        world = self._world
        joined_at = self._count
        while world.size > 1 and (event := self._next()) is not None:
            self._count += 1
            take_part(event)
        last = np.array([joined_at * world.size + world.rank])
        return int(collectives.allreduce(last, "max", world)[0]) % world.size

    def _next(self) -> dict[str, Any] | None:
        short = collectives.iallreduce(np.zeros(_SHORT_NBYTES, np.uint8), "max", self._world).wait()
        nbytes = int(short[: _HEADER.itemsize].view(_HEADER)[0])
        if not nbytes:
            return None
        text = short[_HEADER.itemsize :][:nbytes]
        if nbytes > text.size:
            text = collectives.iallreduce(np.zeros(nbytes, np.uint8), "max", self._world).wait()
        try:
            return json.loads(text.tobytes())  # type: ignore[no-any-return]
        except ValueError:  # the maximum of different announcements
            raise MismatchError(
                "join", expected="the same operation on all ranks with data", got="different ones",
                remedy="call the same operations in the same order on all ranks",
            ) from None  # fmt: skip


def _messages_of(text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the short message of an announcement, and the long one, empty if the short one has the text."""
    short = np.zeros(_SHORT_NBYTES, np.uint8)
    short[: _HEADER.itemsize].view(_HEADER)[0] = len(text)
    encoded = np.frombuffer(text, np.uint8)
    if len(text) <= _SHORT_NBYTES - _HEADER.itemsize:
        short[_HEADER.itemsize :][: len(text)] = encoded
        return short, encoded[:0]
    return short, encoded.copy()


def _announcements(world: World) -> Announcements:
    return world.keep(Announcements, lambda: Announcements(world))


class _WithGradient(torch.autograd.Function):
    """``run(x)``, whose gradient is ``back(gradient)``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Callable[..., Any], back: Callable[..., Any]) -> Any:
        ctx.back = back
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.back(gradient), None, None


def _averaged_gradient(tensor: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """Return ``tensor``; backward divides its gradient by the number of ranks."""
    n = process_set.size()
    return _WithGradient.apply(tensor, torch.Tensor.clone, lambda gradient: gradient / n)  # type: ignore[no-any-return, no-untyped-call]


def _needs_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def reduction_named(operation: str, op: ReduceOp | None, average: bool | None) -> str:
    """Return hpcdp's name of a reduction."""
    if op is not None and average is not None:
        raise ConfigError(operation, where="average", expected="op= alone", got="op= and average=")
    if op is None:
        op = Sum if average is False else Average
    if op is Adasum:
        raise UnsupportedError(
            operation, where="op", expected="Average, Sum, Min, Max or Product", got="Adasum, which hpcdp lacks",
            remedy="use op=hvd.Average, and hpcdp.optim.LARS or a warm-up for large batches",
        )  # fmt: skip
    value: str = instance(operation, "op", op, ReduceOp, "hvd.Average, Sum, Min, Max or Product").value
    return value


def _factors(
    tensors: Sequence[torch.Tensor], op: str, prescale: float, postscale: float
) -> tuple[float, float, dict[str, float]]:
    """Return the factors to multiply by before and after an operation, and those that it applies itself.

    It scales sums and means of floats in the pass in which it adds them up; other tensors are scaled here.
    """
    floats = all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
    if floats and op in (Sum.value, Average.value):
        return 1.0, 1.0, {"prescale": float(prescale), "postscale": float(postscale)}
    return prescale, postscale, {}


def _scale_(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply ``tensor`` in place: integers in double precision, halves in single precision."""
    if factor != 1:
        with torch.no_grad():  # it may be a parameter
            if not tensor.is_floating_point():
                tensor.copy_(tensor.double() * factor)
            elif tensor.dtype in _HALVES:
                tensor.copy_(tensor.float() * factor)
            else:
                tensor.mul_(factor)
    return tensor


def _rows(splits: Any) -> list[int] | None:
    if isinstance(splits, torch.Tensor) and splits.is_floating_point():
        raise ConfigError("alltoall", where="splits", expected="integers", got=str(splits.dtype))
    return None if splits is None else np.asarray(splits).tolist()  # type: ignore[no-any-return]


def _even_rows(tensor: torch.Tensor, n: int) -> list[int]:
    """Return the number of rows for each rank; the first ranks get one more."""
    if tensor.ndim == 0:
        raise UnsupportedError("reducescatter", where="tensor", expected="at least one axis", got="a number")
    least, more = divmod(len(tensor), n)
    return [least + (rank < more) for rank in range(n)]
