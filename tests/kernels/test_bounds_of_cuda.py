"""No CUDA kernel reads or writes beyond its arrays: their tests on this processor, with a sanitizer of addresses."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

HERE = Path(__file__).parent
WITH_KERNELS = sorted(str(path) for path in HERE.glob("test_cuda*.py") if path.stem != "test_cuda_sources")
BEYOND = """
from gpu_on_host import cupy_module
import numpy as np
from hpcdp.kernels import cuda

code = 'extern "C" __global__ void beyond(int* out, int count) { if (threadIdx.x <= count) out[threadIdx.x] = 1; }'
with cupy_module.instead() as cupy:
    kernel = cupy.RawModule(code=code, options=cuda.OPTIONS).get_function("beyond")
    for count in (999, 1000):
        kernel((1,), (1024,), (cupy.asarray(np.zeros(1000, np.int32)), np.int32(count)))
        print("written", count, flush=True)
"""


def sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python whose memory is watched; the first access beyond it ends the process."""
    if not shutil.which("g++"):
        pytest.skip("needs g++, which compiles CUDA kernels for this processor")
    libraries = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
                 for name in ("libasan.so", "libstdc++.so")]  # fmt: skip  # the second for errors of the first
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("needs g++'s address sanitizer")
    environment = {  # nor reports to the run of which this is a test
        **{name: value for name, value in os.environ.items() if not name.startswith(("HPCDP_TEST_", "PYTEST_"))},
        "LD_PRELOAD": " ".join(libraries), "PYTHONMALLOC": "malloc", "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


def test_no_kernel_reads_or_writes_beyond_its_arrays() -> None:
    done = sanitized("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *WITH_KERNELS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]


def test_what_is_written_beyond_an_array_is_found() -> None:
    done = sanitized("-c", BEYOND)
    assert done.stdout == "written 999\n", done.stderr
    assert "heap-buffer-overflow" in done.stderr
