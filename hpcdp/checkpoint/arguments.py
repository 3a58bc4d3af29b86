"""What programs may give a `Manager`, checked before ranks do anything together."""

from __future__ import annotations

import os
from pathlib import Path

from .shard import failing


def absolute(path: str | os.PathLike[str]) -> Path:
    """A folder by a name that stays the same where the program goes on in another one.

    Raises:
        DataError: the folder that the program is in is gone.
    """
    with failing("Manager", lambda: path):
        return Path(os.path.abspath(path))
