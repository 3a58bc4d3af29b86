"""Floor 2: comm. Imports: engine, kernels, streams, arrays, devices, errors, exits, interpreter, launched,
listening, replica.

Who takes part in a job and how they reach each other. The only importer of mpi4py.

- `communicator` says what every communicator can do; `mpi` does it with MPI, `threads` with N ranks in one process.
- `steps` is work under way, resumed when what it waits for has come.
- `reductions` are what an allreduce can compute.
- `shared` is memory that the ranks of a node have in common.
- `gpus` finds GPUs, and the one that a rank computes on.
- `node_rows` says what sums over the GPUs of a node can do; `nccl` (in an `agreed_order`) and `cuda_ipc` do it,
  `ways` chooses and `node_groups` makes.
- `world` says who takes part: ranks, nodes and rails; `starting` makes that of this process of MPI. `sanity` refuses
  jobs that fell apart at launch, `roles` those whose servers do not come behind the workers; `cores` shares cores out
  among the ranks of a machine. `started_by_rank` says what processes are that a rank starts, and `refused` stands where
  a process may not communicate.
- `backing_files` removes what Open MPI's shared memory leaves in /dev/shm.
- `agreement` compares what ranks hold and raises the same error on all of them; `calls` compares the collective calls
  that they make.
- `watchdog` ends a job whose ranks wait for ever; `roll_call` asks those of other nodes, by a tree, how far they are.
"""

from .communicator import Communicator, Request
from .reductions import Monoid, Reduction
from .starting import init
from .world import World

__all__ = ["Communicator", "Monoid", "Reduction", "Request", "World", "init"]
