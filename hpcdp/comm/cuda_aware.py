"""Whether messages go from and to a GPU's memory itself: some MPI libraries take arrays there (CUDA-aware ones).

What a library says of itself may be wrong: it then crashes, or sends something else. So where it says yes, two ranks of
a job of their own try it on each machine, as in `hpcdp info`. Between nodes a library goes another way than within a
machine, and a rank can start no job there. So then the ranks themselves send each other a message, and look what comes.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from .communicator import Communicator
from .world import World

SETTING = "HPCDP_GPU_MESSAGES"
MESSAGES = ("auto", "direct", "staged")
"""The valid values of ``HPCDP_GPU_MESSAGES``: direct where it was tried, direct untried, through host memory."""

_COUNTS = (100, 1 << 17)
"""Of int64: what a library sends at once, and the longest message of `gradients.direct`."""
_LIMIT_S = 120.0
"""Of the try, which ends itself after 60 s."""

_TRY = "from hpcdp.launch.diagnosis import gpus; print(gpus.cuda_aware())"
_YES = "yes"
_OF_A_RANK = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "SLURM_")
"""How variables begin by which launchers tell a process that it is a rank, and of which job."""
_SETTINGS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_", "PRTE_ALLOW_")
"""What a user sets begins so, and has to do with what a library can."""
_OF_OPEN_MPI_4 = ("OMPI_MCA_ess_", "OMPI_MCA_orte_")


def says(library: ctypes.CDLL) -> bool:
    """Whether an MPI library says that it takes arrays in a GPU's memory."""
    said = ctypes.c_int()
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI
        said.value = library.MPIX_Query_cuda_support()
    elif hasattr(library, "MPIX_GPU_query_support"):  # MPICH
        library.MPIX_GPU_query_support(0, ctypes.byref(said))
    return bool(said.value)


def agreed(world: World) -> tuple[bool, str]:
    """Whether messages of ``world`` take arrays in GPUs' memory as they are, and why, or why not.

    Every rank must call, and all have the same answer, that of the first call: all libraries say so, on each node it
    was tried, and between nodes comes what was sent; or what ``HPCDP_GPU_MESSAGES`` of rank 0 says.

    Raises:
        ConfigError: it says something else than `MESSAGES`; on all ranks.
    """
    return world.keep("messages of GPUs", lambda: _agree(world))


def _agree(world: World) -> tuple[bool, str]:
    setting = world.comm.allgather_json(os.environ.get(SETTING) or "auto")[0]
    if setting not in MESSAGES:
        raise ConfigError("reduction", where=SETTING, expected=" or ".join(MESSAGES), got=repr(setting))
    if setting == "direct" and world.rank == 0 and not library_says():
        warnings.warn(
            f"{SETTING}=direct, but the MPI library says that it takes no arrays in a GPU's memory: it may crash",
            stacklevel=5,
        )
    if setting != "auto":
        return setting == "direct", f"{SETTING}={setting}"
    if not all(world.comm.allgather_json(library_says())):
        return False, "no, the MPI library says"
    answers = world.comm.allgather_json(tried() if world.local_rank == 0 else _YES)
    no = next((each for each in answers if not each.startswith(_YES)), None)
    if no is not None:
        return False, no
    wrong = [rank for rank, arrives in enumerate(world.comm.allgather_json(_arrives(world.rail_comm))) if not arrives]
    if wrong:
        return False, f"no: rank {wrong[0]} gets something else from another node than was sent"
    return True, f"{answers[0]}, and between nodes comes what is sent" if world.num_nodes > 1 else answers[0]


def _arrives(comm: Communicator | None) -> bool:
    """Whether each rank of ``comm`` gets what the one before it sends, of all lengths; every rank of it must call."""
    if comm is None or comm.size == 1:
        return True
    cupy = importlib.import_module("cupy")
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    is_right = True
    for count in _COUNTS:
        sent, come = cupy.arange(count) + comm.rank, cupy.zeros(count, dtype=np.int64)
        cupy.cuda.get_current_stream().synchronize()  # a library does not wait for it
        requests = comm.irecv(come, before), comm.isend(sent, after)
        for each in requests:
            each.wait()
        is_right = is_right and bool((come == cupy.arange(count) + before).all())
    return is_right


def library_says() -> bool:
    """Whether that which this process has loaded does; not where there is none."""
    lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    mapped = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return any(says(ctypes.CDLL(each)) for each in sorted(mapped) if Path(each).name.startswith("libmpi"))


def tried() -> str:
    """What two ranks on this machine have found, as `hpcdp info` tells it: it begins with ``yes``, or else says why
    not. For a process that may itself be a rank."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY], env=outside_of_jobs(os.environ), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_LIMIT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no: it cannot be tried, {error}"
    if done.returncode:
        return f"no: it cannot be tried, {(done.stderr.splitlines() or [f'status {done.returncode}'])[-1]}"
    return done.stdout.splitlines()[-1]


def outside_of_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what tells a process that it is a rank of a job."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OF_A_RANK) or (name.startswith(_SETTINGS) and not name.startswith(_OF_OPEN_MPI_4))
    }
