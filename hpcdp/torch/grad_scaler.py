"""Losses scaled up against underflow, with an optimizer of which every rank does its part."""

from __future__ import annotations

from typing import Any

import torch

from .sharded_optimizer import ShardedOptimizer


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``, for a `ShardedOptimizer`, too: a step is left out on all ranks or on none.

    With ``owner="rank"`` torch's own does as well, since all ranks see the same averages. Every rank must make it, with
    the same settings, and call `unscale_`, `step` and `update`. After `DistributedDataParallel.join`
    `broadcast_optimizer_state` gives all ranks the scale of those that went on longest.

    Args:
        device: of the gradients, ``"cuda"`` for those on GPUs.
        settings: as torch's takes them: init_scale, growth_factor, backoff_factor, growth_interval, enabled.
    """

    def __init__(self, device: str = "cpu", **settings: Any) -> None:
        super().__init__(device, **settings)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Update, unless a gradient of some rank is not finite; every rank must call."""
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.knows_scaler = True
            steps = optimizer.num_steps
            result = super().step(optimizer, *args, **kwargs)
            if self.is_enabled() and optimizer.num_steps == steps:
                optimizer.skip()
            return result
        return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # Torch's FSDP overrides the same method for the same end.
        if not isinstance(optimizer, ShardedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        finite = optimizer.unscale(float(inv_scale))
        return {found_inf.device: found_inf.fill_(0.0 if finite else 1.0)}
