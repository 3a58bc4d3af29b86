"""Floor 7: launch. Imports: comm, errors, kernels, arrays, data_files, interpreter, launched, listening,
permissions, toml.

Starts ranks, by one of the `launchers`, on other hosts through `remote`, in jobs of `batch_systems`; writes and
submits batch scripts (`slurm`); examines the
machine and its MPI library (`diagnosis`). MPI is never started in the launcher itself.
"""

from ..errors import LaunchError


class ProgramMissingError(LaunchError):
    """The program to be launched does not exist. The command line exits with 127, as a shell does."""
