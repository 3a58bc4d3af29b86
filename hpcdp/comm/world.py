"""The world: the ranks of a job, their nodes, rails and GPUs.

Who takes part: ranks, the nodes they run on, and the rails between nodes. `starting` makes one of MPI.

The GPUs that a process may see, and which of them a rank computes on.

CUDA's driver is asked itself, so that CuPy, which takes a second, is imported by nobody who has no arrays of it. The
driver numbers the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, and Slurm sets that for each task it binds; so a rank that
sees one GPU has number 0.

Methods that are called later, of objects that may be gone by then.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakMethod

import numpy as np

from ..core.checks import instance
from ..core.devices import Device, cpu, cuda_release, gpu
from ..engine import Engine
from ..errors import ConfigError, DeviceError, UnsupportedError, whole_number
from .communicator import Communicator, tell_servers
from .consistency import Call, Calls, Refused, refuse
from .shared_memory import NodeMemory
from .watchdog import Watchdog

LIBRARY = "libcuda.so.1"
"""Of CUDA's driver."""
MANAGEMENT_LIBRARY = "libnvidia-ml.so.1"
"""NVML, which comes with the driver."""
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
"""Where the kernel says which driver it has."""
_TEXT_NBYTES, _UUID_NBYTES = 256, 16


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may see."""

    index: int
    """Its number in this process."""
    name: str
    bus_id: str
    """Where it is on the PCI bus, e.g. ``0000:3b:00.0``; the same for all processes of a machine."""
    uuid: str
    """Of the GPU, or of the instance where it is divided into some (MIG): those have one place on the bus."""


class Driver:
    """CUDA's driver.

    Raises:
        DeviceError: there is none, or it cannot start; it says why.
    """

    def __init__(self, library: str) -> None:
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise DeviceError("CUDA's driver", expected=library, got=str(error)) from error
        self._call("cuInit", 0)

    def _call(self, function: str, *args: Any) -> None:
        status = getattr(self._cuda, function)(*args)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise DeviceError("CUDA's driver", where=function, got=f"error {status}, {(text.value or b'').decode()}")

    def version(self) -> str:
        """The newest CUDA that it can run, e.g. ``12.8``."""
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return cuda_release(number.value)

    def gpus(self) -> tuple[Gpu, ...]:
        """Those that this process may see, by number."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return tuple(self._gpu(index) for index in range(count.value))

    def _gpu(self, index: int) -> Gpu:
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * _UUID_NBYTES)()
        name, bus_id = (ctypes.create_string_buffer(_TEXT_NBYTES) for _ in range(2))
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDeviceGetName", name, _TEXT_NBYTES, device)
        self._call("cuDeviceGetPCIBusId", bus_id, _TEXT_NBYTES, device)
        # The first version names the GPU, not the instance.
        of_instance = "cuDeviceGetUuid_v2" if hasattr(self._cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        self._call(of_instance, uuid, device)
        return Gpu(index, name.value.decode(), bus_id.value.decode().lower(), bytes(uuid).hex())


def driver_release() -> str:
    """That of NVIDIA's driver, e.g. ``580.65.06``: NVML says it, or the kernel; ``unknown`` where neither does."""
    release = ctypes.create_string_buffer(_TEXT_NBYTES)
    try:
        nvml = ctypes.CDLL(MANAGEMENT_LIBRARY)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(release, _TEXT_NBYTES) == 0:
            return release.value.decode()
    except (OSError, AttributeError):
        pass  # a container may have the driver without it
    with contextlib.suppress(OSError):
        if found := re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", KERNEL_MODULE.read_text()):
            return found[1]
    return "unknown"


@cache
def visible() -> tuple[Gpu, ...]:
    """The GPUs that this process may see; none where CUDA's driver cannot be asked."""
    try:
        return Driver(LIBRARY).gpus()
    except DeviceError:
        return ()


def device_of(place: int) -> Device:
    """The device of the rank of this number among those of its machine: a GPU that it sees, each in turn.

    The CPU where there is none, or no CuPy.
    """
    found = visible() if importlib.util.find_spec("cupy") is not None else ()
    return gpu(found[place % len(found)].index) if found else cpu()


T = TypeVar("T")


def weakly(method: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that calls a bound method as long as its object lives, and then returns False."""
    weak = WeakMethod(method)

    def call() -> bool:
        living = weak()
        return living is not None and living()

    return call


class WeakMethods(list[WeakMethod[Callable[[], T]]]):
    """Bound methods without arguments, which keep no object alive."""

    def add(self, method: Callable[[], T]) -> None:
        """One more, in the place of all whose objects are gone."""
        self[:] = [each for each in self if each() is not None]
        self.append(WeakMethod(method))

    def living(self) -> list[Callable[[], T]]:
        """Those whose objects live, in the order in which they came."""
        return [method for method in (each() for each in self) if method is not None]


MOST_COLOR = 2**31 - 1
"""Of `World.split`: MPI takes an int."""

_BARRIER, _SPLIT = Call("barrier"), Call("split")

GPU_OF_MESSAGES = "GPU of messages"
"""What a world keeps it under: the GPU whose memory messages go from and to."""


@dataclass(frozen=True)
class World:
    """All ranks of a job, seen from one of them. Made by `init` or `split`, in tests by `hpcdp.comm.thread_comm.run`.

    Where there are servers, they are no ranks of it: see `whole`.
    """

    rank: int
    """The number of this rank, from 0."""
    size: int
    """The number of ranks."""
    local_rank: int
    """This rank among those of its node, from 0."""
    local_size: int
    """How many ranks this node has."""
    node: int
    """The number of this node; nodes are ordered by their lowest rank."""
    num_nodes: int
    """The number of nodes."""
    num_rails: int
    """As many as the smallest node has ranks that share memory; 1 where memory cannot be shared."""
    comm: Communicator
    """All ranks."""
    call_comm: Communicator
    """All ranks, for `Calls` alone."""
    node_comm: Communicator
    """The ranks of this node."""
    rail_comm: Communicator | None
    """One rank of every node, those of the same number; None for a rank whose number is not below `num_rails`."""
    node_memory: NodeMemory
    """Memory shared with the node's other ranks; of size 1 where memory cannot be shared."""
    library: str = ""
    """The MPI library and its version."""
    cores: int = 1
    """How many cores the ranks of this node may use together."""
    place: int = 0
    """The number of this rank among those of its machine, which may be several virtual nodes."""
    concurrent: bool = True
    """Whether several threads of a rank may communicate at a time (MPI's THREAD_MULTIPLE)."""
    whole: World | None = None
    """The world of all processes, workers first and then the servers, for stores; None where there are no servers, and
    in that world itself."""
    num_servers: int = 0
    """So many of this world's ranks, the last ones, are servers."""
    kept: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
    """See `keep`."""
    common: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
    """What this world has in common with all that `split` makes of it, on this rank."""
    endings: WeakMethods[None] = field(default_factory=WeakMethods, repr=False, compare=False)
    """Called by `finish`, the last first."""
    closings: WeakMethods[None] = field(default_factory=WeakMethods, repr=False, compare=False)
    """Called when the world is closed: of what has communicators or memory of it, in whose place `comm` refuses."""
    meetings: WeakMethods[AbstractContextManager[None]] = field(default_factory=WeakMethods, repr=False, compare=False)
    """What makes the contexts of `meeting`; added, and dropped when nothing lives on any rank, by all ranks alike."""
    under_way: WeakMethods[None] = field(default_factory=WeakMethods, repr=False, compare=False)
    """Called by `settle`."""
    divide: Callable[..., World] | None = field(default=None, repr=False, compare=False)
    """What makes the worlds of `split`; None in a world with servers among its ranks."""
    _parts: list[weakref.ref[World]] = field(default_factory=list, repr=False, compare=False)
    """See `parts`."""
    parent: World | None = field(default=None, repr=False, compare=False)
    """The world that this one is split from."""
    model_comm: Communicator | None = None
    """The ranks that together hold one copy of a model, of which this one has a part; None where it has all of it. What
    is summed over a model, such as the norm of its gradients, is summed over these as well."""
    part_comm: Communicator | None = None
    """The ranks that compute the same layers together, each with its part of them; None where there is one such rank.
    Parameters are cut into parts among these (`state.Cut`), or whole and alike on all of them."""

    def __copy__(self) -> World:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> World:
        return self  # a copy of a layer is one of the same ranks

    def __reduce__(self) -> Any:
        """Pickle as a call of `init`, which gives another process its own world of all ranks.

        Raises:
            UnsupportedError: it is a part of those ranks, or of thread ranks, which another process does not have.
        """
        from .startup import init, is_of_process

        if not is_of_process(self):
            raise UnsupportedError(
                "World", expected="the world of hpcdp.init() to be pickled", got="one of other ranks, as split() makes",
                remedy="pickle state_dict() of what holds it, or copy that by copy.deepcopy()",
            )  # fmt: skip
        return init, ()

    @property
    def device(self) -> Device:
        """Where this rank is to keep its arrays: one of the GPUs that it sees, by its `place`; ``cpu(0)`` without CuPy.

        Several ranks have the same one where they outnumber the GPUs. It becomes CuPy's current device by `Device.use`.
        """
        return self.keep("device", lambda: device_of(self.place))

    def split(self, color: int, model_comm: Communicator | None = None, part_comm: Communicator | None = None) -> World:
        """The ranks that pass the same ``color``, in their order here, as a world of their own; every rank must call.

        It ends with this one, or before: when no rank holds it any more, or at the end of a context (see `close`):
        ``with world.split(color) as part``. Nodes are those of this world, as far as they have ranks in it.

        Args:
            color: an integer from 0 to `MOST_COLOR`, or a bool.
            model_comm: of the new world, see there.
            part_comm: as well; default that of this one.

        Raises:
            ConfigError: some ranks are servers, or the color is another one.
        """
        if self.divide is None:
            raise ConfigError("split", expected="a world of workers", got="one with servers among its ranks")
        number = _color(color)
        part_comm = self.part_comm if part_comm is None else part_comm
        with self._all_in(_SPLIT):
            part: World = self.divide(
                number, model_comm=model_comm, part_comm=part_comm, common=self.common, parent=self
            )
        self._parts[:] = [each for each in self._parts if each() is not None]
        self._parts.append(weakref.ref(part))
        return part

    @property
    def parts(self) -> list[World]:
        """Those that `split` has made on this rank and that somebody still holds."""
        return [part for part in (each() for each in self._parts) if part is not None]

    def close(self) -> None:
        """Give up a world that `split` has made; nobody is waited for, and other ranks may go on in it alone.

        Memory, threads and communicators are given back as if nobody held the world any more: these when all of its
        ranks have come so far. What is called with a closed world, or with what was made for it, raises `ConfigError`.

        Raises:
            ConfigError: the world of `hpcdp.init`, which ends with the program.
        """
        self._require_part("close")
        if self.is_closed:
            return
        self.finish()
        self._drop()

    def __enter__(self) -> World:
        """See `close`."""
        self._require_part("with")
        _ = self.comm.signatures  # refused where it is closed
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self.is_closed:
            self._drop()  # what is under way may never end

    def _require_part(self, operation: str) -> None:
        if self.parent is None:
            raise ConfigError(
                operation, expected="a world that split() has made", got="that of hpcdp.init()",
                remedy="leave it: it ends with the program",
            )  # fmt: skip

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return isinstance(self.comm, Refused)

    def _drop(self) -> None:
        for part in self.parts:
            part._drop()
        if (watchdog := self.kept.get(Watchdog)) is not None:
            watchdog.end(has_closed=True)
        self.end()
        self.endings.clear()
        assert self.parent is not None
        self.parent._parts[:] = [each for each in self.parent._parts if each() not in (None, self)]
        refuse(
            self, ConfigError, None, expected="an open world", got=f"the one of {self.size} ranks after close()",
            remedy="make another one: world.split(color)",
        )  # fmt: skip
        for let_go in self.closings.living():
            let_go()

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """A context for what all ranks call: what might keep them from coming, while this one waits, lets them go."""
        if not self.meetings or "meeting" in self.kept:
            yield
            return
        self.kept["meeting"] = True
        try:
            with contextlib.ExitStack() as stack:
                for each in self.meetings.living():
                    stack.enter_context(each())
                yield
                self._meet()  # nothing keeps anybody waiting again before all have come
            if not self._meet():
                self.meetings.clear()
        finally:
            del self.kept["meeting"]

    def _meet(self) -> bool:
        """Wait for all ranks; whether anything of `meetings` lives on one of them."""
        living = np.array([bool(self.meetings.living())], np.int32)
        with Watchdog.of(self).watching("a call of all ranks"):
            self.comm.native_allreduce(living, "max")
        return bool(living[0])

    def settle(self) -> None:
        """End what was started here, before this rank waits otherwise: others may wait for it first."""
        for end in self.under_way.living():
            end()

    @contextlib.contextmanager
    def _all_in(self, call: Call) -> Iterator[None]:
        """Enter a context when every rank has made ``call``."""
        with self.meeting(), Watchdog.of(self).watching(call.operation):
            self.settle()
            Calls.of(self).agree(call)
            yield

    def barrier(self) -> None:
        """Block until every rank has called it.

        Raises:
            MismatchError: some rank has called something else; the same error on every rank.
        """
        with contextlib.nullcontext() if not self.meetings else self.meeting():
            watchdog = Watchdog.of(self)
            watchdog.calls += 1
            watched = "barrier", None
            watchdog.enter(watched)
            try:
                self.settle()
                Calls.of(self).agree(_BARRIER)
            finally:
                watchdog.leave(watched)

    def finish(self) -> None:
        """Let end what is under way and others need: called when a program has come to its end without an error.

        A worker tells the servers that it needs them no longer.
        """
        with contextlib.ExitStack() as stack:  # the last one in is the first one out; an error keeps none from its turn
            if self.whole is not None:
                stack.callback(tell_servers, self.whole.comm, self.whole.num_servers)
                stack.callback(self.whole.finish)
            for ending in self.endings.living():
                stack.callback(ending)
            for part in self.parts:
                stack.callback(part.finish)

    def end(self) -> None:
        """Shut down the engines that are kept, for a world that ends before its process does."""
        for part in self.parts:
            part.end()
        for each in self.kept.values():
            if isinstance(each, Engine):
                each.shutdown()
        if self.whole is not None:
            self.whole.end()

    def use_gpu_of_messages(self) -> None:
        """Let this thread have that GPU for its current one, where there is one; for threads in MPI beside others.

        MPI may go on with a message of any thread in each call of any other, and libraries copy by the context that the
        thread has: UCX's `cuda_copy` ends with an error where that has none.
        """
        device = self.kept.get(GPU_OF_MESSAGES)
        if device is not None:
            device.use()
        for part in self.parts:
            part.use_gpu_of_messages()

    def keep(self, key: object, make: Callable[[], T]) -> T:
        """What ``make()`` returned when ``key`` was first asked for: state of a higher room, such as staging buffers.

        Where ``make`` allocates shared memory every rank of the node must ask, in the same order.
        """
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]


def require_world(operation: str, given: object) -> None:
    """Raises `ConfigError` unless it is a world, or None for that of `hpcdp.init`."""
    if given is not None:
        instance(operation, "world", given, World, "what hpcdp.init() returns, or None for that")


def _color(color: object) -> int:
    """``color`` as MPI takes it, which would cut 1.5 to 1 without a word."""
    return whole_number("split", "color", int(color) if isinstance(color, bool | np.bool_) else color, 0, MOST_COLOR)
