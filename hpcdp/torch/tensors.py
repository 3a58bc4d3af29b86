"""Parameters and buffers of a PyTorch module as arrays.

Tensors and arrays over the same memory: NumPy's on the host, CuPy's on a GPU, by DLPack and without a copy.

What is summed on GPUs is given to CuPy's current stream, what torch computes to torch's. `on_torchs_stream` makes them
the same, so that nobody has to wait, and what comes later on either finds what came before on the other.

Source: the Python specification of DLPack, and CUDA's stream protocol, by which CuPy takes a stream of others.

A module's buffers on a GPU, given to all ranks: by the rows of the node's GPUs, or between nodes through the host.

On one node NCCL brings the row of one rank to all others, and nobody waits for a GPU; with CUDA IPC hosts wait until it
is there. Between nodes the host waits for what that rank's GPU was given until then, and sends one message of pinned
memory.

A module's buffers, such as running statistics: the same on all ranks, which take those of rank 0.

A torch parameter as the reducer sees it: arrays over the memory of tensors.

The order of an optimizer's parameters: torch's state dicts number them, and names say which is which.

An optimizer numbers its parameters by the order in which it was given them, so that states that are loaded by number go
to others where layers are registered in another order since.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..checkpoint.flatten import overlaps
from ..comm import World, gpu_groups
from ..comm.cuda_memory import GpuTransport, NodeRows, RowSize, lone_rows
from ..comm.tasks import run_until_complete
from ..core.arrays import Array, is_host
from ..core.devices import Device, Streams, gpu
from ..errors import ConfigError, UnsupportedError, listed


def gpu_of(tensor: torch.Tensor) -> Device | None:
    """The GPU that ``tensor`` is on, None on the host."""
    return gpu(tensor.device.index) if tensor.device.type == "cuda" else None


def require_cupy(operation: str, where: str, device: Device) -> None:
    """Raises `ConfigError` where there is no CuPy, by which gradients on GPUs are summed."""
    try:
        importlib.import_module("cupy")
    except ImportError as error:
        raise ConfigError(
            operation, where=where, expected=f"CuPy, for what is on {device}", got="no module named cupy",
            remedy="pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]', as the CUDA of your PyTorch",
        ) from error  # fmt: skip


def as_array(tensor: torch.Tensor) -> Array:
    """An array over the memory of ``tensor``, which needs no gradient."""
    device = gpu_of(tensor)
    if device is None:
        return tensor.numpy()
    with on_torchs_stream(device):  # else CuPy would let its own stream wait for torch's
        return importlib.import_module("cupy").from_dlpack(tensor)


def as_tensor(array: Array) -> torch.Tensor:
    """A tensor over the memory of ``array``."""
    if is_host(array):
        return torch.from_numpy(array)
    with on_torchs_stream(Device.of(array)):
        return torch.from_dlpack(array)


def give_back_cache(device: Device | None) -> None:
    """Let CUDA have what torch keeps unused for its next tensors; nobody else would ask torch for it."""
    if device is not None:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def on_torchs_stream(device: Device | None) -> Iterator[None]:
    """Within it CuPy gives its work on ``device`` to the stream that is torch's there, in this thread.

    Args:
        device: None: the host, where there is nothing to do.
    """
    if device is None:
        yield
        return
    stream = _Protocol(torch.cuda.current_stream(device.index))
    from_external = importlib.import_module("cupy.cuda").Stream.from_external
    with torch.cuda.device(device.index), Streams(device).on_device(), from_external(stream):
        yield


class _Protocol:
    """A stream of torch's as CUDA's stream protocol has it, which PyTorch follows only of late."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self._stream.cuda_stream)


_ALIGNED = 16
"""Bytes: each buffer begins at a multiple, as the widest dtype wants."""
_WORD = np.dtype(np.int32)


class GpuBuffers:
    """Memory for all buffers of a module on one GPU, one after another.

    Args:
        world: the ranks.
        device: the GPU, this thread's current device.
        way: how the gradients are summed in the node; None: on the host.
    """

    def __init__(self, world: World, device: Device, way: GpuTransport | None) -> None:
        self._world, self.device = world, device
        self._by_row = world.num_nodes == 1 and way in (GpuTransport.NCCL, GpuTransport.CUDA_IPC, GpuTransport.GROUPS)
        self._streams = streams = Streams(device)
        self._filled, self._come = streams.event(), streams.event()
        self._room = 0
        self._row: NodeRows
        self._memory: torch.Tensor
        self._host = np.empty(0, np.uint8)

    def broadcast(self, buffers: Sequence[torch.Tensor], root: int) -> None:
        """Give every rank the values of rank ``root``; every rank must call. Changes ``buffers`` in place.

        Args:
            buffers: on the GPU, of the same shapes and dtypes on all ranks.
        """
        with on_torchs_stream(self.device):
            places = self._places(buffers)
            if self._world.rank == root:
                _copy(places, buffers)
            if self._by_row:
                self._bring_row(root)
            else:
                self._send(root)
            if self._world.rank != root:
                _copy(buffers, places)

    def _bring_row(self, root: int) -> None:
        streams, row = self._streams, self._row
        ends = [row.size.count if rank >= root else 0 for rank in range(self._world.size)]
        streams.record(self._filled, streams.current())
        run_until_complete(row.allgather(list(zip([0, *ends], ends, strict=False)), (self._filled,)))
        streams.record(self._come, row.stream)
        streams.wait_event(streams.current(), self._come)

    def _send(self, root: int) -> None:
        streams, is_root = self._streams, self._world.rank == root
        if is_root:
            streams.copy_async(self._host, self._row.mine.view(np.uint8), streams.current())
            streams.record(self._come, streams.current())
        streams.synchronize(self._come)  # of another rank: what came before has long left the host's memory
        self._world.comm.native_broadcast(self._host, root)
        if not is_root:
            streams.copy_async(self._row.mine.view(np.uint8), self._host, streams.current())
            streams.record(self._come, streams.current())

    def _places(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where each of ``buffers`` goes, of its shape and dtype; more memory is taken when more is needed."""
        begins, room = [], 0
        for each in buffers:
            begins.append(room)
            room += -(-each.nbytes // _ALIGNED) * _ALIGNED
        if room > self._room:
            self._room = room
            sizes = [RowSize(room // _WORD.itemsize, _WORD)]
            give_back_cache(self.device)
            if self._by_row:
                (self._row,), _ = gpu_groups.make(self._world, self._streams, sizes)
            else:
                (self._row,) = lone_rows(self._streams, sizes)
                self._host = self._streams.pinned(room, self._streams.current())
            self._memory = as_tensor(self._row.mine).view(torch.uint8)
        return [
            self._memory[begin : begin + each.nbytes].view(each.dtype).view(each.shape)
            for begin, each in zip(begins, buffers, strict=True)
        ]


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Those of a dtype at once."""
    for dtype in dict.fromkeys(each.dtype for each in sources):
        pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


class ModuleBuffers:
    """The buffers of a module, of which all of a dtype travel in one message.

    They are copied together and back, and stay where they are: others may hold views of them. Those on the GPU of
    `on_gpu` go its way, once that is there; others on a GPU go through the host, which waits for them.

    Raises:
        UnsupportedError: a buffer that is not dense, or whose elements share memory.
    """

    def __init__(self, module: torch.nn.Module, world: World) -> None:
        self._module = module
        self._world = world
        self.on_gpu: GpuBuffers | None = None
        for name, each in module.named_buffers():
            if each.layout is not torch.strided:
                raise UnsupportedError(
                    "DistributedDataParallel", where=name, expected="a dense buffer", got=f"one of layout {each.layout}"
                )
            if overlaps(each.shape, each.stride(), 1):
                raise UnsupportedError(
                    "DistributedDataParallel", where=name, expected="a buffer whose elements have memory of their own",
                    got=f"one of strides {each.stride()}", remedy="clone() what was expanded",
                )  # fmt: skip

    def broadcast(self, root: int = 0) -> None:
        """Give every rank the values of rank ``root``; every rank must call.

        Changes the buffers in place. As with torch's wrapper autograd takes no notice, so that the backward of an
        earlier forward may follow.
        """
        if self._world.size == 1:
            return
        buffers = [each.data for each in self._module.buffers() if each.numel()]
        if self.on_gpu is not None:
            there = [each for each in buffers if gpu_of(each) == self.on_gpu.device]
            buffers = [each for each in buffers if gpu_of(each) != self.on_gpu.device]
            if there:
                self.on_gpu.broadcast(there, root)
        for dtype, device in dict.fromkeys((each.dtype, each.device) for each in buffers):
            members = [each for each in buffers if (each.dtype, each.device) == (dtype, device)]
            flat = torch.cat([each.reshape(-1) for each in members]).cpu()
            self._world.comm.native_broadcast(flat.view(torch.uint8).numpy(), root)
            if self._world.rank != root:
                parts = flat.to(device).split([each.numel() for each in members])
                torch._foreach_copy_(
                    members, [part.view(each.shape) for part, each in zip(parts, members, strict=True)]
                )


_SUMMED_AS: dict[Any, np.dtype[Any]] = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(np.float32),
    torch.float16: np.dtype(np.float32),
}
"""Half precision is summed in single: NumPy has no bfloat16, and sums of many ranks lose less."""


_moved: Any = WeakTensorKeyDictionary()
"""Parameters whose memory an optimizer has laid out, perhaps for several ranks: who comes next takes a copy."""


class TorchParameter:
    """`hpcdp.data_parallel.buckets.Parameter` over a ``torch.nn.Parameter``.

    Args:
        name: as ``module.named_parameters()`` has it.
        tensor: the parameter, in CPU memory or on a GPU.
        moves: whether `data` will be assigned, as owners of shards do: then the elements are laid out in the order that
            they have in the tensor's memory, so that it keeps its strides (``channels_last``).

    Raises:
        UnsupportedError: its dtype, device or layout is none that can be reduced.
        ConfigError: it is on a GPU, and there is no CuPy.
    """

    def __init__(self, name: str, tensor: torch.nn.Parameter, moves: bool = False) -> None:
        if isinstance(tensor, torch.nn.parameter.UninitializedParameter):
            raise UnsupportedError(
                "DistributedDataParallel", where=name, expected="a parameter with values", got="one without yet",
                remedy="run one forward before wrapping",
            )  # fmt: skip
        dtype = _SUMMED_AS.get(tensor.dtype)
        device = gpu_of(tensor)
        is_reachable = device is not None or tensor.device.type == "cpu"
        if dtype is None or not is_reachable or tensor.layout is not torch.strided:
            raise UnsupportedError(
                "DistributedDataParallel", where=name,
                expected="a dense parameter of float64, float32, bfloat16 or float16, in CPU memory or on a CUDA GPU",
                got=f"{tensor.layout}, {tensor.device}, {tensor.dtype}",
            )  # fmt: skip
        if device is not None:
            require_cupy("DistributedDataParallel", name, device)
        if _moved.pop(tensor, False):
            tensor.data = tensor.data.clone()
        self.name = name
        self.tensor = tensor
        self.device = device
        """The GPU that it is on, None on the host."""
        self._strides = torch.empty_like(tensor, device="meta").stride()
        """Those of ``tensor``; where it has gaps, those of a dense tensor of the same order."""
        self._has_order = moves or tensor.is_contiguous()
        """Whether the elements are in the order of ``tensor``'s memory, and not in C order."""
        is_c_order = tensor.is_contiguous() or not moves
        self.shape = tuple(tensor.shape) if is_c_order else (tensor.numel(),)
        """As the reducer sees it: flat where the elements are not in C order."""
        self.dtype: np.dtype[Any] = dtype
        """Of its bucket."""
        self.grad_req = "write"
        self.grad_hook: Callable[[Any], None]
        self._summed: Array | None = None
        self._view: torch.Tensor | None = None
        self._lent: torch.Tensor
        self._address: int

    @property
    def data(self) -> Array:
        """The values in `shape`, an array over the tensor's memory; a copy of half precision, and of what has gaps."""
        values = self.tensor.detach()
        values = values.float() if values.element_size() < self.dtype.itemsize else values
        return as_array(values if self.shape == tuple(values.shape) else self.flat(values))

    @data.setter
    def data(self, place: Array) -> None:
        self.tensor.data = self.shaped(as_tensor(place))
        _moved[self.tensor] = True

    def shaped(self, place: torch.Tensor) -> torch.Tensor:
        """Return a view of ``place``, of this `shape` and contiguous, in the tensor's shape and strides."""
        return place.reshape(-1).as_strided(self.tensor.shape, self._strides) if self._has_order else place

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """Return what `shaped` is a view of, in one dimension: a view if ``values`` has the strides, else a copy."""
        if not self._has_order:
            return values.reshape(-1)
        if values.stride() != self._strides:
            values = self.shaped(torch.empty(values.numel(), dtype=values.dtype, device=values.device)).copy_(values)
        return values.as_strided((values.numel(),), (1,))

    @property
    def grad(self) -> Array:
        """The place in the bucket."""
        assert self._summed is not None
        return self._summed

    @grad.setter
    def grad(self, place: Array) -> None:
        self._summed = place
        self._view = self.shaped(as_tensor(place))
        self._lend()

    def _lend(self) -> None:
        self._lent = self.view.detach()  # a tensor of its own: module.to() gives gradients other memory and dtypes
        self._address = self.view.data_ptr()

    @property
    def view(self) -> torch.Tensor:
        """The place in the bucket as a tensor."""
        assert self._view is not None
        return self._view

    def contribute(self, share: float) -> None:
        """Write ``share`` times the tensor's gradient to its place, in one pass; none counts as zero.

        Raises:
            UnsupportedError: the gradient is of a longer dtype than its place.
        """
        grad, view = self.tensor.grad, self.view
        if grad is None or share == 0.0:
            view.zero_()
        elif grad.data_ptr() == self._address:
            view.mul_(share)
        elif grad.dtype == view.dtype:
            torch.mul(grad.detach(), share, out=view)
        else:
            if grad.dtype.itemsize > view.dtype.itemsize:
                raise UnsupportedError(
                    "backward", where=self.name, expected=f"a gradient of {view.dtype}", got=f"one of {grad.dtype}",
                    remedy="change dtypes before wrapping",
                )  # fmt: skip
            view.copy_(grad.detach()).mul_(share)

    def release(self) -> None:
        """Let the place stand for the tensor's gradient where it can, so that autograd's memory is free again.

        At once and not when backward ends: what is freed layer by layer is used again, and needs no new pages.
        """
        if self._place_is_as_tensor:
            if self._lent.data_ptr() != self._address:
                self._lend()
            self.tensor.grad = self._lent

    @property
    def _place_is_as_tensor(self) -> bool:
        """Whether dtype and strides are those of the tensor, which torch's fused optimizers take for granted."""
        tensor = self.tensor  # whose memory may have changed since
        return tensor.dtype == self.view.dtype and self._has_order and tensor.stride() == self._strides

    def take(self) -> None:
        """Let the tensor's gradient be what stands in its place."""
        self.release()
        grad, view = self.tensor.grad, self.view
        if self._place_is_as_tensor:
            return
        if grad is None:
            self.tensor.grad = torch.empty_like(self.tensor).copy_(view)
        else:
            grad.copy_(view)


_OF_WRAPPERS = ("module.", "_orig_mod.")
"""What wrappers, such as `DistributedDataParallel` and torch.compile, put before the names of a module."""


class Order(NamedTuple):
    """A saved order in terms of the one here."""

    numbers: dict[int, int]
    """The number of each parameter here, by its saved one."""
    groups: list[int]
    """For each group here, the number of the saved one."""


def plain(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the names without the prefixes of wrappers, unless two would be the same then."""
    stripped = [[_stripped(name) for name in names] for names in groups]
    count = sum(map(len, groups))
    return stripped if len({name for names in stripped for name in names}) == count else [[*names] for names in groups]


def _stripped(name: str) -> str:
    while name.startswith(_OF_WRAPPERS):
        name = name.partition(".")[2]
    return name


def match(operation: str, numbers: Sequence[Sequence[int]], saved: Sequence[Sequence[str]],
          own: Sequence[Sequence[str]]) -> Order:  # fmt: skip
    """Match saved parameters and their groups with those here, by their names.

    Args:
        operation: for errors.
        numbers: of the saved parameters, by group.
        saved: their names, by group.
        own: the names of the parameters here, by group; they are numbered in this order.

    Raises:
        ConfigError: names, or the members of a group, differ.
    """
    saved, own = plain(saved), plain(own)
    theirs, ours = ({name for names in groups for name in names} for groups in (saved, own))
    if theirs != ours:
        missing, odd = sorted(ours - theirs), sorted(theirs - ours)
        raise ConfigError(
            operation, where="param_names", expected=f"states of {listed(missing)}" if missing else "no other states",
            got=f"states of {listed(odd)}" if odd else "none", remedy="make the optimizer with the same parameters",
        )  # fmt: skip
    left = list(range(len(saved)))
    groups = []
    for number, names in enumerate(own):
        same = next((each for each in left if set(saved[each]) == set(names)), None)
        if same is None:
            raise ConfigError(
                operation, where=f"group {number}", expected=f"a group of {listed(names)}", got="other groups",
                remedy="make the optimizer with groups of the same parameters",
            )  # fmt: skip
        left.remove(same)
        groups.append(same)
    if left:
        raise ConfigError(operation, where="param_groups", expected=f"{len(own)} groups", got=len(saved))
    places = {name: place for place, name in enumerate(name for names in own for name in names)}
    pairs = (
        (old, name) for olds, names in zip(numbers, saved, strict=True) for old, name in zip(olds, names, strict=True)
    )
    return Order({old: places[name] for old, name in pairs}, groups)


def ordered(operation: str, state_dict: dict[str, Any], own: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a state dict of torch's whose parameters are in the order of ``own``, by its ``param_names``.

    One without names is returned as it is. ``param_names`` are left out of the result.

    Raises:
        ConfigError: as `match`.
    """
    groups = state_dict["param_groups"]
    if not all("param_names" in group for group in groups):
        return state_dict
    order = match(operation, [group["params"] for group in groups], [group["param_names"] for group in groups], own)
    state = {order.numbers.get(number, number): each for number, each in state_dict["state"].items()}
    made, first = [], 0
    for number, names in zip(order.groups, own, strict=True):
        kept = {name: value for name, value in groups[number].items() if name != "param_names"}
        made.append({**kept, "params": list(range(first, first + len(names)))})
        first += len(names)
    return {**state_dict, "state": state, "param_groups": made}
