"""A torch parameter as the reducer sees it: arrays over the memory of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..arrays import Array
from ..errors import UnsupportedError
from . import exchange

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
    """`hpcdp.gradients.bucket.Parameter` over a ``torch.nn.Parameter``.

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
        device = exchange.gpu_of(tensor)
        is_reachable = device is not None or tensor.device.type == "cpu"
        if dtype is None or not is_reachable or tensor.layout is not torch.strided:
            raise UnsupportedError(
                "DistributedDataParallel", where=name,
                expected="a dense parameter of float64, float32, bfloat16 or float16, in CPU memory or on a CUDA GPU",
                got=f"{tensor.layout}, {tensor.device}, {tensor.dtype}",
            )  # fmt: skip
        if device is not None:
            exchange.require_cupy("DistributedDataParallel", name, device)
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
        return exchange.as_array(values if self.shape == tuple(values.shape) else self.flat(values))

    @data.setter
    def data(self, place: Array) -> None:
        self.tensor.data = self.shaped(exchange.as_tensor(place))
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
        self._view = self.shaped(exchange.as_tensor(place))
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
