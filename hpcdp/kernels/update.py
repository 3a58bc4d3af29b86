"""Fused optimizer updates for NumPy arrays, one pass over memory.

`reference.update` is the specification: same names, same arguments, same bits. There is no fastmath here: LLVM may then
neither contract a multiplication and an addition nor reorder, so the vectorised body of a loop and its scalar tail
round alike, and any split of the arrays gives the same bits (measured: no slower, the loops wait for memory).
"""

from __future__ import annotations

import numba
import numpy as np

from .machine_code import kernel

_FLAT = (numba.float32[::1], numba.float64[::1])


def _compile(num_arrays: int, num_coefficients: int):  # type: ignore[no-untyped-def]
    coefficients = numba.types.UniTuple(numba.float64, num_coefficients)
    signatures = [numba.void(*[flat] * num_arrays, coefficients) for flat in _FLAT]
    return kernel(signatures)


@_compile(2, 3)
def sgd(param, grad, coefficients):  # type: ignore[no-untyped-def]
    """SGD without momentum; see `reference.update.sgd`."""
    lr = param.dtype.type(coefficients[0])
    weight_decay = param.dtype.type(coefficients[1])
    scale = param.dtype.type(coefficients[2])
    for i in range(param.size):
        p = param[i]
        g = grad[i] * scale + p * weight_decay
        param[i] = p - g * lr


@_compile(3, 4)
def sgd_momentum(param, grad, velocity, coefficients):  # type: ignore[no-untyped-def]
    """SGD with momentum; see `reference.update.sgd_momentum`."""
    lr = param.dtype.type(coefficients[0])
    weight_decay = param.dtype.type(coefficients[1])
    scale = param.dtype.type(coefficients[2])
    momentum = param.dtype.type(coefficients[3])
    for i in range(param.size):
        p = param[i]
        g = grad[i] * scale + p * weight_decay
        v = velocity[i] * momentum + g
        velocity[i] = v
        param[i] = p - v * lr


@_compile(3, 4)
def sgd_nesterov(param, grad, velocity, coefficients):  # type: ignore[no-untyped-def]
    """SGD with Nesterov's momentum; see `reference.update.sgd_nesterov`."""
    lr = param.dtype.type(coefficients[0])
    weight_decay = param.dtype.type(coefficients[1])
    scale = param.dtype.type(coefficients[2])
    momentum = param.dtype.type(coefficients[3])
    for i in range(param.size):
        p = param[i]
        g = grad[i] * scale + p * weight_decay
        v = velocity[i] * momentum + g
        velocity[i] = v
        param[i] = p - (g + v * momentum) * lr


@_compile(4, 9)
def adam(param, grad, m, v, coefficients):  # type: ignore[no-untyped-def]
    """Adam and AdamW; see `reference.update.adam`."""
    step_size = param.dtype.type(coefficients[0])
    weight_decay = param.dtype.type(coefficients[1])
    scale = param.dtype.type(coefficients[2])
    shrink = param.dtype.type(coefficients[3])
    one_minus_beta1 = param.dtype.type(coefficients[4])
    beta2 = param.dtype.type(coefficients[5])
    one_minus_beta2 = param.dtype.type(coefficients[6])
    root_scale = param.dtype.type(coefficients[7])
    eps = param.dtype.type(coefficients[8])
    for i in range(param.size):
        p = param[i]
        g = grad[i] * scale + p * weight_decay
        first = m[i] + (g - m[i]) * one_minus_beta1
        second = v[i] * beta2 + (g * g) * one_minus_beta2
        m[i] = first
        v[i] = second
        param[i] = p * shrink - (first / (np.sqrt(second) * root_scale + eps)) * step_size
