"""Collectives with gradients, for `hpcdp.autograd`, and batch normalization with statistics of all ranks' batches.

There are two conventions, by the losses of the ranks:

- **Each rank has a loss of its own**, and gradients are those of the sum of all losses: `allreduce`, `allgather`,
  `reduce_scatter`, `alltoall`, `broadcast`. The gradient of a sum is the sum of its gradients, and that of an exchange
  is the exchange in the other direction.
- **All ranks compute one loss from full tensors**, which have the same bits on each, and so have their gradients:
  `fan_out`, `summed`, `gathered`, `own_channels`, of which the layers of `tensor_parallel` are made. `fan_out` is f and
  `summed` is g of Shoeybi et al., "Megatron-LM", 2019, figure 3.

Every rank must call, in the same order, and so must its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import collectives
from ..autograd import Gradient, Tensor, on_tape
from ..autograd.tape import catch_up
from ..collectives.staging import checked_root, ranks_of
from ..comm import World, init
from ..comm.world import require_world
from ..core.arrays import Array, array_namespace, on_device_of
from ..core.checks import instance
from ..errors import ConfigError, UnsupportedError
from ..kernels import empty
from ..nn import BatchNorm, Module, entered_shard
from ..nn.functional import joint_batch_norm
from ..nn.virtual_shards import move


def allreduce(x: Tensor, op: str = "sum", world: World | None = None) -> Tensor:
    """Return the elementwise sum or mean over all ranks; backward reduces the gradients in the same way.

    Args:
        x: a tensor of the same shape and dtype on all ranks.
        op: ``"sum"`` or ``"mean"``.
        world: the ranks; default `hpcdp.init()`.
    """
    op, world = _checked_op("allreduce", op), ranks_of(world)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(collectives.allreduce(gy, op, world, out=dx.empty()))

    total = empty(x.shape, x.dtype, array_namespace(x.data))
    return on_tape(collectives.allreduce(x.data, op, world, out=total), (x,), pullback)


def allgather(x: Tensor, world: World | None = None) -> Tensor:
    """Return every rank's rows, concatenated in the order of the ranks; backward sums the gradients of its rows.

    Args:
        x: a tensor with at least one axis; ranks may differ in the length of axis 0.
        world: the ranks; default `hpcdp.init()`.
    """
    world, shape = ranks_of(world), x.shape

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            rows = collectives.allgather(np.array([shape[0]]), world).tolist()
            dx.add(collectives.reduce_scatter(gy, world=world, splits=rows))

    return on_tape(collectives.allgather(x.data, world), (x,), pullback)


def reduce_scatter(
    x: Tensor, op: str = "sum", world: World | None = None, splits: Sequence[int] | None = None
) -> Tensor:
    """Return this rank's rows of the sum or mean over all ranks; backward gathers their gradients.

    Args:
        x: a tensor of the same shape and dtype on all ranks, with at least one axis.
        op: ``"sum"`` or ``"mean"``.
        world: the ranks; default `hpcdp.init()`.
        splits: the number of rows for each rank, the same on all ranks; default rows ``N r // n`` to ``N (r + 1) // n``
            of N for rank r of n.
    """
    op, world = _checked_op("reduce_scatter", op), ranks_of(world)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            gathered = collectives.allgather(gy, world)
            dx.add(gathered / gathered.dtype.type(world.size) if op == "mean" else gathered)

    shard = collectives.reduce_scatter(x.data, op, world, splits="even" if splits is None else splits)
    return on_tape(shard, (x,), pullback)


def alltoall(x: Tensor, splits: Sequence[int] | None = None, world: World | None = None) -> Any:
    """Send each rank its rows of ``x``, as `hpcdp.alltoall`; backward sends their gradients back.

    Args:
        x: as for `hpcdp.alltoall`.
        splits: the number of rows for each rank; default equal numbers.
        world: the ranks; default `hpcdp.init()`.

    Returns:
        The received rows; with ``splits`` a pair, with the number of rows from each rank.
    """
    world = ranks_of(world)
    exchanged = collectives.alltoall(x.data, splits, world)
    received, counts = (exchanged, None) if splits is None else exchanged

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            if counts is None:
                dx.add(collectives.alltoall(gy, world=world))
            else:
                dx.add(collectives.alltoall(gy, counts, world)[0])

    result = on_tape(received, (x,), pullback)
    return result if splits is None else (result, counts)


def broadcast(x: Tensor, root: int = 0, world: World | None = None) -> Tensor:
    """Return the ``x`` of rank ``root`` on all ranks; backward sums the gradients on ``root``, others get zeros.

    Args:
        x: a tensor of the same shape and dtype on all ranks.
        root: the rank whose ``x`` is sent.
        world: the ranks; default `hpcdp.init()`.
    """
    world = ranks_of(world)
    root = checked_root("broadcast", root, world)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            total = dx.empty()
            total[...] = gy
            collectives.reduce(total, "sum", root, world)
            if world.rank != root:
                total[...] = 0
            dx.add(total)

    return on_tape(collectives.broadcast(x.data.copy(), root, world), (x,), pullback)


def _checked_op(operation: str, op: str) -> str:
    if op not in ("sum", "mean"):
        raise UnsupportedError(operation, where="op", expected='"sum" or "mean", which have gradients', got=repr(op))
    return op


def fan_out(x: Tensor, parts: World) -> Tensor:
    """Return ``x``, full, as the input of different computations; backward sums their gradients over the ranks."""
    if parts.size == 1:
        return x

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(collectives.allreduce(gy, "sum", parts, out=dx.empty()))

    return on_tape(x.data, (x,), pullback)


def summed(x: Tensor, parts: World) -> Tensor:
    """Return the full sum over the ranks; the gradient of each ``x`` is that of the sum."""
    if parts.size == 1:
        return x
    total = empty(x.shape, x.dtype, array_namespace(x.data))

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(gy)

    return on_tape(collectives.allreduce(x.data, "sum", parts, out=total), (x,), pullback)


def gathered(x: Tensor, axis: int, ends: Sequence[int], parts: World) -> Tensor:
    """Return the full tensor from each rank's channels along ``axis``; backward returns each rank its gradient.

    ``ends`` are the bounds of the ranks' channels, ``parts.size + 1`` integers.
    """
    if parts.size == 1:
        return x
    own_part = _own(axis % x.ndim, ends, parts)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(array_namespace(gy).ascontiguousarray(gy[own_part]))

    return on_tape(_join(x.data, axis, ends, parts), (x,), pullback)


def own_channels(x: Tensor, axis: int, ends: Sequence[int], parts: World) -> Tensor:
    """Return this rank's channels of the full ``x``; backward gathers the gradient. ``ends`` are as in `gathered`."""
    if x.ndim < 2 or x.shape[axis] != ends[-1]:
        expected = f"{ends[-1]} channels along axis {axis}, to be split over {parts.size} ranks"
        raise UnsupportedError("own_channels", expected=expected, got=tuple(x.shape))
    if parts.size == 1:
        return x

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(_join(gy, axis, ends, parts))

    channels = x.data[_own(axis % x.ndim, ends, parts)]
    return on_tape(array_namespace(channels).ascontiguousarray(channels), (x,), pullback)


def _own(axis: int, ends: Sequence[int], parts: World) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(ends[parts.rank], ends[parts.rank + 1]))


def _join(part: Array, axis: int, ends: Sequence[int], parts: World) -> Array:
    """Return all ranks' channels in rank order, padded for allgather since ranks may have different numbers."""
    xp = array_namespace(part)
    counts = [ends[rank + 1] - ends[rank] for rank in range(parts.size)]
    channels = xp.moveaxis(part, axis, 0)
    padded = xp.zeros((parts.size, max(counts), *channels.shape[1:]), dtype=part.dtype)
    padded[parts.rank, : counts[parts.rank]] = channels
    collectives.allgather(padded[parts.rank], parts, out=padded)
    full = xp.concatenate([padded[rank, :count] for rank, count in enumerate(counts)])
    return xp.ascontiguousarray(xp.moveaxis(full, 0, axis))


class SyncBatchNorm(BatchNorm):
    """A `nn.BatchNorm` that normalizes by the mean and variance of the global batch in training.

    Batches may differ in size and be empty. Every rank must run the same forwards and backwards, a rank without samples
    on an empty batch, as in `fit`. Prediction needs no other rank. Gradients of ``gamma`` and ``beta`` are those of
    this rank's samples; a `Trainer` sums them like others. Running statistics are the same on all ranks. Like
    `nn.BatchNorm` they use the biased variance (divided by the number n of values in the global batch), while
    ``torch.nn.SyncBatchNorm`` and `hpcdp.torch.SyncBatchNorm` use the unbiased one (divided by n - 1).

    On a GPU forward sends two sums per channel and their count through the host, in float64, and backward two sums per
    channel. The host waits for both.

    Args:
        channels: as in `nn.BatchNorm`.
        momentum: as in `nn.BatchNorm`.
        eps: as in `nn.BatchNorm`.
        world: the ranks; default `hpcdp.init()`.

    Raises:
        ConfigError: in forward, with a reproducible `Trainer`, whose virtual shards have their own statistics.

    Source: Ioffe and Szegedy, "Batch normalization", 2015, algorithm 1, over the global batch.
    """

    needs_all_ranks = True

    def __init__(self, channels: int, momentum: float = 0.9, eps: float = 1e-5, world: World | None = None) -> None:
        super().__init__(channels, momentum, eps)
        require_world("SyncBatchNorm", world)
        self.world = init() if world is None else world
        self._mark()

    @classmethod
    def convert(cls, net: Module, world: World | None = None) -> Module:
        """Replace each `nn.BatchNorm` within ``net``, in place, by a `SyncBatchNorm` with the same parameters.

        Parameters and buffers are shared with the replaced layer, so a `Trainer` may be created before or after.

        Args:
            net: the network, or a single `nn.BatchNorm`.
            world: the ranks; default `hpcdp.init()`.

        Returns:
            ``net``, or a new layer if ``net`` is itself a `nn.BatchNorm`.

        Raises:
            ConfigError: ``net`` is not a network, or splits batches: `nn.Replicas`, `parallel.Pipeline`.
        """
        instance("SyncBatchNorm.convert", None, net, Module, "a network")
        if net.gives_pieces:
            name = type(net).__name__
            expected = "a network that takes each rank's whole batch"
            raise ConfigError("SyncBatchNorm.convert", expected=expected, got=f"a {name}, which splits the batch")
        require_world("SyncBatchNorm.convert", world)
        world = init() if world is None else world
        if type(net) is BatchNorm:
            layer = cls(net.gamma.shape[0], net.momentum, net.eps, world)
            for name in ("gamma", "beta", "running_mean", "running_var"):
                setattr(layer, name, getattr(net, name))
            layer._mark()
            return layer
        for name, child in net.children():
            setattr(net, name, cls.convert(child, world))
        return net

    def _mark(self) -> None:
        """Let a `Trainer` detect ranks without this layer, for which the other ranks would wait."""
        self.gamma.is_joint = self.beta.is_joint = True

    def by_batch(self, x: Tensor) -> Tensor:
        """See `nn.BatchNorm`."""
        if entered_shard() is not None:
            raise ConfigError(
                "SyncBatchNorm", expected="a Trainer without reproducible=True", got="reproducible=True",
                remedy="use nn.BatchNorm, whose statistics are those of a virtual shard on any number of ranks",
            )  # fmt: skip
        with on_device_of(x.data):  # as operators do, which this is not: its order is the same on all ranks
            y, mean, variance, count = joint_batch_norm(
                x, self.gamma, self.beta, self.eps, lambda sums: collectives.allreduce(sums, "sum", self.world)
            )
            if count:
                catch_up()  # earlier asynchronous calls may still read the statistics
                move(self.running_mean, self.momentum, mean)
                move(self.running_var, self.momentum, variance)
        return y
