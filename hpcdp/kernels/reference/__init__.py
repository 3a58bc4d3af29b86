"""Reference implementations of all kernels, in the operations that NumPy and CuPy share.

They are the specification that the compiled kernels are tested against, and compute for arrays that have no kernel.
``X.py`` has the functions of ``hpcdp/kernels/X.py`` for NumPy arrays and of ``hpcdp/kernels/cuda/X.py`` for CuPy's,
with the same names and arguments.
"""
