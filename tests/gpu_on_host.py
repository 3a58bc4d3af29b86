"""CUDA's streams, events, copies, IPC and NCCL without a GPU, for ranks that are threads; on top of `cupy_on_host`.

Work that is given to a stream is done as late as it may be, and streams take turns at random: at least one piece of all
that may be done, of any rank, is done whenever somebody asks for an event. So who does not wait for what he needs finds
it missing, and who reuses memory too early spoils it. The default stream is the host itself: what it is given is done
at once, and for an event it waits.

What real ones answer with an error, or with nonsense, is an error here: NCCL's collectives in different orders, two of
its ranks on one GPU, handles opened by their own process, memory freed while others have it mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
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
import numpy as np

from hpcdp.comm import ways

LIMIT_S = 20.0
PASSED, NOT_READY = 0, 600
DEFAULT = 0
"""The default stream."""


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}: stand-in")
        self.status = status


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL_ERROR_{status}: stand-in")


class _Event:
    def __init__(self, interprocess: bool) -> None:
        self.interprocess = interprocess
        self.recorded = self.passed = 0


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
        return self.events[ptr]

    def process(self) -> str:
        return threading.current_thread().name


class Stream:
    def __init__(self, gpus: Gpus, ptr: int) -> None:
        self._gpus, self.ptr = gpus, ptr

    def __enter__(self) -> Stream:
        vars(self._gpus.of_thread).setdefault("streams", []).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._gpus.of_thread.streams.pop()

    def synchronize(self) -> None:
        self._gpus.wait_until(lambda: not self._gpus.queues.get(self.ptr))


class _Device:
    def __init__(self, gpus: Gpus, index: int) -> None:
        self._gpus, self._index = gpus, index

    def use(self) -> None:
        self._gpus.of_thread.device = self._index

    def __enter__(self) -> None:
        self._before = getattr(self._gpus.of_thread, "device", 0)
        self.use()

    def __exit__(self, *_: object) -> None:
        self._gpus.of_thread.device = self._before


def _runtime(gpus: Gpus) -> ModuleType:
    """The functions of ``cupy.cuda.runtime`` with the arguments that CuPy 14 has."""
    made = ModuleType("cupy.cuda.runtime")

    def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
        assert kind == made.memcpyDefault
        gpus.push(stream, lambda: ctypes.memmove(dst, src, size) and None, name="copy")

    def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
        gpus.push(stream, lambda: ctypes.memset(ptr, value, size) and None, name="clear")

    def eventRecord(event: int, stream: int) -> None:
        recorded = gpus.event(event)
        recorded.recorded += 1
        number = recorded.recorded
        gpus.push(stream, lambda: setattr(recorded, "passed", number), name="event")

    def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:
        awaited = gpus.event(event)
        number = awaited.recorded
        gpus.push(stream, lambda: None, lambda: awaited.passed >= number, "wait")

    def eventQuery(event: int) -> int:
        gpus.step()
        asked = gpus.event(event)
        return PASSED if asked.passed >= asked.recorded else NOT_READY

    def malloc(size: int) -> int:
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
        memcpyDefault=4, CUDARuntimeError=CUDARuntimeError, getDeviceCount=lambda: 8, memcpyAsync=memcpyAsync,
        memsetAsync=memsetAsync, eventRecord=eventRecord, streamWaitEvent=streamWaitEvent, eventQuery=eventQuery,
        malloc=malloc, free=free, ipcGetMemHandle=ipcGetMemHandle, ipcOpenMemHandle=ipcOpenMemHandle,
        ipcCloseMemHandle=gpus.mapped.remove, ipcGetEventHandle=ipcGetEventHandle, ipcOpenEventHandle=opened,
        eventDestroy=lambda event: None,
    )  # fmt: skip
    return made


class _Clique:
    """The ranks of one NCCL communicator, and where each is among its collectives."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.devices: dict[int, int] = {}
        self.calls: dict[int, dict[int, tuple[Any, ...]]] = {}
        self.done: set[int] = set()


_WORDS = {0: "i1", 1: "u1", 2: "i4", 3: "u4", 4: "i8", 5: "u8", 6: "f2", 7: "f4", 8: "f8", 9: "bfloat16"}


class NcclCommunicator:
    """NCCL's, over arrays in host memory; a group's calls are one piece of work."""

    gpus: Gpus
    cliques: dict[bytes, _Clique]
    made: list[NcclCommunicator]

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        assert isinstance(commId, bytes) and len(commId) == 128
        with self.gpus.lock:
            self._clique = self.cliques.setdefault(commId, _Clique(ndev))
            self._clique.devices[rank] = getattr(self.gpus.of_thread, "device", 0)
        self.gpus.wait_until(lambda: len(self._clique.devices) == ndev)
        if len(set(self._clique.devices.values())) < ndev:
            raise NcclError(5)
        self._rank, self._number, self._left = rank, 0, 0
        self.failed = self.aborted = self.destroyed = False
        self.made.append(self)

    def _call(self, stream: int, name: str, *call: Any) -> None:
        if self.failed:
            raise NcclError(1)
        assert not self.aborted and not self.destroyed
        self.gpus.of_thread.group.append((self, stream, name, call))

    def enqueue(self, stream: int, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        number, self._number = self._number, self._number + 1
        self._left += 1
        clique, rank = self._clique, self._rank

        def ready() -> bool:
            met = clique.calls.setdefault(number, {})
            met[rank] = tuple((name, call[2:]) for name, call in calls), calls
            if any(alike != met[rank][0] for alike, _ in met.values()):
                self.gpus.fault = f"NCCL's collectives are not alike: {sorted(str(alike) for alike, _ in met.values())}"
            return len(met) == clique.size or self.aborted

        def run() -> None:
            self._left -= 1
            if number not in clique.done and not self.aborted:
                clique.done.add(number)
                met = clique.calls[number]
                for at, (name, _) in enumerate(calls):
                    _collective(name, [met[each][1][at][1] for each in range(clique.size)])

        self.gpus.push(stream, run, ready, "nccl " + " ".join(name for name, _ in calls))

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        self._call(stream, "reduceScatter", sendbuf, recvbuf, recvcount, datatype, op)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._call(stream, "allGather", sendbuf, recvbuf, count, datatype)

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._call(stream, "allReduce", sendbuf, recvbuf, count, datatype, op)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        self._call(stream, "reduce", sendbuf, recvbuf, count, datatype, op, root)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._call(stream, "broadcast", sendbuff, recvbuff, count, datatype, root)

    def check_async_error(self) -> None:
        if self.failed:
            raise NcclError(6)

    def abort(self) -> None:
        self.aborted = True

    def destroy(self) -> None:
        every = [each for each in self.made if each._clique is self._clique]
        assert not any(each._left for each in every), "ended while ranks have something under way: it may hang"
        self.destroyed = True


def _at(ptr: int, count: int, datatype: int) -> np.ndarray:
    if _WORDS[datatype] == "bfloat16":
        dtype = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    else:
        dtype = np.dtype(_WORDS[datatype])
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(ptr), dtype)


def _collective(name: str, calls: list[tuple[Any, ...]]) -> None:
    """``calls`` by rank; sums in the order of the ranks."""
    size, (_, _, count, kind, *more) = len(calls), calls[0]
    sent = [_at(each[0], count * (size if name == "reduceScatter" else 1), kind).copy() for each in calls]
    if name == "reduceScatter":
        for rank, each in enumerate(calls):
            _at(each[1], count, kind)[...] = sum(x[rank * count : (rank + 1) * count] for x in sent)
    elif name == "allGather":
        for each in calls:
            _at(each[1], count * size, kind)[...] = np.concatenate(sent)
    elif name == "allReduce":
        for each in calls:
            _at(each[1], count, kind)[...] = sum(sent)
    elif name == "reduce":
        _at(calls[more[1]][1], count, kind)[...] = sum(sent)
    else:
        for each in calls:
            _at(each[1], count, kind)[...] = sent[more[0]]


def _nccl(gpus: Gpus) -> ModuleType:
    made = ModuleType("cupy.cuda.nccl")

    def groupStart() -> None:
        gpus.of_thread.group = []

    def groupEnd() -> None:
        calls, gpus.of_thread.group = gpus.of_thread.group, None
        for comm, stream in {(comm, stream) for comm, stream, _, _ in calls}:
            comm.enqueue(stream, [(name, call) for _, _, name, call in calls])

    vars(made).update(
        available=True, get_version=lambda: 22501, NcclError=NcclError, groupStart=groupStart, groupEnd=groupEnd,
        get_unique_id=lambda: next(gpus.numbers).to_bytes(128, "little"),
        NcclCommunicator=type("NcclCommunicator", (NcclCommunicator,), {"gpus": gpus, "cliques": {}, "made": []}),
    )  # fmt: skip
    return made


@contextlib.contextmanager
def installed(monkeypatch: Any, seed: int = 0) -> Iterator[Gpus]:
    """Let ``cupy`` be this one."""
    with cupy_on_host.instead() as cupy:
        gpus = Gpus(seed)
        cuda: Any = ModuleType("cupy.cuda")
        null = Stream(gpus, DEFAULT)

        def make_stream(non_blocking: bool = False) -> Stream:
            assert non_blocking, "it would wait for the default stream"
            with gpus.lock:
                made = Stream(gpus, next(gpus.numbers))
                gpus.queues[made.ptr] = deque()
            return made

        def make_event(
            block: bool = False, disable_timing: bool = False, interprocess: bool = False
        ) -> SimpleNamespace:
            assert disable_timing
            with gpus.lock:
                ptr = next(gpus.numbers)
                gpus.events[ptr] = _Event(interprocess)
            made = gpus.events[ptr]
            return SimpleNamespace(ptr=ptr, synchronize=lambda: gpus.wait_until(lambda: made.passed >= made.recorded))

        def current() -> Stream:
            return (getattr(gpus.of_thread, "streams", None) or [null])[-1]

        def array_at(shape: tuple[int, ...], dtype: Any, memptr: Any) -> Any:
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            held = np.frombuffer((ctypes.c_char * nbytes).from_address(memptr.ptr), dtype)
            return cupy.Array(held.reshape(shape))

        vars(cuda).update(
            runtime=_runtime(gpus), nccl=_nccl(gpus), Device=lambda index=0: _Device(gpus, index), Stream=make_stream,
            Event=make_event, get_current_stream=current,
            alloc_pinned_memory=lambda size: np.full(size, 0xA5, np.uint8),
            UnownedMemory=lambda ptr, size, owner: SimpleNamespace(ptr=ptr, owner=owner),
            MemoryPointer=lambda mem, offset: SimpleNamespace(ptr=mem.ptr + offset, mem=mem),
        )  # fmt: skip
        cupy.cuda, cupy.ndarray = cuda, array_at
        cupy.Array.device = property(lambda x: SimpleNamespace(id=getattr(gpus.of_thread, "device", 0)))
        for name, module in (("", cuda), (".runtime", cuda.runtime), (".nccl", cuda.nccl)):
            monkeypatch.setitem(sys.modules, f"cupy.cuda{name}", module)
        monkeypatch.setattr(ways, "getpid", threading.get_ident)
        monkeypatch.setattr(cupy_on_host, "give", lambda run: gpus.push(current().ptr, run, name="kernel"))
        yield gpus
