"""Floor 5: kvstore. Imports: gradients, collectives, optim, comm, engine, compression, archive, kernels, state,
arrays, errors.

Values under keys, that every worker pushes to and pulls from.

- `create`: a store of one of the `KINDS`.
- `store`: what all kinds have in common: the calls, in every form of their arguments.
- `keeps_state`: what a store keeps, as part of a run's state.
- `local`: within one process; `sync`: over the ranks of a world, each push merged with those of all others.
"""

from .create import KINDS, create
from .pulled import Pulled
from .store import KVStore

__all__ = ["KINDS", "KVStore", "Pulled", "create"]
