"""Optimizer updates of NumPy arrays in one pass over memory, optionally fused with the sum over a node's ranks.

Plain updates have the names, arguments and bits of `reference.gradients`, which also has LARS. Without fastmath LLVM
can neither contract a multiplication and an addition nor reorder. The vectorised body of a loop and its scalar tail
therefore round alike, and any split of the arrays gives the same bits (measured: no slower, the loops wait for memory).

``reduce_*`` sum a block, in the order of the ranks, into a buffer in the L1 cache, and apply the plain update to it:
the operations of `reduce.combine` and the update, so the same bits. A shard is one call: separate calls for blocks of
256 KiB took 102 to 149 us for 1 MB on 2 ranks, this takes 62 to 102. One loop for the sum and the rule took some 20 us
less, but needs a second copy of each rule.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from .jit import kernel
from .reduce import combine
from .reference.gradients import SUM
from .reference.gradients import lars_sgd as lars_sgd
from .reference.gradients import lars_sgd_momentum as lars_sgd_momentum
from .reference.gradients import lars_sgd_nesterov as lars_sgd_nesterov

_FLAT = (numba.float32[::1], numba.float64[::1])


def _compile(num_arrays: int, num_coefficients: int):  # type: ignore[no-untyped-def]
    coefficients = numba.types.UniTuple(numba.float64, num_coefficients)
    signatures = [numba.void(*[flat] * num_arrays, coefficients) for flat in _FLAT]
    return kernel(signatures)


@_compile(2, 3)
def sgd(param, grad, coefficients):  # type: ignore[no-untyped-def]
    """Update by SGD without momentum; see `reference.sgd`."""
    lr = param.dtype.type(coefficients[0])
    weight_decay = param.dtype.type(coefficients[1])
    scale = param.dtype.type(coefficients[2])
    for i in range(param.size):
        p = param[i]
        g = grad[i] * scale + p * weight_decay
        param[i] = p - g * lr


@_compile(3, 4)
def sgd_momentum(param, grad, velocity, coefficients):  # type: ignore[no-untyped-def]
    """Update by SGD with momentum; see `reference.sgd_momentum`."""
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
    """Update by SGD with Nesterov's momentum; see `reference.sgd_nesterov`."""
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
    """Update by Adam or AdamW; see `reference.adam`."""
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


_SUM_BLOCK = 1024
"""Number of elements summed at a time."""

REDUCING_DTYPES = (np.dtype("float32"), np.dtype("float64"))
"""Dtypes for which these are called."""

_coefficients = {count: types.UniTuple(types.float64, count) for count in (3, 4, 9)}


def _compile_reducing(num_states: int, num_coefficients: int):  # type: ignore[no-untyped-def]
    signatures = []
    for dtype in REDUCING_DTYPES:
        t = getattr(types, dtype.name)
        flats = [types.Array(t, 1, "C")] * (1 + num_states)
        signatures.append(
            types.void(types.Array(t, 2, "C"), types.intp, types.intp, *flats, _coefficients[num_coefficients])
        )
    return kernel(signatures)


# A factory that closes over the rule would be compiled by every process: Numba's cache key contains the identity of
# kernels in the closure, which differs between processes (measured: no hit in a second run).


@_compile_reducing(0, 3)
def reduce_sgd(rows, lo, hi, param, coefficients):  # type: ignore[no-untyped-def]
    """Sum columns ``lo`` to ``hi`` of ``rows``, shape ``(n, m)``, and update ``param``, shape ``(hi - lo,)``.

    ``coefficients`` and the rule are those of `sgd`. The variants with state take arrays of the shape of ``param``.
    """
    grad = np.empty(_SUM_BLOCK, param.dtype)
    for first in range(0, param.size, _SUM_BLOCK):
        last = min(first + _SUM_BLOCK, param.size)
        combine(rows, lo + first, lo + last, grad[: last - first], SUM)
        sgd(param[first:last], grad[: last - first], coefficients)


@_compile_reducing(1, 4)
def reduce_sgd_momentum(rows, lo, hi, param, velocity, coefficients):  # type: ignore[no-untyped-def]
    """Sum and update by SGD with momentum, as `reduce_sgd`."""
    grad = np.empty(_SUM_BLOCK, param.dtype)
    for first in range(0, param.size, _SUM_BLOCK):
        last = min(first + _SUM_BLOCK, param.size)
        combine(rows, lo + first, lo + last, grad[: last - first], SUM)
        sgd_momentum(param[first:last], grad[: last - first], velocity[first:last], coefficients)


@_compile_reducing(1, 4)
def reduce_sgd_nesterov(rows, lo, hi, param, velocity, coefficients):  # type: ignore[no-untyped-def]
    """Sum and update by SGD with Nesterov's momentum, as `reduce_sgd`."""
    grad = np.empty(_SUM_BLOCK, param.dtype)
    for first in range(0, param.size, _SUM_BLOCK):
        last = min(first + _SUM_BLOCK, param.size)
        combine(rows, lo + first, lo + last, grad[: last - first], SUM)
        sgd_nesterov(param[first:last], grad[: last - first], velocity[first:last], coefficients)


@_compile_reducing(2, 9)
def reduce_adam(rows, lo, hi, param, m, v, coefficients):  # type: ignore[no-untyped-def]
    """Sum and update by Adam or AdamW, as `reduce_sgd`."""
    grad = np.empty(_SUM_BLOCK, param.dtype)
    for first in range(0, param.size, _SUM_BLOCK):
        last = min(first + _SUM_BLOCK, param.size)
        combine(rows, lo + first, lo + last, grad[: last - first], SUM)
        adam(param[first:last], grad[: last - first], m[first:last], v[first:last], coefficients)


REDUCING_RULES = {
    "sgd": reduce_sgd,
    "sgd_momentum": reduce_sgd_momentum,
    "sgd_nesterov": reduce_sgd_nesterov,
    "adam": reduce_adam,
}
"""The fused updates by the names of the plain ones."""
