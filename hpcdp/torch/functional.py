"""Collectives and messages with gradients, for `torch.autograd`.

Every rank computes a loss of its own, and gradients are those of the sum of all losses. So the gradient of a sum is the
sum of its gradients, and that of an exchange is the exchange in the other direction. Backward communicates: every rank
must run it, through the same operations, also where a rank's own loss does not need the result. Second derivatives
exist, too, except through messages.

Operations return new tensors and change no argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .. import collectives
from ..collectives.staging import checked_root, ranks_of
from ..comm import World
from ..errors import UnsupportedError

_HALVES = (torch.float16, torch.bfloat16)


def allreduce(x: torch.Tensor, op: str = "sum", world: World | None = None) -> torch.Tensor:
    """Return the elementwise sum or mean over all ranks; every rank must call.

    Args:
        x: a tensor of the same shape and dtype on all ranks.
        op: ``"sum"`` or ``"mean"``.
        world: the ranks; default `hpcdp.init()`.
    """
    return _AllReduce.apply(x, _checked_op("allreduce", op), ranks_of(world))  # type: ignore[no-any-return, no-untyped-call]


def allgather(x: torch.Tensor, world: World | None = None) -> torch.Tensor:
    """Return every rank's rows, concatenated in the order of the ranks; every rank must call.

    Args:
        x: a tensor; ranks may differ in the length of axis 0. A number counts as shape ``(1,)``.
        world: the ranks; default `hpcdp.init()`.
    """
    return _AllGather.apply(x, ranks_of(world))  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter(
    x: torch.Tensor, op: str = "sum", world: World | None = None, splits: Sequence[int] | None = None
) -> torch.Tensor:
    """Return this rank's rows of the sum or mean over all ranks; every rank must call.

    Args:
        x: a tensor of the same shape and dtype on all ranks, with at least one axis.
        op: ``"sum"`` or ``"mean"``.
        world: the ranks; default `hpcdp.init()`.
        splits: the number of rows for each rank, the same on all ranks; default rows ``N r // n`` to ``N (r + 1) // n``
            of N for rank r of n.
    """
    op, world = _checked_op("reduce_scatter", op), ranks_of(world)
    return _ReduceScatter.apply(x, op, world, "even" if splits is None else splits)  # type: ignore[no-any-return, no-untyped-call]


def alltoall(x: torch.Tensor, splits: Sequence[int] | None = None, world: World | None = None) -> Any:
    """Send each rank its rows of ``x`` and receive this rank's rows of every other ``x``; every rank must call.

    Args:
        x: as for `hpcdp.alltoall`.
        splits: the number of rows for each rank; default equal numbers.
        world: the ranks; default `hpcdp.init()`.

    Returns:
        As `hpcdp.alltoall`: the received rows, and with ``splits`` also the number of rows from each rank.
    """
    received, counts = _AllToAll.apply(x, splits, ranks_of(world))  # type: ignore[no-untyped-call]
    return received if splits is None else (received, counts)


def broadcast(x: torch.Tensor, root: int = 0, world: World | None = None) -> torch.Tensor:
    """Return the ``x`` of rank ``root`` on all ranks; every rank must call.

    Args:
        x: a tensor of the same shape and dtype on all ranks. The gradient is zero on all ranks but ``root``.
        root: the rank whose ``x`` is sent.
        world: the ranks; default `hpcdp.init()`.
    """
    world = ranks_of(world)
    return _Broadcast.apply(x, checked_root("broadcast", root, world), world)  # type: ignore[no-any-return, no-untyped-call]


def send(x: torch.Tensor, dest: int, tag: int = 0, world: World | None = None) -> torch.Tensor:
    """Send ``x`` to rank ``dest``, which calls `recv`; backward receives its gradient.

    Args:
        x: a tensor.
        dest: the receiver.
        tag: as for `hpcdp.send`.
        world: the ranks; default `hpcdp.init()`.

    Returns:
        A zero, to be added to the loss: backward through it reaches ``x``. A rank without a loss calls its
            ``backward()``.
    """
    world = ranks_of(world)
    has_gradient = x.requires_grad and torch.is_grad_enabled()
    collectives.send(np.array([has_gradient]), dest, tag, world)
    return _Send.apply(x, dest, tag, world)  # type: ignore[no-any-return, no-untyped-call]


def recv(
    source: int, tag: int = 0, world: World | None = None, after: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:  # fmt: skip
    """Receive a tensor that rank ``source`` sends with `send`; backward sends its gradient back.

    Args:
        source: the sender.
        tag: the tag of `send`.
        world: the ranks; default `hpcdp.init()`.
        after: the result of an earlier `send` of this rank, whose gradient backward receives after this one is sent.
        device: the device of the result.

    Returns:
        A new tensor. It requires a gradient if the sent tensor does, and then this rank must run backward.
    """
    world = ranks_of(world)
    has_gradient = bool(collectives.recv(None, source, tag, world)[0])
    mark = torch.zeros((), requires_grad=has_gradient)
    return _Recv.apply(mark, after, source, tag, world, device)  # type: ignore[no-any-return, no-untyped-call]


def _checked_op(operation: str, op: str) -> str:
    if op not in ("sum", "mean"):
        raise UnsupportedError(
            operation, where="op", expected='"sum" or "mean", which have gradients', got=repr(op),
            remedy=f"call hpcdp.{operation} on x.detach()",
        )  # fmt: skip
    return op


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: str, world: World) -> torch.Tensor:
        ctx.op, ctx.world = op, world
        return collectives.allreduce(x, op, world, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return allreduce(grad, ctx.op, ctx.world), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World) -> Any:
        ctx.shape, ctx.world = x.shape, world
        return collectives.allgather(x, world)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        rows = ctx.shape[0] if ctx.shape else 1
        splits = collectives.allgather(np.array([rows]), ctx.world).tolist()
        return reduce_scatter(grad, "sum", ctx.world, splits).reshape(ctx.shape), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: str, world: World, splits: Sequence[int] | str) -> torch.Tensor:
        ctx.op, ctx.world = op, world
        return collectives.reduce_scatter(x, op, world, splits=splits)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        share = grad / ctx.world.size if ctx.op == "mean" else grad
        return allgather(share, ctx.world), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, splits: Sequence[int] | None, world: World) -> Any:
        ctx.world = world
        if splits is None:
            received, counts = collectives.alltoall(x, None, world), None
            ctx.back = None
        else:
            received, counts = collectives.alltoall(x, splits, world)
            ctx.back = counts.tolist()
            ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:  # type: ignore[override]
        back = alltoall(grad, ctx.back, ctx.world)
        return back if ctx.back is None else back[0], None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, root: int, world: World) -> torch.Tensor:
        ctx.root, ctx.world = root, world
        return collectives.broadcast(x.clone(), root, world)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _Reduce.apply(grad, ctx.root, ctx.world), None, None  # type: ignore[no-untyped-call]


class _Reduce(torch.autograd.Function):
    """The sum over all ranks on one of them, and zeros on others."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, root: int, world: World) -> torch.Tensor:
        ctx.root, ctx.world = root, world
        total = collectives.reduce(x.clone(), "sum", root, world)
        return total if world.rank == root else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return broadcast(grad, ctx.root, ctx.world), None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dest: int, tag: int, world: World) -> torch.Tensor:
        ctx.like, ctx.dest, ctx.tag, ctx.world = torch.empty_like(x, device="meta"), dest, tag, world
        ctx.device = x.device
        collectives.send(x, dest, tag, world)
        return x.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        out = torch.empty_like(ctx.like, device=ctx.device)
        return collectives.recv(out, ctx.dest, ctx.tag, ctx.world), None, None, None


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mark: torch.Tensor, after: torch.Tensor | None, source: int, tag: int, world: World, device: Any
    ) -> torch.Tensor:
        ctx.source, ctx.tag, ctx.world, ctx.after = source, tag, world, after
        received: torch.Tensor = torch.as_tensor(collectives.recv(None, source, tag, world), device=device)
        if not received.is_floating_point():
            ctx.mark_non_differentiable(received)
        return received

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        collectives.send(grad, ctx.source, ctx.tag, ctx.world)
        zeros = None if ctx.after is None else torch.zeros_like(ctx.after)
        return torch.zeros(()), zeros, None, None, None, None
