"""Floor 0: interpreter, how this process starts others of its Python. Imports: nothing."""

from __future__ import annotations

import os
import sys


def apart() -> tuple[str, ...]:
    """What Python is given to find modules as this process has found them: not in the working folder, where a user's
    ``random.py`` would pass for the standard library's, unless hpcdp itself is there."""
    is_here = sys.path[:1] in ([""], [os.getcwd()])
    return () if is_here else ("-P",)


def module(name: str) -> tuple[str, ...]:
    """What Python is given to run a module of hpcdp."""
    return (*apart(), "-m", name)
