"""Checkpoints: the state of a run on disk.

- `manager`: the interface of programs: save, restore and retention; a save by all ranks.
- `load`: a restore by all ranks, which falls back to an older checkpoint if the newest is damaged.
- `flatten`: a nested state as JSON and named tensors, and back.
- `hdf5_file`: the HDF5 file of a shard, and the checksums of what is read from it.
- `manifest`: the list of all tensors and files, with a checksum of its own.
- `step_folders`: the folder of each step: whether it is complete, its atomic replacement; lock of the writer; overview.
- `inspect`: the commands of ``hpcdp checkpoint``, in one process: the search for damage, comparison, export.

docs/checkpoint-format.md describes the files.
"""

from ..core.state import Part, PerRank, Sharded
from .load import Restored
from .manager import Manager

__all__ = ["Manager", "Part", "PerRank", "Restored", "Sharded"]
