"""Other libraries' allreduce on the same ranks, as candidates of `measure.alternate`; absent ones are named."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hpcdp import comm
from hpcdp.bench.measure import Exchange, FreshData
from hpcdp.errors import ConfigError


class Gloo:
    """PyTorch's gloo process group over the ranks of ``world``; every rank must make it, and close it.

    Args:
        world: all ranks on one machine.

    Raises:
        ModuleNotFoundError: PyTorch is not installed.
    """

    def __init__(self, world: comm.World) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.torch.set_num_threads(1)
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-") if world.rank == 0 else None
        store = world.comm.allgather_json(self._folder.name if self._folder else "")[0]
        self._group: Any = importlib.import_module("torch.distributed")
        self._group.init_process_group(
            "gloo", init_method=(Path(store) / "store").as_uri(), rank=world.rank, world_size=world.size
        )

    def exchange(self, data: FreshData, x: np.ndarray) -> Exchange:
        """The sum of ``x`` over all ranks, in place."""
        tensor = self.torch.from_numpy(x)
        return Exchange("gloo", data, x, x, lambda: self._group.all_reduce(tensor))

    def close(self) -> None:
        """Leave the group."""
        self._group.barrier()
        self._group.destroy_process_group()
        if self._folder:
            self._folder.cleanup()


def mpi_exchanges(world: comm.World, data: FreshData, x: np.ndarray, out: np.ndarray) -> list[Exchange]:
    """The MPI library's sum of ``x``: in place, and from ``x`` into ``out``; which is faster depends on the size.

    Thread ranks have no MPI library: then there are none.
    """
    library = getattr(world.comm, "mpi", None)
    if library is None:
        return []
    return [
        Exchange("MPI in place", data, x, x, lambda: world.comm.native_allreduce(x, "sum")),
        Exchange("MPI", data, x, out, lambda: library.Allreduce(x, out)),
    ]


def check_python(what: str, python: str) -> None:
    """Refuse an interpreter, of an environment with MPICH, that cannot be run.

    Raises:
        ConfigError: there is none.
    """
    if shutil.which(python) is None:
        raise ConfigError(what, expected="a Python that can be run", got=repr(python))


def require_torch(what: str) -> None:
    """Refuse what cannot be measured without PyTorch.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(what, expected="PyTorch, installed beside hpcdp", got="none")


def gloo_or_reason(world: comm.World) -> tuple[Gloo | None, str]:
    """Gloo, or None and why not; the same on all ranks, all of which must call."""
    found = importlib.util.find_spec("torch") is not None
    if getattr(world.comm, "mpi", None) is None:
        return None, "gloo: ranks are threads of one process"
    if not all(world.comm.allgather_json(found)):
        return None, "gloo: PyTorch is not installed"
    return Gloo(world), ""
