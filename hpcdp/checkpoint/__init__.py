"""Floor 5: checkpoint, the state of a run on disk. Imports: arrays, autograd, collectives, comm, engine,
errors, nn, state.

- `manager`: what programs call: save, restore, how many are kept.
- `arguments`: what they may give.
- `saving`: one save, by all ranks.
- `choosing`: which checkpoint is restored. `restoring`: back into arrays and objects.
- `tree`: a nested state as JSON and named tensors. `leaves`: what may stand in it, `sharded`: in parts.
- `plan`: which rank writes what. `staging`: a copy of it, written behind training.
- `files`: whose elements lie in one file. `shard`: such an HDF5 file. `index`: one that shows all of them.
- `manifest`: what says where everything is.
- `folder`: names, what is complete, what is left over. `lock`: one writer a folder.
- `notice`: warnings.
- `overview`, `verify`, `difference`, `statistics`, `export`, `pruning`: what `hpcdp checkpoint` does, by one process.
  `reading`: whole tensors, piece by piece.

docs/checkpoint-format.md describes the files.
"""

from ..state import Part, PerRank, Sharded
from .manager import Manager
from .restoring import Restored

__all__ = ["Manager", "Part", "PerRank", "Restored", "Sharded"]
