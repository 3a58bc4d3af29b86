"""Files of Open MPI's shared memory, removed once they are mapped: no kill leaves them behind in /dev/shm then.

Open MPI leaves it to the launcher to remove them. mpirun does; srun does not for a world of one, also at a good end,
nor where its own daemon on a host is killed, too. Under mpirun they stay: a program may start further processes there.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..launched import is_launched, started_by_srun

if TYPE_CHECKING:
    from .mpi import MpiCommunicator

_MAPPED = re.compile(r" (/\S*/(?:sm|vader)_segment\.[^/\s]+)$", re.MULTILINE)


def remove(machine: MpiCommunicator, environ: Mapping[str, str] = os.environ) -> None:
    """Remove the files that all ranks of a machine have mapped; each of these ranks must call."""
    if is_launched(environ) and not started_by_srun(environ):
        return
    mapped = _mapped()
    if machine.size > 1 and not all(machine.allgather_json(len(mapped) == machine.size)):
        return  # somebody will look for one by its name
    for path in mapped:
        with contextlib.suppress(OSError):  # another rank has been faster
            path.unlink()


def _mapped() -> set[Path]:
    """Return the files of segments that this process has mapped, of itself and of other ranks."""
    with contextlib.suppress(OSError):
        return set(map(Path, _MAPPED.findall(Path("/proc/self/maps").read_text(errors="surrogateescape"))))
    return set()
