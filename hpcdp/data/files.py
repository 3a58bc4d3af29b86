"""Floor 3: data, whether a file is there. Imports: errors."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import DataError


def require_file(operation: str, path: str | Path) -> None:
    """Raises `DataError` unless ``path`` is a file, or a link to one; it says why where the system does."""
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            return
        got = "none"
    except (FileNotFoundError, NotADirectoryError):
        got = "none"
    except OSError as error:  # pathlib raises it, too: a folder that may not be searched, a name that is too long
        got = error.strerror or str(error)
    raise DataError(operation, where=path, expected="a file", got=got)
