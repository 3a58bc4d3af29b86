"""Batch normalisation by the statistics of all ranks' batches."""

from __future__ import annotations

from ..autograd import Tensor
from ..autograd.tape import catch_up
from ..collectives import allreduce
from ..comm import World, init
from ..comm.world import require_world
from ..core.arrays import on_device_of
from ..errors import ConfigError, type_named
from ..nn import BatchNorm, Module, entered_shard
from ..nn.functional import joint_batch_norm
from ..nn.microbatch import move


class SyncBatchNorm(BatchNorm):
    """`nn.BatchNorm` that in training normalises by mean and variance of the batches of all ranks together.

    Batches may differ in size and be empty. Every rank must run the same forwards and backwards, those without samples
    on an empty batch, as `fit` does. Prediction needs no other rank. The gradients of ``gamma`` and ``beta`` are those
    of this rank's samples, which a `Trainer` sums as others; running statistics stay alike on all ranks. As those of
    `nn.BatchNorm` they take the biased variance of the whole batch (divided by its number of values), while
    ``torch.nn.SyncBatchNorm`` and `hpcdp.torch.SyncBatchNorm` keep the unbiased one (divided by one less).

    Of a batch on a GPU two sums a channel and their count go through the host, in float64, and in backward two sums a
    channel; the host waits for both.

    Args:
        world: the ranks; default `hpcdp.init()`. The others are those of `nn.BatchNorm`.

    Raises:
        ConfigError: in forward, under a reproducible `Trainer`, where each virtual shard has statistics of its own.

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
        """Replace each `nn.BatchNorm` within ``net``, in place, by one of this kind with its parameters and buffers.

        Returns:
            ``net``; of a layer alone a new one. Before a `Trainer` has the parameters, or after: they are the same.

        Raises:
            ConfigError: no network, or one that computes a batch in pieces: `nn.Replicas`, `parallel.Pipeline`.
        """
        if not isinstance(net, Module):
            raise ConfigError("SyncBatchNorm.convert", expected="a network", got=type_named(net))
        if net.gives_pieces:
            name = type(net).__name__
            expected = "a network that takes each rank's whole batch"
            raise ConfigError("SyncBatchNorm.convert", expected=expected, got=f"a {name}, which cuts it")
        require_world("SyncBatchNorm.convert", world)
        world = init() if world is None else world
        if type(net) is BatchNorm:
            found = cls(net.gamma.shape[0], net.momentum, net.eps, world)
            for name in ("gamma", "beta", "running_mean", "running_var"):
                setattr(found, name, getattr(net, name))
            found._mark()
            return found
        for name, child in net.children():
            setattr(net, name, cls.convert(child, world))
        return net

    def _mark(self) -> None:
        """So that a `Trainer` finds ranks without this layer, for which the others would wait."""
        self.gamma.is_joint = self.beta.is_joint = True

    def by_batch(self, x: Tensor) -> Tensor:
        if entered_shard() is not None:
            raise ConfigError(
                "SyncBatchNorm", expected="a Trainer without reproducible=True", got="one with it",
                remedy="take nn.BatchNorm: its statistics are those of a virtual shard, on any number of ranks",
            )  # fmt: skip
        with on_device_of(x.data):  # as operators do; this is none, since ranks must come to it in one order
            y, mean, variance, count = joint_batch_norm(
                x, self.gamma, self.beta, self.eps, lambda sums: allreduce(sums, "sum", self.world)
            )
            if count:
                catch_up()  # earlier calls, which may read them, where calls are asynchronous
                move(self.running_mean, self.momentum, mean)
                move(self.running_var, self.momentum, variance)
        return y
