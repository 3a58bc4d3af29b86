"""CuPy's place taken by `cupy_on_host`, so that CUDA kernels and what launches them run without a GPU."""

import shutil
import sys
from collections.abc import Iterator
from types import ModuleType

import cupy_on_host
import pytest

from hpcdp.kernels import cuda


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    if not shutil.which("g++"):
        pytest.skip("needs g++, which compiles CUDA kernels for this processor")
    monkeypatch.setitem(sys.modules, "cupy", None)  # what is there now comes back afterwards
    yield cupy_on_host.install()
    cuda._kernel.cache_clear()
    cuda._module.cache_clear()
