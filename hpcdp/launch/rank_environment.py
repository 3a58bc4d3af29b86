"""What ranks need in their environment, on one machine and on several; what the user has set already wins."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..core.environment import THREAD_VARIABLES, batch_system
from . import hosts
from .hosts import HostSlots, those_of_this_machine
from .mpi_library import Dialect, MpiLibrary, is_open_mpi_4

READ_BY_PROGRAMS = (
    "HPCDP_", "PYTHON", "MPI4PY_", "OMP_", "OPENBLAS_", "MKL_", "NUMBA_", "HDF5_", "GLOO_", "NCCL_", "UCX_", "FI_",
)  # fmt: skip
"""How the variables begin that ranks need on every host."""

FIND_PROGRAMS = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""The others."""

_TRAVEL = (*READ_BY_PROGRAMS, "TTY_")
_TRAVEL_ALONE = (*FIND_PROGRAMS, "COLUMNS")


def environment(
    library: MpiLibrary, mpirun: Path, ranks: int, environ: Mapping[str, str], servers: int = 0
) -> dict[str, str]:
    """``environ`` with what ``ranks`` ranks on one machine need; what the user has set already wins.

    They are started on this machine's memory alone (Open MPI otherwise looks for fabrics for a second, and its TCP
    listens on all addresses; UCX and libfabric, which MPICH opens in any case, keep to the loopback), unbound (two
    jobs on a machine would both bind to its first cores), with the cores shared out among the ranks' BLAS threads;
    ``servers`` behind them do not compute.
    """
    cores = len(os.sched_getaffinity(0))
    wanted = _everywhere(library, environ, ranks + servers > cores)
    if library.family == "openmpi":
        shared = "vader" if is_open_mpi_4(mpirun) else "sm"
        wanted |= {
            "OMPI_MCA_btl": f"self,{shared}",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }
    else:
        wanted["HYDRA_LAUNCHER"] = "fork"
        wanted |= dict.fromkeys(("FI_TCP_IFACE", "FI_SOCKETS_IFACE", "UCX_NET_DEVICES"), hosts.loopback())
    wanted |= blas_threads(max(1, cores // ranks), environ)
    return {**wanted, **environ}


def environment_of_hosts(
    library: MpiLibrary, dialect: Dialect, places: Sequence[HostSlots], environ: Mapping[str, str]
) -> dict[str, str]:
    """``environ`` with what mpirun and the ranks need on ``places``, those of a batch system where there are none.

    Fabrics are looked for. How many cores there are is known of this machine alone: where it is none of ``places``,
    whoever starts the ranks there shares its cores out.
    """
    own = those_of_this_machine(place.name for place in places)
    here = [place for place in places if place.name in own]
    cores = len(os.sched_getaffinity(0))
    wanted = _everywhere(library, environ, any(place.processes > cores for place in here)) | dialect.keep_alive()
    if library.family == "mpich" and batch_system(environ) == "Slurm":  # hydra's daemons are tasks of an srun
        wanted["SLURM_KILL_BAD_EXIT"] = "1"
    if library.family == "mpich":  # which makes UCX warn, on standard output, of what it has not given back
        wanted["UCX_LOG_LEVEL"] = "error"
    if here:
        wanted |= blas_threads(max(1, cores // max(1, *(place.ranks for place in here))), environ)
    return {**wanted, **environ}


def travelling(environ: Mapping[str, str], further: Iterable[str]) -> list[str]:
    """The names of the variables that ranks on all hosts get: what programs of this room read, and ``further``.

    Not a number of threads that this machine's cores have given: each host's own give it there.
    """
    own = set() if any(name in os.environ for name in THREAD_VARIABLES) else set(THREAD_VARIABLES)
    found = {name for name in environ if name.startswith(_TRAVEL) or name in _TRAVEL_ALONE}
    return sorted((found - own).union(further))


def _everywhere(library: MpiLibrary, environ: Mapping[str, str], crowded: bool) -> dict[str, str]:
    wanted: dict[str, str] = {}
    if library.family == "openmpi":
        wanted |= {
            "OMPI_MCA_osc": "^ucx",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "OMPI_MCA_hwloc_base_binding_policy": "none",
        }
        if batch_system(environ) == "Slurm":
            wanted["PMIX_MCA_psec"] = "native"  # Slurm's own PMIx otherwise complains of a lock that it does not have
        if crowded:
            wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if os.geteuid() == 0:
            wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if "HOME" not in environ:  # Open MPI does not start without; a service or a container may have none
        wanted["HOME"] = _home()
    if "PATH" not in environ:  # where the launcher has found the program
        wanted["PATH"] = os.defpath
    return wanted | _terminal()


def blas_threads(share: int | str, environ: Mapping[str, str]) -> dict[str, str]:
    """What gives BLAS so many threads; nothing where ``environ``, which is the user's, says how many it has."""
    return {} if any(name in environ for name in THREAD_VARIABLES) else dict.fromkeys(THREAD_VARIABLES, str(share))


def _home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return tempfile.gettempdir()


def _terminal() -> dict[str, str]:
    """What rich asks for: ranks write to a pipe or to a pseudo-terminal of mpirun, wherever the launcher writes."""
    interactive = "1" if sys.stdout.isatty() else "0"
    size = {"COLUMNS": str(shutil.get_terminal_size().columns)} if sys.stdout.isatty() else {}
    return {"TTY_COMPATIBLE": interactive, "TTY_INTERACTIVE": interactive, **size}
