"""One file that all ranks write through parallel HDF5, where some Python has it.

``HPCDP_PARALLEL_HDF5_PYTHON`` names one whose h5py was built with HDF5_MPI=ON; without it, that of the tests is asked.
docs/checkpoints.md says how to make one on Debian.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("HPCDP_PARALLEL_HDF5_PYTHON", sys.executable)
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import numpy as np
import hpcdp
from hpcdp import checkpoint
from hpcdp.comm.communicator import bounds

world = hpcdp.init()
ends, whole = bounds(555, world.size), np.random.default_rng(2).standard_normal((37, 15)).astype("f4")
big = np.random.default_rng(3).standard_normal((600, 700))
own = whole.reshape(-1)[ends[world.rank] : ends[world.rank + 1]].copy()
state = {
    "whole": checkpoint.Sharded((37, 15), np.dtype("f4"), [checkpoint.Part(ends[world.rank], own)]),
    "big": big, "own": checkpoint.PerRank(np.arange(world.rank)), "none": np.zeros((0, 3)),
}
with checkpoint.Manager(sys.argv[1], world, shards="all") as manager:
    for wait in (True, False):
        manager.save(5 + wait, state, wait=wait)
        manager.wait()
        restored = manager.restore().state
        assert np.array_equal(restored["whole"], whole) and np.array_equal(restored["big"], big)
        assert np.array_equal(restored["own"], np.arange(world.rank)) and restored["none"].shape == (0, 3)
print("saved and restored")
"""


def reason() -> str | None:
    asks = "import h5py, isal, mpi4py, numba, sys; sys.exit(not h5py.get_config().mpi)"
    done = subprocess.run([PYTHON, "-c", asks], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else "no h5py with parallel HDF5 (HPCDP_PARALLEL_HDF5_PYTHON names none)"


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.thorough
def test_all_ranks_write_one_file(n: int, tmp_path: Path) -> None:
    if (why := reason()) is not None:
        pytest.skip(why)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [PYTHON, "-m", "hpcdp.cli", "launch", "-n", str(n), "--", PYTHON, "program.py", str(tmp_path / "saved")]
    found = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("saved and restored") == n
    names = sorted(path.name for path in (tmp_path / "saved" / "step-0000000005").iterdir())
    assert names == ["index.h5", "manifest.json", "shard-all.h5"]
    verify = [PYTHON, "-m", "hpcdp.cli", "checkpoint", "verify", str(tmp_path / "saved")]
    assert subprocess.run(verify, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode == 0
