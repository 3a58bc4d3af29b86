"""What all processes of an asynchronous store do together: workers call it, servers are told to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...comm import World
from ...comm.agreement import on_every_rank
from ...comm.roles import short_name_of
from ...compression import Compression
from ...errors import ConfigError
from ..arguments import Key
from ..updaters import Updater
from .requests import Requests
from .server import Server
from .table import Described, Table, updater_of


def make(table: Table, described: Sequence[Described], values: Sequence[np.ndarray]) -> None:
    """Make keys, with rank 0's ``values``; those of other ranks are overwritten."""
    _broadcast(table, values)
    table.make(described, values)
    table.group.comm.barrier()


def assign(table: Table, keys: Sequence[Key], values: Sequence[np.ndarray]) -> None:
    """Overwrite keys by rank 0's ``values``; those of other ranks are overwritten."""
    _broadcast(table, values)
    for key, value in zip(keys, values, strict=True):
        table.assign(table.items[key], value)
    table.group.comm.barrier()


def _broadcast(table: Table, values: Sequence[np.ndarray]) -> None:
    for value in values:
        table.group.comm.native_broadcast(value.reshape(-1).view(np.uint8), 0)


def set_updater(table: Table, find: Callable[[], Updater]) -> None:
    """Let pushes be applied by what ``find()`` returns.

    Raises:
        ConfigError: some process cannot find it; on all of them.
    """
    comm = table.group.comm
    try:
        updater = on_every_rank(comm, find)
    except ConfigError as error:
        if error.rank is not None:  # among workers and servers
            workers = table.group.size - table.group.num_servers
            error.operation, error.rank = f"{short_name_of(error.rank, workers)}: {error.operation}", None
        raise
    table.set_updater(updater)
    comm.barrier()


def compress(table: Table, compression: Compression | None) -> None:
    """Let pushes be encoded so from now on."""
    table.compression = compression
    table.group.comm.barrier()


def serve(whole: World) -> None:
    """What a server does until all workers have ended: answers beside this thread, and does here what it is told.

    Args:
        whole: workers, and this and all other servers behind them.
    """
    server = Server.of(whole, has_servers=True)
    for command in server.next_commands(whole.size - whole.num_servers):
        _obey(command, server, whole)


def _obey(command: dict[str, Any], server: Server, whole: World) -> None:
    """Do a server's part of what all do; keeps nothing of the store, which may be dropped next."""
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
        make(table, described, [np.empty(shape, dtype) for _, shape, dtype in described])
    elif do == "assign":
        items = [table.items[key] for key in command["keys"]]
        assign(table, command["keys"], [np.empty(item.shape, item.dtype) for item in items])
    elif do == "update":
        with contextlib.suppress(ConfigError):  # which all workers raise, too
            set_updater(table, partial(updater_of, command["described"]))
    else:
        compress(table, Compression.of(command["said"] or None))
