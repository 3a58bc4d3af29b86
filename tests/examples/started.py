"""Examples as their users start them, with threads of this process in place of ranks, so that no interpreter starts."""

import contextlib
import io
import sys
import threading
from pathlib import Path

import pytest

import hpcdp
from hpcdp.comm import thread_comm

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def start(name: str, ranks: int, *arguments: str) -> str:
    """What ``hpcdp launch -n RANKS -- python examples/NAME ARGUMENTS`` prints; what it raises is raised."""
    return start_code((EXAMPLES / name).read_text(), name, ranks, *arguments)


def start_code(source: str, name: str, ranks: int, *arguments: str) -> str:
    """As `start` for a program that is given by its text."""
    code = compile(source, name, "exec")
    own, said = threading.local(), io.StringIO()

    def rank(world: hpcdp.World) -> None:
        own.world = world
        exec(code, {"__name__": "__main__", "__file__": str(EXAMPLES / name)})

    def fail(reason: object, status: int, *, by_all: bool = False) -> int:
        if own.world.rank == 0:
            print(f"hpcdp: {reason}", file=sys.stderr)
        return status

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", [name, *arguments])
        patch.setattr(hpcdp, "init", lambda: own.world)
        patch.setattr("hpcdp.launch.parser.fail", fail)
        thread_comm.run(ranks, rank)
    return said.getvalue()
