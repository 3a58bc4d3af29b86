"""The usual mismatches of Slurm, its plugins and the MPI library: `hpcdp doctor --slurm`.

Inside a job steps of two tasks are run for it; outside only what can be seen is looked at.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence

from ...errors import LaunchError
from ...interpreter import apart
from .. import mpi_library
from ..batch_systems.slurm_allocation import Allocation, allocation
from ..children import child
from ..launchers import slurm
from .doctor import HELLO, Finding, failed, ok, warning

_COMMANDS = ("srun", "sbatch", "squeue", "scancel", "scontrol")
_LITTLE_MIB = 512
_OUTSIDE = "not tried outside of a job"
_ASK = "salloc --ntasks=2 hpcdp doctor --slurm"
_NODE = """
import json, socket
from hpcdp.launch import machine, mpi_library
print(json.dumps([socket.gethostname(), str(mpi_library.find_library().path), machine.memory_mib()[0]]))
"""


def check_commands() -> Finding:
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        return failed(f"{', '.join(missing)} not on PATH", "run this on a login node or in a job; module load slurm")
    status, said = child(["scontrol", "ping"])
    if status != 0 or "DOWN" in said:
        return failed(f"its controller does not answer: {said}", "wait, or tell the site")
    return ok(child(["srun", "--version"])[1])


def check_job() -> Finding:
    try:
        given = allocation()
    except LaunchError as error:
        return failed(str(error), "run this in the shell of a job, without variables of another one")
    if given is None:
        return warning("this is none: steps cannot be tried", _ASK)
    cores = os.environ.get("SLURM_CPUS_PER_TASK")
    if cores is not None and os.environ.get("SRUN_CPUS_PER_TASK") != cores:
        return warning(
            f"{given}, of {cores} cores a task, which srun does not take from the job",
            f"export SRUN_CPUS_PER_TASK={cores}",
        )
    return ok(str(given))


def check_plugin() -> Finding:
    """srun's --mpi must be one that the library speaks."""
    try:
        family = mpi_library.find_library().family
        there = slurm.mpi_types()
    except LaunchError as error:
        return failed(str(error), str(error.remedy or "see the checks of hpcdp doctor"))
    needed, name = slurm.MPI_TYPES[family], mpi_library.FAMILIES[family]
    if needed not in there:
        return failed(
            f"srun --mpi knows {', '.join(there)}, and {name} speaks {needed}",
            "start ranks by mpirun (hpcdp launch inside the job), or ask the site for the plugin "
            "(Debian: libpmix2 libpmix-dev)",
        )
    return ok(f"srun --mpi={needed} is there, for {name}")


def check_default() -> Finding:
    """What srun takes where --mpi is not said."""
    try:
        needed = slurm.MPI_TYPES[mpi_library.find_library().family]
    except LaunchError as error:
        return failed(str(error), "see the checks of hpcdp doctor")
    said = os.environ.get("SLURM_MPI_TYPE")
    if said is not None and not said.startswith(needed):
        return failed(f"SLURM_MPI_TYPE={said}, and the library speaks {needed}", f"export SLURM_MPI_TYPE={needed}")
    status, line = child(["sh", "-c", "scontrol show config | grep -i '^MpiDefault'"])
    default = said or (line.partition("=")[2].strip().replace("(null)", "none") if status == 0 else "unknown")
    if not default.startswith(needed):
        return warning(
            f"{default}: a plain srun starts N worlds of one", f"srun --mpi={needed}, or export SLURM_MPI_TYPE={needed}"
        )
    return ok(default)


def check_two_tasks() -> Finding:
    given = _job()
    if given is None:
        return warning(_OUTSIDE, _ASK)
    if given.tasks < 2:
        return warning(f"the job has {given.tasks} task", _ASK)
    try:
        needed = slurm.MPI_TYPES[mpi_library.find_library().family]
    except LaunchError as error:
        return failed(str(error), "see the checks of hpcdp doctor")
    nodes = min(2, len(given.hosts))
    layout = [f"--nodes={nodes}", "--ntasks=2", f"--ntasks-per-node={2 // nodes}"]
    status, said = _step([f"--mpi={needed}", *layout, sys.executable, *apart(), "-c", HELLO], "hello")
    words = said.split()
    if status == 0 and words[:2] == ["hello", "2"]:
        return ok(f"one world of 2 on {nodes} {'nodes' if nodes > 1 else 'node'}, by srun --mpi={needed}")
    if (status == 0 and words[:1] == ["hello"]) or "worlds of one" in said:
        return failed(
            f"srun --mpi={needed} starts two worlds of one",
            "the MPI library was built for another PMI: take the site's MPI module and mpi4py built with it, or mpirun",
        )
    if re.search("pmix|plugin|dlopen", said, re.IGNORECASE):
        return failed(f"srun --mpi={needed}: {said}", "the nodes lack libpmix.so or the plugin: the site can add it")
    return failed(f"they end with {said or f'status {status}'}", "see the other checks, then hpcdp doctor in the job")


def check_nodes() -> Finding:
    """Every node must see this Python, find the same MPI library, and have memory."""
    given = _job()
    if given is None:
        return warning(_OUTSIDE, _ASK)
    try:
        here = str(mpi_library.find_library().path)
    except LaunchError as error:
        return failed(str(error), "see the checks of hpcdp doctor")
    for host in given.hosts:
        status, said = _step(
            [f"--nodelist={host.name}", "--nodes=1", "--ntasks=1", sys.executable, *apart(), "-c", _NODE], "["
        )
        if status != 0 or not said.startswith("["):
            return failed(
                f"{host.name}: {said or f'status {status}'}",
                f"{sys.prefix} and the source of hpcdp must lie on a file system that all nodes see",
            )
        name, library, memory_mib = json.loads(said)
        if library != here:
            return failed(f"{name} loads {library}, this shell {here}", "load the same modules in the batch script")
        if memory_mib < _LITTLE_MIB:
            return warning(f"{name}: {memory_mib} MiB of memory for the job", "ask for more: --mem=4G")
    return ok(f"{len(given.hosts)} see this Python and {here}")


def check_memory() -> Finding:
    """A node whose memory nobody has configured counts 1 MiB: jobs that ask for memory are refused."""
    status, said = child(["sh", "-c", "sinfo --noheader --format=%m | sort -n | head -1"])
    if status != 0 or not said.rstrip("+").isdecimal():
        return warning(f"unknown: {said}", "is Slurm's controller up?")
    if int(said.rstrip("+")) <= 1:
        return warning("nodes are configured with 1 MiB", "do not say --mem; the site can set RealMemory")
    return ok(f"at least {int(said.rstrip('+')):,} MiB a node")


def check_export() -> Finding:
    for name in ("SLURM_EXPORT_ENV", "SBATCH_EXPORT"):
        value = os.environ.get(name, "ALL")
        if not value.startswith("ALL"):
            return warning(f"{name}={value}: ranks lack this shell's variables", "srun --export=ALL")
    if _job() is None:
        return ok("nothing hinders it")
    script = 'test "$HPCDP_DOCTOR" = reached && test "$PATH" = "$HPCDP_DOCTOR_PATH"'
    command = ["env", "HPCDP_DOCTOR=reached", f"HPCDP_DOCTOR_PATH={os.environ.get('PATH', '')}"]
    status, said = child([*command, "srun", "--overlap", "--nodes=1", "--ntasks=1", "sh", "-c", script])
    if status != 0:
        return warning(f"a step has another environment than this shell: {said}", "srun --export=ALL; a TaskProlog?")
    return ok("a step has the environment of this shell")


CHECKS: dict[str, Callable[[], Finding]] = {
    "Slurm": check_commands,
    "job": check_job,
    "MPI plugin": check_plugin,
    "MPI default": check_default,
    "two tasks": check_two_tasks,
    "nodes": check_nodes,
    "memory": check_memory,
    "variables": check_export,
}


def _job() -> Allocation | None:
    try:
        return allocation() if shutil.which("srun") else None
    except LaunchError:
        return None


def _step(arguments: Sequence[str], answer: str) -> tuple[int, str]:
    """A step beside others of the job, as `child`; without the library's word about munge."""
    return child(["env", "PMIX_MCA_psec=native", "srun", "--overlap", "--export=ALL", *arguments], answer)
