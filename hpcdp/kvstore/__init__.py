"""Floor 5: kvstore. Imports: gradients, collectives, optim, comm, engine, compression, archive, kernels, state,
streams, devices, arrays, errors.

Values under keys, that every worker pushes to and pulls from.

- `kinds`: the names, and what they mean; `create`: a store of one of them.
- `store`: what all kinds have in common: the calls, in every form of their arguments.
- `keeps_state`: what a store keeps, as part of a run's state.
- `local`: within one process; `sync`: over the ranks of a world, each push merged with those of all others.
- `device_sync`: the same with keys on GPUs; `placed`: what is pushed and pulled, on the host and on GPUs.
- `asynchronous`: each push by itself, to keys that `servers` keep; `serve`: the program of a server.
"""

from .create import create
from .kinds import KINDS
from .pulled import Pulled
from .store import KVStore

__all__ = ["KINDS", "KVStore", "Pulled", "create"]
