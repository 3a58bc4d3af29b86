"""Conversion of nested states to a form in JSON with named tensors, and back.

The nodes of a **form**: None, true, false, integers, texts and finite floats are themselves; others are objects of one
member: ``{"float": "nan"}``, ``{"dict": [[key, node], ...]}``, ``{"list": [...]}``, ``{"tuple": [...]}``,
``{"tensor": name}`` (with ``"kind"`` for arrays of another library than NumPy), ``{"ranks": [node of rank 0, ...]}``.

Arrays of any library are converted to NumPy arrays, and objects to their states. Other packages add kinds by
``as_array.register``, ``as_stateful.register`` and entries of `MAKERS`.

Objects of the program may raise anything, on one rank alone. `refused` turns it into an `HpcdpError` that names the
entry, which `comm.consistency` raises on all ranks. That includes a `SystemExit`, because the other ranks would wait
for the rank that ends. Ctrl-C ends the job as elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from .. import nn
from ..autograd import waitall
from ..collectives import allreduce
from ..comm import World
from ..core.arrays import (
    bits,
    copied_to_host,
    from_host,
    has_namespace,
    is_float,
    is_host,
    native,
    of_bits,
    on_device_of,
    to_host,
)
from ..core.checks import instance, whole_number
from ..core.state import FitsSaved, Part, PerRank, Sharded, Stateful
from ..errors import ConfigError, HpcdpError, UnsupportedError, WorldAborted, shortened

TOLD = (Exception, SystemExit)
"""Exceptions of the program's objects that are raised on all ranks."""


def refused(operation: str, name: str, error: BaseException) -> HpcdpError:
    """Return the error of a state's entry.

    Args:
        operation: "save" or "restore".
        name: name of the entry; empty for the whole state.
        error: the exception of the entry. A `WorldAborted` is raised again, because no rank is left to report to.
    """
    if isinstance(error, WorldAborted):
        raise error
    if isinstance(error, HpcdpError):
        if error.where is None:
            error.where = name or "the state"
        return error
    expected = "its state, to save it" if operation == "save" else "it to take its state"
    return raised(operation, name or "the state", expected, error)


def raised(operation: str, where: str, expected: str, error: BaseException) -> HpcdpError:
    """Return the error of an object of the program that has raised ``error``."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    named = UnsupportedError(operation, where=where, expected=expected, got=text)
    named.__cause__ = error
    return named


class HostView(NamedTuple):
    """An array of any library as a NumPy array."""

    array: np.ndarray
    """Contiguous array on the host, which shares memory with the original where that is possible."""
    dtype: str
    """Name of the elements' dtype, which differs from that of `array` only for bfloat16, see `bits`."""
    kind: str = ""
    """Key in `MAKERS` of the function that makes such an array; "" for NumPy."""
    write_back: Callable[[np.ndarray], object] | None = None
    """Function that copies values back to the original; None where `array` shares its memory."""
    overlaps: bool = False
    """True if elements of the original share memory, and so cannot be set separately."""


def overlaps(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether elements share memory, like those of a broadcast array.

    ``strides`` and ``itemsize`` have the same unit.
    """
    span = itemsize
    for stride, count in sorted((abs(stride), count) for stride, count in zip(strides, shape, strict=True)):
        if count > 1 and stride < span:
            return math.prod(shape) > 0
        span += stride * (count - 1)
    return False


@functools.singledispatch
def as_array(value: Any) -> HostView | None:
    """Return ``value`` as a NumPy array; None if it is not an array."""
    if has_namespace(value):
        copied, dtype = copied_to_host(value), str(value.dtype)

        def take(x: np.ndarray) -> None:
            with on_device_of(value):
                value[...] = from_host(of_bits(x, dtype), value)

        return HostView(bits(copied), dtype, "", take)
    return None


@as_array.register
def _(value: np.ndarray) -> HostView:
    value = np.asarray(value)  # no np.matrix, which always has two dimensions
    if value.flags.carray and value.dtype.isnative:
        return HostView(bits(value), value.dtype.name)
    native = np.array(value, value.dtype.newbyteorder("="), order="C")
    shared = overlaps(value.shape, value.strides, value.itemsize)
    dtype = native.dtype.name
    return HostView(bits(native), dtype, "", lambda x: np.copyto(value, of_bits(x, dtype)), shared)


@as_array.register
def _(value: np.ma.MaskedArray) -> None:
    return None  # a save would lose the mask


@as_array.register
def _(value: np.generic) -> HostView:
    return HostView(bits(np.array(value)), value.dtype.name)


MAKERS: dict[str, Callable[[np.ndarray, str], Any]] = {"": of_bits}
"""Functions by `HostView.kind` that make an array of that kind from a NumPy array and the name of its dtype."""


class NamedTensor(NamedTuple):
    """The name of a parameter of a module in a state."""

    place: str
    """Name of the module in the state."""
    name: str
    """Name of the parameter in the module."""
    full: str
    """Name of the parameter in checkpoints."""


class Adapter(FitsSaved):
    """The state of an object for checkpoints, where the object has none, or checkpoints need another."""

    takes_more = False
    """True if `load_state_dict` also gets saved entries that the current `state_dict` does not have."""
    names: Mapping[int, NamedTensor] = {}
    """Names of the parameters of all modules in the state by `id`, in the order of their registration."""

    def state_dict(self) -> Any:
        """See `Stateful`; every rank calls."""
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        """See `Stateful`; every rank calls."""
        raise NotImplementedError


@functools.singledispatch
def as_stateful(value: Any, world: World) -> Stateful | None:
    """Return the object that saves and loads the state of ``value``; None if it has no state."""
    return value if isinstance(value, Stateful) and not isinstance(value, type) else None


def stateful_of(value: Any, world: World, names: Mapping[int, NamedTensor]) -> Stateful | None:
    """Return `as_stateful`, with the names of parameters in the same state."""
    stateful = as_stateful(value, world)
    if isinstance(stateful, Adapter):
        stateful.names = names
    return stateful


@functools.singledispatch
def named_parameters(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the parameters of a module by name, if states of its optimizers do not name them."""
    return ()


@as_stateful.register
def _(value: np.ndarray, world: World) -> None:
    return None  # a shortcut: the check of the protocol takes longer than all other work for an array


class _Network(Adapter):
    """The parameters, buffers and random generators of a network.

    Running statistics differ between ranks, which see different samples. The checkpoint has their mean and those of
    each rank; ranks load their own if the number of ranks is the same. Parameters that are sliced over ranks are saved
    as whole tensors.
    """

    def __init__(self, net: nn.Module, world: World) -> None:
        self._net, self._world = net, world

    def state_dict(self) -> dict[str, Any]:
        own = {name: buffer.data.copy() for name, buffer in self._net.named_buffers()}
        generators = dict(self._net.named_generators())
        state = self._net.state_dict() | averages(own, self._world) | self._parts()
        return state | ({GENERATORS: PerRank(generators)} if generators else {}) | of_ranks(own)

    def _parts(self) -> dict[str, Sharded]:
        """Return this rank's slices of sliced parameters by name."""
        cut = {name: param for name, param in self._net.named_parameters() if param.cut is not None}
        if not cut:
            return {}
        mine = [param.cut.first for param in cut.values() if param.cut is not None]
        by_rank = self._world.comm.allgather_json(mine)
        return {
            name: _sharded(param, [firsts[number] for firsts in by_rank], self._world.rank)
            for number, (name, param) in enumerate(cut.items())
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load buffers; parameters and generators have been restored in place."""
        own = state.get(STATISTICS) or {}
        for name, buffer in self._net.named_buffers():
            buffer.data[...] = own.get(name, state[name])


def _sharded(param: nn.Parameter, firsts: list[int], rank: int) -> Sharded:
    """Return this rank's slice of a parameter as a part of the whole tensor.

    ``firsts`` are the first indices of all ranks' slices; ranks with the same one hold copies.
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
"""Names of a network's entries per rank, with spaces, which names of layers do not have."""


def of_ranks(statistics: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of each rank's running statistics; empty without any."""
    return {STATISTICS: PerRank(statistics)} if statistics else {}


def averages(arrays: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Return new arrays by name: means over all ranks, or rank 0's integers; every rank must call.

    Arrays that are the same on all ranks, as with a reproducible trainer, are returned unchanged, because the division
    of a sum of equal numbers may change the last bit.
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


class RandomState(Adapter):
    """The state of a random generator, by functions that get and set it."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._get, self._put = get, put

    def state_dict(self) -> Any:
        """See `Adapter.state_dict`."""
        return self._get()

    def load_state_dict(self, state: Any) -> None:
        """See `Adapter.load_state_dict`."""
        self._put(state)


@as_stateful.register
def _(value: np.random.Generator, world: World) -> Stateful:
    bits = value.bit_generator
    return RandomState(lambda: bits.state, lambda state: setattr(bits, "state", state))


@as_stateful.register
def _(value: random.Random, world: World) -> Stateful:
    return RandomState(value.getstate, value.setstate)


def plain(operation: str, name: str, tensor: Sharded) -> Sharded:
    """Return a checked `Sharded` with Python integers, for the manifest.

    Raises:
        ConfigError: its shape, copies or parts are invalid.
    """
    where = name or "the state"
    expected = "a Sharded with a shape, of integers >= 0"
    sizes = instance(operation, where, tensor.shape, Iterable, expected)
    shape = tuple(whole_number(operation, where, size, 0, expected=expected, shown=tensor.shape) for size in sizes)
    copies = whole_number(operation, where, tensor.copies, 1, expected="a Sharded of 1 copy or more")
    expected = f"a Sharded whose copy is one of its {copies} copies"
    copy = whole_number(operation, where, tensor.copy, 0, copies - 1, expected=expected)
    return dataclasses.replace(tensor, shape=shape, parts=_parts(operation, where, tensor), copies=copies, copy=copy)


def _parts(operation: str, where: str, tensor: Sharded) -> list[Part]:
    expected = "a Sharded with a list of Part(first, values)"
    parts: Any = tensor.parts
    for part in parts if isinstance(parts, list | tuple) else [parts]:
        instance(operation, where, part, Part, expected)
        whole_number(operation, where, part.first, expected=expected, shown=part)
        if not hasattr(part.values, "dtype") or not hasattr(part.values, "shape"):
            raise ConfigError(operation, where=where, expected="a Part with an array of values",
                              got=shortened(repr(part.values), 40))  # fmt: skip
    return [Part(int(part.first), part.values) for part in parts]


def check_parts(operation: str, name: str, tensor: Sharded, parts: Iterable[Part]) -> None:
    """Raise `UnsupportedError` unless each of ``parts``, in host memory, is a run of the whole tensor's elements."""
    for part in parts:
        values, dtype = part.values, np.dtype(tensor.dtype)
        if (values.ndim, values.dtype) != (1, dtype) or not values.flags.c_contiguous:
            expected, got = f"parts of shape (count,), contiguous, {dtype}", f"{values.shape} {values.dtype}"
            raise UnsupportedError(operation, where=name or "the state", expected=expected, got=got)
        if not 0 <= part.first <= tensor.count - values.size:
            got = f"a part from {part.first} to {part.first + values.size}"
            raise UnsupportedError(operation, where=name or "the state", expected=f"{tensor.count} elements", got=got)


def _unsavable(name: str, expected: str, got: object, remedy: str | None = None) -> UnsupportedError:
    return UnsupportedError("save", where=name or "the state", expected=expected, got=got, remedy=remedy)


Form = Any
DEEPEST = 100
"""Most levels of a state."""
MOST_AXES = 32
"""Most dimensions of a tensor in HDF5."""
_DIGITS = sys.int_info.default_max_str_digits  # the default limit of the JSON parser
_TOO_LONG = 10**_DIGITS
_ROOT = "%"  # the name of a tensor that is the whole state: see `quoted`
_OTHERS = 256  # least number of a dtype that is not NumPy's own
_SAVABLE = "arrays, numbers, texts, None, dicts, lists, tuples, and objects with state_dict() and load_state_dict()"


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """This rank's parts of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Dtype of the elements; bfloat16 is stored as uint16."""
    stored: np.dtype
    parts: tuple[Part, ...]
    copies: int
    copy: int
    is_own: bool = False
    """True if other ranks have another tensor in its place, see `PerRank`."""
    is_copied: bool = False
    """True if the parts are copies, of an array on a device or one that is not contiguous."""


@dataclass
class Flattened:
    """A state as a form and tensors."""

    form: Form
    held: list[HeldTensor] = field(default_factory=list)
    """Tensors with the same names in the same order on all ranks, except in a `PerRank`."""
    error: HpcdpError | None = None
    """Error of an entry that cannot be saved, maybe on this rank alone."""


def quoted(key: object) -> str:
    """Return a key as a part of a name, with ``%``, ``/``, NUL and ``@`` escaped."""
    text = hex(key) if _is_too_long(key) else str(key)
    text = text.replace("%", "%25").replace("/", "%2F").replace("\0", "%00").replace("@", "%40")
    return {"": "%", ".": "%2E", "..": "%2E%2E"}.get(text, text)


def _is_too_long(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and abs(value) >= _TOO_LONG


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can encode a text, which lone surrogates prevent."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def flatten(state: Any, world: World) -> Flattened:
    """Return the form and the tensors of a state; every rank must call, with states of the same `outline`."""
    waitall()  # asynchronous calls under way may change running statistics and generators
    flattening = _Flattening(world, parameter_names(state))
    form = flattening.node(state, "", world.size, world.rank)
    return Flattened(form, flattening.held, flattening.error)


def outline(operation: str, state: Any) -> list[str]:
    """Return a line for each object in a state, whose ``state_dict()`` ranks may call collectively.

    Raises:
        HpcdpError: a dict of the state has raised.
    """
    try:
        return [f"{name} {type(value).__qualname__}" for name, value in _objects(state, "", ())]
    except TOLD as error:
        raise refused(operation, "", error) from error


def parameter_names(state: Any) -> dict[int, NamedTensor]:
    """Return the names of all parameters of modules in a state, by `id`, see `Adapter.names`."""
    names: dict[int, NamedTensor] = {}
    for place, value in _objects(state, "", ()):
        for name, param in named_parameters(value):
            names.setdefault(id(param), NamedTensor(place, name, joined(place, name)))
    return names


def _objects(value: Any, name: str, within: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list | tuple):
        if id(value) not in within and len(within) < DEEPEST:
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, item in items:
                yield from _objects(item, joined(name, key), (*within, id(value)))
    elif not (value is None or isinstance(value, bool | int | float | str | np.ndarray | np.generic | Sharded)):
        yield name, value


class _Flattening:
    def __init__(self, world: World, names: Mapping[int, NamedTensor]) -> None:
        self._world, self._names = world, names
        self.held: list[HeldTensor] = []
        self.error: HpcdpError | None = None
        self._within: list[int] = []  # ids of the containers of the current entry
        self._own = False

    def node(self, value: Any, name: str, copies: int, copy: int) -> Form:
        try:
            return self._node(value, name, copies, copy)
        except TOLD as error:  # go on, because other ranks would wait for this one
            self.error = self.error or refused("save", name, error)
            return None

    def _node(self, value: Any, name: str, copies: int, copy: int) -> Form:
        if _is_too_long(value):
            raise _unsavable(name, f"integers of at most {_DIGITS} digits", "a longer one")
        if value is None or isinstance(value, bool | int | str):
            return str.__str__(value) if isinstance(value, str) else value  # str() of an enum is its name
        if isinstance(value, np.generic):
            return self._tensor(value, name, copies, copy)
        if isinstance(value, float):
            return float_node(value)
        if id(value) in self._within:
            raise _unsavable(name, "a state without cycles", "a container that contains itself")
        if len(self._within) == DEEPEST:
            raise _unsavable(name[:80], f"at most {DEEPEST} levels", "more")
        self._within.append(id(value))
        try:
            return self._compound(value, name, copies, copy)
        finally:
            self._within.pop()

    def _compound(self, value: Any, name: str, copies: int, copy: int) -> Form:
        if isinstance(value, PerRank) and self._own:
            return self.node(value.value, name, copies, copy)
        if isinstance(value, PerRank):
            self._own = True
            node = self.node(value.value, joined(name, f"rank-{self._world.rank}"), 1, 0)
            self._own = False
            return {"ranks": node}  # of this rank; see `with_ranks`
        if isinstance(value, Mapping):
            return {"dict": [[key, self.node(item, joined(name, key), copies, copy)]
                             for key, item in _checked(value, name).items()]}  # fmt: skip
        if isinstance(value, list | tuple):
            nodes = [self.node(item, joined(name, at), copies, copy) for at, item in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": nodes}
        if isinstance(value, Sharded):
            tensor = plain("save", name, value)
            parts = tuple(
                part if is_host(part.values) else Part(part.first, copied_to_host(part.values)) for part in tensor.parts
            )
            check_parts("save", name, tensor, parts)
            dtype = np.dtype(tensor.dtype)
            stored = bits(native(np.empty(0, dtype))).dtype
            if not _is_storable(stored):
                raise _unsavable(name, _SAVABLE, f"a Sharded of {dtype}")
            name = name or _ROOT
            runs = tuple(Part(part.first, bits(native(part.values))) for part in parts)
            is_copied = not any(is_host(part.values) for part in tensor.parts)
            return self._hold(
                HeldTensor(
                    name, tensor.shape, dtype.name, stored, runs, tensor.copies, tensor.copy, self._own, is_copied
                )
            )
        stateful = stateful_of(value, self._world, self._names)
        if stateful is not None:
            return self.node(stateful.state_dict(), name, copies, copy)
        return self._tensor(value, name, copies, copy)

    def _hold(self, held: HeldTensor) -> Form:
        """Record a tensor of this rank, and return its node."""
        if not is_utf8(held.name):
            raise _unsavable(ascii(held.name)[1:-1], "a name in Unicode", "a lone surrogate")
        if len(held.shape) > MOST_AXES:
            raise _unsavable(held.name, f"at most {MOST_AXES} dimensions", len(held.shape))
        self.held.append(held)
        return {"tensor": held.name}

    def _tensor(self, value: Any, name: str, copies: int, copy: int) -> Form:
        view = as_array(value)
        if view is None or not _is_storable(view.array.dtype):
            got = type(value).__name__ if view is None else f"an array of {view.array.dtype}"
            remedy = _of_torch(value)
            if isinstance(value, np.ma.MaskedArray):
                remedy = "save its data and its mask as two arrays"
            raise _unsavable(name, _SAVABLE, got, remedy)
        array, part = view.array, Part(0, view.array.reshape(-1))
        is_copied = view.write_back is not None
        node = self._hold(
            HeldTensor(name or _ROOT, array.shape, view.dtype, array.dtype, (part,), copies, copy, self._own, is_copied)
        )
        return node | ({"kind": view.kind} if view.kind else {})


def _is_storable(stored: np.dtype) -> bool:
    """Return whether files can store a dtype: a number of NumPy's own, not one that another library registers."""
    return stored.kind in "biufc" and stored.num < _OTHERS


def _of_torch(value: object) -> str | None:
    """Return the remedy for an object of PyTorch that has no state."""
    if type(value).__module__.partition(".")[0] != "torch":
        return None
    hpcdp_torch, name = sys.modules.get("hpcdp.torch"), type(value).__name__
    if hpcdp_torch is None:
        return "import hpcdp.torch, too"
    return f"use hpcdp.torch.{name}, which has a state" if hasattr(hpcdp_torch, name) else None


def joined(name: str, key: object) -> str:
    """Return the name of the entry ``key`` of the container ``name``."""
    return f"{name}/{quoted(key)}" if name else quoted(key)


def _checked(value: Mapping[Any, Any], name: str) -> Mapping[Any, Any]:
    odd = [key for key in value if type(key) not in (str, int) or _is_too_long(key)]
    if odd:
        got = f"an integer of over {_DIGITS} digits" if _is_too_long(odd[0]) else repr(odd[0])
        raise _unsavable(name, "keys that are str or int", got)
    by_text: dict[str, Any] = {}
    for key in value:
        if str(key) in by_text:
            got = " and ".join(shortened(repr(equal), 40) for equal in (by_text[str(key)], key))
            raise _unsavable(name, "keys that differ as text", got)
        by_text[str(key)] = key
    return value


def float_node(value: float) -> Form:
    """Return the node of a float, as text for NaN and infinities, which JSON does not have."""
    return float(value) if math.isfinite(value) else {"float": str(float(value))}


def own_nodes(form: Form) -> list[Form]:
    """Return the nodes of each `PerRank` in a rank's form, in order."""
    if not isinstance(form, dict):
        return []
    ((tag, content), *_) = form.items()
    if tag == "ranks":
        return [content]
    nodes = [node for _, node in content] if tag == "dict" else content if tag in ("list", "tuple") else []
    return [own for node in nodes for own in own_nodes(node)]


def with_ranks(form: Form, everyone: Sequence[Iterator[Form]]) -> Form:
    """Return the form of all ranks, from that of one rank and the `own_nodes` of each."""
    if not isinstance(form, dict):
        return form
    ((tag, content), *more) = form.items()
    if tag == "ranks":
        return {"ranks": [next(nodes) for nodes in everyone]}
    if tag == "dict":
        return {"dict": [[key, with_ranks(node, everyone)] for key, node in content]}
    if tag in ("list", "tuple"):
        return {tag: [with_ranks(node, everyone) for node in content]}
    return {tag: content} | dict(more)


def alike(form: Form, name: str = "") -> Iterator[str]:
    """Yield a line for each node of a form that must be the same on all ranks."""
    ((tag, content), *_) = form.items() if isinstance(form, dict) else (("", form),)
    if tag == "ranks":
        yield f"{name} = for each rank"
    elif tag in ("dict", "list", "tuple"):
        yield f"{name or 'the state'} = a {tag} of {len(content)}"
        for key, node in content if tag == "dict" else enumerate(content):
            yield from alike(node, joined(name, key))
    else:
        yield f"{name} = {form}"


def leaves(form: Form, name: str = "") -> Iterator[tuple[str, Form]]:
    """Yield name and node of each entry that is not a dict, list or tuple."""
    if isinstance(form, dict):
        ((tag, content), *_) = form.items()
        if tag == "dict":
            for key, node in content:
                yield from leaves(node, joined(name, key))
            return
        if tag in ("list", "tuple"):
            for at, node in enumerate(content):
                yield from leaves(node, joined(name, at))
            return
    yield name, form


def entries(form: Form, name: str = "") -> Iterator[tuple[str, Form]]:
    """Yield name and node as `leaves`, with a separate name for each rank's entry of a `PerRank`."""
    for inner, node in leaves(form, name):
        if isinstance(node, dict) and "ranks" in node:
            for rank, own in enumerate(node["ranks"]):
                yield from entries(own, joined(inner, f"rank-{rank}"))
        else:
            yield inner, node


def below(form: Form, name: str) -> Form:
    """Return the node of a name; None if there is none."""
    for key in name.split("/"):
        tag, content = _opened(form)
        if tag == "dict":
            form = next((node for other, node in content if quoted(other) == key), None)
        elif tag in ("list", "tuple") and key.isdecimal() and int(key) < len(content):
            form = content[int(key)]
        else:
            return None
    return form


def without_ranks(form: Form) -> Form:
    """Return a form without entries per rank, which are left out of dicts, and None elsewhere."""
    tag, content = _opened(form)
    if tag == "ranks":
        return None
    if tag == "dict":
        entries = [[key, node] for key, node in content if not (isinstance(node, dict) and "ranks" in node)]
        return {"dict": [[key, without_ranks(node)] for key, node in entries]}
    if tag in ("list", "tuple"):
        return {tag: [without_ranks(node) for node in content]}
    return form


def built(form: Form, tensor: Callable[[str], Any]) -> Any:
    """Return the nested state of a form without entries per rank; ``tensor(name)`` makes its tensors."""
    tag, content = _opened(form)
    if tag == "dict":
        return {key: built(node, tensor) for key, node in content}
    if tag in ("list", "tuple"):
        return (list if tag == "list" else tuple)(built(node, tensor) for node in content)
    return tensor(content) if tag == "tensor" else value_of(form)


def _opened(form: Form) -> tuple[str, Any]:
    return next(iter(form.items())) if isinstance(form, dict) else ("", form)


def value_of(node: Form) -> Any:
    """Return the value of a leaf that is not a tensor."""
    return float(node["float"]) if isinstance(node, dict) else node
