"""Stand-in for the communicators and the memory of a world in which this process may not communicate.

A world is closed, or this process is a child of a rank. What is called then fails at its first use of a communicator,
so that nothing needs to be asked where communication is possible.
"""

from __future__ import annotations

import sys
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

    def __getitem__(self, _: object) -> NoReturn:
        self._refuse()

    def __repr__(self) -> str:
        return "refused"

    def _refuse(self) -> NoReturn:
        raise self._kind(_called(), **self._why)


def _called() -> str:
    """Return the name of the outermost function of hpcdp on this thread's stack, below what the program has called."""
    frame: FrameType | None = sys._getframe(2)
    name = "communicate"
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(f"{__package__.partition('.')[0]}."):
            if "<locals>" not in frame.f_code.co_qualname:  # a decorator's own
                name = frame.f_code.co_qualname
        elif module != "contextlib":
            break
        frame = frame.f_back
    owner, _, name = name.rpartition(".")
    return owner.rpartition(".")[2] if name == "__init__" else name


def refuse(world: World, kind: type[HpcdpError], kept: Any, **why: Any) -> None:
    """Let all communication of ``world`` fail from now on; ``kept`` takes the place of its `World.kept`."""
    for name in FIELDS:
        if (before := getattr(world, name)) is not None and not isinstance(before, Refused):
            rank, size = getattr(before, "rank", 0), getattr(before, "size", 1)
            object.__setattr__(world, name, Refused(kind, rank, size, **why))
    object.__setattr__(world, "kept", Refused(kind, 0, 1, **why) if kept is None else kept)
