"""Data-parallel training of PyTorch models, on the reducer of `hpcdp.data_parallel`.

- `distributed`: the wrapper of a module whose gradients are averaged over all ranks; an index sampler for each rank.
- `backward`: the hooks of the wrapper.
- `sharded_optimizer`: an optimizer in which each rank updates its shard of the parameters.
- `functional`: collectives and messages with gradients; batch normalization over the batches of all ranks.
- `process_group`: the backend "hpcdp" of `torch.distributed`. `c10d_store`: its key-value store.
- `checkpoint_adapters`: torch's objects in checkpoints. `tensors`: parameters and buffers as arrays.
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
    checkpoint_adapters,  # noqa: F401  (registers torch's tensors for checkpoints)
    functional,
)
from .distributed import DistributedDataParallel, DistributedSampler
from .functional import SyncBatchNorm
from .sharded_optimizer import GradScaler, ShardedOptimizer, broadcast_optimizer_state

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
