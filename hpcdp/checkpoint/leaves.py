"""What may stand in a state, and how it is seen: arrays of any library as NumPy arrays, objects as states.

Rooms of higher floors add kinds of their own: `as_array` and `as_stateful` by ``register``, `MAKERS` by an entry.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import nn
from ..arrays import bits, copied_to_host, from_host, has_namespace, is_float, of_bits, on_device_of, to_host
from ..collectives import allreduce
from ..comm import World
from ..state import FitsSaved, Part, PerRank, Sharded, Stateful


class HostView(NamedTuple):
    """An array as NumPy sees it."""

    array: np.ndarray
    """Shares memory with what it is a view of, where that is contiguous host memory."""
    dtype: str
    """The name of the dtype that the elements have; `array` has another only where it is bfloat16, see `bits`."""
    kind: str = ""
    """The key of `MAKERS` by which such an array is made again; "" for NumPy's."""
    write_back: Callable[[np.ndarray], object] | None = None
    """Copies values back where `array` is a copy; None where it shares memory."""
    overlaps: bool = False
    """Whether elements of what it is a view of share memory, and so cannot get values of their own."""


def overlaps(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether elements share memory, as those of a broadcast array do.

    Args:
        strides: by dimension, in units of which an element has ``itemsize``.
    """
    span = itemsize
    for stride, count in sorted((abs(stride), count) for stride, count in zip(strides, shape, strict=True)):
        if count > 1 and stride < span:
            return math.prod(shape) > 0
        span += stride * (count - 1)
    return False


@functools.singledispatch
def as_array(value: Any) -> HostView | None:
    """``value`` as a NumPy array, None where it is no array."""
    if has_namespace(value):
        copied, dtype = copied_to_host(value), str(value.dtype)

        def take(x: np.ndarray) -> None:
            with on_device_of(value):
                value[...] = from_host(of_bits(x, dtype), value)

        return HostView(bits(copied), dtype, "", take)
    return None


@as_array.register
def _(value: np.ndarray) -> HostView:
    value = np.asarray(value)  # a matrix stays one of two dimensions when it is reshaped to one
    if value.flags.carray and value.dtype.isnative:
        return HostView(bits(value), value.dtype.name)
    native = np.array(value, value.dtype.newbyteorder("="), order="C")
    shared = overlaps(value.shape, value.strides, value.itemsize)
    dtype = native.dtype.name
    return HostView(bits(native), dtype, "", lambda x: np.copyto(value, of_bits(x, dtype)), shared)


@as_array.register
def _(value: np.ma.MaskedArray) -> None:
    return None  # the mask would be lost; and what it hides is no number


@as_array.register
def _(value: np.generic) -> HostView:
    return HostView(bits(np.array(value)), value.dtype.name)


MAKERS: dict[str, Callable[[np.ndarray, str], Any]] = {"": of_bits}
"""By `HostView.kind`: makes an array of that kind of a NumPy array, and the name of its dtype."""


class Named(NamedTuple):
    """The name of a parameter whose module stands in a state."""

    place: str
    """The name of the module in the state."""
    name: str
    """The name that the module gives the parameter."""
    full: str
    """The name in checkpoints: both together."""


class Adapter(FitsSaved):
    """An object's state for checkpoints, where it has none of its own, or another is wanted."""

    takes_more = False
    """Whether `load_state_dict` is given what was saved under names that `state_dict` does not have now, too."""
    names: Mapping[int, Named] = {}
    """The names of the parameters of modules in the same state, by `id`, in the order of their registration."""

    def state_dict(self) -> Any:
        """See `Stateful`; every rank calls."""
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        """See `Stateful`; every rank calls."""
        raise NotImplementedError


@functools.singledispatch
def as_stateful(value: Any, world: World) -> Stateful | None:
    """What gives and takes the state of ``value``, None where it has none."""
    return value if isinstance(value, Stateful) and not isinstance(value, type) else None


def stateful_of(value: Any, world: World, names: Mapping[int, Named]) -> Stateful | None:
    """Return `as_stateful`, with the names of parameters in the same state."""
    found = as_stateful(value, world)
    if isinstance(found, Adapter):
        found.names = names
    return found


@functools.singledispatch
def named_parameters(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the parameters of a module by name, for states that do not name them; nothing where there is no need."""
    return ()


@as_stateful.register
def _(value: np.ndarray, world: World) -> None:
    return None  # asking by protocol would take longer than all else that is done for an array


class _Network(Adapter):
    """Parameters, buffers, random generators of each rank.

    Saving changes nothing, but running statistics differ between ranks, each of which has seen samples of its own. So
    there is the mean of all, and what each rank has: ranks get theirs back where there are as many as before.
    Parameters that are cut into parts are saved whole, by those that have the parts.
    """

    def __init__(self, net: nn.Module, world: World) -> None:
        self._net, self._world = net, world

    def state_dict(self) -> dict[str, Any]:
        own = {name: buffer.data.copy() for name, buffer in self._net.named_buffers()}
        generators = dict(self._net.named_generators())
        state = self._net.state_dict() | averages(own, self._world) | self._parts()
        return state | ({GENERATORS: PerRank(generators)} if generators else {}) | of_ranks(own)

    def _parts(self) -> dict[str, Sharded]:
        """What this rank holds of the parameters that are cut, by name."""
        cut = {name: param for name, param in self._net.named_parameters() if param.cut is not None}
        if not cut:
            return {}
        mine = [param.cut.first for param in cut.values() if param.cut is not None]
        everyone = self._world.comm.allgather_json(mine)
        return {
            name: _sharded(param, [firsts[number] for firsts in everyone], self._world.rank)
            for number, (name, param) in enumerate(cut.items())
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Parameters and generators have been restored in place."""
        own = state.get(STATISTICS) or {}
        for name, buffer in self._net.named_buffers():
            buffer.data[...] = own.get(name, state[name])


def _sharded(param: nn.Parameter, firsts: list[int], rank: int) -> Sharded:
    """What this rank holds of a whole parameter.

    Args:
        firsts: where the part of each rank begins; those of which it is the same have copies.
    """
    assert param.cut is not None
    flat, shape = param.data.reshape(-1), tuple(param.data.shape)
    parts = [Part(place, flat[first : first + count]) for first, place, count in param.cut.runs(shape, 0, flat.size)]
    same = [other for other, first in enumerate(firsts) if first == param.cut.first]
    return Sharded(param.cut.whole(shape), np.dtype(param.data.dtype), parts, len(same), same.index(rank))


@as_stateful.register
def _(value: nn.Module, world: World) -> Stateful:
    return _Network(value, world)


GENERATORS, STATISTICS = "random generators", "running statistics"
"""Names of what a network's ranks have for themselves; with spaces, so no part of a network has them."""


def of_ranks(statistics: dict[str, Any]) -> dict[str, Any]:
    """The entry of running statistics that each rank has for itself; nothing where there are none."""
    return {STATISTICS: PerRank(statistics)} if statistics else {}


def averages(arrays: Mapping[str, Any], world: World) -> dict[str, Any]:
    """New arrays by name: the means over all ranks, or rank 0's of what is no floating array; every rank must call.

    Where all ranks have the same, as with a reproducible trainer, that is the mean: the sum of equal numbers, divided,
    may be another number in its last bit.
    """
    hosts = {name: np.array(to_host(x)) for name, x in arrays.items()}
    if world.size > 1 and hosts:
        digest = hashlib.sha256(b"".join(host.tobytes() for host in hosts.values())).hexdigest()
        are_alike = len({*world.comm.allgather_json(digest)}) == 1
        for host in () if are_alike else hosts.values():
            if host.size and is_float(host.dtype):
                allreduce(host, "mean", world)
            elif host.size:
                world.comm.native_broadcast(host, 0)
    return {name: from_host(host, arrays[name]) for name, host in hosts.items()}


class _Generator(Adapter):
    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> Any:
        return self._generator.bit_generator.state

    def load_state_dict(self, state: Any) -> None:
        self._generator.bit_generator.state = state


@as_stateful.register
def _(value: np.random.Generator, world: World) -> Stateful:
    return _Generator(value)


class _Random(Adapter):
    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def state_dict(self) -> Any:
        return self._generator.getstate()

    def load_state_dict(self, state: Any) -> None:
        self._generator.setstate(state)


@as_stateful.register
def _(value: random.Random, world: World) -> Stateful:
    return _Random(value)
