"""CUDA's streams, events, copies and IPC without a GPU, for ranks that are threads; on top of `cupy_module`.

NCCL's place is taken by `nccl`.

Work that is given to a stream is done as late as it may be, and streams take turns at random: at least one piece of all
that may be done, of any rank, is done whenever somebody asks for an event. So who does not wait for what he needs finds
it missing, and who reuses memory too early spoils it. So it is on the default stream, of which each rank has one a GPU:
an array has its shape at once, and its elements when its stream comes to them. Its memory goes to the next who asks for
as much on its stream as soon as Python has it no more, whatever has still to be done there (`pool`).

What real ones answer with an error, or with nonsense, is an error here: handles opened by their own process, memory
freed while others have it mapped. An array is on the GPU that was current when it was made; a thread's current GPU is
number 0 until it says otherwise, and what makes one current, or needs one, makes a context there.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from hpcdp.comm import thread_comm
from hpcdp.comm.gpu_buckets import transport
from hpcdp.core.arrays import Streams

from . import cupy_module, nccl
from .arrays import change_later, compute_in_turn, remember_devices, without_owners
from .streams import DEFAULT, Device, Event, EventState, Gpus, Stream, runtime


@contextlib.contextmanager
def installed(monkeypatch: Any, seed: int = 0) -> Iterator[Gpus]:
    """Let ``cupy`` be this one."""
    with cupy_module.instead() as cupy:
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
                gpus.events[ptr] = EventState(not disable_timing)
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

        def pinned(size: int) -> Any:
            gpus.current()
            return gpus.pinned(size)

        def free_all_blocks() -> None:
            gpus.room = float("inf")

        vars(cuda).update(
            runtime=runtime(gpus), nccl=nccl.module(gpus), Device=lambda index=0: Device(gpus, index),
            Stream=make_stream, Event=make_event, get_current_stream=current, alloc_pinned_memory=pinned,
            get_elapsed_time=lambda start, end: cuda.runtime.eventElapsedTime(start.ptr, end.ptr),
            UnownedMemory=lambda ptr, size, owner: SimpleNamespace(ptr=ptr, owner=owner),
            MemoryPointer=lambda mem, offset: SimpleNamespace(ptr=mem.ptr + offset, mem=mem),
        )  # fmt: skip
        cupy.cuda, cupy.ndarray = cuda, array_at

        def give(run: Callable[[], None], args: tuple[Any, ...] = ()) -> None:
            lent = without_owners(cupy, args)
            gpus.push(current().ptr, lambda lent=lent: run(), name="kernel")  # memory of no pool must live until then

        def set_limit(size: int | None = None, fraction: float | None = None) -> None:
            assert size is None
            gpus.limits[gpus.process()] = gpus.current(), fraction

        cupy.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=free_all_blocks, set_limit=set_limit)
        remember_devices(cupy, gpus)
        change_later(cupy, gpus, lambda run: gpus.push(current().ptr, run, name="change"))
        compute_in_turn(cupy, gpus, current)
        for name, module in (("", cuda), (".runtime", cuda.runtime), (".nccl", cuda.nccl)):
            monkeypatch.setitem(sys.modules, f"cupy.cuda{name}", module)
        start = threading.Thread.start

        def started(thread: threading.Thread) -> None:
            thread.started_by = gpus.process()  # type: ignore[attr-defined]
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", started)
        monkeypatch.setattr(transport, "getpid", threading.get_ident)
        monkeypatch.setattr("hpcdp.core.arrays._forgotten", deque())  # that of another stand-in would be looked at
        monkeypatch.setattr(cupy_module, "give", give)
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
        method = getattr(thread_comm.ThreadCommunicator, name)
        monkeypatch.setattr(thread_comm.ThreadCommunicator, name, there(method))
