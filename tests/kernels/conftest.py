"""Where CUDA kernels are tested: on a GPU with ``HPCDP_TEST_GPU=1`` (``make test-gpu``), else with CuPy's place taken
by `cupy_on_host`, so that they and what launches them run without one."""

import os
import shutil
import sys
from collections.abc import Iterator
from types import ModuleType

import cupy_on_host
import pytest

from hpcdp.kernels import cuda

ON_GPU = os.environ.get("HPCDP_TEST_GPU", "") not in ("", "0")


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    if not shutil.which("g++"):
        pytest.skip("needs g++, which compiles CUDA kernels for this processor")
    monkeypatch.setitem(sys.modules, "cupy", None)  # what is there now comes back afterwards
    yield cupy_on_host.install()
    cuda._kernel.cache_clear()
    cuda._module.cache_clear()


@pytest.fixture
def cupy(request: pytest.FixtureRequest) -> ModuleType:
    if not ON_GPU:
        return request.getfixturevalue("on_host")  # type: ignore[no-any-return]
    module = pytest.importorskip("cupy", reason="needs CuPy: pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]'")
    if not module.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU and its driver")
    module.ndarray.to_host = module.ndarray.get  # as the stand-in's
    return module


@pytest.fixture
def product_error(cupy: ModuleType) -> float:
    """How far cuBLAS's products may be from NumPy's, of the largest element."""
    return 1e-5 if ON_GPU else 0.0
