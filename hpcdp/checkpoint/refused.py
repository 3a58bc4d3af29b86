"""What an entry of a state has raised, as an error that names the entry.

States are taken from programs' own objects, and given to them, which may raise anything, perhaps on one rank alone. To
be told to the other ranks, see `comm.agreement`, that must be an `HpcdpError`.
"""

from __future__ import annotations

from ..errors import HpcdpError, UnsupportedError, WorldAborted


def refused(operation: str, name: str, error: Exception) -> HpcdpError:
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


def raised(operation: str, where: str, expected: str, error: Exception) -> HpcdpError:
    """The error of something of the program's that has raised ``error`` instead of what was expected of it."""
    named = UnsupportedError(operation, where=where, expected=expected, got=f"{type(error).__name__}: {error}")
    named.__cause__ = error
    return named
