"""Floor 0: replacing, files that are written whole or not at all. Imports: nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path


def part_of(path: Path) -> Path:
    """Where what is to be ``path`` is written meanwhile, by one writer at a time."""
    return path.with_name(path.name + ".part")


def own_part_of(path: Path) -> Path:
    """Where this process alone writes it: several may replace one file at a time, and the last has its place."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


@contextlib.contextmanager
def replaced(path: Path, part: Callable[[Path], Path] = part_of) -> Iterator[Path]:
    """Yields where to write a file, which takes the place of ``path`` in one go when the block has ended.

    Where the block raises, what it has written is removed and ``path`` stays as it was. Nobody waits for the disk: what
    must outlast a power loss is flushed to it, by fsync, before the block ends.

    Args:
        path: the file; of a link, what it leads to is replaced. A device or a pipe is written to itself.
        part: where it is written, in the same folder; for several writers at a time: `own_part_of`.

    Raises:
        OSError: it cannot take that place.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    written = part(path)
    try:
        yield written
        os.replace(written, path)
    except BaseException:
        with contextlib.suppress(OSError):
            written.unlink()  # it may be what fills the disk
        raise
