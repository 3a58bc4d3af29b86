"""Registration of the backend "hpcdp" with torch.distributed, at ``import torch``.

PyTorch calls `register` through the entry point group ``torch.backends``. It never raises, and imports neither MPI nor
NumPy. The backend itself, `hpcdp.torch.process_group`, is imported when a process group is made.

Under a launcher of MPI the rendezvous ``env://`` needs no address: where ``MASTER_ADDR`` is not set, c10d's store lives
on MPI (`hpcdp.torch.c10d_store`). On several nodes ``MASTER_ADDR`` is then set, for libraries that ask for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .core.environment import launched_rank, launched_ranks

NAME = "hpcdp"

_LOCAL = {
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}


def register() -> None:
    """Register the backend and its rendezvous, and set variables for the ranks of a job; never raise."""
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
            _take_rendezvous(sys.modules["torch.distributed.rendezvous"])
            set_variables(os.environ)


def set_variables(environ: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE from the launcher's variables, where they are missing.

    Nothing is set where RANK or WORLD_SIZE have other values, as in a program that a rank starts by other means.

    PyTorch reads THP_MEM_ALLOC_ENABLE at its first allocation: tensors of 2 MB and more then lie in huge pages, as
    NumPy's do. Updates of large models take two thirds of the time, and messages that other ranks read half.
    """
    rank, size = launched_rank(environ), launched_ranks(environ)
    if rank is None or environ.get("RANK", str(rank)) != str(rank) or environ.get("WORLD_SIZE", str(size)) != str(size):
        return
    environ["RANK"], environ["WORLD_SIZE"] = str(rank), str(size)
    for name, sources in _LOCAL.items():
        value = next((environ[source] for source in sources if source in environ), None)
        if value is not None:
            environ.setdefault(name, value)
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _create(*args: Any) -> Any:
    from .torch.process_group import create

    return create(*args)


def _take_rendezvous(rendezvous: Any) -> None:
    """Answer ``env://`` without an address under a launcher of MPI."""
    default = rendezvous._rendezvous_handlers["env"]
    own_address = ""

    def handler(url: str, timeout: Any = None, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        nonlocal own_address
        address = os.environ.get("MASTER_ADDR", "")
        if address != own_address or launched_ranks() is None:
            limit = {} if timeout is None else {"timeout": timeout}
            yield from default(url, **limit, **kwargs)
            return
        from .torch.c10d_store import open_store

        store, rank, size, host = open_store(timeout)
        if host is not None:
            own_address = os.environ["MASTER_ADDR"] = host  # Accelerate refuses several nodes without it
        asked = parse_qs(urlsplit(url).query)  # rank= and world_size= of init_process_group, which `create` compares
        yield store, int(asked.get("rank", [rank])[0]), int(asked.get("world_size", [size])[0])

    rendezvous._rendezvous_handlers["env"] = handler
