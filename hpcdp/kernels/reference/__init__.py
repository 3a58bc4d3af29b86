"""What each kernel computes, in the operations that NumPy and CuPy share: the specification that the others are tested
against, and what computes for arrays that have no kernel.

``X.py`` has what ``kernels/X.py`` has for NumPy arrays and ``kernels/cuda/X.py`` for CuPy's, with the same names and
arguments.
"""
