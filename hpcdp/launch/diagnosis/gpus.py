"""What this machine has for computing on GPUs: those that CUDA's driver shows, CuPy, NCCL, and MPI's way with them.

Whether MPI takes arrays in a GPU's memory it is asked, and then tried: a library that says so may still be built for
another CUDA, and one that does not crashes. So that happens in processes of their own, on this machine: between nodes a
job tries itself (`comm.cuda_aware`).
"""

from __future__ import annotations

import importlib.util
import sys

from ...comm.gpus import LIBRARY, Driver, Gpu, driver_release
from ...errors import DeviceError, LaunchError
from ...interpreter import apart, module
from ...launched import launched_ranks
from .. import machine, mpi_library
from ..children import child

NOT_INSTALLED = "not installed"
_CUPY = """
import warnings
warnings.simplefilter("ignore")
from hpcdp.devices import check_memory_limit, gpu
check_memory_limit()
import cupy
from cupy.cuda import nccl
gpu(0).check()
if int(cupy.arange(1000).sum()) != 499500:
    raise SystemExit("a wrong sum")
number = nccl.get_version() if nccl.available else 0
release = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
print("CuPy", cupy.__version__, f"NCCL {release}" if number else "without NCCL")
"""

_CUDA_AWARE = """
import ctypes, sys
import hpcdp
from hpcdp.comm import cuda_aware
world = hpcdp.init()
if not cuda_aware.says(ctypes.CDLL(sys.argv[1])):
    answer = "no, it says"
else:
    import cupy
    world.device.use()
    x = cupy.arange(1 << 20) * (1 - world.rank)
    cupy.cuda.Device().synchronize()
    if world.rank == 0:
        world.comm.mpi.Send(x, 1)
    else:
        world.comm.mpi.Recv(x, 0)
    right = world.comm.allgather_json(bool((x == cupy.arange(1 << 20)).all()))[1]
    does = "yes, it says and does between two ranks of this machine"
    answer = does if right else "no: it says so, but sends something else"
if world.rank == 0:
    print("answer", answer)
"""


def visible() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that this process may see, and the newest CUDA that their driver runs, or why there are none."""
    try:
        driver = Driver(LIBRARY)
        return driver.gpus(), driver.version()
    except DeviceError as error:
        return (), str(error.got)


def shown() -> dict[str, str]:
    """For `hpcdp info`: facts by title."""
    found, told = visible()
    if not found:
        unused = "".join(f"{model} cannot be used, " for model in machine.gpus())
        return {"GPU": f"none: {unused}{told}"}
    return {
        "GPU": ", ".join(f"{each.index}: {each.name} at {each.bus_id}" for each in found),
        "GPU driver": f"{driver_release()}, for CUDA up to {told}",
        "CuPy": cupy()[1],
        "CUDA-aware MPI": cuda_aware(),
    }


def cupy() -> tuple[bool, str]:
    """Whether CuPy computes on a GPU, and its version and that of NCCL, or what is wrong."""
    if importlib.util.find_spec("cupy") is None:
        return False, NOT_INSTALLED
    status, said = child([sys.executable, *apart(), "-c", _CUPY], "CuPy")
    return status == 0, said.removeprefix("CuPy ") if status == 0 else f"does not work: {said or f'status {status}'}"


def cuda_aware() -> str:
    """Whether the MPI library takes arrays in a GPU's memory: ``yes`` or ``no``, and how one knows."""
    if launched_ranks() is not None:
        return "not tried: this is itself a rank of a job"
    try:
        library = mpi_library.find_library()
    except LaunchError as error:
        return f"no: {error.got}"
    ranks = [sys.executable, *module("hpcdp.cli"), "launch", "-n", "2", "--"]
    status, said = child([*ranks, sys.executable, *apart(), "-c", _CUDA_AWARE, str(library.path)], "answer")
    if status != 0:
        return f"no: it says so, but ranks that try it end with {said or f'status {status}'}"
    return said.removeprefix("answer ")
