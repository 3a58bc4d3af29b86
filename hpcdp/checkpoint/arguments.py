"""What programs may give a `Manager`, checked before ranks do anything together."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .shard import failing


def absolute(path: str | os.PathLike[str]) -> Path:
    """A folder by a name that stays the same where the program goes on in another one.

    Raises:
        DataError: the folder that the program is in is gone.
    """
    with failing("Manager", lambda: path):
        return Path(os.path.abspath(path))


def told_alike(metrics: Mapping[str, float], config: Mapping[str, Any]) -> list[str]:
    """What of a save's arguments must be the same on all ranks, a line each, whatever their order."""
    numbers = [f"metric {name} = {float(value)!r}" for name, value in metrics.items()]
    settings = [f"config {name} = {json.dumps(value, sort_keys=True)}" for name, value in config.items()]
    return sorted(numbers) + sorted(settings)
