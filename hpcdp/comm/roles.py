"""Who works and who serves: the processes of a job are workers, and behind them the servers, if there are some."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import LaunchError
from .communicator import Communicator

ENDS = 3
"""The tag of a worker's last message to the servers."""

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


def tell_servers(comm: Communicator, servers: Sequence[int]) -> None:
    """Tell servers that this worker has ended; one that has heard it of all workers ends, too.

    Args:
        comm: workers and servers.
        servers: their ranks in it.
    """
    for server in servers:
        comm.isend(np.empty(0, np.uint8), server, ENDS).wait()


def name_of(rank: int, workers: int) -> str:
    """What a process is called in messages, by its rank among all."""
    return f"rank {rank} of {workers}" if rank < workers else f"server {rank - workers} (rank {rank})"
