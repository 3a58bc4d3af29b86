"""The program of a server: ``mpirun -n 4 python train.py : -n 2 python -m hpcdp.kvstore.serve``.

A server keeps keys for the workers, and ends after them.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from functools import partial
from typing import Any

import numpy as np

from ..comm import World
from ..compression import Compression
from ..errors import ConfigError, LaunchError
from .server_keys import Requests, Table, updater_of
from .server_loop import Server


def main() -> None:
    """Run a server; every server calls, while every worker calls `hpcdp.init`."""
    # A batch system or launcher sends these signals to all processes of a job, and only workers handle them.
    for sign in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sign, signal.SIG_IGN)
    from ..comm.startup import init_server

    try:
        whole = init_server()
    except LaunchError as error:  # raised on every process
        sys.exit(f"hpcdp: {error}")
    serve(whole)


def serve(whole: World) -> None:
    """Run a server until all workers have ended: execute commands here, and answer requests in an engine thread.

    Args:
        whole: all workers, followed by all servers.
    """
    server = Server.of(whole, has_servers=True)
    for command in server.next_commands(whole.size - whole.num_servers):
        _execute(command, server, whole)


def _execute(command: dict[str, Any], server: Server, whole: World) -> None:
    """Do a server's part of a collective operation, without keeping a reference to the store."""
    number, do = command["store"], command["do"]
    if do == "store":
        table = Table(whole, command["workers"], command["staleness"])
        table.strangers = server.comm
        server.stores[number] = Requests(table)
        whole.comm.barrier()
        return
    requests = server.stores[number]
    assert isinstance(requests, Requests)
    table = requests.table
    if do == "make":
        described = [(key, tuple(shape), dtype) for key, shape, dtype in command["described"]]
        table.make(described, [np.empty(shape, dtype) for _, shape, dtype in described])
    elif do == "assign":
        items = [table.items[key] for key in command["keys"]]
        table.overwrite(command["keys"], [np.empty(item.shape, item.dtype) for item in items])
    elif do == "update":
        with contextlib.suppress(ConfigError):  # all workers raise it
            table.find_updater(partial(updater_of, command["described"]))
    else:
        table.compress(Compression.of(command["settings"] or None))


if __name__ == "__main__":
    main()
