"""Stand-in for the communicators and the memory of a world in which this process may not communicate.

A world is closed, or this process is a child of a rank. What is called then fails at its first use of a communicator,
so that nothing needs to be asked where communication is possible.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import HpcdpError

if TYPE_CHECKING:
    from .world import World

FIELDS = ("comm", "call_comm", "node_comm", "rail_comm", "node_memory", "divide")
"""Of a `World`: what it communicates by."""


class Refused:
    """Raises an error for whatever is called of it, by the name of the function of hpcdp that the program has called.

    Args:
        kind: of error.
        rank, size: what the communicator says of itself.
        why: the parts of the error.
    """

    def __init__(self, kind: type[HpcdpError], rank: int, size: int, **why: Any) -> None:
        self.rank, self.size = rank, size
        self._kind, self._why = kind, why

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy, pickle and NumPy ask for some
            raise AttributeError(name)
        self._refuse()

    def __call__(self, *_: object, **__: object) -> NoReturn:
        self._refuse()

    def __contains__(self, _: object) -> NoReturn:
        self._refuse()

    def __len__(self) -> NoReturn:
        self._refuse()

    def __getitem__(self, _: object) -> NoReturn:
        self._refuse()

    def __repr__(self) -> str:
        return "refused"

    def _refuse(self) -> NoReturn:
        raise self._kind(called(sys._getframe(2))[1], **self._why)


def called(frame: FrameType | None) -> tuple[str, str]:
    """Return what a program has called: the outermost function of hpcdp below it on a stack.

    Args:
        frame: the innermost of the stack.

    Returns:
        The public name of its class, which may be empty, and its own: of what makes or calls an object the class's
        again, of a context ``with``, of an attribute that is made on demand the attribute's.
    """
    package = __package__.partition(".")[0]
    owner, name = "", "communicate"
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(f"{package}."):
            if found := _public_name(frame, sys.modules[package].__all__):
                owner, name = found
        elif module != "contextlib":
            break
        frame = frame.f_back
    return owner, name


def _public_name(frame: FrameType, public: Collection[str]) -> tuple[str, str] | None:
    code, seen = frame.f_code, frame.f_locals
    path = code.co_qualname
    if "<locals>" in path:  # of a decorator: what it decorates
        path = next((seen[each].__qualname__ for each in code.co_freevars if hasattr(seen.get(each), "__code__")), "")
        if not path or "<locals>" in path:
            return None
    owner, _, name = path.rpartition(".")
    owner = owner.rpartition(".")[2]
    if owner and code.co_argcount:
        this = seen.get(code.co_varnames[0])
        classes = [each.__name__ for each in (this if isinstance(this, type) else type(this)).__mro__]
        if owner in classes:
            owner = next((each for each in classes if each in public), classes[0])
    if name == "__getattr__":
        name = str(seen.get(code.co_varnames[1]))
    elif name in ("__enter__", "__exit__"):
        name = "with"
    elif name.startswith("__"):
        name = owner
    return owner, name


def refuse(world: World, kind: type[HpcdpError], kept: Any, **why: Any) -> None:
    """Let all communication of ``world`` fail from now on; ``kept`` takes the place of its `World.kept`."""
    for name in FIELDS:
        if (before := getattr(world, name)) is not None and not isinstance(before, Refused):
            rank, size = getattr(before, "rank", 0), getattr(before, "size", 1)
            object.__setattr__(world, name, Refused(kind, rank, size, **why))
    object.__setattr__(world, "kept", Refused(kind, 0, 1, **why) if kept is None else kept)
