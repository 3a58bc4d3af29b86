"""Collective operations and messages between two ranks, blocking and nonblocking, on arrays and objects.

Public functions:

- `api`: reductions, and movements of arrays of one shape.
- `data_movement`: movements of any sizes. `grouped`: several arrays as one operation.
- `point_to_point`: messages between two ranks. `objects`: Python objects.

- `staging`: checks of arrays, and their copies in host memory.
- `algorithm_choice`: the algorithms of each collective, among them the reference and the MPI library's own, and the
  choice between them.
- `cost_model`: predicted times, and measured links.

The algorithms:

- `intra_node`: the ranks of a node read each other's memory.
- `ring`: around one ring, or several at once.
- `halving_doubling`: pairs at growing distances exchange halves, quarters, ..., or the whole array.
- `tree`: up and down a binomial tree, or two binary trees with half of the array each.
- `blocks`: a block of any size from every rank to every rank.
- `hierarchical`: memory inside nodes, rings between them.

The allreduce of compressed messages is in `hpcdp.compression`.
"""

from ..comm.communicator import Monoid
from .algorithm_choice import ALGORITHMS
from .api import (
    allgather,
    allreduce,
    broadcast,
    iallgather,
    iallreduce,
    ibroadcast,
    ireduce,
    ireduce_scatter,
    reduce,
    reduce_scatter,
)
from .data_movement import alltoall, barrier, gather, ialltoall, ibarrier, igather, iscatter, scatter
from .grouped import (
    grouped_allgather,
    grouped_allreduce,
    grouped_broadcast,
    grouped_reduce_scatter,
    igrouped_allgather,
    igrouped_allreduce,
    igrouped_broadcast,
    igrouped_reduce_scatter,
)
from .objects import (
    allgather_object,
    broadcast_object,
    gather_object,
    iallgather_object,
    ibroadcast_object,
    igather_object,
    irecv_object,
    iscatter_object,
    isend_object,
    recv_object,
    scatter_object,
    send_object,
)
from .point_to_point import irecv, isend, isendrecv, recv, send, sendrecv

__all__ = [
    "ALGORITHMS",
    "Monoid",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "gather",
    "gather_object",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_broadcast",
    "grouped_reduce_scatter",
    "iallgather",
    "iallgather_object",
    "iallreduce",
    "ialltoall",
    "ibarrier",
    "ibroadcast",
    "ibroadcast_object",
    "igather",
    "igather_object",
    "igrouped_allgather",
    "igrouped_allreduce",
    "igrouped_broadcast",
    "igrouped_reduce_scatter",
    "irecv",
    "irecv_object",
    "ireduce",
    "ireduce_scatter",
    "iscatter",
    "iscatter_object",
    "isend",
    "isend_object",
    "isendrecv",
    "recv",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object",
    "send",
    "send_object",
    "sendrecv",
]
