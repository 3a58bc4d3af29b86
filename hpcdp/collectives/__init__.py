"""Floor 3: collectives. Imports: comm, kernels, arrays, errors.

Operations in which every rank takes part. One algorithm a file, each a function over a world:

- `reference`: everybody sends everything to everybody; the specification.
- `native`: the MPI library's own.
- `shared`: the ranks of a node read each other's memory.
- `select`: which algorithm, and the public `allreduce`.
"""

from .select import ALGORITHMS, allreduce

__all__ = ["ALGORITHMS", "allreduce"]
