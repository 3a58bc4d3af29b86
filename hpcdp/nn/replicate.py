"""Replicas: one network on several devices of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ..autograd import Gradient, Tensor, concatenate, is_training, on_tape, pause
from ..autograd.tape import catch_up
from ..core.arrays import Array, Device, on_device_of, require_devices, to_device_of
from ..core.checks import instance, instances
from ..errors import ConfigError, DeviceError
from .jit.tracing import ChangeDetector, array_of
from .module import Module, Parameter, lacks_shapes
from .virtual_shards import KeepsStatistics


def moved(x: Tensor, device: Device) -> Tensor:
    """Copy ``x`` to ``device``; backward copies the gradient back."""
    home = x.data

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            with on_device_of(home):  # gradients are summed there
                dx.add(to_device_of(gy, home))

    return on_tape(device.put(home), (x,), pullback)


class Replicas(Module):
    """Network that computes each batch in pieces, one per device, with copies of its parameters there.

    Parameters and gradients are those of ``net``, with gradients summed over the devices. A `Trainer`, checkpoints,
    `fit` and `evaluate` can therefore treat it as ``net``. Every call copies parameters, buffers and settings of
    ``net`` to the other devices, and the results to the first one. GPUs compute concurrently, each on its current
    stream; host devices compute one after the other.

    Batch normalization uses the statistics of each device's piece. Running statistics are those of the first device,
    and all devices predict with them.

    If ``net`` is hybridized, only its calls on the first device use plans.

    Args:
        net: a network that treats each sample independently. Deferred shapes are found at the first call, by a
            prediction on the first device.
        devices: distinct devices; ``net`` is already on the first one.

    Raises:
        ConfigError: no network, no device, a repeated device, or a layer such as `train.SyncBatchNorm` that needs all
            ranks, on several devices. In a call: ``net`` returns something other than a tensor.
        DeviceError: the machine lacks a device, or ``net`` is not on the first; a RuntimeError.
    """

    is_traceable = False
    gives_pieces = True

    def __init__(self, net: Module, devices: Sequence[Device]) -> None:
        self.net = instance("Replicas", "net", net, Module, "a Module")
        self.devices = require_devices("Replicas", devices)
        if len(set(self.devices)) != len(self.devices):
            raise ConfigError("Replicas", where="devices", expected="distinct devices", got=list(devices))
        for device in self.devices:
            device.check()
        _require_on(net, self.devices[0])
        if len(self.devices) > 1:
            net.require_parts_of_this_rank("Replicas")
        self._look = ChangeDetector()
        self._copies = {device: None if lacks_shapes(net) else _Copy(net, device) for device in self.devices[1:]}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_copies": dict.fromkeys(self._copies)}  # recreated on demand

    def on(self, device: Device) -> Module:
        """Return the network on ``device``, for a piece of a batch there; see `data.split_and_load`.

        For several pieces call one backward, ``autograd.backward([loss, ...])``, which sums their gradients.

        Raises:
            DeviceError: ``device`` is not one of ``devices``; a RuntimeError.
        """
        if device == self.devices[0]:
            return self.net
        if device not in self._copies:
            raise DeviceError("Replicas", where=device, expected=f"one of {', '.join(map(repr, self.devices))}",
                              got="a device without the network")  # fmt: skip
        copied = self._copies[device]
        if copied is not None:
            return _Replica(copied)
        network = _Replica(_Copy(self.net, device))
        network.update()  # raises if shapes are still deferred
        self._copies[device] = network.copy
        return network

    def forward(self, x: Tensor) -> Tensor:
        """Map the batch ``x``, split along axis 0 over the devices, to the network's result on the first device."""
        if len(self.devices) > 1 and is_training() and self._look.is_due():
            self.net.require_parts_of_this_rank("Replicas")
        home, count, parts = self.devices[0], x.shape[0], len(self.devices)
        pieces = {
            device: x[count * number // parts : count * (number + 1) // parts]
            for number, device in enumerate(self.devices)
            if count * number // parts < count * (number + 1) // parts
        } or {home: x}
        if None in self._copies.values() and lacks_shapes(self.net):
            with pause():
                self.net(x[:1])  # sets deferred shapes, which copies need
        computes = {device: self._ready(device, piece) for device, piece in pieces.items()}
        outputs = {device: compute() for device, compute in computes.items()}
        instances("Replicas", None, outputs.values(), Tensor, "a network that returns a tensor")
        results = [output if device == home else moved(output, home) for device, output in outputs.items()]
        return results[0] if len(results) == 1 else concatenate(results)

    def _ready(self, device: Device, piece: Tensor) -> Callable[[], Tensor]:
        """Return the call that computes ``piece`` on ``device``, after starting all copies to it.

        A copy waits for earlier work of the first GPU, so it must start before that GPU gets its own piece.
        """
        if device == self.devices[0]:
            return partial(self.net, piece)
        network = self.on(device)
        assert isinstance(network, _Replica)
        network.update()
        return partial(network.compute, moved(piece, device))

    def children(self) -> Iterator[tuple[str, Module]]:
        """Return the children of the network."""
        return self.net.children()

    def _tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        return self.net._tensors(prefix)

    def _modules(self, prefix: str) -> Iterator[tuple[str, Module]]:
        return self.net._modules(prefix)

    def describe(self) -> str:
        """Return the devices shown in ``repr``."""
        return ", ".join(map(repr, self.devices))


class _Replica(Module):
    """The network on one device; each call first copies the network's current state there."""

    def __init__(self, copy: _Copy) -> None:
        self.net, self.module, self.device = copy.net, copy.module, copy.device
        self.copy = copy

    def forward(self, *inputs: Any) -> Any:
        """Copy the network's state to the device and compute there."""
        self.update()
        return self.compute(*inputs)

    def update(self) -> None:
        """Copy the network's current state to the device."""
        with self.device.current():
            self.copy.update({})

    def compute(self, *inputs: Any) -> Any:
        """Compute with the state copied last."""
        with self.device.current():
            return self.module(*inputs)


def _require_on(net: Module, device: Device) -> None:
    """Raise `DeviceError` unless ``net`` is on ``device``; all virtual CPU devices share the host's memory."""
    for name, tensor in net._tensors():
        place = Device.of(array_of(tensor))
        if place != device and not place.kind == device.kind == "cpu":
            raise DeviceError(
                "Replicas", where=device, expected="the network on the first device", got=f"{name} on {place}",
                remedy=f"call net.to(hpcdp.{device})",
            )  # fmt: skip


class _Copy:
    """Copy of a module on a device, with the same random generators, parts, parameters, buffers and settings.

    Attributes that the copy's own forward has assigned are kept, as state that persists between calls.
    """

    def __init__(self, net: Module, device: Device) -> None:
        self.net, self.device = net, device
        self.module = copy.copy(net)
        self.module.hybridize(False)  # its parameters are other objects in each call
        self._parts: dict[str, _Copy] = {}
        self._copied = vars(self.module).copy()
        """Attributes copied from the network."""

    def update(self, done: dict[Tensor, Tensor]) -> None:
        """Copy the network's current attributes; ``done`` maps parameters already copied, since layers may share them.

        In training each device keeps its own running statistics: they are not read before the next copy.
        """
        here, copied = vars(self.module), self._copied
        statistics = self.net.statistics() if is_training() and isinstance(self.net, KeepsStatistics) else ()
        for name, value in vars(self.net).items():
            is_own = here.get(name) is not copied.get(name)
            if isinstance(value, Module):
                here[name] = copied[name] = self._part(name, value, done)
            elif isinstance(value, Parameter):
                if value not in done:
                    done[value] = moved(value, self.device)
                here[name] = copied[name] = done[value]
            elif is_own or name == "_hybrid" or (here.get(name) is not value and any(value is x for x in statistics)):
                continue
            elif isinstance(value, Tensor):
                catch_up()
                here[name] = copied[name] = Tensor(self.device.put(value.data))
            else:
                here[name] = copied[name] = value
        self._remove_missing()

    def _remove_missing(self) -> None:
        """Delete attributes that the network no longer has, and restore the network's order."""
        here, copied, source = vars(self.module), self._copied, vars(self.net)
        for name in copied.keys() - source.keys():
            if here.get(name) is copied.pop(name):
                here.pop(name, None)
                self._parts.pop(name, None)
        if [name for name in here if name in source] != [name for name in source if name in here]:
            here.update([(name, here.pop(name)) for name in source if name in here])

    def _part(self, name: str, value: Module, done: dict[Tensor, Tensor]) -> Module:
        part = self._parts.get(name)
        if part is None or part.net is not value:
            part = self._parts[name] = _Copy(value, self.device)
        part.update(done)
        return part.module
