"""Files of figures: refused before anything is measured, then written all or nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...comm import World
from ...comm.agreement import on_rank_0
from ...errors import ConfigError
from ...replacing import part_of, replaced


def check_writable(what: str, paths: Iterable[str | None], world: World | None = None) -> None:
    """Refuse what cannot be written, before anything is measured; every rank of ``world`` must call.

    Args:
        what: is asked to write, for the error.
        paths: of files, those that are None or empty are left out.
        world: rank 0 looks for all its ranks; None where there is only this process.

    Raises:
        ConfigError: on every rank.
    """

    def check() -> None:
        for path in paths:
            if path and (reason := _obstacle(path)):
                raise ConfigError(f"{what}: {reason}")

    if world is None:
        check()
    else:
        on_rank_0(world.comm, check)


def _obstacle(path: str) -> str:
    """Why ``path`` cannot be written, or nothing."""
    given = Path(path)
    try:
        if given.is_dir():
            return f"{path} is a folder"
        if not given.parent.is_dir():
            return f"there is no folder {given.parent}"
        if given.exists() and not os.access(given, os.W_OK):
            return f"{path} may not be written"
        if not _is_special(given):  # to try is the only way to know: permissions mean nothing to root, or on /proc
            part = part_of(given.resolve())
            try:
                part.touch()
            finally:
                part.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        return _reason(path, error)
    return ""


def _reason(path: str, error: OSError | ValueError) -> str:
    return f"{path} cannot be written: {getattr(error, 'strerror', None) or error}"


def _is_special(path: Path) -> bool:
    """Whether it is a device or a pipe, which nothing can replace."""
    return path.exists() and not path.is_file()


def write(path: str, content: bytes | str) -> None:
    """Write a file, which is replaced in one go unless it is a device or a pipe.

    Raises:
        ConfigError: it cannot be written; what was there stays.
    """
    data = content.encode() if isinstance(content, str) else content
    given = Path(path)
    try:
        if _is_special(given):
            given.write_bytes(data)
            return
        with replaced(given.resolve()) as part:
            part.write_bytes(data)
    except OSError as error:
        raise ConfigError(_reason(path, error)) from error


def as_json(report: dict[str, Any]) -> str:
    """``report`` as it stands in a file."""
    return json.dumps(report, indent=1) + "\n"


def write_json(path: str | None, world: World, report: dict[str, Any]) -> None:
    """Write ``report`` on rank 0, if a path was given; every rank must call.

    Raises:
        ConfigError: on every rank: it cannot be written.
    """
    if path:
        on_rank_0(world.comm, lambda: write(path, as_json(report)))
