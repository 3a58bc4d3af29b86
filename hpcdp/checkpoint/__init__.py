"""The state of a run on disk.

- `manager`: what programs call: save, restore, how many checkpoints are kept.
- `save`, `load`: one save or restore by all ranks.
- `flatten`: a nested state as JSON and named tensors, and back.
- `hdf5_file`: the HDF5 file of a shard. `manifest`: the list of all tensors and files.
- `directory`: names and locks of checkpoints in a folder.
- `inspect`, `export`: what ``hpcdp checkpoint`` does, in one process.

docs/checkpoint-format.md describes the files.
"""

from ..core.state import Part, PerRank, Sharded
from .load import Restored
from .manager import Manager

__all__ = ["Manager", "Part", "PerRank", "Restored", "Sharded"]
