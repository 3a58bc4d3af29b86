"""What an entry of a state has raised, as an error that names the entry.

States are taken from programs' own objects, and given to them, which may raise anything, perhaps on one rank alone. To
be told to the other ranks, see `comm.agreement`, that must be an `HpcdpError`. A `SystemExit` is told, too: the others
would wait for a rank that ends by itself. Ctrl-C is for all ranks, and ends the job as it does elsewhere.
"""

from __future__ import annotations

from ..errors import HpcdpError, UnsupportedError, WorldAborted

TOLD = (Exception, SystemExit)
"""What is caught, to be told to all ranks."""


def refused(operation: str, name: str, error: BaseException) -> HpcdpError:
    """The error of an entry.

    Args:
        operation: "save" or "restore".
        name: of the entry; empty for the whole state.
        error: what it has raised. `WorldAborted` is raised again: nobody is left to be told.
    """
    if isinstance(error, WorldAborted):
        raise error
    if isinstance(error, HpcdpError):
        if error.where is None:
            error.where = name or "the state"
        return error
    expected = "its state, to save it" if operation == "save" else "it to take its state"
    return raised(operation, name or "the state", expected, error)


def raised(operation: str, where: str, expected: str, error: BaseException) -> HpcdpError:
    """The error of something of the program's that has raised ``error`` instead of what was expected of it."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    named = UnsupportedError(operation, where=where, expected=expected, got=said)
    named.__cause__ = error
    return named
