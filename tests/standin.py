"""A device namespace for tests without a device: arrays that wrap NumPy's and refuse to mix with them.

``standin.asarray(x)`` copies a NumPy array to the "device", ``x.to_host()`` copies back; anything else that would make
NumPy and stand-in arrays meet raises TypeError, as CuPy's arrays do. The functions are the part of NumPy that the
library may use on a device: a function that is missing here is one to think about before it is used.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

bool_, uint8, uint16, uint32 = np.bool_, np.uint8, np.uint16, np.uint32
int8, int16, int32, int64 = np.int8, np.int16, np.int32, np.int64
float16, float32, float64 = np.float16, np.float32, np.float64
newaxis, inf, nan, pi = None, np.inf, np.nan, np.pi


class Array:
    """An array of the stand-in device; views share memory as NumPy's do."""

    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, held: np.ndarray) -> None:
        self._held = held

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return sys.modules[__name__]

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("a stand-in array is no NumPy array; use to_host()")

    def to_host(self) -> np.ndarray:
        return self._held.copy()

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, key: Any) -> Array:
        key = _held(key)
        found = self._held[key]
        if isinstance(found, np.generic):  # on a device one element is a view, too
            found = self._held[(*(key if isinstance(key, tuple) else (key,)), ...)]
        return Array(found)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._held[_held(key)] = _held(value)

    def __float__(self) -> float:
        return float(self._held)

    def __int__(self) -> int:
        return int(self._held)

    def __bool__(self) -> bool:
        return bool(self._held)

    def __repr__(self) -> str:
        return f"standin.{self._held!r}"

    @property
    def T(self) -> Array:
        return Array(self._held.T)

    def item(self) -> Any:
        return self._held.item()

    def tolist(self) -> Any:
        return self._held.tolist()

    def fill(self, value: float) -> None:
        self._held.fill(value)


def _held(x: Any) -> Any:
    """The NumPy array behind a stand-in array, through tuples and lists; NumPy arrays are refused."""
    if isinstance(x, Array):
        return x._held
    if isinstance(x, (tuple, list)):
        return type(x)(_held(each) for each in x)
    if isinstance(x, np.ndarray):
        raise TypeError("a NumPy array met a stand-in array; move it with asarray()")
    return x


class _Function:
    """A NumPy function on stand-in arrays; results are always arrays, as on a device."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        result = self._function(*(_held(x) for x in args), **{name: _held(x) for name, x in kwargs.items()})
        if out is not None:
            return out
        if isinstance(result, (list, tuple)):
            return type(result)(Array(np.asarray(each)) for each in result)
        return Array(np.asarray(result)) if isinstance(result, (np.ndarray, np.generic)) else result

    def at(self, x: Array, key: Any, value: Any) -> None:
        self._function.at(_held(x), _held(key), _held(value))


def _in_place(x: Array, operator: str, other: Any) -> Array:
    x._held = getattr(x._held, operator)(_held(other))
    return x


def asarray(x: Any, dtype: Any = None) -> Array:
    """``x`` on the stand-in device: itself where it is there already and of that dtype, else a copy."""
    if isinstance(x, Array) and (dtype is None or x._held.dtype == dtype):
        return x
    return Array(np.array(x._held if isinstance(x, Array) else x, dtype))


def array(x: Any, dtype: Any = None, order: str = "K") -> Array:
    """A copy of ``x`` on the stand-in device."""
    return Array(np.array(x._held if isinstance(x, Array) else x, dtype, order=order))


_FUNCTIONS = """
abs add all any arange argmax argmin argsort ascontiguousarray broadcast_to clip concatenate copyto cos cumsum divide
einsum empty empty_like equal exp expand_dims eye full full_like greater isfinite less log log1p matmul max maximum
mean min minimum moveaxis multiply negative ones ones_like power prod ravel reciprocal repeat reshape shares_memory sign
sin split sqrt square squeeze stack subtract sum swapaxes take tanh tensordot transpose var where zeros zeros_like
"""
for _name in _FUNCTIONS.split():
    globals()[_name] = _Function(getattr(np, _name))

_OPERATORS = """
add sub mul truediv floordiv mod pow matmul radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul neg pos abs invert
and or xor lshift rshift lt le eq ne gt ge
"""
for _name in _OPERATORS.split():
    setattr(Array, f"__{_name}__", lambda self, *args, _n=f"__{_name}__": _Function(getattr(self._held, _n))(*args))

for _name in ("iadd", "isub", "imul", "itruediv", "iand", "ior"):
    setattr(Array, f"__{_name}__", lambda self, x, _n=f"__{_name}__": _in_place(self, _n, x))

_METHODS = """
all any argmax argmin astype copy cumsum dot flatten max mean min prod ravel repeat reshape squeeze sum swapaxes take
transpose var view
"""
for _name in _METHODS.split():
    setattr(Array, _name, lambda self, *a, _n=_name, **k: _Function(getattr(self._held, _n))(*a, **k))

for _name in ("shape", "dtype", "ndim", "size", "nbytes", "strides", "itemsize", "flags"):
    setattr(Array, _name, property(lambda self, _n=_name: getattr(self._held, _n)))
