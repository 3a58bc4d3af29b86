"""CUDA's streams, events, copies and IPC without a GPU, for ranks that are threads; on top of `cupy_on_host`.

NCCL's place is taken by `nccl_on_host`.

Work that is given to a stream is done as late as it may be, and streams take turns at random: at least one piece of all
that may be done, of any rank, is done whenever somebody asks for an event. So who does not wait for what he needs finds
it missing, and who reuses memory too early spoils it. So it is on the default stream, of which each rank has one a GPU:
an array has its shape at once, and its elements when its stream comes to them; until then it is full of 0xA5.

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
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import cupy_on_host
import nccl_on_host
import numpy as np

from hpcdp.comm import threads, ways
from hpcdp.streams import Streams

LIMIT_S = 20.0
PASSED, NOT_READY = 0, 600
_NO_MEMORY = 2
DEFAULT = 0
"""The default stream, which is another one for each rank and GPU."""
_UNWRITTEN = 0xA5


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}: stand-in")
        self.status = status


class _Event:
    def __init__(self, timed: bool) -> None:
        self.timed = timed
        self.at_ms = 0.0
        self.recorded = 0
        self.passed: set[int] = set()
        """Of its records, which streams may come to in another order."""
        self.destroyed = False

    def has_passed(self, number: int | None = None) -> bool:
        """Whether that record has, or the last one; what nobody has recorded has."""
        number = self.recorded if number is None else number
        return number == 0 or number in self.passed


class Gpus:
    """All that a machine's ranks do on its GPUs."""

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.numbers = itertools.count(1)
        self.queues: dict[int, deque[tuple[Callable[[], bool], Callable[[], None]]]] = {}
        self.defaults: dict[tuple[str, int], int] = {}
        """By process and GPU the key in ``queues`` of the default stream."""
        self.default_is_host = False
        """Whether default streams do at once what they are given, as where others compute there without them."""
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
        self.now_ms: dict[str, float] = {}
        """The clock of each process."""
        self.log: list[str] = []
        """What was given to streams, in the order in which it was done."""

    def push(
        self, stream: int, run: Callable[[], None], ready: Callable[[], bool] = lambda: True, name: str = ""
    ) -> None:
        def logged() -> None:
            run()
            self.log.append(name)

        with self.lock:
            self.check()
            self.queue_of(stream).append((ready, logged))
        if stream == DEFAULT and self.default_is_host:
            self.reach(stream)

    def queue_of(self, stream: int) -> deque[tuple[Callable[[], bool], Callable[[], None]]]:
        """What a stream has still to do; of the default one, that of this process and its current GPU."""
        with self.lock:
            if stream == DEFAULT:
                key = self.process(), getattr(self.of_thread, "device", 0)
                if key not in self.defaults:
                    self.defaults[key] = next(self.numbers)
                stream = self.defaults[key]
            return self.queues.setdefault(stream, deque())

    def unwritten(self, like: np.ndarray, stream: int) -> np.ndarray:
        """New memory of the shape, dtype and order of ``like``. When nobody has it any more it is spoilt, but not
        before ``stream`` has done what it was given until then: as in CuPy's pool, which gives it to others there."""
        block, queue = np.full(max(1, like.nbytes), _UNWRITTEN, np.uint8), self.queue_of(stream)
        owned = (ctypes.c_char * block.nbytes).from_buffer(block)
        weakref.finalize(owned, lambda: queue.append((lambda: True, lambda: block.fill(_UNWRITTEN)))).atexit = False
        order = "F" if like.flags.f_contiguous and not like.flags.c_contiguous else "C"
        return np.ndarray(like.shape, like.dtype, owned, order=order)

    def reach(self, stream: int) -> None:
        """Do all that a stream was given, and of the others what that waits for: they are as late as they may be."""
        queue = self.queue_of(stream)

        def is_done() -> bool:
            while queue and queue[0][0]():
                self.check()
                queue.popleft()[1]()
            return not queue

        self.wait_until(is_done)

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

    @contextlib.contextmanager
    def looking_at(self, device: int) -> Iterator[None]:
        """This is the current GPU of this thread, which has a context there already."""
        before = getattr(self.of_thread, "device", 0)
        self.of_thread.device = device
        try:
            yield
        finally:
            self.of_thread.device = before

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
        """Give the current stream work that takes so long, by the clock that events of this process read."""
        process = self.process()

        def run() -> None:
            self.now_ms[process] = self.now_ms.get(process, 0.0) + ms

        self.push(sys.modules["cupy"].cuda.get_current_stream().ptr, run)

    def process(self) -> str:
        """Whose threads have one default stream: a rank with those that it has started."""
        thread = threading.current_thread()
        return thread.name if thread.name.startswith("rank-") else getattr(thread, "started_by", "main")


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
        queue = self._gpus.queue_of(self.ptr)
        self._gpus.wait_until(lambda: not queue)

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
        self._gpus.wait_until(made.has_passed)

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
        number, process = recorded.recorded, gpus.process()

        def passes() -> None:
            recorded.passed.add(number)
            recorded.at_ms = gpus.now_ms.get(process, 0.0)

        gpus.push(stream, passes, name="event")

    def eventElapsedTime(start: int, end: int) -> float:
        gpus.current()
        first, last = gpus.event(start), gpus.event(end)
        assert first.timed and last.timed, "cudaErrorInvalidResourceHandle"
        if not first.has_passed() or not last.has_passed():
            raise CUDARuntimeError(NOT_READY)
        return last.at_ms - first.at_ms

    def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:
        gpus.current()
        awaited = gpus.event(event)
        number = awaited.recorded
        gpus.push(stream, lambda: None, lambda: awaited.has_passed(number), "wait")

    def eventQuery(event: int) -> int:
        gpus.current()
        gpus.step()
        asked = gpus.event(event)
        return PASSED if asked.has_passed() else NOT_READY

    def streamQuery(stream: int) -> int:
        gpus.current()
        gpus.step()
        return NOT_READY if gpus.queue_of(stream) else PASSED

    def malloc(size: int) -> int:
        gpus.current()
        if size > gpus.room:
            raise CUDARuntimeError(_NO_MEMORY)
        block = np.full(size, _UNWRITTEN, np.uint8)
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

    vars(made).update(
        memcpyDefault=4, getDevice=lambda: getattr(gpus.of_thread, "device", 0),
        CUDARuntimeError=CUDARuntimeError, getDeviceCount=lambda: 8, memcpyAsync=memcpyAsync,
        memsetAsync=memsetAsync, eventRecord=eventRecord, streamWaitEvent=streamWaitEvent, eventQuery=eventQuery,
        eventElapsedTime=eventElapsedTime, streamQuery=streamQuery,
        malloc=malloc, free=free, ipcGetMemHandle=ipcGetMemHandle, ipcOpenMemHandle=ipcOpenMemHandle,
        ipcCloseMemHandle=gpus.mapped.remove,
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
    cupy.Array.fill = deferred(cupy.Array.fill, answers=False)


_VIEWS = ("reshape", "view", "ravel", "squeeze", "swapaxes", "transpose", "empty", "empty_like", "ascontiguousarray")
"""Functions of arrays that look at no element, or are asked of what is contiguous."""


def _compute_in_turn(cupy: Any, gpus: Gpus, current: Callable[[], Stream]) -> None:
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
            gpus.push(current().ptr, lambda: made._held.__setitem__(..., found), name=name)
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

            def run() -> None:
                call(self, *args, **kwargs)

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
            with gpus.looking_at(gpus.device_of(self._held).id):
                reach()
            return method(self)

        return read

    cupy._Function.__call__, array.__getitem__ = called, chosen
    cupy.array, cupy.asarray = uploaded, asarray
    for name in ("__float__", "__int__", "__bool__", "item", "tolist", "to_host"):
        setattr(array, name, reading(getattr(array, name)))
    array.get = array.to_host


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

        def make_event(block: bool = False, disable_timing: bool = False) -> Event:
            with gpus.lock:
                ptr = next(gpus.numbers)
                gpus.events[ptr] = _Event(not disable_timing)
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
            return np.full(size, _UNWRITTEN, np.uint8)

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
        start = threading.Thread.start

        def started(thread: threading.Thread) -> None:
            thread.started_by = gpus.process()  # type: ignore[attr-defined]
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", started)
        monkeypatch.setattr(ways, "getpid", threading.get_ident)
        monkeypatch.setattr(cupy_on_host, "give", lambda run: gpus.push(current().ptr, run, name="kernel"))
        yield gpus


@contextlib.contextmanager
def on_new_stream(streams: Streams) -> Iterator[Stream]:
    """The current stream is another one, which is behind what the one before was given."""
    stream: Stream = streams.stream()
    streams.follow(stream)
    with stream:
        yield stream


def pinned_nbytes(size: int) -> int:
    """What CuPy's pool takes for pinned memory of so many bytes (``cupy/cuda/pinned_memory.pyx``)."""
    return 1 << (max(size, 512) - 1).bit_length()


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
