"""Parameters and buffers of PyTorch modules as arrays, and the order of an optimizer's parameters.

- `as_array`, `as_tensor`: NumPy arrays on the host and CuPy arrays on a GPU that share memory with tensors, by DLPack.
- `TensorKind`: tensors as arguments and results of collectives.
- `on_torchs_stream`: makes torch's current stream CuPy's, too. Sums on GPUs use CuPy's stream and computation uses
  torch's; on one stream neither has to wait for the other.
- `TorchParameter`: a torch parameter for the reducer.
- `ModuleBuffers`, `GpuBuffers`: the broadcast of a module's buffers, such as running statistics.
- `match`, `ordered`: torch's state dicts number parameters in the order in which the optimizer got them. If layers are
  registered in another order since, loading by number would mix up states, so names identify them.

Source: the Python specification of DLPack, and CUDA's stream protocol, by which CuPy uses a stream of torch.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .. import kernels
from ..checkpoint.flatten import overlaps
from ..comm import World, gpu_buckets
from ..comm.gpu_buckets.transport import GpuTransport, NodeRows, RowSize, lone_rows
from ..comm.progress import run_until_complete
from ..core import arrays
from ..core.arrays import BFLOAT16, Array, Device, Streams, dtype_of, gpu, is_bfloat16, is_host
from ..errors import ConfigError, UnsupportedError, listed


def gpu_of(tensor: torch.Tensor) -> Device | None:
    """Return the GPU of ``tensor``; None for the host."""
    return gpu(tensor.device.index) if tensor.device.type == "cuda" else None


def require_cupy(operation: str, where: str, device: Device) -> None:
    """Raise `ConfigError` if CuPy, which sums gradients on GPUs, is missing."""
    try:
        importlib.import_module("cupy")
    except ImportError as error:
        raise ConfigError(
            operation, where=where, expected=f"CuPy, for tensors on {device}", got="no module named cupy",
            remedy="pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]', for the CUDA version of your PyTorch",
        ) from error  # fmt: skip


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` itself, or a copy if it is a lazy conjugate or negative, which has other values in memory."""
    return tensor.resolve_conj().resolve_neg() if is_lazy(tensor) else tensor


def is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a lazy conjugate or negative, such as ``x.conj()`` and ``x.conj().imag``."""
    return tensor.is_conj() or tensor.is_neg()


def as_array(tensor: torch.Tensor) -> Array:
    """Return an array over the memory of ``tensor``, which must not require a gradient."""
    device = gpu_of(tensor)
    if device is None:
        return tensor.numpy()
    with on_torchs_stream(device):  # otherwise CuPy's stream would wait for torch's
        return importlib.import_module("cupy").from_dlpack(tensor)


def as_tensor(array: Array) -> torch.Tensor:
    """Return a tensor over the memory of ``array``."""
    if is_host(array):
        return torch.from_numpy(array)
    with on_torchs_stream(Device.of(array)):
        return torch.from_dlpack(array)


class _Exported:
    """A tensor in host memory without lazy conjugation, to NumPy.

    `torch.Tensor.__dlpack__` checks in Python what is known here, for 5 us.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return _to_dlpack(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _HOST


_HOST = (1, 0)
_to_dlpack: Any = getattr(torch._C, "_to_dlpack_versioned", None)
"""None in old versions of PyTorch, whose function for this gives arrays that are read-only."""


def _exported(tensor: torch.Tensor) -> Any:
    """Return what `np.from_dlpack` takes for a detached tensor."""
    return tensor if _to_dlpack is None or type(tensor) is not torch.Tensor else _Exported(tensor)


class TensorKind:
    """Tensors as arguments and results of functions that compute on arrays, see `core.arrays.kinds`.

    Host tensors and NumPy arrays share memory, GPU tensors and CuPy arrays do.
    """

    name = "torch"

    def as_array(self, operation: str, where: str, x: torch.Tensor) -> Array:
        """Return an array over the memory of ``x``; over a copy if it is a lazy conjugate, see `written`.

        Raises:
            UnsupportedError: ``x`` requires a gradient, which would not pass through the operation, or it has no memory
                that an array can describe.
        """
        if x.requires_grad and torch.is_grad_enabled():
            name = operation.removeprefix("i")
            has_gradient = name in _WITH_GRADIENTS
            remedy = f"pass {where}.detach(), or call it within torch.no_grad()"
            raise UnsupportedError(
                operation, where=where, expected="a tensor that requires no gradient",
                got="a tensor with requires_grad=True",
                remedy=f"{remedy}; hpcdp.torch.functional.{name} has a gradient" if has_gradient else remedy,
            )  # fmt: skip
        device = gpu_of(x) if x.is_cuda else None
        if device is not None:
            require_cupy(operation, where, device)
        try:
            values = resolved(x.detach())
            if device is not None:
                return as_array(values)
            # Not `values.numpy()`: it forbids resizing the storage, which FSDP does.
            if x.dtype == torch.bfloat16:
                return np.from_dlpack(_exported(values.view(torch.int16))).view(dtype_of(BFLOAT16))
            return np.from_dlpack(_exported(values))
        except (RuntimeError, TypeError, BufferError, ValueError) as error:
            raise UnsupportedError(
                operation, where=where, expected="a dense tensor in host memory or on a CUDA GPU",
                got=f"a tensor of {x.dtype}, {x.layout}, on {x.device}", remedy="copy it to one",
            ) from error  # fmt: skip

    def as_values(self, x: torch.Tensor) -> np.ndarray:
        """Return the values of ``x`` in host memory; it may require a gradient."""
        array: np.ndarray = self.as_array("object", "tensor", x.detach().cpu())
        return array

    def of_array(self, x: Array) -> torch.Tensor:
        """Return a tensor over the memory of ``x``, on whose current stream torch's waits for CuPy's."""
        if not is_host(x):
            return torch.from_dlpack(x)
        if is_bfloat16(x):
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)

    def written(self, x: torch.Tensor, array: Array) -> None:
        """Let autograd refuse a backward that needs earlier values of ``x``; copy ``array`` to a lazy conjugate."""
        if is_lazy(x):
            x.detach().copy_(self.of_array(array))
        elif not x.is_inference():
            torch.autograd.graph.increment_version(x)

    def ordered_with(self, x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Return a context in which CuPy uses torch's stream."""
        return on_torchs_stream(gpu_of(x))


_WITH_GRADIENTS = ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast", "send", "recv")
"""The operations that `functional` has, too."""

arrays.register(torch.Tensor, TensorKind())


def give_back_cache(device: Device | None) -> None:
    """Release torch's unused cached memory to CUDA, for allocations by others."""
    if device is not None:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def on_torchs_stream(device: Device | None) -> Iterator[None]:
    """Make torch's current stream on ``device`` CuPy's current stream in this thread, within the context.

    Args:
        device: the GPU; None: the host, where the context does nothing.
    """
    if device is None:
        yield
        return
    stream = _Protocol(torch.cuda.current_stream(device.index))
    from_external = importlib.import_module("cupy.cuda").Stream.from_external
    with torch.cuda.device(device.index), Streams(device).on_device(), from_external(stream):
        yield


class _Protocol:
    """A stream of torch in CUDA's stream protocol, which only recent versions of PyTorch implement."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self._stream.cuda_stream)


_ALIGNED = 16
"""Alignment of each buffer in bytes, for the widest dtype."""
_WORD = np.dtype(np.int32)


class GpuBuffers:
    """The broadcast of a module's buffers on one GPU, through contiguous memory for all of them.

    On one node NCCL copies the row of one rank to all others, without waiting; with CUDA IPC the hosts wait for the
    copy. Between nodes the host waits for the GPU's earlier work, and sends one message from pinned memory.

    Args:
        world: the ranks.
        device: the GPU, this thread's current device.
        way: the transport of gradients inside the node; None: the host.
    """

    def __init__(self, world: World, device: Device, way: GpuTransport | None) -> None:
        self._world, self.device = world, device
        self._by_row = world.num_nodes == 1 and way in (GpuTransport.NCCL, GpuTransport.CUDA_IPC, GpuTransport.GROUPS)
        self._streams = streams = Streams(device)
        self._filled, self._copied = streams.event(), streams.event()
        self._capacity = 0
        self._row: NodeRows
        self._memory: torch.Tensor
        self._host = np.empty(0, np.uint8)

    def broadcast(self, buffers: Sequence[torch.Tensor], root: int) -> None:
        """Copy the values of rank ``root`` to ``buffers`` of every rank, in place; every rank must call.

        Args:
            buffers: tensors on the GPU, of the same shapes and dtypes on all ranks.
            root: the rank whose values are copied.
        """
        with on_torchs_stream(self.device):
            places = self._places(buffers)
            if self._world.rank == root:
                _copy(places, buffers)
            if self._by_row:
                self._gather_row(root)
            else:
                self._send(root)
            if self._world.rank != root:
                _copy(buffers, places)

    def _gather_row(self, root: int) -> None:
        """Copy the row of ``root`` by an allgather in which only that rank has elements."""
        streams, row = self._streams, self._row
        ends = [row.size.count if rank >= root else 0 for rank in range(self._world.size)]
        streams.record(self._filled, streams.current())
        run_until_complete(row.allgather(list(zip([0, *ends], ends, strict=False)), (self._filled,)))
        streams.record(self._copied, row.stream)
        streams.wait_event(streams.current(), self._copied)

    def _send(self, root: int) -> None:
        streams, is_root = self._streams, self._world.rank == root
        if is_root:
            streams.copy_async(self._host, self._row.mine.view(np.uint8), streams.current())
            streams.record(self._copied, streams.current())
        streams.synchronize(self._copied)  # on other ranks: the last copy from the host's memory
        self._world.comm.native_broadcast(self._host, root)
        if not is_root:
            streams.copy_async(self._row.mine.view(np.uint8), self._host, streams.current())
            streams.record(self._copied, streams.current())

    def _places(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a view of the memory for each of ``buffers``, in its shape and dtype; grow the memory if needed."""
        begins, nbytes = [], 0
        for buffer in buffers:
            begins.append(nbytes)
            nbytes += -(-buffer.nbytes // _ALIGNED) * _ALIGNED
        if nbytes > self._capacity:
            self._capacity = nbytes
            sizes = [RowSize(nbytes // _WORD.itemsize, _WORD)]
            give_back_cache(self.device)
            if self._by_row:
                (self._row,), _ = gpu_buckets.make(self._world, self._streams, sizes)
            else:
                (self._row,) = lone_rows(self._streams, sizes)
                self._host = self._streams.pinned(nbytes, self._streams.current())
            self._memory = as_tensor(self._row.mine).view(torch.uint8)
        return [
            self._memory[begin : begin + buffer.nbytes].view(buffer.dtype).view(buffer.shape)
            for begin, buffer in zip(begins, buffers, strict=True)
        ]


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors, all tensors of a dtype in one call."""
    for dtype in dict.fromkeys(source.dtype for source in sources):
        pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


class ModuleBuffers:
    """The broadcast of a module's buffers, with one message for all buffers of a dtype.

    Buffers are concatenated for the message and copied back, so they keep their memory, of which there may be views.
    `on_gpu`, if set, broadcasts those on its GPU; buffers on other GPUs go through the host, which waits.

    Args:
        module: the module.
        world: the ranks.
        ignored: names of buffers that stay each rank's own.

    Raises:
        UnsupportedError: a buffer that is not dense, or whose elements share memory.
    """

    def __init__(self, module: torch.nn.Module, world: World, ignored: Set[str] = frozenset()) -> None:
        self._module = module
        self._world = world
        self._ignored = ignored
        self.on_gpu: GpuBuffers | None = None
        for name, buffer in module.named_buffers():
            if name in ignored:
                continue
            if buffer.layout is not torch.strided:
                raise UnsupportedError(
                    "DistributedDataParallel", where=name, expected="a dense buffer", got=f"layout {buffer.layout}"
                )
            if overlaps(buffer.shape, buffer.stride(), 1):
                raise UnsupportedError(
                    "DistributedDataParallel", where=name, expected="a buffer whose elements share no memory",
                    got=f"strides {buffer.stride()}", remedy="call clone() on an expanded buffer",
                )  # fmt: skip

    def broadcast(self, root: int = 0) -> None:
        """Copy the values of rank ``root`` to the buffers of every rank, in place; every rank must call.

        As with torch's wrapper, autograd does not notice, so that the backward of an earlier forward may follow.
        """
        if self._world.size == 1:
            return
        named = self._module.named_buffers()
        buffers = [buffer.data for name, buffer in named if buffer.numel() and name not in self._ignored]
        if self.on_gpu is not None:
            on_gpu = [buffer for buffer in buffers if gpu_of(buffer) == self.on_gpu.device]
            buffers = [buffer for buffer in buffers if gpu_of(buffer) != self.on_gpu.device]
            if on_gpu:
                self.on_gpu.broadcast(on_gpu, root)
        for dtype, device in dict.fromkeys((buffer.dtype, buffer.device) for buffer in buffers):
            members = [buffer for buffer in buffers if (buffer.dtype, buffer.device) == (dtype, device)]
            flat = torch.cat([buffer.reshape(-1) for buffer in members]).cpu()
            self._world.comm.native_broadcast(flat.view(torch.uint8).numpy(), root)
            if self._world.rank != root:
                parts = flat.to(device).split([buffer.numel() for buffer in members])
                torch._foreach_copy_(
                    members, [part.view(buffer.shape) for part, buffer in zip(parts, members, strict=True)]
                )


_SUMMED_AS: dict[Any, np.dtype[Any]] = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(np.float32),
    torch.float16: np.dtype(np.float32),
    torch.complex64: np.dtype(np.float32),
    torch.complex128: np.dtype(np.float64),
}
"""Dtype of the sum by dtype: half precision is summed in single, because NumPy has no bfloat16, and for accuracy.
Complex numbers are pairs of real ones."""


_STREAMED_NBYTES = 1 << 20
"""Gradients of at least this size are copied past the caches, which backward uses; the sum reads them much later."""

_moved: Any = WeakTensorKeyDictionary()
"""Parameters in memory of an optimizer, perhaps shared by ranks; a later wrapper copies them."""


class TorchParameter:
    """`hpcdp.data_parallel.bucket_layout.ParameterLike` over a ``torch.nn.Parameter``.

    Args:
        name: the name in ``module.named_parameters()``.
        tensor: the parameter, in CPU memory or on a GPU.
        moves: whether `data` will be assigned, as by owners of shards. Then the elements keep the order of the tensor's
            memory, so that it keeps its strides (``channels_last``).

    Raises:
        UnsupportedError: a dtype, device or layout that cannot be reduced.
        ConfigError: the parameter is on a GPU, and CuPy is missing.
    """

    def __init__(self, name: str, tensor: torch.nn.Parameter, moves: bool = False) -> None:
        if isinstance(tensor, torch.nn.parameter.UninitializedParameter):
            raise UnsupportedError(
                "DistributedDataParallel", where=name, expected="a parameter with values",
                got="an uninitialized parameter", remedy="run one forward before wrapping",
            )  # fmt: skip
        dtype = _SUMMED_AS.get(tensor.dtype)
        device = gpu_of(tensor)
        is_reachable = device is not None or tensor.device.type == "cpu"
        if dtype is None or not is_reachable or tensor.layout is not torch.strided:
            raise UnsupportedError(
                "DistributedDataParallel", where=name,
                expected="a dense parameter of float or complex, of 16 to 64 bits a number, on the CPU or a CUDA GPU",
                got=f"{tensor.layout}, {tensor.device}, {tensor.dtype}",
            )  # fmt: skip
        if device is not None:
            require_cupy("DistributedDataParallel", name, device)
        if _moved.pop(tensor, False):
            tensor.data = tensor.data.clone()
        self.name = name
        self.tensor = tensor
        self.device = device
        """GPU of the parameter; None on the host."""
        self._strides = torch.empty_like(tensor, device="meta").stride()
        """Strides of ``tensor``; if it has gaps, those of a dense tensor of the same order."""
        self._has_order = moves or tensor.is_contiguous()
        """True if the elements are in the order of ``tensor``'s memory, not in C order."""
        is_c_order = tensor.is_contiguous() or not moves
        pair = (2,) * tensor.is_complex()
        self.shape = (*tensor.shape, *pair) if is_c_order else (tensor.numel() * (1 + len(pair)),)
        """Shape for the reducer: flat if the elements are not in C order, and with a last axis of 2 if complex."""
        self.dtype: np.dtype[Any] = dtype
        """Dtype of its bucket."""
        self.grad_req = "write"
        self.grad_hook: Callable[[Any], None]
        self._summed: Array | None = None
        self._view: torch.Tensor | None = None
        self._streamed: np.ndarray | None = None
        """The gradient's place, shape ``(count,)``, if it is written past the caches."""
        self._lent: torch.Tensor
        self._address: int

    @property
    def data(self) -> Array:
        """Array of `shape` over the tensor's memory; a copy in half precision, and if the tensor has gaps."""
        values = self.tensor.detach()
        values = values.float() if values.element_size() < self.dtype.itemsize else values
        if values.is_complex():
            return as_array(self.flat(values).reshape(self.shape))
        return as_array(values if self.shape == tuple(values.shape) else self.flat(values))

    @data.setter
    def data(self, place: Array) -> None:
        self.tensor.data = self.shaped(as_tensor(place))
        _moved[self.tensor] = True

    def shaped(self, place: torch.Tensor) -> torch.Tensor:
        """Return a view of ``place``, of this `shape` and contiguous, in the tensor's shape and strides."""
        if self.tensor.is_complex():
            pairs = place.reshape(-1, 2)
            place = torch.view_as_complex(pairs).reshape(self.tensor.shape)
        return place.reshape(-1).as_strided(self.tensor.shape, self._strides) if self._has_order else place

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """Return the inverse of `shaped`, in one dimension: a view if ``values`` has the strides, otherwise a copy."""
        if self._has_order and values.stride() != self._strides:
            ordered = torch.empty_strided(values.shape, self._strides, dtype=values.dtype, device=values.device)
            values = ordered.copy_(values)
        line = values.as_strided((values.numel(),), (1,)) if self._has_order else values.reshape(-1)
        return torch.view_as_real(line).reshape(-1) if line.is_complex() else line

    @property
    def grad(self) -> Array:
        """Array of the gradient's place in the bucket."""
        assert self._summed is not None
        return self._summed

    @grad.setter
    def grad(self, place: Array) -> None:
        self._summed = place
        self._view = self.shaped(as_tensor(place))
        self._streamed = None
        is_long = is_host(place) and place.dtype == np.float32 and place.nbytes >= _STREAMED_NBYTES
        if is_long and self._view.is_contiguous():
            self._streamed = place.reshape(-1)
            nothing = self._streamed[:0]
            kernels.load("copies").stream_scaled(nothing, nothing, np.float32(1))  # compile it now
        self._lend()

    def _lend(self) -> None:
        self._lent = self.view.detach()  # a new tensor: module.to() replaces memory and dtype of gradients
        self._address = self.view.data_ptr()

    @property
    def view(self) -> torch.Tensor:
        """Tensor of the gradient's place in the bucket."""
        assert self._view is not None
        return self._view

    def contribute(self, share: float) -> None:
        """Write ``share`` times the tensor's gradient to its place, in one pass; a missing gradient counts as zero.

        Raises:
            UnsupportedError: the gradient has a wider dtype than its place.
        """
        grad, view = self.tensor.grad, self.view
        if grad is None or share == 0.0:
            view.zero_()
        elif grad.data_ptr() == self._address:
            view.mul_(share)
        elif self._streamed is not None and grad.dtype == torch.float32 and grad.is_contiguous():
            values = grad.detach().numpy().reshape(-1)
            kernels.load("copies").stream_scaled(self._streamed, values, np.float32(share))
        elif grad.dtype == view.dtype:
            torch.mul(grad.detach(), share, out=view)
        else:
            if grad.dtype.itemsize > view.dtype.itemsize:
                raise UnsupportedError(
                    "backward", where=self.name, expected=f"a gradient of {view.dtype}",
                    got=f"a gradient of {grad.dtype}", remedy="change dtypes before wrapping",
                )  # fmt: skip
            view.copy_(grad.detach()).mul_(share)

    def release(self) -> None:
        """Make the place the tensor's gradient, if possible, so that autograd's memory is freed.

        Called at once and not at the end of backward: memory freed layer by layer is reused, and needs no new pages.
        """
        if self._place_is_as_tensor:
            if self._lent.data_ptr() != self._address:
                self._lend()
            self.tensor.grad = self._lent

    @property
    def _place_is_as_tensor(self) -> bool:
        """True if the place has the dtype and strides of the tensor, which torch's fused optimizers require."""
        tensor = self.tensor  # its memory may have changed since construction
        return tensor.dtype == self.view.dtype and self._has_order and tensor.stride() == self._strides

    def take(self) -> None:
        """Set the tensor's gradient to the values in its place."""
        self.release()
        grad, view = self.tensor.grad, self.view
        if self._place_is_as_tensor:
            return
        if grad is None:
            self.tensor.grad = torch.empty_like(self.tensor).copy_(view)
        else:
            grad.copy_(view)


_OF_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that wrappers, such as `DistributedDataParallel` and torch.compile, add to names of a module."""


class Order(NamedTuple):
    """The mapping from a saved order of parameters and groups to the current one."""

    numbers: dict[int, int]
    """Current number of each parameter, by its saved number."""
    groups: list[int]
    """Saved number of each current group."""


def plain(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the names without the prefixes of wrappers, unless this makes two names equal."""
    stripped = [[_stripped(name) for name in names] for names in groups]
    count = sum(map(len, groups))
    return stripped if len({name for names in stripped for name in names}) == count else [[*names] for names in groups]


def _stripped(name: str) -> str:
    while name.startswith(_OF_WRAPPERS):
        name = name.partition(".")[2]
    return name


def match(operation: str, numbers: Sequence[Sequence[int]], saved: Sequence[Sequence[str]],
          own: Sequence[Sequence[str]]) -> Order:  # fmt: skip
    """Match saved parameters and groups with the current ones, by name.

    Args:
        operation: the operation of errors.
        numbers: the numbers of the saved parameters, by group.
        saved: the names of the saved parameters, by group.
        own: the names of the current parameters, by group; they are numbered in this order.

    Raises:
        ConfigError: names, or the members of a group, differ.
    """
    saved, own = plain(saved), plain(own)
    saved_names, own_names = ({name for names in groups for name in names} for groups in (saved, own))
    if saved_names != own_names:
        missing, odd = sorted(own_names - saved_names), sorted(saved_names - own_names)
        raise ConfigError(
            operation, where="param_names", expected=f"states of {listed(missing)}" if missing else "no other states",
            got=f"states of {listed(odd)}" if odd else "none", remedy="make the optimizer with the same parameters",
        )  # fmt: skip
    left = list(range(len(saved)))
    groups = []
    for number, names in enumerate(own):
        same = next((group for group in left if set(saved[group]) == set(names)), None)
        if same is None:
            raise ConfigError(
                operation, where=f"group {number}", expected=f"a group of {listed(names)}", got="other groups",
                remedy="make the optimizer with groups of the same parameters",
            )  # fmt: skip
        left.remove(same)
        groups.append(same)
    if left:
        raise ConfigError(operation, where="param_groups", expected=f"{len(own)} groups", got=f"{len(saved)} groups")
    places = {name: place for place, name in enumerate(name for names in own for name in names)}
    pairs = (
        (old, name) for olds, names in zip(numbers, saved, strict=True) for old, name in zip(olds, names, strict=True)
    )
    return Order({old: places[name] for old, name in pairs}, groups)


def ordered(operation: str, state_dict: dict[str, Any], own: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a state dict of torch with parameters in the order of ``own``, by its ``param_names``.

    A state dict without names is returned unchanged. The result has no ``param_names``.

    Raises:
        ConfigError: as `match`.
    """
    groups = state_dict["param_groups"]
    if not all("param_names" in group for group in groups):
        return state_dict
    order = match(operation, [group["params"] for group in groups], [group["param_names"] for group in groups], own)
    state = {order.numbers.get(number, number): values for number, values in state_dict["state"].items()}
    made, first = [], 0
    for number, names in zip(order.groups, own, strict=True):
        settings = {name: value for name, value in groups[number].items() if name != "param_names"}
        made.append({**settings, "params": list(range(first, first + len(names)))})
        first += len(names)
    return {**state_dict, "state": state, "param_groups": made}
