"""Clusters of hosts on this machine for the tests marked ``cluster``, which `make test-cluster` runs."""

import ctypes
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench_harness.cluster import Cluster, obstacle

Run = Callable[[Cluster, int | list[int], str], list[dict[str, Any]]]


@pytest.fixture(scope="session", autouse=True)
def sigint_is_not_ignored() -> None:
    """Shells start a command behind which ``&`` stands with SIGINT ignored, and all that it starts would be so."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def hosts_possible() -> None:
    if os.environ.get("HPCDP_TEST_CLUSTER") != "1":
        pytest.skip("make test-cluster runs it: hosts on this machine, which need root")
    reason = obstacle()
    if reason is not None:
        pytest.skip(f"no hosts can be made here: {reason}")


@pytest.fixture(scope="session")
def slurm_possible(hosts_possible: None) -> None:
    """That Slurm can start Open MPI's ranks."""
    for tool in ("munged", "slurmctld", "slurmd", "srun"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian: slurm-wlm munge libpmix2 libpmix-dev)")
    try:
        ctypes.CDLL("libpmix.so")
    except OSError:
        pytest.skip("Slurm finds no libpmix.so (Debian: libpmix2 libpmix-dev)")
    if (Path(sys.executable).parent / "mpiexec.hydra").exists():
        pytest.skip("MPICH knows no PMIx")


@pytest.fixture(scope="module")
def two_hosts(hosts_possible: None) -> Iterator[Cluster]:
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three_hosts(hosts_possible: None) -> Iterator[Cluster]:
    with Cluster(3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def four_hosts(hosts_possible: None) -> Iterator[Cluster]:
    with Cluster(4) as cluster:
        yield cluster


@pytest.fixture
def run() -> Run:
    """Runs a Python program as ranks of a cluster and returns what each rank left in ``answer``, in rank order.

    The program finds ``world`` and ``answer``, a dict, and may use ``hpcdp`` and ``np``.
    """

    def runs(cluster: Cluster, ranks_per_node: int | list[int], program: str) -> list[dict[str, Any]]:
        script, answers = cluster.folder / "program.py", cluster.folder / "answers.json"
        lines = ["import json, sys", "import numpy as np", "import hpcdp", "world, answer = hpcdp.init(), {}", program]
        lines += ["answers = world.comm.allgather_json(answer)", "if world.rank == 0:"]
        lines += ["    open(sys.argv[1], 'w').write(json.dumps(answers))"]
        script.write_text("\n".join(lines))
        answers.unlink(missing_ok=True)
        done = cluster.mpirun(ranks_per_node, [sys.executable, script, answers], 240)
        assert done.returncode == 0, done.stdout + done.stderr
        return list(json.loads(Path(answers).read_text()))

    return runs
