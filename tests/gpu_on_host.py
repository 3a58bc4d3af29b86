"""CUDA's streams, events, copies and IPC without a GPU, for ranks that are threads; on top of `cupy_on_host`.

NCCL's place is taken by `nccl_on_host`.

Work that is given to a stream is done as late as it may be, and streams take turns at random: at least one piece of all
that may be done, of any rank, is done whenever somebody asks for an event. So who does not wait for what he needs finds
it missing, and who reuses memory too early spoils it. The default stream is the host itself: what it is given is done
at once, and for an event it waits.

What real ones answer with an error, or with nonsense, is an error here: handles opened by their own process, memory
freed while others have it mapped. An array is on the GPU that was current when it was made; a thread's current GPU is
number 0 until it says otherwise, and what makes one current, or needs one, makes a context there.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import cupy_on_host
import nccl_on_host
import numpy as np

from hpcdp.comm import threads, ways

LIMIT_S = 20.0
PASSED, NOT_READY = 0, 600
_NO_MEMORY = 2
DEFAULT = 0
"""The default stream."""


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}: stand-in")
        self.status = status


class _Event:
    def __init__(self, interprocess: bool, timed: bool) -> None:
        self.interprocess, self.timed = interprocess, timed
        self.at_ms = 0.0
        self.recorded = self.passed = 0
        self.destroyed = False


class Gpus:
    """All that a machine's ranks do on its GPUs."""

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.numbers = itertools.count(1)
        self.queues: dict[int, deque[tuple[Callable[[], bool], Callable[[], None]]]] = {}
        self.events: dict[int, _Event] = {}
        self.allocated: dict[int, np.ndarray] = {}
        self.mapped: list[int] = []
        self.handles: dict[bytes, tuple[int, str]] = {}
        self.fault = ""
        self.of_thread = threading.local()
        self.contexts: set[int] = set()
        """The GPUs that some thread has had for its current one when it called something that needs one."""
        self.made_on: dict[int, int] = {}
        """The GPU of each array, by the address of its memory."""
        self.room: float = float("inf")
        """Bytes for which `malloc` has room until the pool gives back what it keeps."""
        self.limits: dict[str, tuple[int, float | None]] = {}
        """By process the GPU whose pool was limited, and to which part of its memory."""
        self.log: list[str] = []
        """What was given to streams, in the order in which it was done."""

    def push(
        self, stream: int, run: Callable[[], None], ready: Callable[[], bool] = lambda: True, name: str = ""
    ) -> None:
        def logged() -> None:
            run()
            self.log.append(name)

        if stream == DEFAULT:
            self.wait_until(ready)
            logged()
        else:
            with self.lock:
                self.check()
                self.queues[stream].append((ready, logged))

    def step(self) -> bool:
        """Do one piece of what may be done; whether there was one."""
        with self.lock:
            self.check()
            for stream in self.random.sample(sorted(self.queues), len(self.queues)):
                queue = self.queues[stream]
                if queue and queue[0][0]():
                    queue.popleft()[1]()
                    return True
            return False

    def wait_until(self, ready: Callable[[], bool]) -> None:
        until = time.monotonic() + LIMIT_S
        while True:
            with self.lock:
                if ready():
                    return
            if not self.step():
                time.sleep(1e-4)
            assert time.monotonic() < until, "the GPU hangs"

    def check(self) -> None:
        assert not self.fault, self.fault

    def event(self, ptr: int) -> _Event:
        if self.events[ptr].destroyed:
            self.fault = "an event is used that the process which made it has destroyed"
        self.check()
        return self.events[ptr]

    def current(self) -> int:
        """The current GPU of this thread, which from now on has a context."""
        device: int = getattr(self.of_thread, "device", 0)
        self.contexts.add(device)
        return device

    def streams_of_thread(self) -> list[Stream]:
        """Those that are current, the last one now, on the current GPU of this thread."""
        by_device = vars(self.of_thread).setdefault("streams", {})
        found: list[Stream] = by_device.setdefault(getattr(self.of_thread, "device", 0), [])
        return found

    def note_array(self, held: np.ndarray) -> None:
        if not isinstance(held.base, np.ndarray):
            self.made_on[held.ctypes.data] = getattr(self.of_thread, "device", 0)

    def require_here(self, cupy: Any, xs: Any) -> None:
        """CuPy would compute with arrays of another GPU through its memory, if at all; kernels of ours would fault."""
        for x in xs:
            if isinstance(x, cupy.Array):
                current = getattr(self.of_thread, "device", 0)
                assert self.device_of(x._held).id == current, f"an array of another GPU is computed with on {current}"

    def device_of(self, held: np.ndarray) -> _Device:
        while isinstance(held.base, np.ndarray):
            held = held.base
        return _Device(self, self.made_on[held.ctypes.data])

    def take_ms(self, ms: float) -> None:
        """Let the clock that events of this thread read go on."""
        self.of_thread.now_ms = self.now_ms() + ms

    def now_ms(self) -> float:
        return getattr(self.of_thread, "now_ms", 0.0)

    def process(self) -> str:
        return threading.current_thread().name


class Stream:
    def __init__(self, gpus: Gpus, ptr: int, device: int | None = None) -> None:
        self._gpus, self.ptr, self._device = gpus, ptr, device

    def __enter__(self) -> Stream:
        if self._device not in (None, getattr(self._gpus.of_thread, "device", 0)):
            raise RuntimeError(f"The device that the stream is created on ({self._device}) does not match")
        self._gpus.streams_of_thread().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._gpus.streams_of_thread().pop()

    def synchronize(self) -> None:
        self._gpus.current()
        self._gpus.wait_until(lambda: not self._gpus.queues.get(self.ptr))

    def record(self, event: Event) -> Event:
        sys.modules["cupy.cuda.runtime"].eventRecord(event.ptr, self.ptr)
        return event

    def wait_event(self, event: Event) -> None:
        sys.modules["cupy.cuda.runtime"].streamWaitEvent(self.ptr, event.ptr)


class Event:
    def __init__(self, gpus: Gpus, ptr: int) -> None:
        self._gpus, self.ptr = gpus, ptr

    def synchronize(self) -> None:
        self._gpus.current()
        made = self._gpus.events[self.ptr]
        self._gpus.wait_until(lambda: made.passed >= made.recorded)

    def __del__(self) -> None:
        self._gpus.events[self.ptr].destroyed = True


class _Device:
    def __init__(self, gpus: Gpus, index: int) -> None:
        self._gpus, self.id = gpus, index
        self._before: list[int] = []

    def use(self) -> None:
        self._gpus.of_thread.device = self.id
        self._gpus.current()

    def __enter__(self) -> _Device:
        self._before.append(getattr(self._gpus.of_thread, "device", 0))
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        _Device(self._gpus, self._before.pop()).use()


def _runtime(gpus: Gpus) -> ModuleType:
    """The functions of ``cupy.cuda.runtime`` with the arguments that CuPy 14 has."""
    made = ModuleType("cupy.cuda.runtime")

    def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
        gpus.current()
        assert kind == made.memcpyDefault
        gpus.push(stream, lambda: ctypes.memmove(dst, src, size) and None, name="copy")

    def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
        gpus.current()
        gpus.push(stream, lambda: ctypes.memset(ptr, value, size) and None, name="clear")

    def eventRecord(event: int, stream: int) -> None:
        gpus.current()
        recorded = gpus.event(event)
        recorded.recorded += 1
        number = recorded.recorded

        def passes() -> None:
            recorded.passed, recorded.at_ms = number, gpus.now_ms()

        gpus.push(stream, passes, name="event")

    def eventElapsedTime(start: int, end: int) -> float:
        gpus.current()
        first, last = gpus.event(start), gpus.event(end)
        assert first.timed and last.timed, "cudaErrorInvalidResourceHandle"
        if any(each.passed < each.recorded for each in (first, last)):
            raise CUDARuntimeError(NOT_READY)
        return last.at_ms - first.at_ms

    def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:
        gpus.current()
        awaited = gpus.event(event)
        number = awaited.recorded
        gpus.push(stream, lambda: None, lambda: awaited.passed >= number, "wait")

    def eventQuery(event: int) -> int:
        gpus.current()
        gpus.step()
        asked = gpus.event(event)
        return PASSED if asked.passed >= asked.recorded else NOT_READY

    def malloc(size: int) -> int:
        gpus.current()
        if size > gpus.room:
            raise CUDARuntimeError(_NO_MEMORY)
        block = np.full(size, 0xA5, np.uint8)
        with gpus.lock:
            gpus.allocated[block.ctypes.data] = block
        return block.ctypes.data

    def free(ptr: int) -> None:
        with gpus.lock:
            assert ptr not in gpus.mapped, "freed while another process has it mapped"
            del gpus.allocated[ptr]

    def handle_of(ptr: int) -> bytes:
        handle = next(gpus.numbers).to_bytes(64, "little")
        gpus.handles[handle] = ptr, gpus.process()
        return handle

    def opened(handle: bytes) -> int:
        assert isinstance(handle, bytes)
        ptr, owner = gpus.handles[handle]
        if owner == gpus.process():
            raise CUDARuntimeError(201)
        return ptr

    def ipcGetMemHandle(devPtr: int) -> bytes:
        assert devPtr in gpus.allocated, "no start of an allocation"
        return handle_of(devPtr)

    def ipcOpenMemHandle(handle: bytes, flags: int = 1) -> int:
        ptr = opened(handle)
        gpus.mapped.append(ptr)
        return ptr

    def ipcGetEventHandle(event: int) -> bytes:
        assert gpus.event(event).interprocess
        return handle_of(event)

    vars(made).update(
        memcpyDefault=4, getDevice=lambda: getattr(gpus.of_thread, "device", 0),
        CUDARuntimeError=CUDARuntimeError, getDeviceCount=lambda: 8, memcpyAsync=memcpyAsync,
        memsetAsync=memsetAsync, eventRecord=eventRecord, streamWaitEvent=streamWaitEvent, eventQuery=eventQuery,
        eventElapsedTime=eventElapsedTime,
        malloc=malloc, free=free, ipcGetMemHandle=ipcGetMemHandle, ipcOpenMemHandle=ipcOpenMemHandle,
        ipcCloseMemHandle=gpus.mapped.remove, ipcGetEventHandle=ipcGetEventHandle, ipcOpenEventHandle=opened,
        eventDestroy=lambda event: None,
    )  # fmt: skip
    return made


def _remember_devices(cupy: Any, gpus: Gpus) -> None:
    """Let each array be on the GPU that was current when its memory was taken."""
    make = cupy.Array.__init__

    def noted(self: Any, held: np.ndarray) -> None:
        make(self, held)
        gpus.note_array(held)

    cupy.Array.__init__ = noted
    cupy.Array.device = property(lambda x: gpus.device_of(x._held))


def _change_later(cupy: Any, gpus: Gpus, give: Callable[[Callable[[], None]], None]) -> None:
    """Let what changes an array in place be done when the current stream comes to it, as kernels are."""

    def deferred(method: Any, answers: bool) -> Any:
        def call(self: Any, *args: Any) -> Any:
            gpus.require_here(cupy, (self, *args))

            def run() -> None:
                method(self, *args)

            cupy._held(args)  # NumPy's arrays are refused at once
            give(run)
            return self if answers else None

        return call

    for name in ("setitem", "iadd", "isub", "imul", "itruediv", "iand", "ior"):
        method = getattr(cupy.Array, f"__{name}__")
        setattr(cupy.Array, f"__{name}__", deferred(method, name != "setitem"))


_VIEWS = ("reshape", "view", "ravel", "squeeze", "swapaxes", "transpose", "empty", "empty_like", "ascontiguousarray")
"""Functions of arrays that look at no element, or are asked of what is contiguous."""


def _compute_in_turn(cupy: Any, gpus: Gpus, current: Callable[[], Stream]) -> None:
    """What makes a new array, or reads one, is done at once, when all is done that its stream was given before."""

    def reach() -> None:
        if current().ptr != DEFAULT:
            current().synchronize()

    call, get_item, to_host = cupy._Function.__call__, cupy.Array.__getitem__, cupy.Array.to_host

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        gpus.require_here(cupy, args)
        strided = any(isinstance(x, cupy.Array) and not x.flags.c_contiguous for x in args)
        if self._function.__name__ not in _VIEWS or (self._function.__name__ == "ascontiguousarray" and strided):
            reach()
        return call(self, *args, **kwargs)

    def chosen(self: Any, key: Any) -> Any:
        if isinstance(key, cupy.Array):
            reach()
        return get_item(self, key)

    def copied(self: Any) -> np.ndarray:
        reach()
        return to_host(self)

    cupy._Function.__call__, cupy.Array.__getitem__ = called, chosen
    cupy.Array.to_host = cupy.Array.get = copied


@contextlib.contextmanager
def installed(monkeypatch: Any, seed: int = 0) -> Iterator[Gpus]:
    """Let ``cupy`` be this one."""
    with cupy_on_host.instead() as cupy:
        gpus = Gpus(seed)
        cuda: Any = ModuleType("cupy.cuda")
        null = Stream(gpus, DEFAULT)

        def make_stream(non_blocking: bool = False, priority: int | None = None) -> Stream:
            assert non_blocking, "it would wait for the default stream"
            assert priority == -1, "what other ranks wait for would wait for what computes"
            with gpus.lock:
                made = Stream(gpus, next(gpus.numbers), getattr(gpus.of_thread, "device", 0))
                gpus.queues[made.ptr] = deque()
            return made

        make_stream.from_external = lambda obj: Stream(gpus, obj.__cuda_stream__()[1])  # type: ignore[attr-defined]

        def make_event(block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> Event:
            assert not interprocess or disable_timing
            with gpus.lock:
                ptr = next(gpus.numbers)
                gpus.events[ptr] = _Event(interprocess, not disable_timing)
            return Event(gpus, ptr)

        def current() -> Stream:
            return (gpus.streams_of_thread() or [null])[-1]

        def array_at(shape: tuple[int, ...], dtype: Any, memptr: Any) -> Any:
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            memory: Any = (ctypes.c_char * nbytes).from_address(memptr.ptr)
            memory.owner = memptr.mem
            held = np.frombuffer(memory, dtype)
            gpus.note_array(held)
            return cupy.Array(held.reshape(shape))

        def pinned(size: int) -> np.ndarray:
            gpus.current()
            return np.full(size, 0xA5, np.uint8)

        def free_all_blocks() -> None:
            gpus.room = float("inf")

        vars(cuda).update(
            runtime=_runtime(gpus), nccl=nccl_on_host.module(gpus), Device=lambda index=0: _Device(gpus, index),
            Stream=make_stream, Event=make_event, get_current_stream=current, alloc_pinned_memory=pinned,
            UnownedMemory=lambda ptr, size, owner: SimpleNamespace(ptr=ptr, owner=owner),
            MemoryPointer=lambda mem, offset: SimpleNamespace(ptr=mem.ptr + offset, mem=mem),
        )  # fmt: skip
        cupy.cuda, cupy.ndarray = cuda, array_at

        def set_limit(size: int | None = None, fraction: float | None = None) -> None:
            assert size is None
            gpus.limits[gpus.process()] = gpus.current(), fraction

        cupy.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=free_all_blocks, set_limit=set_limit)
        _remember_devices(cupy, gpus)
        _change_later(cupy, gpus, lambda run: gpus.push(current().ptr, run, name="change"))
        _compute_in_turn(cupy, gpus, current)
        for name, module in (("", cuda), (".runtime", cuda.runtime), (".nccl", cuda.nccl)):
            monkeypatch.setitem(sys.modules, f"cupy.cuda{name}", module)
        monkeypatch.setattr(ways, "getpid", threading.get_ident)
        monkeypatch.setattr(cupy_on_host, "give", lambda run: gpus.push(current().ptr, run, name="kernel"))
        yield gpus


def let_messages_reach(monkeypatch: Any, cupy: Any) -> None:
    """Let messages take arrays on GPUs: MPI's real ones, which read and write host memory, and those of thread ranks.

    Both do so at once, whatever streams have still to do.
    """

    def interface(x: Any) -> dict[str, Any]:
        return {"shape": x.shape, "typestr": x.dtype.str, "data": (x._held.ctypes.data, False), "version": 3}

    def there(method: Any) -> Any:
        def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self, x._held if isinstance(x, cupy.Array) else x, *args, **kwargs)

        return call

    monkeypatch.setattr(cupy.Array, "__cuda_array_interface__", property(interface), raising=False)
    for name in ("isend", "irecv"):
        method = getattr(threads.ThreadCommunicator, name)
        monkeypatch.setattr(threads.ThreadCommunicator, name, there(method))
