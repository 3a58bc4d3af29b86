"""How soon a thread that mostly sleeps gets back a core on which another one computes.

Since Linux 6.6 (the scheduler EEVDF) a thread that wakes up waits until the running one has used up its slice, some
3 ms, and meanwhile messages lie about. Since 6.12 a thread may ask for shorter slices than others; it then gets its
share of the core in smaller pieces, but as soon as it wakes up. Measured with a reduction of 16 MiB over 1 Gbit/s
beside backward, a core a rank: a step took 274 ms without and 235 ms with it (docs/benchmarks.md, "Overlap").

Source: Stoica and Abdel-Wahab, "Earliest eligible virtual deadline first", 1995; sched_setattr(2).
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

SLICE_NS = 100_000
"""The shortest that Linux grants."""

_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275), "ppc64le": (355, 356)}
"""Of the system calls sched_setattr and sched_getattr, for which glibc has no functions before 2.41."""

_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period."""

_ORDINARY, _RUNTIME = 0, 5


def ask_for_short_slices() -> bool:
    """Let the calling thread have its share of a core soon and in small pieces; its priority stays as it is.

    Returns:
        Whether the system took the wish. Before Linux 6.12 it does, and nothing changes.
    """
    attributes = _attributes()
    if attributes is None or attributes[1] != _ORDINARY:
        return False
    attributes[_RUNTIME] = SLICE_NS
    setter, _ = _NUMBERS[platform.machine()]
    return bool(_system().syscall(setter, 0, _ATTRIBUTES.pack(*attributes), 0) == 0)


def _attributes() -> list[int] | None:
    if sys.platform != "linux" or platform.machine() not in _NUMBERS:
        return None
    _, getter = _NUMBERS[platform.machine()]
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if _system().syscall(getter, 0, buffer, _ATTRIBUTES.size, 0) != 0:
        return None
    return list(_ATTRIBUTES.unpack(buffer.raw))


def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
