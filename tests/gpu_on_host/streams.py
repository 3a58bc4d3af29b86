"""The streams, events, memory and devices of `gpu_on_host`, and what CUDA's runtime does with them."""

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
from types import ModuleType
from typing import Any

import numpy as np

from .pool import UNWRITTEN, Pool, Queue

LIMIT_S = 20.0
PASSED, NOT_READY = 0, 600
_NO_MEMORY = 2
DEFAULT = 0
"""The default stream, which is another one for each rank and GPU."""
PER_THREAD = 2
"""The one that is another for each thread, too, and that nobody has here."""


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}: stand-in")
        self.status = status


class EventState:
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
        self.numbers = itertools.count(PER_THREAD + 1)
        self.queues: dict[int, Queue] = {}
        self.defaults: dict[tuple[str, int], int] = {}
        """By process and GPU the key in ``queues`` of the default stream."""
        self.default_is_host = False
        """Whether default streams do at once what they are given, as where others compute there without them."""
        self.events: dict[int, EventState] = {}
        self.allocated: dict[int, np.ndarray] = {}
        self.once_pinned: list[np.ndarray] = []
        """What some stream may still copy to, or from."""
        self.mapped: list[int] = []
        self.handles: dict[bytes, tuple[int, str]] = {}
        self.fault = ""
        self.of_thread = threading.local()
        self.contexts: set[int] = set()
        """The GPUs that some thread has had for its current one when it called something that needs one."""
        self.made_on: dict[int, int] = {}
        """The GPU of each array, by the address of its memory."""
        self.pool = Pool()
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

    def key_of(self, stream: int) -> int:
        """That of a stream in ``queues``; of the default one, that of this process and its current GPU."""
        if stream != DEFAULT:
            return stream
        with self.lock:
            key = self.process(), getattr(self.of_thread, "device", 0)
            if key not in self.defaults:
                self.defaults[key] = next(self.numbers)
            return self.defaults[key]

    def queue_of(self, stream: int) -> Queue:
        """What a stream has still to do."""
        with self.lock:
            return self.queues.setdefault(self.key_of(stream), deque())

    def unwritten(self, like: np.ndarray, stream: int) -> np.ndarray:
        """Memory of the pool for an array ``like`` this one, on ``stream``."""
        return self.pool.unwritten(like, self.key_of(stream), self.queue_of(stream))

    def pinned(self, nbytes: int) -> Any:
        """Host memory, which is spoilt when nobody has it any more, whatever streams have still to do with it: as in
        CuPy's pool, which gives it to the next who asks."""
        block = np.full(max(1, nbytes), UNWRITTEN, np.uint8)
        self.once_pinned.append(block)
        owned = (ctypes.c_char * block.nbytes).from_buffer(block)
        weakref.finalize(owned, block.fill, UNWRITTEN).atexit = False
        return owned

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

    def event(self, ptr: int) -> EventState:
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

    def device_of(self, held: np.ndarray) -> Device:
        while isinstance(held.base, np.ndarray):
            held = held.base
        return Device(self, self.made_on[held.ctypes.data])

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

    def record(self) -> None:
        sys.modules["cupy"].cuda.get_current_stream().record(self)

    def synchronize(self) -> None:
        self._gpus.current()
        made = self._gpus.events[self.ptr]
        self._gpus.wait_until(made.has_passed)

    def __del__(self) -> None:
        self._gpus.events[self.ptr].destroyed = True


class Device:
    def __init__(self, gpus: Gpus, index: int) -> None:
        self._gpus, self.id = gpus, index
        self._before: list[int] = []

    def use(self) -> None:
        self._gpus.of_thread.device = self.id
        self._gpus.current()

    def __enter__(self) -> Device:
        self._before.append(getattr(self._gpus.of_thread, "device", 0))
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        Device(self._gpus, self._before.pop()).use()


def runtime(gpus: Gpus) -> ModuleType:
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
        block = np.full(size, UNWRITTEN, np.uint8)
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
        memcpyDefault=4, streamPerThread=PER_THREAD, getDevice=lambda: getattr(gpus.of_thread, "device", 0),
        CUDARuntimeError=CUDARuntimeError, getDeviceCount=lambda: 8, memcpyAsync=memcpyAsync,
        memsetAsync=memsetAsync, eventRecord=eventRecord, streamWaitEvent=streamWaitEvent, eventQuery=eventQuery,
        eventElapsedTime=eventElapsedTime, streamQuery=streamQuery,
        malloc=malloc, free=free, ipcGetMemHandle=ipcGetMemHandle, ipcOpenMemHandle=ipcOpenMemHandle,
        ipcCloseMemHandle=gpus.mapped.remove,
    )  # fmt: skip
    return made
