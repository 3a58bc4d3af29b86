"""Data-parallel training of PyTorch models, on the reducer of `hpcdp.data_parallel`.

- `distributed`: the wrapper of a module whose gradients are averaged over all ranks. `backward`: its hooks.
- `sharded_optimizer`: an optimizer in which each rank updates its shard of the parameters.
- `sync_batch_norm`: batch normalization over the batches of all ranks.
- `sampler`: an index sampler for each rank.
- `functional`: collectives and messages with gradients.
- `process_group`: the backend "hpcdp" of `torch.distributed`. `store`: its key-value store.
- `state`: torch's objects in checkpoints. `tensors`: parameters and buffers as arrays.
"""

from ..errors import ConfigError

try:
    import torch  # noqa: F401
except ImportError as _error:
    raise ConfigError(
        "hpcdp.torch", expected="PyTorch", got="no module named torch", remedy="pip install 'hpcdp[torch]'"
    ) from _error

from ..torch_backend import register
from . import (
    functional,
    state,  # noqa: F401  (registers torch's tensors for checkpoints)
)
from .distributed import DistributedDataParallel
from .sampler import DistributedSampler
from .sharded_optimizer import GradScaler, ShardedOptimizer, broadcast_optimizer_state
from .sync_batch_norm import SyncBatchNorm

register()  # where PyTorch does not do it: TORCH_DEVICE_BACKEND_AUTOLOAD=0, or a copy that is not installed

__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "GradScaler",
    "ShardedOptimizer",
    "SyncBatchNorm",
    "broadcast_optimizer_state",
    "functional",
]
