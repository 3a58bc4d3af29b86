"""The ranks of a job and how they reach each other; the only importer of mpi4py.

- `communicator`: the interface; `mpi_communicator` implements it with MPI, `thread_comm` with N ranks in one process.
- `progress`: resumable exchanges of messages that progress together.
- `startup`: start-up of MPI; `world`: ranks, nodes, rails and GPUs.
- `shared_memory`: memory that the ranks of a node share; `node_messages`: messages through it.
- `consistency`: compares collective calls between ranks, and raises the same error on all of them.
- `gpu_buckets`: the memory of buckets on GPUs, summed by NCCL or CUDA IPC; CUDA-aware MPI between nodes.
- `watchdog`, `roll_call`: report ranks that wait too long.
"""

from .communicator import Communicator, Monoid, Reduction, Request
from .startup import init
from .world import World

__all__ = ["Communicator", "Monoid", "Reduction", "Request", "World", "init"]
