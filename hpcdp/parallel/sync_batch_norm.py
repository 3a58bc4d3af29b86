"""Batch normalization with the statistics of all ranks' batches."""

from __future__ import annotations

from ..autograd import Tensor
from ..autograd.tape import catch_up
from ..collectives import allreduce
from ..comm import World, init
from ..comm.world import require_world
from ..core.arrays import on_device_of
from ..core.checks import instance
from ..errors import ConfigError
from ..nn import BatchNorm, Module, entered_shard
from ..nn.functional import joint_batch_norm
from ..nn.virtual_shards import move


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
            raise ConfigError("SyncBatchNorm.convert", expected=expected, got=f"a {name}, which splits it")
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
                "SyncBatchNorm", expected="a Trainer without reproducible=True", got="a reproducible one",
                remedy="use nn.BatchNorm, whose statistics are those of a virtual shard on any number of ranks",
            )  # fmt: skip
        with on_device_of(x.data):  # as operators do, which this is not: its order is the same on all ranks
            y, mean, variance, count = joint_batch_norm(
                x, self.gamma, self.beta, self.eps, lambda sums: allreduce(sums, "sum", self.world)
            )
            if count:
                catch_up()  # earlier asynchronous calls may still read the statistics
                move(self.running_mean, self.momentum, mean)
                move(self.running_var, self.momentum, variance)
        return y
