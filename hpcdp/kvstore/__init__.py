"""Values under keys, to which every worker pushes and from which it pulls.

- `factory`: makes a store of a kind; `arguments`: the forms in which calls take keys and values.
- `store`: what all kinds have in common. `store_state`: the state of a store.
- `sync`, `sync_rounds`: each push merged with those of all other ranks; `device_sync`, `gpu_keys`: with keys on GPUs.
- `asynchronous`: each push by itself, to keys that servers keep: `client`, `server`, `handlers`, `protocol`.
- `serve`: the program of a server.
- `updaters`: optimizers and functions that update values. `trainer`: the trainer on a store.
"""

from .arguments import KINDS, PullHandle
from .factory import create
from .store import KVStore

__all__ = ["KINDS", "KVStore", "PullHandle", "create"]
