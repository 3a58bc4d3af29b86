"""`SyncBatchNorm`: batch normalization with statistics over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from ..collectives import allreduce
from ..comm import World, init
from ..errors import UnsupportedError


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
        kept = torch.promote_types(x.dtype, torch.float32)
        return count, mean.to(kept), var.to(kept)

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
    allreduce(array, "sum", world)
    if host is not sums:
        sums.copy_(host)
