"""Data parallelism: from the gradients of a model to its update, on all ranks.

- `bucket_layout`: the layout of parameters in flat buckets, and the state of a bucket.
- `reducer`: the owner of buckets, gradient hooks and the state of a step.
- `cpu_reduction`, `gpu_reduction`, `deterministic`: reductions in host memory, on GPUs, and in a fixed order of sums.
- `overlap`: schedules of reductions and updates, at the end of a step or beside computation; times of a step.
- `sharded_update`: update strategies: every rank updates all parameters, or the owner of a shard updates it.
- `base_trainer`, `bucket_trainer`: the base of all trainers, the trainer on buckets.
- `gradient_policy`: missing and non-finite gradients. `loss_scaling`: constant and dynamic scales of the loss.
- `trainer_state`: the saved state of a trainer: the optimizer's state, and the residuals of compression.
"""

from .bucket_layout import Layout, Slot
from .reducer import Reducer
from .sharded_update import Replicated, ShardedUpdate, UpdateStrategy

__all__ = ["Layout", "Reducer", "Replicated", "ShardedUpdate", "Slot", "UpdateStrategy"]
