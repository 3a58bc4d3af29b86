"""PyTorch models on the same reducer.

- `distributed`: the wrapper of a module whose gradients are averaged over all ranks, and its backward.
- `sharded_optimizer`: every rank updates its part of parameters that a node holds once.
- `sync_batch_norm`: batch normalisation over the batches of all ranks.
- `sampler`: gives every rank its own samples.
- `state`: tensors, generators and schedules in checkpoints. `tensors`: parameters and buffers as arrays.
"""

from ..errors import ConfigError

try:
    import torch  # noqa: F401
except ImportError as _error:
    raise ConfigError(
        "hpcdp.torch", expected="PyTorch", got="no module named torch", remedy="pip install 'hpcdp[torch]'"
    ) from _error

from . import state  # noqa: F401  (checkpoints see torch's tensors from now on)
from .distributed import DistributedDataParallel
from .sampler import DistributedSampler
from .sharded_optimizer import GradScaler, ShardedOptimizer, broadcast_optimizer_state
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "GradScaler",
    "ShardedOptimizer",
    "SyncBatchNorm",
    "broadcast_optimizer_state",
]
