"""Who works and who serves: the processes of a job are workers, and behind them the servers, if there are some."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import LaunchError
from .communicator import Communicator

ENDED = 3
"""The tag of the empty message to each server, on the communicator of all, by which a worker says that it has ended."""

_REMEDY = (
    "mpirun -n 4 python train.py : -n 2 python -m hpcdp.kvstore.serve, or hpcdp launch -n 4 -s 2 -- python train.py"
)


def count_workers(serve: Sequence[bool]) -> int:
    """How many processes are workers, those behind them being servers.

    Args:
        serve: whether each process is a server, by rank.

    Raises:
        LaunchError: there is no worker, or a server comes before one.
    """
    workers = list(serve).count(False)
    if workers == 0:
        got = "1 server alone" if len(serve) == 1 else f"{len(serve)} servers alone"
        raise LaunchError("init", expected="workers, and servers behind them", got=got, remedy=_REMEDY)
    if any(serve[:workers]):
        server = list(serve).index(True)
        worker = list(serve).index(False, server)
        got = f"a server as rank {server} and a worker as rank {worker}"
        raise LaunchError("init", expected="all workers before the servers", got=got, remedy=_REMEDY)
    return workers


def name_of(rank: int, workers: int) -> str:
    """What a process is called in messages, by its rank among all."""
    return f"rank {rank} of {workers}" if rank < workers else f"server {rank - workers} (rank {rank})"


def short_name_of(rank: int, workers: int) -> str:
    """As `name_of`, of a worker without how many there are."""
    return f"rank {rank}" if rank < workers else name_of(rank, workers)


def tell_servers(comm: Communicator, num_servers: int) -> None:
    """Say on the communicator of all that this worker has ended (`ENDED`): the servers end when all workers have."""
    for server in range(comm.size - num_servers, comm.size):
        comm.isend(np.empty(0, np.uint8), server, ENDED).wait()
