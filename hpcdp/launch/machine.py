"""What this process may use of its machine, read from the operating system; nothing is started or imported for it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_MIB = 1 << 20


def usable_cores() -> list[int]:
    """The numbers of the cores in this process's affinity mask."""
    return sorted(os.sched_getaffinity(0))


def cores_of(pid: int) -> str:
    """The cores in a process's affinity mask, as `ranges` writes them; empty for one that has ended."""
    with contextlib.suppress(OSError):
        return ranges(sorted(os.sched_getaffinity(pid)))
    return ""


def core_quota() -> float | None:
    """The cores' worth of time that the control group allows a second, None without a limit."""
    for path in ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"):
        try:
            limit, period = [*Path(path).read_text().split(), "100000"][:2]
        except OSError:
            continue
        return int(limit) / int(period) if limit.isdecimal() else None
    return None


def memory_mib() -> tuple[int, int]:
    """(total, available) memory in MiB, both at most the control group's limit."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(lines[key].split()[0]) // 1024 for key in ("MemTotal", "MemAvailable"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(path).read_text().strip()
        except OSError:
            continue
        if limit.isdecimal():
            total, available = min(total, int(limit) // _MIB), min(available, int(limit) // _MIB)
    return total, available


def files_in_use(prefix: str) -> set[str]:
    """The files below ``prefix`` that processes of this user map or hold open; those of other users are not shown."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_text(errors="surrogateescape").splitlines()
            found |= {line.split(maxsplit=5)[5] for line in lines if prefix in line}
            for entry in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    found.add(os.readlink(entry))
    return {path for path in found if path.startswith(prefix)}


def started_at_s(name: str) -> list[float]:
    """When each process of that name was started, in seconds since the epoch, give or take one (proc(5))."""
    found = []
    booted_s = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if "btime" in line)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, fields = stat.read_bytes().rpartition(b") ")
            if head.partition(b"(")[2] == name.encode():
                found.append(booted_s + int(fields.split()[19]) / os.sysconf("SC_CLK_TCK"))
    return found


def gpus() -> list[str]:
    """The models of this machine's NVIDIA GPUs, as their driver names them."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        names.append(lines.get("Model", "unknown").strip())
    return names


def version(distribution: str) -> str | None:
    """The version of an installed Python distribution, None if it is not installed."""
    import importlib.metadata  # an eighth of the time of a launch

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def ranges(numbers: list[int]) -> str:
    """Sorted numbers as a list of ranges, the way that taskset writes cores: "0-3,8"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
