"""Checkpoints: the state of a run on disk.

- `manager`: the interface of programs: save, restore and retention; a save by all ranks.
- `load`: a restore by all ranks, which falls back to an older checkpoint if the newest is damaged.
- `flatten`: a nested state as JSON and named tensors, and back.
- `hdf5_file`: the HDF5 file of a shard; it computes the checksums of tensors and compares those of what is read.
- `manifest`: the list of all tensors and files, with the checksums of tensors and one of its own.
- `complete_steps`: which steps' folders are complete, their atomic replacement; the writer's lock; overview.
- `inspect`: the commands of ``hpcdp checkpoint``, in one process: the search for damage, comparison, export.

docs/checkpoint-format.md describes the files.
"""

from ..core.state import Part, PerRank, Sharded
from .load import Restored
from .manager import Manager

__all__ = ["Manager", "Part", "PerRank", "Restored", "Sharded"]
