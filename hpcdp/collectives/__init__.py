"""Collective operations: allreduce, reduce-scatter, allgather, broadcast and reduce.

- `api`: the public functions.
- `registry`: the algorithms of each collective, and the choice between them.
- `cost_model`: predicted times, and measured links.

One algorithm a file:

- `naive`: every rank sends everything to every rank; the specification.
- `mpi_native`: the MPI library's own.
- `intra_node`: the ranks of a node read each other's memory.
- `ring`: around one ring, or several at once.
- `halving_doubling`: pairs at growing distances exchange halves, quarters, ..., or the whole array.
- `tree`: up and down a binomial tree, or two binary trees with half of the array each.
- `compressed`: every shard encoded on its way to its owner and back.
- `hierarchical`: memory inside nodes, rings between them.
"""

from ..comm.communicator import Monoid
from .api import allgather, allreduce, broadcast, iallreduce, reduce, reduce_scatter
from .registry import ALGORITHMS

__all__ = [
    "ALGORITHMS",
    "Monoid",
    "allgather",
    "allreduce",
    "broadcast",
    "iallreduce",
    "reduce",
    "reduce_scatter",
]
