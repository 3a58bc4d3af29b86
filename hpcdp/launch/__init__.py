"""Launching of ranks: by one of the `launchers`, through a `guard` on each other host, and in batch jobs.

The launcher never initializes MPI.
"""

from ..errors import LaunchError


class ProgramMissingError(LaunchError):
    """The program to be launched does not exist. The command line exits with 127, as a shell does."""
