"""The arrays of `gpu_on_host`: on the GPU that was current, with elements when their stream comes to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .pool import without_owner
from .streams import Gpus, Stream


def remember_devices(cupy: Any, gpus: Gpus) -> None:
    """Let each array be on the GPU that was current when its memory was taken."""
    make = cupy.Array.__init__

    def noted(self: Any, held: np.ndarray) -> None:
        make(self, held)
        gpus.note_array(held)

    cupy.Array.__init__ = noted
    cupy.Array.device = property(lambda x: gpus.device_of(x._held))
    cupy.Array.data = property(lambda x: _Pointer(x._held.ctypes.data, cupy.cuda.runtime))


class _Pointer:
    """CuPy's to the memory of an array."""

    def __init__(self, ptr: int, runtime: Any) -> None:
        self.ptr, self._runtime = ptr, runtime

    def copy_from_device_async(self, src: _Pointer, size: int, stream: Stream) -> None:
        self._runtime.memcpyAsync(self.ptr, src.ptr, size, self._runtime.memcpyDefault, stream.ptr)


def without_owners(cupy: Any, x: Any) -> Any:
    """``x`` with arrays that keep no memory, through tuples and lists, for what a stream is given."""
    if isinstance(x, cupy.Array):
        return cupy.Array(without_owner(x._held))
    if isinstance(x, (tuple, list)):
        return type(x)(without_owners(cupy, each) for each in x)
    return x


def change_later(cupy: Any, gpus: Gpus, give: Callable[[Callable[[], None]], None]) -> None:
    """Let what changes an array in place be done when the current stream comes to it, as kernels are."""

    def deferred(method: Any, answers: bool) -> Any:
        def call(self: Any, *args: Any) -> Any:
            gpus.require_here(cupy, (self, *args))
            lent = without_owners(cupy, (self, *args))

            def run() -> None:
                method(*lent)

            cupy._held(args)  # NumPy's arrays are refused at once
            give(run)
            return self if answers else None

        return call

    for name in ("setitem", "iadd", "isub", "imul", "itruediv", "iand", "ior"):
        method = getattr(cupy.Array, f"__{name}__")
        setattr(cupy.Array, f"__{name}__", deferred(method, name != "setitem"))
    cupy.Array.fill = deferred(cupy.Array.fill, answers=False)


_VIEWS = ("reshape", "view", "ravel", "squeeze", "swapaxes", "transpose", "empty", "empty_like", "ascontiguousarray")
"""Functions of arrays that look at no element, or are asked of what is contiguous."""


def compute_in_turn(cupy: Any, gpus: Gpus, current: Callable[[], Stream]) -> None:
    """New arrays are filled when the current stream comes to them, and who reads one waits until it has.

    What is computed of others is so at once, for its shape, when the stream has done all that it was given before.
    """
    array, call, get_item = cupy.Array, cupy._Function.__call__, cupy.Array.__getitem__

    def reach() -> None:
        gpus.reach(current().ptr)

    def late(found: np.ndarray, name: str) -> Any:
        """An array that is ``found`` when the current stream comes to it."""
        made = array(gpus.unwritten(found, current().ptr))
        if not name.startswith("empty"):
            target = without_owner(made._held)
            gpus.push(current().ptr, lambda: target.__setitem__(..., found), name=name)
        return made

    def later(found: Any, given: list[np.ndarray], name: str) -> Any:
        if isinstance(found, (list, tuple)):
            return type(found)(later(each, given, name) for each in found)
        is_view = not isinstance(found, array) or any(np.may_share_memory(found._held, each) for each in given)
        return found if is_view else late(found._held, name)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        gpus.require_here(cupy, args)
        name, out = self._function.__name__, kwargs.get("out")
        if out is not None or name == "copyto":
            cupy._held((*args, *kwargs.values()))
            lent, named = without_owners(cupy, (args, list(kwargs.items())))

            def run() -> None:
                call(self, *lent, **dict(named))

            gpus.push(current().ptr, run, name="result")
            return out
        strided = any(isinstance(x, array) and not x.flags.c_contiguous for x in args)
        if name not in _VIEWS or (name == "ascontiguousarray" and strided):
            reach()
        owner = getattr(self._function, "__self__", None)
        given = [each for each in (owner, *cupy._held(args)) if isinstance(each, np.ndarray)]
        return later(call(self, *args, **kwargs), given, name)

    def chosen(self: Any, key: Any) -> Any:
        if not any(isinstance(each, (array, list)) for each in (key if isinstance(key, tuple) else (key,))):
            return get_item(self, key)
        reach()
        return late(get_item(self, key)._held, "result")

    def uploaded(x: Any, dtype: Any = None, order: str = "K") -> Any:
        if isinstance(x, array):
            reach()
        return late(np.array(cupy._held(x) if isinstance(x, array) else x, dtype, order=order), "upload")

    def asarray(x: Any, dtype: Any = None) -> Any:
        return x if isinstance(x, array) and (dtype is None or x.dtype == dtype) else uploaded(x, dtype)

    def reading(method: Any) -> Any:
        def read(self: Any) -> Any:
            stream = current().ptr  # of the current GPU, also where the array is on another one, as CuPy has it
            with gpus.looking_at(gpus.device_of(self._held).id):
                gpus.reach(stream)
            return method(self)

        return read

    cupy._Function.__call__, array.__getitem__ = called, chosen
    cupy.array, cupy.asarray = uploaded, asarray
    for name in ("__float__", "__int__", "__bool__", "item", "tolist", "to_host"):
        setattr(array, name, reading(getattr(array, name)))
    array.get = array.to_host
