"""Jobs that cannot work as they were started, such as N worlds of one where one world of N was meant."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import LaunchError, to_stderr

_OPEN_FILES = 18
"""Of a rank that is connected to nobody, in MPI_Init of Open MPI 5; MPICH has fewer."""
_OWN_VARIABLE = {"Open MPI": "OMPI_COMM_WORLD_SIZE", "MPICH": "PMI_SIZE"}
_LAUNCHER = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "a PMI launcher (MPICH's or Intel's mpiexec, or srun --mpi=pmi2)",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def refuse_lonely_world(library: str, size: int, environ: Mapping[str, str]) -> None:
    """Refuse a world of one whose innermost launcher started more processes; say why and what to do.

    The variable of the loaded MPI library's own launcher decides where it is set: inside ``mpirun`` in a batch job the
    variables of Slurm describe the launcher's daemons, and a launcher around another leaves its own behind.

    Args:
        library: ``"Open MPI"``, ``"MPICH"`` or another library's name.
        size: the size of the world that MPI reports.
        environ: the process's environment.

    Raises:
        LaunchError: the job is N worlds of one.
    """
    if size > 1:
        return
    _refuse_torchrun(library, environ)
    own = _OWN_VARIABLE.get(library)
    others = [name for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if name != own]
    order = [name for name in ([own] if own else []) + others + ["SLURM_STEP_NUM_TASKS"] if name in environ]
    if not order:
        return
    variable = order[0]
    try:
        started = int(environ[variable])
    except ValueError:
        return
    if started <= 1:
        return
    if variable == "SLURM_STEP_NUM_TASKS":
        remedy = {
            "Open MPI": "start it with `srun --mpi=pmix` (Open MPI knows no other), or with its mpirun inside sbatch",
            "MPICH": "start it with `srun --mpi=pmi2`, or with `mpiexec.hydra` inside sbatch",
        }.get(library, "choose the --mpi of srun that this library knows (`srun --mpi=list`)")
    elif variable == own:
        remedy = "the launcher and the library are of different versions: use the mpirun installed with the library"
    else:
        remedy = f"use the mpirun of {library}: `hpcdp launch` finds it, `hpcdp doctor` shows which is first on PATH"
    error = LaunchError(
        "init",
        expected=f"one world of {started} ranks, as {_LAUNCHER[variable]} started ({variable})",
        got=f"{started} separate worlds of one under {library}",
        remedy=remedy,
    )
    error.is_on_every_rank = True
    raise error


def _refuse_torchrun(library: str, environ: Mapping[str, str]) -> None:
    started = environ.get("WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" in environ and started.isdecimal() and int(started) > 1:
        raise LaunchError(
            "init",
            expected=f"one world of {started} ranks, as torchrun started (WORLD_SIZE)",
            got=f"{started} separate worlds of one under {library}",
            remedy=f"torchrun does not start MPI: `hpcdp launch -n {started} -- python SCRIPT`, or mpirun, or srun",
        )


def warn_of_foreign_launcher(library: str, environ: Mapping[str, str]) -> None:
    """Say one line on rank 0 where MPICH is about to start under Open MPI's mpirun: it may end the process by itself.

    MPICH's wheel does not know that launcher's protocol (PMIx) and aborts in MPI_Init, before it could be refused.
    """
    foreign = library == "MPICH" and int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1 and "PMI_SIZE" not in environ
    if foreign and environ.get("OMPI_COMM_WORLD_RANK") == "0":
        to_stderr(
            "hpcdp: Open MPI's mpirun has started a program that uses MPICH, which may not start under it; "
            "use the mpirun of MPICH: `hpcdp launch` finds it, `hpcdp doctor` shows which is first on PATH",
        )


def warn_of_few_descriptors(ranks: int, limit: int) -> None:
    """Say one line where a rank may open fewer files than MPI is about to: libraries end without a word then.

    Args:
        ranks: of the job; each is connected to those next to it in some trees.
        limit: the number of files that this process may open.
    """
    needed = _OPEN_FILES + 2 * max(1, ranks - 1).bit_length()
    if limit < needed:
        to_stderr(
            f"hpcdp: this rank may open {limit} files (ulimit -n), and needs some {needed} among {ranks} ranks: MPI "
            "may end without a word; raise the limit"
        )
