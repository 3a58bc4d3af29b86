"""The bodies of ``tests/gpu`` through CuPy itself, to their end: comparisons are left out, for there are no values."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
TESTS = Path(__file__).parents[1]
PROGRAM = f"""
import sys
import numpy.testing
numpy.testing.assert_allclose = numpy.testing.assert_array_equal = lambda *found, **how: None
sys.path.insert(0, {str(TESTS)!r})
import gpu_cases
gpu_cases.main(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("case", "ranks", "gpus", "nodes"),
    [
        ("nccl", 2, 2, 1), ("cuda_ipc", 2, 1, 1), ("reducer", 4, 1, 2), ("reducer", 2, 2, 1), ("delivery", 1, 1, 1),
        ("stores", 1, 1, 1), ("stores", 2, 1, 2), ("states", 1, 1, 1), ("training", 2, 1, 1), ("training", 4, 1, 2),
        ("graphs", 1, 1, 1), ("graphs", 3, 2, 1), ("graphs", 4, 1, 2),
    ],
)  # fmt: skip
def test_each_comes_to_its_end(on_fake_gpu: Run, case: str, ranks: int, gpus: int, nodes: int) -> None:
    launch = ("-m", "hpcdp.cli", "launch", "-n", ranks, "--", sys.executable, "-O", "-c", PROGRAM, case)
    environ = {"FAKE_GPUS": str(gpus)} | ({"HPCDP_RANKS_PER_NODE": str(ranks // nodes)} if nodes > 1 else {})
    done = on_fake_gpu(*launch, limit_s=250, **environ)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr
