"""One thread for each rank: thread ranks and real ranks share the cores already. Torch's own ranks over gloo."""

import importlib.util
import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Not when files are collected: where no test of theirs is run, torch is not imported."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="module")
def world():
    """The real ranks, which are also those of torch.distributed over gloo."""
    import torch

    import hpcdp

    found = hpcdp.init()
    folder = tempfile.TemporaryDirectory(prefix="gloo-") if found.rank == 0 else None
    store = found.comm.allgather_json(folder.name if folder else "")[0]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=(Path(store) / "store").as_uri(), rank=found.rank, world_size=found.size
    )
    yield found
    found.barrier()
    torch.distributed.destroy_process_group()
    found.barrier()  # a rank that finds its file gone looks for it for ever
    if folder is not None:
        folder.cleanup()
