"""CUDA graphs without a GPU: streams that are captured, memory pools and cuBLAS, on top of `cupy_module`.

Outside of a capture all is done at once. In one, operations on arrays, kernels and products are noted with the
addresses that they are given, and a graph's launch does them; they keep no memory alive. What CUDA or CuPy refuse is
refused with their errors: to read a value, to copy from the host, to wait, also for an event of what is not captured,
the default stream, a stream that waits for it, and CuPy's own products. Stricter than they are: an event that is
recorded in a capture, since nobody may ask for it, and what was not compiled before, by a call outside of captures, are
errors, too.

All arrays are in memory of pools, by stream as CuPy's are. What is freed is filled with NaN and given out again; what
a graph reads there, or in the memory of a pool that is gone, spoils its results. Memory of a capture that the garbage
collector frees is filled when it is given out again: it comes at any moment, also while the graph is launched, which
has that memory by right.

Ranks may be threads: each captures for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from . import cupy_module
from .cublas import REFUSED, Library
from .streams import PER_THREAD

SYNCHRONOUS = "the current stream is capturing, so synchronous API calls are disallowed"
TO_DEVICE = "the current stream is capturing, so H2D transfers are disallowed"
PRODUCTS = {"matmul", "dot", "tensordot", "einsum", "__matmul__", "__rmatmul__"}
COPIES = {
    "empty", "zeros", "ones", "full", "eye", "arange", "empty_like", "zeros_like", "ones_like", "full_like", "copy",
    "ascontiguousarray", "reshape",
}  # fmt: skip
"""Functions for which CuPy has no kernel of their own."""
IN_PLACE = {"copyto", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__"}
ALIGNMENT = 512


class CUDARuntimeError(RuntimeError):
    pass


class Block:
    """Memory of a pool; CuPy's ``Memory``."""

    is_captured = False
    """Whether it was given out in a capture."""

    def __init__(self, machine: Machine, nbytes: int) -> None:
        if nbytes > machine.room:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        machine.room -= nbytes
        whole = np.full(nbytes + ALIGNMENT, 0xFF, np.uint8)
        first = -whole.ctypes.data % ALIGNMENT
        self.memory, self.size = whole[first : first + nbytes], nbytes
        weakref.finalize(self, self._give_back, machine, self.memory).atexit = False

    @staticmethod
    def _give_back(machine: Machine, memory: np.ndarray) -> None:
        machine.room += memory.nbytes
        memory[...] = 0xFF


class MemoryPool:
    """CuPy's: what is freed goes to those that ask on the same stream, and back where there is no more."""

    def __init__(self, machine: Machine, allocator: Callable[[int], Any] | None = None) -> None:
        self._machine = machine
        self._allocator = allocator or (lambda nbytes: SimpleNamespace(mem=Block(machine, nbytes)))
        self._free: dict[int, list[Block]] = {}
        self._blocks: list[Block] = []
        self._taking = threading.RLock()

    def get_limit(self) -> int:
        return 0

    def free_all_blocks(self) -> None:
        with self._taking:
            for free in list(self._free.values()):
                while free:
                    self._blocks.remove(free.pop())

    def _taken(self, nbytes: int) -> Block:
        try:
            found: Block = self._allocator(nbytes).mem
        except CUDARuntimeError:
            self.free_all_blocks()
            found = self._allocator(nbytes).mem
        self._blocks.append(found)
        return found

    def malloc(self, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        """What all arrays in a block have as their base; when it goes, the block is free."""
        size, stream = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT, self._machine.current().ptr
        free = self._free.setdefault(stream, [])
        with self._taking:
            fitting = [each for each in free if size <= each.memory.nbytes]
            if fitting:
                block = min(fitting, key=lambda each: each.memory.nbytes)
                free.remove(block)
                block.memory[...] = 0xFF
            else:
                block = self._taken(size)
        block.is_captured = self._machine.current().is_capturing()
        owned = (ctypes.c_char * block.memory.nbytes).from_buffer(block.memory)
        weakref.finalize(owned, self._release, block, free)
        return owned

    def _release(self, block: Block, free: list[Block]) -> None:
        if not (block.is_captured and self._machine.collector == threading.get_ident()):
            block.memory[...] = 0xFF
        free.append(block)

    def __del__(self) -> None:
        for each in self._blocks:
            each.memory[...] = 0xFF


class Stream:
    def __init__(self, machine: Machine, ptr: int, non_blocking: bool) -> None:
        self._machine, self.ptr, self.non_blocking = machine, ptr, non_blocking
        self.noted: list[Callable[[], object]] | None = None
        self._is_spoilt = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.ptr == self.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __enter__(self) -> Stream:
        self._machine.here.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._machine.here.streams.pop()

    def is_capturing(self) -> bool:
        return self.noted is not None

    def begin_capture(self, mode: int | None = None) -> None:
        if not self.ptr:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: the default stream")
        if self.noted is not None:
            raise CUDARuntimeError("cudaErrorIllegalState: it is captured")
        self.noted, self._is_spoilt = [], False
        self._machine.captured.append(self)

    def end_capture(self) -> Graph:
        if self.noted is None:
            raise CUDARuntimeError("cudaErrorIllegalState: it is not captured")
        noted, self.noted = self.noted, None
        self._machine.captured.remove(self)
        if self._is_spoilt:
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated")
        return Graph(self._machine, noted)

    def record(self, event: Any) -> Any:
        self._machine.refuse_event(self.ptr)
        return event

    def synchronize(self) -> None:
        if self.noted is not None:
            self._is_spoilt = True
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: not permitted when stream is capturing")


class Graph:
    def __init__(self, machine: Machine, noted: list[Callable[[], object]]) -> None:
        self._machine, self._noted = machine, noted
        machine.num_graphs += 1

    def launch(self, stream: Stream | None = None) -> None:
        with stream or contextlib.nullcontext():
            if self._machine.current().is_capturing():
                raise CUDARuntimeError("a graph in a graph")
            self._machine.launches.append(len(self._noted))
            with np.errstate(all="ignore"):
                for each in self._noted:
                    each()


class Device:
    compute_capability = "90"

    def __init__(self, machine: Machine, index: int | None = None) -> None:
        self._machine = machine
        self.id = machine.here.devices[-1] if index is None else index

    def use(self) -> None:
        self._machine.here.devices[-1] = self.id

    def __enter__(self) -> Device:
        self._machine.here.devices.append(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        self._machine.here.devices.pop()


class _Here(threading.local):
    def __init__(self, machine: Machine) -> None:
        self.devices = [0]
        """Those that were current, and the one that is."""
        self.streams = [machine.null]
        self.allocators = [machine.default_pool.malloc]


class Machine:
    """What the process knows of its GPUs, one of which has all arrays."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.numbers = itertools.count(PER_THREAD + 1)
        self.room: float = float("inf")
        """Bytes that pools may still take."""
        self.null = Stream(self, 0, False)
        self.captured: list[Stream] = []
        self.compiled: set[Any] = set()
        self.num_graphs = 0
        self.launches: list[int] = []
        """Of each launch of a graph, how much it had noted."""
        self.default_pool = MemoryPool(self)
        self.device_of_arrays = 0
        self.computed_on: set[int] = set()
        """The GPUs that were current when work was given to streams."""
        self.collector: int | None = None
        """The thread in which garbage is collected now."""
        self.here = _Here(self)

    def collecting(self, phase: str, info: dict[str, int]) -> None:
        """For `gc.callbacks`."""
        self.collector = threading.get_ident() if phase == "start" else None

    def current(self) -> Stream:
        return self.here.streams[-1]

    def stream(self, non_blocking: bool = False, priority: int | None = None) -> Stream:
        return Stream(self, next(self.numbers), non_blocking)

    @contextlib.contextmanager
    def using_allocator(self, allocator: Callable[[int], Any]) -> Iterator[None]:
        self.here.allocators.append(allocator)
        try:
            yield
        finally:
            self.here.allocators.pop()

    def give(self, run: Callable[[], object]) -> None:
        """Give work to the current stream."""
        self.computed_on.add(self.here.devices[-1])
        stream = self.current()
        if stream.noted is not None:
            stream.noted.append(run)
            return
        if not stream.ptr and any(not each.non_blocking for each in self.captured):
            raise CUDARuntimeError("cudaErrorStreamCaptureImplicit: the default stream would wait for a captured one")
        run()

    def refuse_event(self, stream: int) -> None:
        """Where that is captured: it may neither wait for what is not, nor have others wait for it."""
        if any(each.ptr == stream for each in self.captured):
            raise CUDARuntimeError("cudaErrorStreamCaptureIsolation: an event of a captured stream")

    def refuse(self, problem: str) -> None:
        """What CuPy refuses while the current stream is captured."""
        if self.current().is_capturing():
            raise RuntimeError(problem)

    def place(self, like: np.ndarray) -> np.ndarray:
        """Memory of the current allocator, of the shape, dtype and order of ``like``."""
        owned = self.here.allocators[-1](like.nbytes)
        order = "F" if like.flags.f_contiguous and not like.flags.c_contiguous else "C"
        return np.ndarray(like.shape, like.dtype, owned, order=order)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A NumPy function of arrays on the device."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, np.ndarray):
            function, args = getattr(np.ndarray, function.__name__), (owner, *args)
        name = function.__name__
        if name in PRODUCTS and args[0].ndim and args[0].dtype.kind == "f":
            if self.current().is_capturing():
                raise NotImplementedError(REFUSED)
            if max(args[0].ndim, args[1].ndim) > 2:  # as CuPy does
                args = (np.ascontiguousarray(args[0]), np.ascontiguousarray(args[1]), *args[2:])
        arrays = [each for each in _leaves((args, kwargs)) if isinstance(each, np.ndarray)]
        if name == "concatenate" and len(args[0]) > 8:
            self.refuse(TO_DEVICE)  # their addresses
        kernel = name, tuple(str(each.dtype) for each in arrays)
        is_noted = self.current().is_capturing()
        out = kwargs.get("out")
        if out is not None or name in IN_PLACE:
            bare_args, bare_kwargs = _bare((args, kwargs))
            self._compile(kernel)
            self.give(lambda: function(*bare_args, **bare_kwargs))
            return args[0] if out is None else out
        with np.errstate(all="ignore") if is_noted else contextlib.nullcontext():
            found = function(*args, **kwargs)
        if isinstance(found, (list, tuple)):
            return type(found)(self._result(each, arrays, kernel, None) for each in found)
        if not isinstance(found, (np.ndarray, np.generic)):
            return found
        again = None
        if not name.startswith("empty"):
            bare_args, bare_kwargs = _bare((args, kwargs))

            def again() -> Any:
                return function(*bare_args, **bare_kwargs)

        return self._result(np.asarray(found), arrays, kernel, again)

    def _compile(self, kernel: Any) -> None:
        if kernel[0] in COPIES:
            return
        if self.current().is_capturing() and kernel not in self.compiled:
            raise CUDARuntimeError(f"{kernel} would be compiled in a capture")
        self.compiled.add(kernel)

    def _result(
        self, found: np.ndarray, arrays: list[np.ndarray], kernel: Any, again: Callable[[], Any] | None
    ) -> np.ndarray:
        if any(np.may_share_memory(found, each) for each in arrays):
            return found
        self._compile(kernel)
        place = self.place(found)
        if again is not None:
            bare = _bare(place)
            self.give(lambda: bare.__setitem__(..., again()))
        return place


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, (tuple, list)):
        for each in x:
            yield from _leaves(each)
    else:
        yield x


def _bare(x: Any) -> Any:
    """``x`` with arrays that lie where they did, and keep nothing alive."""
    if isinstance(x, dict):
        return {name: _bare(each) for name, each in x.items()}
    if isinstance(x, (tuple, list)):
        return type(x)(_bare(each) for each in x)
    if not isinstance(x, np.ndarray):
        return x
    low, high = np.lib.array_utils.byte_bounds(x)
    memory = (ctypes.c_char * max(1, high - low)).from_address(low)
    return np.ndarray(x.shape, x.dtype, memory, x.ctypes.data - low, x.strides)


def _patch_arrays(cupy: Any, machine: Machine) -> None:
    held, array = cupy._held, cupy.Array

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        given = tuple(held(each) for each in args), {name: held(each) for name, each in kwargs.items()}
        found = machine.call(self._function, *given)
        if out is not None:
            return out
        if isinstance(found, (list, tuple)):
            return type(found)(array(each) for each in found)
        return array(found) if isinstance(found, np.ndarray) else found

    def at(self: Any, x: Any, key: Any, value: Any) -> None:
        bare = _bare((held(x), held(key), held(value)))
        machine.give(lambda: self._function.at(*bare))

    def getitem(self: Any, key: Any) -> Any:
        if any(isinstance(each, list) for each in (key if isinstance(key, tuple) else (key,))):
            machine.refuse(TO_DEVICE)
        parts = key if isinstance(key, tuple) else (key,)
        if not any(isinstance(each, (list, array)) or each is Ellipsis for each in parts):
            return array(self._held[(*parts, ...)])  # a view, also of one element
        return array(machine.call(self._held.__getitem__, (held(key),), {}))

    def setitem(self: Any, key: Any, value: Any) -> None:
        bare = _bare((self._held, held(key), held(value)))  # what it is of lives until it is done
        machine.give(lambda: bare[0].__setitem__(*bare[1:]))

    def in_place(x: Any, operator: str, other: Any) -> Any:
        machine.call(getattr(x._held, operator), (held(other),), {})
        return x

    def asarray(x: Any, dtype: Any = None) -> Any:
        if isinstance(x, array):
            return x if dtype is None or x.dtype == dtype else x.astype(dtype)
        machine.refuse(TO_DEVICE)
        value = np.asarray(x, dtype)
        place = machine.place(value)
        place[...] = value
        return array(place)

    def reading(name: str) -> Callable[..., Any]:
        before = getattr(array, name)

        def read(self: Any, *args: Any) -> Any:
            machine.refuse(SYNCHRONOUS)
            return before(self, *args)

        return read

    vars(cupy).update(asarray=asarray, array=asarray, _in_place=in_place)
    cupy._Function.__call__, cupy._Function.at = call, at
    array.__getitem__, array.__setitem__ = getitem, setitem
    array.fill = lambda self, value: setitem(self, ..., value)
    array.T = property(lambda self: array(self._held.T))
    array.device = property(lambda self: Device(machine, machine.device_of_arrays))
    for name in ("__float__", "__int__", "__bool__", "item", "tolist", "to_host"):
        setattr(array, name, reading(name))


def _runtime(machine: Machine) -> SimpleNamespace:
    """Copies and events, where all is done at once."""

    def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
        ctypes.memmove(dst, src, size)

    return SimpleNamespace(
        runtimeGetVersion=lambda: 12090, getDeviceCount=lambda: 1, getDevice=lambda: machine.here.devices[-1],
        memcpyDefault=4, streamPerThread=PER_THREAD, memcpyAsync=memcpyAsync,
        eventRecord=lambda event, stream: machine.refuse_event(stream),
        streamWaitEvent=lambda stream, event, flags=0: machine.refuse_event(stream),
        eventQuery=lambda event: 0, streamQuery=lambda stream: 0, CUDARuntimeError=CUDARuntimeError,
    )  # fmt: skip


@contextlib.contextmanager
def installed() -> Iterator[Machine]:
    """Let ``cupy`` be this one."""
    with cupy_module.instead() as cupy, pytest.MonkeyPatch.context() as patch:
        machine = Machine(cupy)
        _patch_arrays(cupy, machine)
        library = Library(machine)
        cuda: Any = ModuleType("cupy.cuda")
        vars(cuda).update(
            Stream=machine.stream, get_current_stream=machine.current, Device=functools.partial(Device, machine),
            runtime=_runtime(machine),
            MemoryPool=functools.partial(MemoryPool, machine), using_allocator=machine.using_allocator,
            Memory=functools.partial(Block, machine), MemoryPointer=lambda mem, offset: SimpleNamespace(mem=mem),
            get_cublas_handle=lambda: 7, Event=lambda **_: SimpleNamespace(ptr=1, synchronize=lambda: None, done=True),
            alloc_pinned_memory=lambda size: np.full(size, 0xA5, np.uint8),
        )  # fmt: skip
        cupy.cuda, cupy._core = cuda, SimpleNamespace(get_compute_type=lambda dtype: 1)
        cupy.get_default_memory_pool = lambda: machine.default_pool
        names = ["cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.libs", "cupy_backends.cuda.libs.cublas"]
        for name in names:
            patch.setitem(sys.modules, name, ModuleType(name))
        cublas: Any = importlib.import_module(names[-1])
        cublas.setStream = library.set_stream
        for outer, inner in itertools.pairwise(names):
            setattr(sys.modules[outer], inner.rpartition(".")[2], sys.modules[inner])
        patch.setitem(sys.modules, "cupy.cuda", cuda)
        other = ctypes.CDLL
        patch.setattr(
            ctypes,
            "CDLL",
            lambda name, *args, **kwargs: library if name == "libcublas.so.12" else other(name, *args, **kwargs),
        )
        patch.setattr(cupy_module, "give", lambda run, args: machine.give(run))  # keeps nothing alive
        launches = importlib.import_module("hpcdp.kernels.cuda")
        patch.setattr(launches, "_here", launches._ThreadCapture())
        compiled = cupy.RawModule

        def raw_module(**kwargs: Any) -> Any:
            if machine.current().is_capturing():
                raise CUDARuntimeError("a module would be loaded in a capture")
            return compiled(**kwargs)

        cupy.RawModule = raw_module
        gc.callbacks.append(machine.collecting)
        try:
            yield machine
        finally:
            gc.callbacks.remove(machine.collecting)
            gc.collect()  # arrays go before the memory that they are in
