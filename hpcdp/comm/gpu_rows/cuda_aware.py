"""CUDA-aware MPI: whether messages between nodes may use arrays in GPU memory.

CUDA-aware MPI libraries send and receive arrays in GPU memory. A library's own claim may be wrong: it then crashes, or
sends something else. So if it claims support, two ranks of a separate job try it on each machine, as in `hpcdp info`.
Between nodes a library uses another path, and a rank can start no job there. So the ranks themselves exchange a
message, check it, and time it against host memory: a library without GPUDirect copies in small pieces.
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

from ...core.arrays import Array, Streams, gpu
from ...core.checks import choices
from ...core.environment import apart
from ...errors import ConfigError
from ..communicator import Communicator, split
from ..world import World

SETTING = "HPCDP_GPU_MESSAGES"
MESSAGES = ("auto", "direct", "staged")
"""Valid values of ``HPCDP_GPU_MESSAGES``: direct if tried and faster, direct without a trial, through host memory."""

_COUNTS = (100, 1 << 17)
"""Lengths in int64: a message that libraries send at once, and the longest of `data_parallel.gpu_reduction`."""
_TIMED, _IN_FLIGHT, _TURNS = 1 << 20, 4, 3
"""The length in float32 of a timed exchange, its messages in flight, and its repetitions."""
_LIMIT_S = 120.0
"""Seconds for the trial, which ends itself after 60 s."""

_TRY = "from hpcdp.cli import doctor as gpus; print(gpus.cuda_aware())"
_YES = "yes"
_OF_A_RANK = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "SLURM_")
"""Prefixes of variables by which launchers tell a process that it is a rank, and of which job."""
_SETTINGS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_", "PRTE_ALLOW_")
"""Prefixes of a user's settings that affect the library's abilities."""
_OF_OPEN_MPI_4 = ("OMPI_MCA_ess_", "OMPI_MCA_orte_")


def says(library: ctypes.CDLL) -> bool:
    """Return whether an MPI library claims to take arrays in GPU memory."""
    claim = ctypes.c_int()
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI
        claim.value = library.MPIX_Query_cuda_support()
    elif hasattr(library, "MPIX_GPU_query_support"):  # MPICH
        library.MPIX_GPU_query_support(0, ctypes.byref(claim))
    return bool(claim.value)


def agreed(world: World) -> tuple[bool, str]:
    """Return whether messages of ``world`` may use arrays in GPU memory, and the reason.

    Every rank must call, and all get the same answer, that of the first call. It is yes if all libraries claim support,
    a trial on each node succeeds, and messages between nodes arrive unchanged and faster than through host memory.
    ``HPCDP_GPU_MESSAGES`` of rank 0 overrides it. On one node ranks only send messages if their GPUs have no other
    transport; then all of them are timed.

    Raises:
        ConfigError: the variable is none of `MESSAGES`; on all ranks.
    """
    return world.keep("messages of GPUs", lambda: _agree(world))


def _agree(world: World) -> tuple[bool, str]:
    setting = world.comm.allgather_json(os.environ.get(SETTING) or "auto")[0]
    if setting not in MESSAGES:
        raise ConfigError("reduction", where=SETTING, expected=choices(MESSAGES), got=repr(setting))
    if setting == "direct" and world.rank == 0 and not library_says():
        warnings.warn(
            f"{SETTING}=direct, but the MPI library does not claim to take arrays in GPU memory: it may crash",
            stacklevel=5,
        )
    if setting != "auto":
        return setting == "direct", f"{SETTING}={setting}"
    if not all(world.comm.allgather_json(library_says())):
        return False, "no, the MPI library says"
    answers = world.comm.allgather_json(tried() if world.local_rank == 0 else _YES)
    no = next((answer for answer in answers if not answer.startswith(_YES)), None)
    if no is not None:
        return False, no
    wrong = [rank for rank, arrives in enumerate(world.comm.allgather_json(_arrives(world.rail_comm))) if not arrives]
    if wrong:
        return False, f"no: rank {wrong[0]} receives other data from another node than was sent"
    own = _seconds(world.rail_comm if world.num_nodes > 1 else world.comm)
    direct_s, staged_s = map(max, zip(*world.comm.allgather_json(own), strict=True))
    if direct_s > staged_s:
        times = f"{1e3 * staged_s:.1f} ms for {4 * _TIMED >> 20} MiB, not {1e3 * direct_s:.1f}"
        return False, f"no: staging in host memory is faster, {times}"
    return True, f"{answers[0]}, and messages between nodes arrive" if world.num_nodes > 1 else answers[0]


def _arrives(comm: Communicator | None) -> bool:
    """Return whether each rank of ``comm`` receives what the previous one sends; every rank of it must call."""
    if comm is None or comm.size == 1:
        return True
    cupy = importlib.import_module("cupy")
    before = (comm.rank - 1) % comm.size
    is_right = True
    for count in _COUNTS:
        sent, received = cupy.arange(count) + comm.rank, cupy.zeros(count, dtype=np.int64)
        cupy.cuda.get_current_stream().synchronize()  # libraries do not wait for the stream
        _exchange(comm, sent, received)
        is_right = is_right and bool((received == cupy.arange(count) + before).all())
    return is_right


def _exchange(comm: Communicator, sent: Array, received: Array, messages: int = 1) -> None:
    """Send ``sent`` to the next rank of ``comm`` and receive from the previous one, in ``messages`` pieces at once."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    requests = [comm.irecv(piece, before) for piece in split(received, messages)]
    requests += [comm.isend(piece, after) for piece in split(sent, messages)]
    for request in requests:
        request.wait()


def _seconds(comm: Communicator | None) -> tuple[float, float]:
    """Time an exchange between neighbors of ``comm``: direct, and through host memory; every rank of it must call.

    The latter is not pipelined here, unlike the real staging. Direct messages may take a little longer, because they
    leave the host to other work.
    """
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
    """Return whether the MPI library of this process claims support; False without one."""
    lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    mapped = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return any(says(ctypes.CDLL(path)) for path in sorted(mapped) if Path(path).name.startswith("libmpi"))


def tried() -> str:
    """Return the result of a trial with two ranks on this machine, as in `hpcdp info`: ``yes``, or why not.

    For a process that may itself be a rank.
    """
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
    """Return ``environ`` without the variables that tell a process that it is a rank of a job."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OF_A_RANK) or (name.startswith(_SETTINGS) and not name.startswith(_OF_OPEN_MPI_4))
    }
