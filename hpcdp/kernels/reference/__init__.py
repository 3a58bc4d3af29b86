"""Reference implementations of all kernels, in operations that NumPy and CuPy share.

They are the specification for tests of the compiled kernels, and compute for arrays without a kernel. `networks` has
those of layers and elementwise operations, `gradients` those of sums, norms, updates and compression. The Numba kernels
in ``hpcdp/kernels`` and the CUDA kernels in ``hpcdp/kernels/cuda`` have the same names and arguments.
"""
