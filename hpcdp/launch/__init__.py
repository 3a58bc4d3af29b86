"""Floor 7: launch. Imports: comm, errors, kernels, arrays, launched.

Starts ranks and examines the machine and its MPI library, without ever starting MPI in the launcher itself.
"""

from ..errors import LaunchError


class ProgramMissingError(LaunchError):
    """The program to be launched does not exist. The command line exits with 127, as a shell does."""
