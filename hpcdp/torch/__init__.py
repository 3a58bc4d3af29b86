"""Floor 7: torch, PyTorch models on the same reducer. Imports: checkpoint, gradients, optim, data, collectives,
compression, comm, kernels, state, streams, devices, arrays, errors.

- `distributed`: the wrapper of a module whose gradients are averaged over all ranks.
- `sharded_optimizer`: every rank updates its part of parameters that a node holds once.
- `sync_batch_norm`: batch normalisation over the batches of all ranks.
- `grad_scaler`: losses scaled up, with an optimizer by shards.
- `optimizer_state`: the state of a whole optimizer, from one rank to all.
- `sampler`: every rank gets its own samples.
- `state`: tensors, generators and schedules in checkpoints.
- `export`: a checkpoint as a file for `torch.load`.

Inside them:

- `exchange`: tensors and arrays over the same memory, on the host and on GPUs.
- `parameters`: a torch parameter as the reducer sees it.
- `parameter_order`: which parameter of a saved optimizer is which one.
- `sharded_state`: the state of an optimizer by shards, from and to torch's state dicts.
- `backward`: from the first gradient of a backward to the average of all.
- `module_buffers`: running statistics and the like, the same on all ranks.
- `join`: ranks that have run out of data.
"""

from ..errors import ConfigError

try:
    import torch  # noqa: F401
except ImportError as _error:
    raise ConfigError(
        "hpcdp.torch", expected="PyTorch", got="no module named torch", remedy="pip install 'hpcdp[torch]'"
    ) from _error

from . import state as _state  # noqa: F401  (checkpoints see torch's tensors from now on)
from .distributed import DistributedDataParallel
from .grad_scaler import GradScaler
from .optimizer_state import broadcast_optimizer_state
from .sampler import DistributedSampler
from .sharded_optimizer import ShardedOptimizer
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "GradScaler",
    "ShardedOptimizer",
    "SyncBatchNorm",
    "broadcast_optimizer_state",
]
