"""Key-value stores: every worker pushes values to keys, and pulls values from them.

- `factory`: `create`, and stores of one process; `arguments`: checks of keys and values.
- `store`: the base of all kinds, with the state of a store.
- `sync`: pushes of all ranks are merged; `device_sync`: the same with keys on GPUs.
- `asynchronous`: each push takes effect alone, on servers: `client`, `server`, `handlers`.
- `serve`: the program of a server.
- `updaters`: optimizers and functions that update values; `trainer`: the trainer on a store.
"""

from .arguments import KINDS, PullHandle
from .factory import create
from .store import KVStore

__all__ = ["KINDS", "KVStore", "PullHandle", "create"]
