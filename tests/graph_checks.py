"""What tests of CUDA graphs share, on a GPU or on `graphs_on_host`.

To the bit on the host; on a GPU products with another workspace may round in another way.
"""

import os
import shutil

import numpy as np
import pytest

from hpcdp.core.arrays import to_host

ON_GPU = os.environ.get("HPCDP_TEST_GPU", "") not in ("", "0")
needs_compiler = pytest.mark.skipif(
    not shutil.which("g++"), reason="needs g++, which compiles kernels for this processor"
)


def arrays(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def on_gpu(x):
    import cupy

    return cupy.asarray(x)


def same(a, b):
    a, b = to_host(a), to_host(b)
    assert a.shape == b.shape and a.dtype == b.dtype
    if ON_GPU:
        np.testing.assert_allclose(a.astype("f4"), b.astype("f4"), rtol=1e-4, atol=1e-5)
    else:
        np.testing.assert_array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))
