"""Reference implementations of all kernels, in the operations that NumPy and CuPy share.

They are the specification that the compiled kernels are tested against, and compute for arrays that have no kernel.
`networks` has those of layers and elementwise operations, `gradients` those of sums, norms, updates, compression. The
Numba kernels in ``hpcdp/kernels`` and the CUDA kernels in ``hpcdp/kernels/cuda`` have the same names and arguments.
"""
