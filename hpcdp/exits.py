"""Floor 0: exits, with what status this program ends, told before it has. Imports: nothing.

Python calls no hook for SystemExit. But when nobody has caught it, the interpreter asks it for its code: so in jobs of
several ranks `sys.exit` raises one here that notes being asked. This is so from the import of hpcdp on: in
``sys.exit(main())`` the name is looked up before ``main`` is called. What a program makes itself, ``raise
SystemExit(3)``, is not seen.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

_status = 0


def status() -> int:
    """What `sys.exit` was last called with when nobody caught it: that of this program, at its end; 0 before."""
    return _status


class _Exit(SystemExit):
    __module__ = "builtins"

    @property
    def code(self) -> Any:  # type: ignore[override]
        code = vars(SystemExit)["code"].__get__(self)
        if sys._getframe().f_back is None:  # no function asks, so that the program has ended
            global _status
            _status = code & 0xFF if isinstance(code, int) else int(code is not None)
        return code

    def __reduce__(self) -> tuple[type[SystemExit], tuple[Any, ...]]:  # to be sent to another process
        return SystemExit, self.args


_Exit.__name__ = _Exit.__qualname__ = SystemExit.__name__  # in tracebacks


def _exit(status: object = None, /) -> NoReturn:
    """As `sys.exit`."""
    raise _Exit(status)


def note() -> None:
    """From now on `status` is kept."""
    sys.exit = _exit
