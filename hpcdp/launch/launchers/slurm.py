"""The launcher ``slurm``: ranks by srun, inside a Slurm job on its allocation, outside of one as a new job.

The option --mpi must name an interface of mpi4py's MPI library; with any other, srun starts N worlds of one rank.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ...errors import LaunchError, reason
from .. import mpi_library
from ..hosts import Allocation, allocation, assign_ranks, of_ranks
from ..mpi_library import Dialect, blas_threads, program
from ..runner import check, supervise, warn_of_other_library
from . import Command, Job, LaunchPlan, batch, server

MPI_TYPES = {"openmpi": "pmix", "mpich": "pmi2"}
"""The value of srun's --mpi for the libraries of each family."""

_BINDINGS = {"none": "none", "core": "cores", "numa": "ldoms", "socket": "sockets"}
_LIMIT_S = 30.0
_GOES_ON = "OMPI_MCA_mpi_ft_enable"
"""The variable with which Open MPI's ranks continue after the death of another (ULFM)."""

_BY_RANK = 'workers=$1 python=$2; shift 2; [ "$SLURM_PROCID" -lt "$workers" ] || exec "$python" {}; exec "$@"'
"""The shell command of each task of a job with servers.

A file for srun --multi-prog cannot hold every argument: it supports no nested quotes and no line breaks.
"""


def run_slurm(job: Job) -> int:
    """Run ``job`` under srun and return its exit status, without initializing MPI in this process.

    Raises:
        LaunchError: srun is missing, or lacks the --mpi that the library needs; and the errors of `plan_slurm`.
    """
    if shutil.which("srun") is None:
        raise LaunchError(
            "launch --launcher slurm", expected="srun on PATH", got="none", remedy="use --launcher mpi or ssh"
        )
    (command,) = plan_slurm(job).commands
    _check_mpi_type(command.argv)
    return supervise(command.argv, {**os.environ, **command.env}, "srun", job, elsewhere=job.ranks + job.servers)


def plan_slurm(job: Job) -> LaunchPlan:
    """Return the srun of ``job``.

    Raises:
        LaunchError: srun lacks an option of the job; and the errors of `hpcdp.launch.runner.check`.
        ConfigError: an option of srun has an invalid value; and the errors of `hpcdp.launch.runner.check`.
    """
    allocated = allocation()
    # Outside of an allocation the interfaces of the nodes are unknown.
    checked = job if allocated is not None else dataclasses.replace(job, interface=None)
    further = check(checked, several_hosts=allocated is not None and len(allocated.hosts) > 1)
    batch.check_values("launch --mpi-args", batch.of_words(further, batch.SLURM_SHORT), batch.SLURM)
    if job.sync_dst_dir is not None:
        raise LaunchError(
            "launch --sync-dst-dir", expected="a file system that all hosts of a Slurm job see", got=job.sync_dst_dir,
            remedy="use --launcher ssh, which copies the working folder",
        )  # fmt: skip
    family = mpi_library.find_library().family
    warn_of_other_library(job, family)
    argv = ["srun"]
    if not any(argument.startswith("--mpi=") for argument in further):
        argv.append(f"--mpi={MPI_TYPES[family]}")
    # Export all variables even if the job was submitted without them; one Ctrl-C ends the job, as with mpirun.
    argv += ["--export=ALL", "--quit-on-interrupt"]
    if {**os.environ, **job.env}.get(_GOES_ON, "0") in ("", "0"):
        argv.append("--kill-on-bad-exit=1")  # else ranks could wait forever for one that died, even during MPI_Init
    argv += _layout(job, allocated)
    if job.bind is not None:
        argv.append(f"--cpu-bind={_BINDINGS[job.bind]}")
    if job.tag_output:
        argv.append("--label")
    argv += further
    if job.servers:
        argv += ["sh", "-c", _BY_RANK.format(shlex.join(server())), "hpcdp-rank", str(job.ranks), sys.executable]
    return LaunchPlan([Command.beside([*argv, *program(job.program)], {**_environment(family, job), **job.env})])


def mpi_types() -> tuple[str, ...]:
    """Return the values of ``srun --mpi`` that this Slurm supports; raise `LaunchError` where srun lists none."""
    try:
        done = subprocess.run(
            ["srun", "--mpi=list"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        got = reason(error) if isinstance(error, OSError) else error
        raise LaunchError("srun --mpi=list", got=got) from error
    # "MPI plugin types are...", a name on each line; "specific pmix plugin versions available: pmix_v4"
    words = (line.removeprefix("srun:").split(":")[-1] for line in (done.stdout + done.stderr).splitlines())
    names = [name for line in words for name in re.split(r"[,\s]+", line) if re.fullmatch(r"[a-z][a-z0-9_.]*", name)]
    types = tuple(dict.fromkeys(name for name in names if name.startswith(("pm", "cray", "none", "openmpi"))))
    if done.returncode or not types:
        lines = done.stderr.split("\n")  # the last line has the reason
        got = next((line for line in reversed(lines) if line.strip()), f"status {done.returncode}")
        raise LaunchError("srun --mpi=list", got=got, remedy="run this on a login node of the cluster")
    return types


def _check_mpi_type(argv: Sequence[str]) -> None:
    """Raise `LaunchError` if this machine's srun lacks the --mpi that `plan_slurm` has chosen."""
    families = {f"--mpi={mpi_type}": family for family, mpi_type in MPI_TYPES.items()}
    option = argv[1]
    if option not in families:  # the user has chosen
        return
    types = mpi_types()
    if option.removeprefix("--mpi=") not in types:
        raise LaunchError(
            "launch --launcher slurm",
            expected=f"srun {option}, which {mpi_library.FAMILIES[families[option]]} needs",
            got=f"only {', '.join(types)}",
            remedy="use --launcher mpi inside the job, or ask the site for the plugin",
        )


def _layout(job: Job, allocated: Allocation | None) -> list[str]:
    """Return the options that place the tasks; --nodes and --ntasks alone would place 4 ranks on 2 nodes as 3 and 1."""
    ranks = job.ranks + job.servers
    if job.hosts:  # list the host of each task: srun otherwise sorts the hosts and ignores their slots
        places = assign_ranks(job)
        names = ",".join(of_ranks(places))
        return [f"--nodes={len(places)}", f"--ntasks={ranks}", "--distribution=arbitrary", f"--nodelist={names}"]
    if job.ranks_per_node is not None:
        return _spread(ranks, math.ceil(ranks / job.ranks_per_node), job.ranks_per_node)
    if allocated is None:
        return [f"--ntasks={ranks}"]
    if ranks == allocated.tasks and not allocated.hosts_alike:
        return [f"--nodes={len(allocated.hosts)}", f"--ntasks={ranks}"]  # as allocated
    nodes = min(ranks, len(allocated.hosts))
    return _spread(ranks, nodes, math.ceil(ranks / nodes))


def _spread(ranks: int, nodes: int, per_node: int) -> list[str]:
    """Return the options for ``per_node`` ranks on each node; --ntasks-per-node requires equal numbers on all nodes."""
    layout = f"--ntasks-per-node={per_node}" if per_node * nodes == ranks else f"--distribution=plane={per_node}"
    return [f"--nodes={nodes}", f"--ntasks={ranks}", layout]


def _environment(family: str, job: Job) -> Mapping[str, str]:
    environ: dict[str, str] = {}
    if family == "openmpi":
        # Otherwise Open MPI prints a warning for each window, and each rank one about munge.
        environ |= {"OMPI_MCA_osc": "^ucx", "PMIX_MCA_psec": "native"}
    environ |= Dialect(family).interface(job.interface)
    cores = os.environ.get("SLURM_CPUS_PER_TASK")
    environ |= blas_threads(cores or "1", os.environ)
    if cores is not None:
        environ["SRUN_CPUS_PER_TASK"] = cores  # srun does not inherit it from the job
    return {name: value for name, value in environ.items() if name not in os.environ}
