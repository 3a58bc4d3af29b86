"""Whether messages go from and to a GPU's memory itself: some MPI libraries take arrays there (CUDA-aware ones).

What a library says of itself may be wrong: it then crashes, or sends something else. So where it says yes, two ranks of
a job of their own try it on each machine, as in `hpcdp info`. Between nodes a library goes another way than within a
machine, and a rank can start no job there. So then the ranks themselves send each other a message, look what comes, and
whether it comes sooner than through host memory: a library that has no way from GPU to GPU copies in small pieces.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from ..arrays import Array
from ..devices import gpu
from ..errors import ConfigError
from ..interpreter import apart
from ..streams import Streams
from .communicator import Communicator, split
from .world import World

SETTING = "HPCDP_GPU_MESSAGES"
MESSAGES = ("auto", "direct", "staged")
"""The valid values of ``HPCDP_GPU_MESSAGES``: direct where it was tried and is sooner, direct untried, through host
memory."""

_COUNTS = (100, 1 << 17)
"""Of int64: what a library sends at once, and the longest message of `gradients.direct`."""
_TIMED, _IN_FLIGHT, _TURNS = 1 << 20, 4, 3
"""Of float32, in so many messages at once."""
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
    was tried, and between nodes comes what was sent, sooner than through host memory; or what ``HPCDP_GPU_MESSAGES`` of
    rank 0 says. On one node no message is sent but where ranks have no way on their GPUs; then all of them are timed.

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
    own = _seconds(world.rail_comm if world.num_nodes > 1 else world.comm)
    direct_s, staged_s = map(max, zip(*world.comm.allgather_json(own), strict=True))
    if direct_s > staged_s:
        took = f"{1e3 * staged_s:.1f} ms for {4 * _TIMED >> 20} MiB, not {1e3 * direct_s:.1f}"
        return False, f"no: the way through host memory is faster, {took}"
    return True, f"{answers[0]}, and between nodes comes what is sent" if world.num_nodes > 1 else answers[0]


def _arrives(comm: Communicator | None) -> bool:
    """Whether each rank of ``comm`` gets what the one before it sends, of all lengths; every rank of it must call."""
    if comm is None or comm.size == 1:
        return True
    cupy = importlib.import_module("cupy")
    before = (comm.rank - 1) % comm.size
    is_right = True
    for count in _COUNTS:
        sent, come = cupy.arange(count) + comm.rank, cupy.zeros(count, dtype=np.int64)
        cupy.cuda.get_current_stream().synchronize()  # a library does not wait for it
        _exchange(comm, sent, come)
        is_right = is_right and bool((come == cupy.arange(count) + before).all())
    return is_right


def _exchange(comm: Communicator, sent: Array, come: Array, messages: int = 1) -> None:
    """Send ``sent`` to the next rank of ``comm``, and get ``come`` from the one before, in so many messages at once."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    requests = [comm.irecv(each, before) for each in split(come, messages)]
    requests += [comm.isend(each, after) for each in split(sent, messages)]
    for each in requests:
        each.wait()


def _seconds(comm: Communicator | None) -> tuple[float, float]:
    """Of what each rank of ``comm`` sends to the next one, from GPU to GPU: by its own messages, and through host
    memory; every rank of it must call. The latter is not pipelined here, as the staging is: the former leaves the host
    to others, so it may take a little longer."""
    if comm is None or comm.size == 1:
        return 0.0, 0.0
    streams = Streams(gpu(int(importlib.import_module("cupy").cuda.runtime.getDevice())))
    stream, exchange = streams.stream(), partial(_exchange, comm, messages=_IN_FLIGHT)
    on_gpu = [streams.empty((_TIMED,), np.dtype(np.float32), stream) for _ in range(2)]
    on_host = [streams.pinned(4 * _TIMED, stream).view(np.float32) for _ in range(2)]

    def through_host() -> None:
        streams.copy_async(on_host[0], on_gpu[0], stream)
        streams.synchronize(stream)
        exchange(*on_host)
        streams.copy_async(on_gpu[1], on_host[1], stream)
        streams.synchronize(stream)

    def seconds(way: Callable[[], None]) -> float:
        comm.barrier()
        begin = time.perf_counter()
        way()
        return time.perf_counter() - begin

    turns = [(seconds(partial(exchange, *on_gpu)), seconds(through_host)) for _ in range(_TURNS)]
    direct, staged = map(min, zip(*turns, strict=True))
    return direct, staged


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
            [sys.executable, *apart(), "-c", _TRY], env=outside_of_jobs(os.environ), stdin=subprocess.DEVNULL,
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
