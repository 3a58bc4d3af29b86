"""The words of each MPI library's mpirun, for one and the same thing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import LaunchError
from . import interfaces
from .hosts import Place, of_ranks
from .job import Job

LOST_AFTER_S = 30
"""A host that says nothing for so long is lost. A link that is cut for 25 s may need so long: TCP backs off."""
STALLED_S = 5.0
"""Who has not looked for so long has not run, nor perhaps its machine: what has come meanwhile is not read yet."""


@dataclass(frozen=True)
class Dialect:
    """What an mpirun takes: Open MPI's 5 (PRRTE) or 4, or hydra, which MPICH, Intel MPI and MVAPICH have."""

    family: str
    is_open_mpi_4: bool = False

    @property
    def _is_hydra(self) -> bool:
        return self.family != "openmpi"

    def options(self, job: Job) -> list[str]:
        """Those that concern the whole job on any number of hosts: binding and output."""
        words = []
        if job.bind is not None:
            name = "package" if job.bind == "socket" and not (self._is_hydra or self.is_open_mpi_4) else job.bind
            words += ["-bind-to" if self._is_hydra else "--bind-to", name]
        if job.tag_output:
            words += ["-prepend-rank"] if self._is_hydra else ["--tag-output"] if self.is_open_mpi_4 else _TAGGED
        if self._is_hydra and job.interface is not None:
            words += ["-iface", job.interface]
        return words

    def interface(self, name: str | None) -> dict[str, str]:
        """The variables that keep to a network interface: of ranks, of mpirun's daemons, and of gloo and NCCL."""
        if name is None:
            return {}
        told = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name, "UCX_NET_DEVICES": interfaces.devices(name)}
        if self._is_hydra:
            return {**told, "FI_TCP_IFACE": name, "FI_SOCKETS_IFACE": name}
        told["OMPI_MCA_btl_tcp_if_include"] = name
        # Without a daemon on another host nothing is said there, and mpirun does not start where it is told a loopback.
        return told if interfaces.is_loopback(name) else {**told, f"{self._daemons}_if_include": name}

    @property
    def _daemons(self) -> str:
        return "OMPI_MCA_oob_tcp" if self.is_open_mpi_4 else "PRTE_MCA_prte"

    def host_file(self, places: Sequence[Place]) -> str:
        """The list that `placed` names: for Open MPI the host of each rank, then of each server; for hydra each host
        with how many processes it gets."""
        if not self._is_hydra:
            return "".join(f"{name}\n" for name in of_ranks(places))
        if any(":" in place.name for place in places):
            raise LaunchError(
                "launch -H", expected="names of hosts", got="an IPv6 address", remedy="name it in ~/.ssh/config"
            )
        return "".join(f"{place.name}:{place.processes}\n" for place in places)

    def placed(self, places: Sequence[Place], path: Path) -> list[str]:
        """The words that place each rank and server, with that list in ``path``; hydra fills its hosts in order."""
        if not self._is_hydra:
            return ["--map-by", "seq", "--default-hostfile", str(path)]
        words = ["-f", str(path)]
        if any(place.servers for place in places):  # (host, 1, so many ranks on it), from rank 0 on
            blocks = [(index, place.ranks) for index, place in enumerate(places)]
            blocks += [(index, place.servers) for index, place in enumerate(places)]
            words += ["-rankmap", f"(vector,{','.join(f'({host},1,{count})' for host, count in blocks if count)})"]
        return words

    def per_node(self, ranks: int | None) -> list[str]:
        """At most so many ranks on each host that a batch system has given."""
        if ranks is None:
            return []
        return ["-ppn", str(ranks)] if self._is_hydra else ["--map-by", f"ppr:{ranks}:node"]

    def under_slurm(self) -> list[str]:
        """The words that show what the srun of mpirun's daemons says. When it has lost a host it ends them, sooner than
        they notice: then Open MPI's mpirun says nothing, and has status 0."""
        return [] if self._is_hydra else ["--leave-session-attached"]

    def exports(self, names: Iterable[str]) -> list[str]:
        """The words that take these variables to all hosts; hydra takes all there are."""
        return [] if self._is_hydra else [word for name in names for word in ("-x", name)]

    def folder(self, path: str | None) -> list[str]:
        """The words that make ``path`` the working folder of the ranks."""
        return [] if path is None else ["-wdir" if self._is_hydra else "--wdir", path]

    def by_ssh(self, agent: str | None = None, in_batch: bool = False) -> dict[str, str]:
        """The variables with which mpirun reaches hosts by ssh, or by ``agent``, a program that takes its arguments."""
        if self._is_hydra:
            how = {"HYDRA_LAUNCHER": "ssh", "HYDRA_RMK": "user", "I_MPI_HYDRA_BOOTSTRAP": "ssh"}
            return how | ({"HYDRA_LAUNCHER_EXEC": agent, "I_MPI_HYDRA_BOOTSTRAP_EXEC": agent} if agent else {})
        prefix, name = ("OMPI", "rsh") if self.is_open_mpi_4 else ("PRTE", "ssh")
        # Without a tree of them every daemon is started from here.
        how = {f"{prefix}_MCA_plm": name, f"{prefix}_MCA_plm_{name}_no_tree_spawn": "1"}
        if in_batch:
            how[f"{prefix}_MCA_ras"] = "^slurm,gridengine,lsf,pbs,tm"
        return how | ({f"{prefix}_MCA_plm_{name}_agent": agent} if agent else {})

    def keep_alive(self) -> dict[str, str]:
        """The variables with which mpirun and its daemons notice that a host has fallen silent; hydra has none."""
        if self._is_hydra:
            return {}
        prefix = f"{'OMPI' if self.is_open_mpi_4 else 'PRTE'}_MCA_oob_tcp_keepalive"
        # 10 s later than a guard, which names the host and has no status 0.
        return {f"{prefix}_time": "10", f"{prefix}_intvl": "5", f"{prefix}_probes": str(LOST_AFTER_S // 5)}


def program(words: Sequence[str]) -> list[str]:
    """The words that run a program with its arguments, for every mpirun, and srun. Where one would take some of those
    for its own, a shell has all of them as one."""
    return ["sh", "-c", f"exec {shlex.join(words)}"] if any(map(_TAKEN.fullmatch, words)) else [*words]


_TAGGED = ["--output", "tag"]
# A colon begins another program. Open MPI 5 renames the first four options, and obeys the others.
_TAKEN = re.compile(":|--(?:bind-to|map-by|rank-by|runtime-options)|--?(?:g|o|pmix|prte)?mca")
