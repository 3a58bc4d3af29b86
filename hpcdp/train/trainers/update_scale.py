"""What summed gradients are multiplied by in an update: one over samples and loss scale, less where they are clipped,
and nothing where they are not finite and such steps are left out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...arrays import Array, is_cupy
from ...errors import NonFiniteGradientError
from ...gradients import norms
from ...kernels.reference.norms import clipped_scale

if TYPE_CHECKING:
    from .bucket_trainer import BucketTrainer


def host_looks(trainer: BucketTrainer) -> bool:
    """Whether an update waits until the host knows something of the sums."""
    return trainer.policy.nonfinite != "ignore" or (trainer.clip_norm is not None and not clips_on_gpu(trainer))


def clips_on_gpu(trainer: BucketTrainer) -> bool:
    """Whether norm and scale stay on GPUs: each has all sums, the same ones, and nobody else needs to know them."""
    if trainer.clip_norm is None or trainer.policy.nonfinite != "ignore" or trainer.optimizer.by_layer:
        return False
    reducer, world = trainer.reducer, trainer.world
    has_all = world.size == 1 or trainer.owner.holds_all
    is_whole = world.part_comm is None and world.model_comm is None and reducer.virtual_shards is None
    return has_all and is_whole and all(is_cupy(bucket.mine) for bucket in reducer.buckets)


def update_scale(trainer: BucketTrainer, count: int) -> float | Array | None:
    """What the sums over ``count`` samples are multiplied by in the update; None where it is left out.

    Every rank must call. Counts what is not finite, and tells a loss scale that follows it.

    Raises:
        NonFiniteGradientError: a sum is not finite, and the policy is to raise.
    """
    scale = 1.0 / (count * trainer.loss_scale)
    if clips_on_gpu(trainer):
        return clipped_on_gpu(trainer, scale)
    if not host_looks(trainer):
        return scale
    squares = norms.squares_of_model(trainer.reducer)
    is_finite = math.isfinite(squares)
    if trainer.policy.nonfinite != "ignore":
        trainer.looked(is_finite)
    if not is_finite and trainer.policy.nonfinite == "raise":
        raise NonFiniteGradientError(
            "step", where=f"step {trainer.step_count + 1}", expected="finite gradients",
            got="a NaN or an infinity in their sum over all ranks",
            remedy="lower the learning rate, or skip such steps: Policy(nonfinite='skip')",
        )  # fmt: skip
    if not is_finite and trainer.policy.nonfinite == "skip":
        return None
    return scale if trainer.clip_norm is None else clipped_scale([squares], scale, trainer.clip_norm)


def clipped_on_gpu(trainer: BucketTrainer, scale: float | Array) -> Array:
    """The scale in the place of ``scale``, which may lie on the GPU itself: float64, shape ``(1,)``; nothing waits."""
    assert trainer.clip_norm is not None
    return norms.clipped_scale_on_gpu(trainer.reducer, scale, trainer.clip_norm)
