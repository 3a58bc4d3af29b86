"""Rows on the GPUs of a node, whatever sums them, and reference kernels in the place of CUDA's."""

from types import SimpleNamespace

import numpy as np

from hpcdp import kernels
from hpcdp.comm.progress import run_until_complete


def to_gpu(x):
    import cupy

    return cupy.asarray(x)


def write(row, values):
    """Let a row have ``values`` for what its stream is given from now on."""
    import cupy

    row.mine[...] = to_gpu(values)
    row.stream.wait_event(cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True)))


def summed_and_brought_to_all(row, parts, rank, values):
    """What is in a rank's own part of its row after its sum, and in the whole row after the parts were brought."""
    write(row, values)
    run_until_complete(row.reduce_scatter(parts))
    row.stream.synchronize()
    own = row.mine[slice(*parts[rank])].to_host()
    run_until_complete(row.allgather(parts))
    row.stream.synchronize()
    return own, row.mine.to_host()


def assert_summed(found, parts, wanted):
    """``found`` is that of `summed_and_brought_to_all`, of each rank."""
    for part, (own, everything) in zip(parts, found, strict=True):
        np.testing.assert_array_equal(own, wanted[slice(*part)])
        np.testing.assert_array_equal(everything, wanted)


def reference_kernels(name):
    """In the place of `kernels._for_cuda`: what a stand-in for CuPy computes faster."""
    return SimpleNamespace(is_there=lambda: False) if name == "cudnn_conv" else kernels.reference
