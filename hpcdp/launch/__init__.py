"""Start of ranks: by one of the `launchers`, on other hosts through a `guard` there, in batch jobs.

The launcher itself never starts MPI.
"""

from ..errors import LaunchError


class ProgramMissingError(LaunchError):
    """The program to be launched does not exist. The command line exits with 127, as a shell does."""
