"""From a model's gradients to its update, on all ranks.

- `buckets`: the layout of parameters in flat buckets, and their memory.
- `reducer`: owns buckets, gradient hooks and the state of a step.
- `reductions`: where buckets are in memory and how they are reduced, on one node and along the rails between nodes.
- `gpu_reduction`: the reduction of buckets on GPUs.
- `deterministic`: the reduction in an order that does not depend on the number of ranks.
- `overlap`: when reductions run: at the end of a step, or during backward, with updates during the next forward.
- `sharded_update`: every rank updates all parameters, or the owner of a shard its part.
- `trainer`: what trainers on buckets and on stores share; `bucket_trainer`: the trainer on buckets.
- `trainer_state`: the tensors of its state. `policy`: non-finite and missing gradients, loss scaling.
- `profiling`: times of a step.
"""

from .buckets import Layout, Slot
from .reducer import Reducer
from .sharded_update import Replicated, ShardedUpdate, UpdateStrategy

__all__ = ["Layout", "Reducer", "Replicated", "ShardedUpdate", "Slot", "UpdateStrategy"]
