"""No rank sends before all have come out of MPI_Init: Open MPI 5 crashes one that gets a message in there.

Its MPI_Init ends with a fence of PMIx, and makes the world ready for messages only after that. Ranks come out of the
fence up to some milliseconds apart, and one that is still in it crashes when the message of another comes
(open-mpi/ompi#12495). A second fence, which needs no messages, keeps the first ranks back.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

_LIBRARY = "libpmix.so.2"


def meet() -> None:
    """Return once all processes that the launcher has started have called; all must, once, after MPI_Init.

    Where Open MPI's PMIx is not in this process nothing is waited for.
    """
    with contextlib.suppress(OSError, AttributeError):
        fence = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD).PMIx_Fence
        fence.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]
        fence(None, 0, None, 0)  # of all processes of the job, without data
