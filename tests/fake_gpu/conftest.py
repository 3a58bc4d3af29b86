"""Programs that run CuPy on a GPU that is not there (`fake_gpu`), for ``make test-cupy``."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fake_gpu
import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def on_fake_gpu() -> Run:
    """Runs Python with these arguments and variables of the environment, and what it starts, on the fake GPU."""
    if os.environ.get("HPCDP_TEST_CUPY") != "1":
        pytest.skip("make test-cupy runs it: CuPy without a GPU, in an environment of its own")
    folder = Path(sys.prefix, "fake-gpu")  # kernels that are compiled once stay there, too
    try:
        library = fake_gpu.build(folder)
    except FileNotFoundError:
        pytest.skip("the fake GPU needs gcc and nm")

    def run(*arguments: str | Path, limit_s: float = 100, **environ: str) -> subprocess.CompletedProcess[str]:
        environ = {
            **os.environ, "FAKE_GPU": str(library), "CUPY_CACHE_DIR": str(folder / "kernels"),
            "PYTHONPATH": str(Path(__file__).parent), **environ,
        }  # fmt: skip
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit_s)

    tried = run("-c", "import cupy; cupy.zeros(1)")
    if fake_gpu.Unsuitable.__name__ in tried.stderr:
        pytest.skip(tried.stderr.splitlines()[-1].partition(": ")[2])
    assert tried.returncode == 0, tried.stderr
    return run
