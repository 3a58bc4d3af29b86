"""Collectives and messages with gradients, for `torch.autograd`; batch normalization over the batches of all ranks.

Every rank computes a loss of its own, and gradients are those of the sum of all losses. So the gradient of a sum is the
sum of its gradients, and that of an exchange is the exchange in the other direction. Backward communicates: every rank
must run it, through the same operations, also where a rank's own loss does not need the result. Second derivatives
exist, too, except through messages.

Operations return new tensors and change no argument. The layer `SyncBatchNorm` updates its running statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from .. import collectives
from ..collectives.staging import checked_root, ranks_of
from ..comm import World, init
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
        x: a tensor; ranks may differ in the length of axis 0. A tensor without axes counts as shape ``(1,)``.
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
        return x.new_zeros((), dtype=x.dtype.to_real())

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
        if not (received.is_floating_point() or received.is_complex()):
            ctx.mark_non_differentiable(received)
        return received

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        collectives.send(grad, ctx.source, ctx.tag, ctx.world)
        zeros = None if ctx.after is None else torch.zeros_like(ctx.after)
        return torch.zeros(()), zeros, None, None, None, None


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Batch normalization as ``torch.nn.SyncBatchNorm``: in training with mean and variance over all ranks' batches.

    The input has the shape ``(N, C, ...)``; N may differ between ranks and be 0 on some. Every rank must run the same
    forwards and backwards. Evaluation needs no communication; without running statistics it uses those of this rank's
    batch. As in torch, the biased variance normalizes, and ``running_var`` has the unbiased one, both over all ranks.
    For inputs on GPUs, the sums go through the host, which waits: two a channel and a count in each forward, and two a
    channel in each backward.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: see ``torch.nn.BatchNorm2d``.
        world: the ranks; default `hpcdp.init()`.

    Raises:
        ValueError: an input of fewer than two dimensions; at most one value a channel over all ranks.
        UnsupportedError: an input that is neither in CPU memory nor on a CUDA GPU.

    Source: Ioffe and Szegedy, "Batch normalization", 2015, algorithm 1, over the global batch.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        world: World | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.world = init() if world is None else world

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, world: World | None = None) -> torch.nn.Module:
        """Replace each BatchNorm layer of ``module``, of any number of dimensions, by one of this class.

        The new layers take over parameters and buffers. If ``module`` is itself such a layer, the result is a new one.
        """
        world = init() if world is None else world
        converted = module
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(module, cls):
            converted = cls(
                module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, world
            )
            converted.weight, converted.bias = module.weight, module.bias
            converted.running_mean, converted.running_var = module.running_mean, module.running_var
            converted.num_batches_tracked = module.num_batches_tracked
            converted.training = module.training
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child, world))
        return converted

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``input``; in training every rank must call, and the running statistics change in place."""
        if not self.training or self.world.size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        if input.device.type not in ("cpu", "cuda"):
            raise UnsupportedError("SyncBatchNorm", expected="an input in CPU memory or on a GPU", got=input.device)
        count, mean, var = self._statistics(input.detach())
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            self._keep(count, mean, var)
        return _Normalized.apply(input, self.weight, self.bias, mean, var, self.eps, count, self.world)  # type: ignore[no-any-return,no-untyped-call]

    def _statistics(self, x: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
        """Return count, mean and variance of each channel over all ranks, from sums in float64 against cancellation."""
        over = [dim for dim in range(x.dim()) if dim != 1]
        doubles = x.double()
        sums = torch.cat(
            [
                torch.tensor([x.numel() / x.shape[1]], dtype=torch.float64, device=x.device),
                doubles.sum(over),
                (doubles * doubles).sum(over),
            ]
        )
        _sum_over_ranks(sums, self.world)
        count = float(sums[0])
        if count <= 1:
            raise ValueError(f"SyncBatchNorm: expected more than 1 value per channel over all ranks, got {count:g}")
        mean, mean_of_squares = (sums[1:] / count).chunk(2)
        var = (mean_of_squares - mean * mean).clamp_(min=0)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return count, mean.to(dtype), var.to(dtype)

    def _keep(self, count: float, mean: torch.Tensor, var: torch.Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_((var * (count / (count - 1))).to(self.running_var.dtype), factor)


class _Normalized(torch.autograd.Function):
    """Normalization by statistics that depend on the inputs of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, var: torch.Tensor, eps: float,
        count: float, world: World,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps))
        ctx.count, ctx.world = count, world
        if x.dtype.itemsize == 2:  # torch needs float32 weights for statistics in float32
            weight, bias = (None if param is None else param.to(mean.dtype) for param in (weight, bias))
        return torch.nn.functional.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable  # autograd does not see the sums over ranks
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight, mean, inverse = ctx.saved_tensors
        over = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        normalized = (x - mean.view(shape)) * inverse.view(shape)
        gradient = gradient.to(normalized.dtype)
        of_bias, of_weight = gradient.sum(over), (gradient * normalized).sum(over)
        sums = torch.cat([of_bias, of_weight]).double()
        _sum_over_ranks(sums, ctx.world)
        mean_gradient, mean_product = (sums / ctx.count).to(normalized.dtype).view(2, *shape)
        scale = inverse if weight is None else inverse * weight
        of_x = (gradient - mean_gradient - normalized * mean_product) * scale.view(shape)
        if weight is None:
            return of_x.to(x.dtype), None, None, None, None, None, None, None
        return of_x.to(x.dtype), of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None, None, None, None


def _sum_over_ranks(sums: torch.Tensor, world: World) -> None:
    host = sums.cpu()  # the tensor itself if it is on the host
    array: np.ndarray = host.numpy()
    collectives.allreduce(array, "sum", world)
    if host is not sums:
        sums.copy_(host)
