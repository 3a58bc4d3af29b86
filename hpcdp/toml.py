"""Floor 0: toml, TOML files from outside. Imports: nothing."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read(path: str | Path) -> dict[str, Any]:
    """Return what a TOML file says.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no TOML, is nested too deeply, or has an integer of more than 64 bits. Python would not show
            one of more than 4,300 digits, not even in an error.
    """
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # some editors begin it with a mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:
        raise ValueError("an integer of more than 64 bits") from error
    except RecursionError as error:
        raise ValueError("tables or lists that are nested too deeply") from error
    left: list[Any] = [found]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError("an integer of more than 64 bits")
    return found
