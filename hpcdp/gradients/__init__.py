"""Floor 4: gradients. Imports: collectives, comm, compression, optim, autograd, engine, trace, kernels, streams, state,
devices, holders, arrays, errors.

From a model's gradients to its update:

- `buckets` fuses parameters into flat buckets: a pure function of the model.
- `bucket` is one of them: its memory and its state.
- `reducer` keeps the state of every bucket and sums it over the ranks.
- `rail` sums what nodes have summed, by messages.
- `device_sums` sums buckets on GPUs, in the node there, across nodes through host memory (`staging`).
- `residuals` makes what compression has not sent yet a part of a state.
- `sharded_state` is what a rank holds of the state of each parameter.
- `virtual_shards` sums in an order that does not depend on the number of ranks.
- `beside` is what buckets do while Python computes: reductions that backward launches, updates that outlast a step.
- `closing` exchanges the few numbers that end a step; `usage` counts in them which parameters any rank has used.
- `lane` is where reductions progress while Python computes; `critical_path` is the least time that a step can take.
- `norms` finds the norms of summed gradients: of a whole model, and of its layers.
- `owners` says who updates which parameters: every rank all of them, or the owner of a shard its part; `auto_owner`
  chooses where nobody says.
"""

from .buckets import Layout, Slot
from .owners import EveryRank, Owner, ShardOwner
from .reducer import Reducer

__all__ = ["EveryRank", "Layout", "Owner", "Reducer", "ShardOwner", "Slot"]
