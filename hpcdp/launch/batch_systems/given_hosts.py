"""The hosts that Grid Engine or LSF has given to this job, for an mpirun that does not read them itself.

Open MPI 5 reads those of Slurm and PBS. Those of other batch systems it reads where it was built beside them, which
PyPI's was not: that starts all ranks on the first host of the job, as many as it has cores.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from ...errors import LaunchError
from ...launched import batch_system
from .. import hosts, mpi_library
from ..dialect import Dialect
from ..job import Host, Job

_READERS = {"Grid Engine": b"ras_gridengine", "LSF": b"ras_lsf"}
"""What a runtime of Open MPI 5 has in it that reads them."""


def read(environ: Mapping[str, str] = os.environ) -> tuple[Host, ...]:
    """Those of a job of these two, with the slots that it has there; none of any other.

    Raises:
        LaunchError: what says so cannot be read.
    """
    batch = batch_system(environ)
    if batch == "Grid Engine":
        return hosts.merged(list(_of_grid_engine(environ["PE_HOSTFILE"])))
    return hosts.merged(list(_of_lsf(environ))) if batch == "LSF" else ()


def placed(job: Job, given: tuple[Host, ...], mpirun: Path, dialect: Dialect) -> tuple[hosts.Place, ...]:
    """What ``job`` has of each of the hosts that `read` has found; nothing where this mpirun reads them itself.

    Raises:
        LaunchError: there is not enough room.
    """
    if not given or dialect.family != "openmpi" or dialect.is_open_mpi_4:
        return ()
    batch = batch_system()
    assert batch is not None
    if any(_READERS[batch] in content for content in mpi_library.runtimes(mpirun)):
        return ()
    try:
        return hosts.place(dataclasses.replace(job, hosts=given))
    except LaunchError as error:
        error.operation, error.remedy = f"launch in a job of {batch}", "ask it for more slots, or name hosts by -H"
        raise


def _of_grid_engine(path: str) -> Iterator[Host]:
    """From sge_pe(5), $pe_hostfile: a host, its slots, its queue, its processors."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError as error:
        raise _unreadable("PE_HOSTFILE", "a file of hosts", f"{path}: {error.strerror}") from error
    for line in lines:
        name, slots, *_ = [*line.split(), "", ""]
        if name:
            yield _host("PE_HOSTFILE", name, slots)


def _of_lsf(environ: Mapping[str, str]) -> Iterator[Host]:
    """Of its two variables, which say the same, large jobs have the second one alone."""
    if names := environ.get("LSB_HOSTS", "").split():
        yield from (_host("LSB_HOSTS", name, "1") for name in names)
        return
    words = [*environ["LSB_MCPU_HOSTS"].split(), ""]
    yield from (_host("LSB_MCPU_HOSTS", name, slots) for name, slots in list(pairwise(words))[::2])


def _host(variable: str, name: str, slots: str) -> Host:
    if not re.fullmatch("[1-9][0-9]{0,6}", slots):
        raise _unreadable(variable, "hosts, each with a number of slots", repr(f"{name} {slots}"[:80]))
    return Host(name, int(slots))


def _unreadable(variable: str, expected: str, got: str) -> LaunchError:
    return LaunchError(f"read the hosts of {batch_system()}", where=variable, expected=expected, got=got)
