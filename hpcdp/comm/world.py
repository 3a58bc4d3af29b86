"""The world: the ranks of a job, their nodes and rails, and the GPU of each rank.

`startup` makes the world of MPI. GPUs are listed by CUDA's driver itself, because importing CuPy takes a second and is
useless without GPU arrays. The driver numbers the GPUs in ``CUDA_VISIBLE_DEVICES``, which Slurm sets for each task that
it binds; a rank that sees one GPU therefore has number 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakMethod

import numpy as np

from ..core.arrays import Device, cpu, cuda_release, gpu
from ..core.checks import instance, whole_number, whole_numbers
from ..engine import Engine
from ..engine.engine import Trace
from ..errors import ConfigError, DeviceError, UnsupportedError, WorldAborted, interrupts
from .communicator import Communicator, tell_servers
from .consistency import FIELDS, Call, Calls, Refused, refuse
from .roll_call import ABANDONED, CLOSED
from .shared_memory import NodeMemory
from .watchdog import Watchdog

LIBRARY = "libcuda.so.1"
"""The library of CUDA's driver."""
MANAGEMENT_LIBRARY = "libnvidia-ml.so.1"
"""NVML, which is installed with the driver."""
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
"""The file that names the version of the kernel's driver."""
_TEXT_NBYTES, _UUID_NBYTES = 256, 16


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use."""

    index: int
    """Its number in this process."""
    name: str
    bus_id: str
    """Its place on the PCI bus, e.g. ``0000:3b:00.0``; the same for all processes of a machine."""
    uuid: str
    """The identifier of the GPU, or of the MIG instance: instances of one GPU have the same place on the bus."""


class Driver:
    """CUDA's driver.

    Raises:
        DeviceError: it is missing or cannot start, with the reason.
    """

    def __init__(self, library: str) -> None:
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            is_missing = "No such file" in str(error)  # dlopen has no error number
            got = f"no {library}, the library of NVIDIA's driver" if is_missing else str(error)
            raise DeviceError("CUDA's driver", expected=library, got=got) from error
        self._call("cuInit", 0)

    def _call(self, function: str, *args: Any) -> None:
        status = getattr(self._cuda, function)(*args)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise DeviceError("CUDA's driver", where=function, got=f"error {status}, {(text.value or b'').decode()}")

    def version(self) -> str:
        """Return the newest CUDA version that it supports, e.g. ``12.8``."""
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return cuda_release(number.value)

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that this process may use, by number."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return tuple(self._gpu(index) for index in range(count.value))

    def _gpu(self, index: int) -> Gpu:
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * _UUID_NBYTES)()
        name, bus_id = (ctypes.create_string_buffer(_TEXT_NBYTES) for _ in range(2))
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDeviceGetName", name, _TEXT_NBYTES, device)
        self._call("cuDeviceGetPCIBusId", bus_id, _TEXT_NBYTES, device)
        # The first version of the function returns the GPU's identifier, not the instance's.
        of_instance = "cuDeviceGetUuid_v2" if hasattr(self._cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        self._call(of_instance, uuid, device)
        return Gpu(index, name.value.decode(), bus_id.value.decode().lower(), bytes(uuid).hex())


def driver_release() -> str:
    """Return the release of NVIDIA's driver, e.g. ``580.65.06``, by NVML or the kernel; else ``unknown``."""
    release = ctypes.create_string_buffer(_TEXT_NBYTES)
    try:
        nvml = ctypes.CDLL(MANAGEMENT_LIBRARY)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(release, _TEXT_NBYTES) == 0:
            return release.value.decode()
    except (OSError, AttributeError):
        pass  # a container may have the driver without NVML
    with contextlib.suppress(OSError):
        if match := re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", KERNEL_MODULE.read_text()):
            return match[1]
    return "unknown"


@cache
def visible() -> tuple[Gpu, ...]:
    """Return the GPUs that this process may use; none without CUDA's driver."""
    try:
        return Driver(LIBRARY).gpus()
    except DeviceError:
        return ()


def device_of(place: int) -> Device:
    """Return the device of the rank of this number on its machine: its GPUs in turn, or the CPU.

    The CPU is chosen without a GPU or without CuPy.
    """
    gpus = visible() if importlib.util.find_spec("cupy") is not None else ()
    return gpu(gpus[place % len(gpus)].index) if gpus else cpu()


T = TypeVar("T")


def weakly(method: Callable[[], object]) -> Callable[[], object]:
    """Return a function that calls a bound method while its object lives, and then returns False."""
    weak = WeakMethod(method)

    def call() -> object:
        living = weak()
        return living is not None and living()

    return call


class WeakMethods(list[WeakMethod[Callable[[], T]]]):
    """A list of bound methods without arguments that keeps no object alive."""

    def add(self, method: Callable[[], T]) -> None:
        """Append a method, and drop those whose objects are gone."""
        self[:] = [reference for reference in self if reference() is not None]
        self.append(WeakMethod(method))

    def living(self) -> list[Callable[[], T]]:
        """Return the methods whose objects live, in the order of addition."""
        return [method for method in (reference() for reference in self) if method is not None]


MOST_COLOR = 2**31 - 1
"""The largest color of `World.split`, because MPI takes an int."""

_BARRIER, _SPLIT = Call("barrier"), Call("split")

_GPUS_OF_MESSAGES = "GPUs of messages"
"""The key of a world's senders of `sends_from`, with their GPUs; a list that is replaced, because threads read it."""


@dataclass(frozen=True, repr=False)
class World:
    """All ranks of a job, as one of them sees them; made by `init` or `split`, in tests by `thread_comm.run`.

    Servers, if there are any, are not ranks of it: see `whole`.
    """

    rank: int
    """The number of this rank, from 0."""
    size: int
    """The number of ranks."""
    local_rank: int
    """The number of this rank on its node, from 0."""
    local_size: int
    """The number of ranks on this node."""
    node: int
    """The number of this node; nodes are ordered by their lowest rank."""
    num_nodes: int
    """The number of nodes."""
    num_rails: int
    """The smallest number of ranks that share memory on a node; 1 if memory cannot be shared."""
    comm: Communicator
    """The communicator of all ranks."""
    call_comm: Communicator
    """A communicator of all ranks for `Calls` only."""
    node_comm: Communicator
    """The communicator of this node's ranks."""
    rail_comm: Communicator | None
    """The ranks with this local rank on all nodes; None if the local rank is not below `num_rails`."""
    node_memory: NodeMemory
    """Memory shared with the node's other ranks; of size 1 if memory cannot be shared."""
    library: str = ""
    """The MPI library and its version."""
    cores: int = 1
    """The number of cores that the ranks of this node may use together."""
    place: int = 0
    """The number of this rank on its machine, which may be several virtual nodes."""
    concurrent: bool = True
    """True if several threads of a rank may communicate at a time (MPI's THREAD_MULTIPLE)."""
    whole: World | None = None
    """The world of all processes, workers before servers, for stores. None without servers, and in that world itself.
    """
    num_servers: int = 0
    """The number of this world's last ranks that are servers."""
    kept: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
    """State that `keep` made."""
    common: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
    """State that this rank shares between this world and all worlds split from it."""
    endings: WeakMethods[None] = field(default_factory=WeakMethods, repr=False, compare=False)
    """Methods that `finish` calls, the last one first."""
    closings: WeakMethods[None] = field(default_factory=WeakMethods, repr=False, compare=False)
    """Methods called when the world is closed, by owners of its communicators or memory, which refuse access then."""
    meetings: WeakMethods[AbstractContextManager[None]] = field(default_factory=WeakMethods, repr=False, compare=False)
    """Methods that return the contexts of `meeting`. All ranks add them alike, and drop them when none lives on any
    rank.
    """
    under_way: WeakMethods[None] = field(default_factory=WeakMethods, repr=False, compare=False)
    """Methods that `settle` calls."""
    divide: Callable[..., World] | None = field(default=None, repr=False, compare=False)
    """The function that makes the worlds of `split`; None in a world with servers."""
    _parts: list[weakref.ref[World]] = field(default_factory=list, repr=False, compare=False)
    """See `parts`."""
    _lasting_parts: list[World] = field(default_factory=list, repr=False, compare=False)
    """Worlds of `split` and `subset` that called `live_until_closed`."""
    parent: World | None = field(default=None, repr=False, compare=False)
    """The world that this one was split from."""
    is_borrowed: bool = False
    """True for a world of `from_comm`."""
    model_comm: Communicator | None = None
    """The ranks that together hold one copy of a model, of which this one has a part; None if it has all of it. Values
    summed over a model, such as the norm of its gradients, are summed over these ranks as well.
    """
    part_comm: Communicator | None = None
    """The ranks that compute the same layers together, each with its slice; None if there is one such rank. Parameters
    are split between these ranks (`state.Cut`), or whole and equal on all of them.
    """

    def __repr__(self) -> str:
        names = "rank", "size", "local_rank", "local_size", "node", "num_nodes", "library"
        return f"World({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __copy__(self) -> World:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> World:
        return self  # the copy of a layer belongs to the same ranks

    def __reduce__(self) -> Any:
        """Pickle as a call of `init`, which gives another process its own world of all ranks.

        Raises:
            UnsupportedError: it is a part of the ranks, or of thread ranks, which another process does not have.
        """
        from .startup import init, is_of_process

        if not is_of_process(self):
            raise UnsupportedError(
                "World", expected="the world of hpcdp.init() to be pickled", got="a world made by split()",
                remedy="pickle the state_dict() of its owner, or copy the owner with copy.deepcopy()",
            )  # fmt: skip
        return init, ()

    @property
    def device(self) -> Device:
        """The device for this rank's arrays: one of its GPUs, by its `place`; ``cpu(0)`` without CuPy.

        Ranks share GPUs if they outnumber them. `Device.use` makes it CuPy's current device.
        """
        return self.keep("device", lambda: device_of(self.place))

    @property
    def engine(self) -> Engine:
        """The engine whose lanes run the world's background work: nonblocking operations and overlapped reductions."""

        def make() -> Engine:
            engine = Engine(lanes=(), max_inflight=1 << 20)
            trace = self.kept.get(Trace)
            if trace is not None:
                engine.observer = trace.slice
            return engine

        return self.keep(Engine, make)

    def split(self, color: int, model_comm: Communicator | None = None, part_comm: Communicator | None = None) -> World:
        """Return the ranks that pass the same ``color``, in their order here, as a world; every rank must call.

        It ends with this world or before: when no rank holds it any more, or at the end of a context (see `close`):
        ``with world.split(color) as part``. One whose ranks sum on GPUs ends only in the latter way, or with this
        world. Its nodes are those of this world that have ranks in it.

        Args:
            color: an integer from 0 to `MOST_COLOR`, or a bool.
            model_comm: the new world's `model_comm`.
            part_comm: the new world's `part_comm`; default that of this one.

        Raises:
            ConfigError: some ranks are servers, or the color is not valid.
        """
        if self.divide is None:
            raise ConfigError("split", expected="a world of workers", got="a world with servers")
        number = _color(color)
        part_comm = self.part_comm if part_comm is None else part_comm
        with self._all_in(_SPLIT):
            part: World = self.divide(
                number, model_comm=model_comm, part_comm=part_comm, common=self.common, parent=self
            )
        self._parts[:] = [reference for reference in self._parts if reference() is not None]
        self._parts.append(weakref.ref(part))
        return part

    def subset(self, ranks: Iterable[int]) -> World:
        """Return some of the ranks as a world; these ranks must call, with the same argument, and no others.

        Other ranks go on undisturbed. It ends as a world of `split` does.

        Args:
            ranks: ranks of this world, each once, in any order; they are numbered anew in their order here.

        Raises:
            ConfigError: some ranks are servers, a rank is not valid or repeated, or this rank is not among them.
        """
        if self.divide is None:
            raise ConfigError("subset", expected="a world of workers", got="a world with servers")
        last = self.size - 1
        valid = f"ranks from 0 to {last}"
        if not isinstance(ranks, Iterable):
            raise ConfigError("subset", where="ranks", expected=valid, got=ranks)
        members = sorted(whole_number("subset", "ranks", rank, 0, last, expected=valid) for rank in ranks)
        if len(set(members)) != len(members) or self.rank not in members:
            raise ConfigError(
                "subset", where="ranks", expected=f"different ranks, with this rank {self.rank}", got=members,
                remedy="call it on the ranks of the subset only",
            )  # fmt: skip
        with Watchdog.of(self).watching("subset"):
            self.settle()
            part = self.divide(members, part_comm=self.part_comm, common=self.common, parent=self)
        self._parts[:] = [reference for reference in self._parts if reference() is not None]
        self._parts.append(weakref.ref(part))
        return part

    @property
    def node_world(self) -> World:
        """This node's ranks as a world, numbered by `local_rank`; every rank must use it first at the same time."""
        return self.keep("node world", lambda: self.split(self.node))

    @property
    def rail_world(self) -> World:
        """The ranks with this `local_rank` on all nodes as a world; every rank must use it first at the same time."""
        return self.keep("rail world", lambda: self.split(self.local_rank))

    def mesh(self, rows: int, cols: int) -> Mesh:
        """Arrange the ranks in a grid, row by row: rank r is in row ``r // cols`` and column ``r % cols``.

        Every rank must call. For example, ``mesh(world.num_nodes, world.local_size)`` has a node in each row if all
        nodes have as many ranks, and they are numbered node by node.

        Raises:
            ConfigError: ``rows * cols`` is not the number of ranks; the same on every rank that passes the same.
        """
        whole_numbers("mesh", 1, rows=rows, cols=cols)
        if rows * cols != self.size:
            raise ConfigError(
                "mesh", expected=f"rows * cols = {self.size}, the number of ranks", got=f"{rows} * {cols}"
            )
        row, col = divmod(self.rank, cols)
        return Mesh(rows, cols, row, col, self.split(row), self.split(col))

    @staticmethod
    def from_comm(comm: Any) -> World:
        """Return the ranks of an mpi4py communicator as a world, for programs that own their communicator.

        All of its ranks must call, and no others. The communicator is duplicated, never used or freed. The world ends
        when no rank holds it any more, or with `close`.

        Args:
            comm: an intracommunicator of mpi4py, of processes that have started MPI.

        Raises:
            ConfigError: it is no such communicator.
        """
        from .startup import world_from

        return world_from(comm)

    @property
    def parts(self) -> list[World]:
        """Worlds that `split` made on this rank and that are still referenced."""
        return [part for part in (reference() for reference in self._parts) if part is not None]

    def live_until_closed(self) -> None:
        """Keep a world of `split` or `subset` alive until it is closed or its parent ends, although unreferenced.

        For state that all ranks must release together, which Python frees at a different time on each rank.
        """
        if self.parent is not None and not any(part is self for part in self.parent._lasting_parts):
            self.parent._lasting_parts.append(self)
            self.parent.live_until_closed()

    def close(self) -> None:
        """Release a world that `split`, `subset` or `from_comm` made.

        It does not wait for other ranks, which may continue to use it. Its memory, threads and communicators are freed
        as if it were unreferenced; communicators when all of its ranks have released it. Later calls with the world, or
        with objects made for it, raise `ConfigError`.

        Raises:
            ConfigError: it is the world of `hpcdp.init`, which ends with the program.
        """
        self._require_part("close")
        if self.is_closed:
            return
        self.finish()
        self._drop()

    def __enter__(self) -> World:
        """Return the world; the end of the context closes it."""
        self._require_part("with")
        _ = self.comm.signatures  # raises if the world is closed
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self.is_closed:
            self._drop()  # operations in progress may never end

    def _require_part(self, operation: str) -> None:
        if self.parent is None and not self.is_borrowed:
            raise ConfigError(
                operation, expected="a world that split() or from_comm() has made", got="that of hpcdp.init()",
                remedy="drop the call: that world ends with the program",
            )  # fmt: skip

    @property
    def is_closed(self) -> bool:
        """True after `close`, and after `abandon`."""
        return isinstance(self.comm, Refused)

    def _drop(self) -> None:
        for part in self.parts:
            part._drop()
        if (watchdog := self.kept.get(Watchdog)) is not None:
            watchdog.end(CLOSED)
        self.end()
        self.endings.clear()
        if self.parent is not None:
            self.parent._parts[:] = [reference for reference in self.parent._parts if reference() not in (None, self)]
            self.parent._lasting_parts[:] = [part for part in self.parent._lasting_parts if part is not self]
        closed = f"a world of {self.size} rank{'s' * (self.size > 1)} after close()"
        refuse(
            self, ConfigError, None, expected="an open world", got=closed,
            remedy="make another one: world.split(color)",
        )  # fmt: skip
        for release in self.closings.living():
            release()

    def abandon(self, operation: str, error: BaseException) -> None:
        """Let all communication of the world fail from now on, because ``error`` has left ``operation`` halfway.

        Such as Ctrl-C, or an exception of a signal's handler: this rank's next call would be paired with one of which
        other ranks still wait for the end. Their watchdogs name this rank, and end the job if they need it. Nothing
        happens to a world of one rank, nor after an error of the operation itself (`errors.interrupts`).
        """
        if self.size == 1 or self.is_closed or not interrupts(error):
            return
        name = operation.partition(" (")[0]  # without what a report of waiting ranks adds
        kept: dict[object, Any] = {key: self.kept[key] for key in (Engine, Watchdog) if key in self.kept}
        if (watchdog := kept.get(Watchdog)) is not None:
            watchdog.end(ABANDONED)
        kept["abandoned"] = self.kept, [getattr(self, name) for name in FIELDS]  # MPI may still write into buffers
        refuse(
            self, WorldAborted, kept, expected="ranks that are in step",
            got=f"a world in which {type(error).__name__} has ended {name} of this rank halfway",
            remedy="end the job; let handlers of signals only set a variable that the program reads between calls",
        )  # fmt: skip

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Release whatever might keep other ranks from a collective call while this one waits in it."""
        if not self.meetings or "meeting" in self.kept:
            yield
            return
        self.kept["meeting"] = True
        try:
            with contextlib.ExitStack() as stack:
                for context in self.meetings.living():
                    stack.enter_context(context())
                yield
                self._meet()  # no rank resumes what it released before all ranks are here
            if not self._meet():
                self.meetings.clear()
        finally:
            self.kept.pop("meeting", None)  # `abandon` has dropped it

    def _meet(self) -> bool:
        """Wait for all ranks; return whether a method of `meetings` lives on any of them."""
        living = np.array([bool(self.meetings.living())], np.int32)
        with Watchdog.of(self).watching("a call of all ranks"):
            self.comm.native_allreduce(living, "max")
        return bool(living[0])

    def settle(self) -> None:
        """Complete operations in progress before this rank waits otherwise, because others may wait for them first."""
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
            MismatchError: some rank has called another function; the same error on every rank.
        """
        repeat = self.kept.get(_BARRIER)
        if repeat is not None and repeat(None, None):
            return
        with self._all_in(_BARRIER):
            pass
        if repeat is None:
            from .repeated import repeated_barrier

            self.kept[_BARRIER] = repeated_barrier(self, _BARRIER)

    def finish(self) -> None:
        """Complete operations that other ranks need; called when a program ends without an error.

        A worker tells the servers that it has ended.
        """
        with contextlib.ExitStack() as stack:  # calls all of them in reverse order, even after an error
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
        for value in self.kept.values():
            if isinstance(value, Engine):
                value.shutdown()
        if self.whole is not None:
            self.whole.end()

    def sends_from(self, device: Device, sender: object) -> None:
        """Note that messages use the memory of a GPU for as long as ``sender`` lives."""
        living = [pair for pair in self.kept.get(_GPUS_OF_MESSAGES, ()) if pair[0]() is not None]
        self.kept[_GPUS_OF_MESSAGES] = [*living, (weakref.ref(sender), device)]

    @property
    def gpu_of_messages(self) -> Device | None:
        """The GPU whose memory messages use, that of the latest living sender (`sends_from`); None without one."""
        senders = reversed(self.kept.get(_GPUS_OF_MESSAGES, ()))
        return next((device for sender, device in senders if sender() is not None), None)

    def use_gpu_of_messages(self) -> None:
        """Make the GPU of messages current in this thread, if there is one; for threads that call MPI beside others.

        A call of any thread may progress a message of any other, and libraries copy in the calling thread's CUDA
        context. UCX's `cuda_copy` ends with an error if the thread has none.
        """
        device = self.gpu_of_messages
        if device is not None:
            device.use()
        for part in self.parts:
            part.use_gpu_of_messages()

    def keep(self, key: object, make: Callable[[], T]) -> T:
        """Return the state under ``key``, such as staging buffers; ``make()`` creates it at the first call.

        If ``make`` allocates shared memory, every rank of the node must call, in the same order.
        """
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid; made by `World.mesh`."""

    rows: int
    """The number of rows."""
    cols: int
    """The number of columns."""
    row: int
    """The row of this rank."""
    col: int
    """The column of this rank."""
    row_world: World
    """The ranks of this row, numbered by column."""
    col_world: World
    """The ranks of this column, numbered by row."""


def require_world(operation: str, world: object) -> None:
    """Raise `ConfigError` unless it is a world, or None for that of `hpcdp.init`."""
    if world is not None:
        instance(operation, "world", world, World, "the world of hpcdp.init(), or None for it")


def _color(color: object) -> int:
    """Return ``color`` as an int, because MPI would truncate 1.5 to 1."""
    return whole_number("split", "color", int(color) if isinstance(color, bool | np.bool_) else color, 0, MOST_COLOR)
