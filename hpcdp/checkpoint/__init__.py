"""Checkpoints: the state of a run on disk.

- `manager`: the interface of programs: save, restore and retention.
- `save`, `load`: a save and a restore by all ranks.
- `flatten`: a nested state as JSON and named tensors, and back.
- `hdf5_file`: the HDF5 file of a shard; `manifest`: the list of all tensors and files.
- `directory`: names and locks of checkpoints in a folder.
- `inspect`, `export`: the commands of ``hpcdp checkpoint``, in one process.

docs/checkpoint-format.md describes the files.
"""

from ..core.state import Part, PerRank, Sharded
from .load import Restored
from .manager import Manager

__all__ = ["Manager", "Part", "PerRank", "Restored", "Sharded"]
