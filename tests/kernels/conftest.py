"""Where CUDA kernels are tested: on a GPU with ``HPCDP_TEST_GPU=1`` (``make test-gpu``), else with CuPy's place taken
by `cupy_module`, so that they and what launches them run without one."""

import os
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import pytest
from gpu_on_host import cupy_module

from hpcdp.comm import world
from hpcdp.core.arrays import gpu

ON_GPU = os.environ.get("HPCDP_TEST_GPU", "") not in ("", "0")


@pytest.fixture
def on_host() -> Iterator[ModuleType]:
    with cupy_module.instead() as module:
        yield module


@pytest.fixture
def cupy(request: pytest.FixtureRequest) -> ModuleType:
    if not ON_GPU:
        return request.getfixturevalue("on_host")  # type: ignore[no-any-return]
    module = pytest.importorskip("cupy", reason="needs CuPy: pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]'")
    if not module.cuda.is_available():
        if world.visible():
            gpu(0).check()  # says what CuPy does not
        pytest.skip("needs an NVIDIA GPU and its driver")
    module.ndarray.to_host = module.ndarray.get  # as the stand-in's
    return module


@pytest.fixture
def product_error(cupy: ModuleType) -> float:
    """How far cuBLAS's products may be from NumPy's, of the largest element."""
    return 1e-5 if ON_GPU else 0.0


@pytest.fixture
def flushed() -> Callable[[np.ndarray], np.ndarray]:
    """What kernels compute with, and give, for numbers of float32 or bfloat16: zeros on a GPU for subnormal ones, since
    CuPy compiles all with ``-ftz=true``."""

    def flush(x: np.ndarray) -> np.ndarray:
        is_flushed = ON_GPU and str(x.dtype) in ("float32", "bfloat16")
        return np.where(abs(x) < 2.0**-126, 0, x).astype(x.dtype) if is_flushed else x

    return flush
