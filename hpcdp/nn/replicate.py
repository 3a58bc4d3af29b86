"""One network on several devices of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ..autograd import Gradient, Tensor, concatenate, is_training, on_tape, pause
from ..autograd.tape import catch_up
from ..core.arrays import Array, on_device_of
from ..core.checks import instance, instances
from ..core.devices import Device, require_devices, to_device_of
from ..errors import ConfigError, DeviceError
from .jit.tracing import Look, array_of
from .microbatch import KeepsStatistics
from .module import Module, lacks_shapes
from .parameter import Parameter


def moved(x: Tensor, device: Device) -> Tensor:
    """A copy of ``x`` on ``device``; its gradient comes back to where ``x`` is."""
    home = x.data

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            with on_device_of(home):  # where it is added to others
                dx.add(to_device_of(gy, home))

    return on_tape(device.put(home), (x,), pullback)


class Replicas(Module):
    """A network that computes each batch in pieces, one a device, with copies of its parameters there.

    The parameters are those of ``net``, and so are their gradients, which are summed over devices: to a `Trainer`, to
    checkpoints and to `fit` and `evaluate` this is ``net``. Every call copies parameters and buffers to the other
    devices, which have the settings of ``net``, too, and the results to the first one. The host has devices compute one
    after the other; GPUs, each on the stream that is current there, do so side by side.

    Batch normalisation takes the statistics of each device's piece; the running ones are those of the first device, by
    which all of them predict.

    Where ``net`` is hybridized, its calls on the first device take its plans; all others are made as usual, and so are
    those of hybridized replicas.

    Args:
        net: what it does to a batch it does to each sample. Shapes that its layers do not know yet the first call finds
            out, by a prediction on the first device.
        devices: where, each once. The first is where ``net`` is, with its own parameters.

    Raises:
        ConfigError: no network, no device, or one twice; a layer of all ranks, as `train.SyncBatchNorm`, on several.
        DeviceError: the machine does not have one of them, or ``net`` is not on the first; a RuntimeError.
        In a call: ConfigError, ``net`` returns something else than a tensor.
    """

    is_traceable = False
    gives_pieces = True

    def __init__(self, net: Module, devices: Sequence[Device]) -> None:
        self.net = instance("Replicas", "net", net, Module, "a network, which it copies")
        self.devices = require_devices("Replicas", devices)
        if len(set(self.devices)) != len(self.devices):
            raise ConfigError("Replicas", where="devices", expected="each once", got=list(devices))
        for device in self.devices:
            device.check()
        _require_on(net, self.devices[0])
        if len(self.devices) > 1:
            net.require_parts_of_this_rank("Replicas")
        self._look = Look()
        self._copies = {device: None if lacks_shapes(net) else _Copy(net, device) for device in self.devices[1:]}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_copies": dict.fromkeys(self._copies)}  # a copy makes its own

    def on(self, device: Device) -> Module:
        """The network on ``device``, for a piece of a batch there; see `data.split_and_load`.

        Of several pieces one backward is made, ``autograd.backward([loss, ...])``, which sums their gradients.

        Raises:
            DeviceError: it is not on that device; a RuntimeError.
        """
        if device == self.devices[0]:
            return self.net
        if device not in self._copies:
            raise DeviceError("Replicas", where=device, expected=f"one of {', '.join(map(repr, self.devices))}",
                              got="a device on which the network is not")  # fmt: skip
        there = self._copies[device]
        if there is not None:
            return _OnDevice(there)
        made = _OnDevice(_Copy(self.net, device))
        made.bring()  # an error where its shapes are not known yet
        self._copies[device] = made.copy
        return made

    def forward(self, x: Tensor) -> Tensor:
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
                self.net(x[:1])  # finds out the shapes that copies need
        computes = {device: self._ready(device, piece) for device, piece in pieces.items()}
        found = {device: compute() for device, compute in computes.items()}
        instances("Replicas", None, found.values(), Tensor, "a network that returns a tensor")
        results = [result if device == home else moved(result, home) for device, result in found.items()]
        return results[0] if len(results) == 1 else concatenate(results)

    def _ready(self, device: Device, piece: Tensor) -> Callable[[], Tensor]:
        """What computes ``piece`` on ``device``, to which all that it needs is brought at once: a copy waits for what
        the first GPU was given before, and that would be its own piece."""
        if device == self.devices[0]:
            return partial(self.net, piece)
        there = self.on(device)
        assert isinstance(there, _OnDevice)
        there.bring()
        return partial(there.compute, moved(piece, device))

    def children(self) -> Iterator[tuple[str, Module]]:
        """Those of the network."""
        return self.net.children()

    def _tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        return self.net._tensors(prefix)

    def _modules(self, prefix: str) -> Iterator[tuple[str, Module]]:
        return self.net._modules(prefix)

    def describe(self) -> str:
        return ", ".join(map(repr, self.devices))


class _OnDevice(Module):
    """The network with what it has brought to a device at each call."""

    def __init__(self, there: _Copy) -> None:
        self.net, self.there, self.device = there.net, there.module, there.device
        self.copy = there

    def forward(self, *inputs: Any) -> Any:
        self.bring()
        return self.compute(*inputs)

    def bring(self) -> None:
        """Let it have what the network has now."""
        with self.device.current():
            self.copy.bring({})

    def compute(self, *inputs: Any) -> Any:
        """`forward` with what it has."""
        with self.device.current():
            return self.there(*inputs)


def _require_on(net: Module, device: Device) -> None:
    """Raises `DeviceError` unless ``net`` is there; in the host's memory it is on every virtual device."""
    for name, tensor in net._tensors():
        found = Device.of(array_of(tensor))
        if found != device and not found.kind == device.kind == "cpu":
            raise DeviceError(
                "Replicas", where=device, expected="the network on the first device", got=f"{name} on {found}",
                remedy=f"net.to(hpcdp.{device})",
            )  # fmt: skip


class _Copy:
    """A module on a device, with the same random generators, and with the parts, parameters, buffers and settings that
    the network has; but for what its own forward has assigned, as a state that goes on from call to call."""

    def __init__(self, net: Module, device: Device) -> None:
        self.net, self.device = net, device
        self.module = copy.copy(net)
        self.module.hybridize(False)  # its plans are those of ``net``, and its parameters are others in each call
        self._parts: dict[str, _Copy] = {}
        self._given = vars(self.module).copy()
        """What it has of the network."""

    def bring(self, done: dict[Tensor, Tensor]) -> None:
        """Let it have what the network has now; ``done`` are parameters that are there, as several layers may have one.

        In training each device keeps running statistics of its own: nobody reads them before they are brought.
        """
        here, given = vars(self.module), self._given
        kept = self.net.statistics() if is_training() and isinstance(self.net, KeepsStatistics) else ()
        for name, value in vars(self.net).items():
            is_own = here.get(name) is not given.get(name)
            if isinstance(value, Module):
                here[name] = given[name] = self._part(name, value, done)
            elif isinstance(value, Parameter):
                if value not in done:
                    done[value] = moved(value, self.device)
                here[name] = given[name] = done[value]
            elif is_own or name == "_hybrid" or (here.get(name) is not value and any(value is each for each in kept)):
                continue
            elif isinstance(value, Tensor):
                catch_up()
                here[name] = given[name] = Tensor(self.device.put(value.data))
            else:
                here[name] = given[name] = value
        self._take_away()

    def _take_away(self) -> None:
        """Let it not have what the network has no more, and the rest in the network's order."""
        here, given, theirs = vars(self.module), self._given, vars(self.net)
        for name in given.keys() - theirs.keys():
            if here.get(name) is given.pop(name):
                here.pop(name, None)
                self._parts.pop(name, None)
        if [name for name in here if name in theirs] != [name for name in theirs if name in here]:
            here.update([(name, here.pop(name)) for name in theirs if name in here])

    def _part(self, name: str, value: Module, done: dict[Tensor, Tensor]) -> Module:
        part = self._parts.get(name)
        if part is None or part.net is not value:
            part = self._parts[name] = _Copy(value, self.device)
        part.bring(done)
        return part.module
