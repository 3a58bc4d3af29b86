"""Floor 3: collectives. Imports: comm, compression, kernels, streams, holders, replacing, arrays,
devices, errors.

Operations in which every rank takes part.

- `operations`: the public functions.
- `algorithms`: all of them by name.
- `select`: which one runs.
- `pinned`: arrays on GPUs in host memory and back.
- `progress`: algorithms are machines that are resumed when their messages have come; several progress together.

One algorithm a file:

- `reference`: everybody sends everything to everybody; the specification.
- `native`: the MPI library's own.
- `shared`: the ranks of a node read each other's memory.
- `ring`, `rings`: around one ring, or several at once.
- `halving_doubling`: pairs at growing distances exchange halves, quarters, ...
- `recursive_doubling`: such pairs exchange all of it.
- `tree`, `double_tree`: up and down a binomial tree, or two binary trees with half of the array each.
- `compressed`: every part encoded on its way to its owner and back.
- `fixed_tree`: owners again, who add up in an order that does not depend on the number of ranks.
- `hierarchical`: memory inside nodes, rings between them.
"""

from ..comm.reductions import Monoid
from .algorithms import ALGORITHMS
from .operations import allgather, allreduce, broadcast, iallreduce, reduce, reduce_scatter

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
