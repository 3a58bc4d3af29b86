"""From a nested state to its form, which JSON can carry, and the tensors that it names; and back.

Nodes of a **form**: None, true, false, integers, texts and finite floats are themselves, all else an object of one
member: ``{"float": "nan"}``, ``{"dict": [[key, node], ...]}``, ``{"list": [...]}``, ``{"tuple": [...]}``,
``{"tensor": name}`` (with ``"kind"`` where it is of another library than NumPy), ``{"ranks": [node of rank 0, ...]}``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from ..arrays import bits, copied_to_host, is_host, native
from ..autograd import waitall
from ..comm import World
from ..errors import HpcdpError, UnsupportedError, shortened
from ..state import Part, PerRank, Sharded
from .leaves import Named, as_array, named_parameters, stateful_of
from .refused import TOLD, refused
from .sharded import check_parts, plain

Form = Any
DEEPEST = 100
"""Levels of a state."""
MOST_AXES = 32
"""Dimensions of a tensor that HDF5 has."""
_DIGITS = sys.int_info.default_max_str_digits  # which JSON reads, if nobody has said otherwise
_TOO_LONG = 10**_DIGITS
_ROOT = "%"  # the name of a tensor that is the whole state: see `quoted`
_OTHERS = 256  # numbers of dtypes from here on are not NumPy's own
_SAVABLE = "arrays, numbers, texts, None, dicts, lists, tuples, and objects with state_dict() and load_state_dict()"


@dataclass(frozen=True, eq=False)
class Held:
    """What this rank holds of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """What the elements are; bfloat16 lies there as uint16."""
    stored: np.dtype
    parts: tuple[Part, ...]
    copies: int
    copy: int
    is_own: bool = False
    """Whether other ranks have another tensor in its place, see `PerRank`."""
    is_copied: bool = False
    """Whether its parts lie in memory that nobody else has: of what was on a device, or whose elements lay apart."""


@dataclass
class Flattened:
    """A state as a form and tensors."""

    form: Form
    held: list[Held] = field(default_factory=list)
    """Alike in names and order on all ranks, except what stands in a `PerRank`."""
    error: HpcdpError | None = None
    """What cannot be saved, named by its place; perhaps on this rank alone."""


def quoted(key: object) -> str:
    """A key as a part of a name: without slashes, and without what parts of tensors are told by."""
    text = hex(key) if _is_too_long(key) else str(key)
    text = text.replace("%", "%25").replace("/", "%2F").replace("\0", "%00").replace("@", "%40")
    return {"": "%", ".": "%2E", "..": "%2E%2E"}.get(text, text)


def _is_too_long(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and abs(value) >= _TOO_LONG


def is_utf8(text: str) -> bool:
    """Whether files can carry it: surrogates by themselves are no characters."""
    return not any("\ud800" <= each <= "\udfff" for each in text)


def flatten(state: Any, world: World) -> Flattened:
    """The form and the tensors of a state; every rank must call, with states whose `outline` is the same."""
    waitall()  # asynchronous calls under way may move running statistics and generators
    flattening = _Flattening(world, parameter_names(state))
    form = flattening.node(state, "", world.size, world.rank)
    return Flattened(form, flattening.held, flattening.error)


def outline(operation: str, state: Any) -> list[str]:
    """What in a state has a state of its own, which ranks may make together: a line each.

    Raises:
        HpcdpError: what the state's own dicts have raised.
    """
    try:
        return [f"{name} {type(value).__qualname__}" for name, value in _objects(state, "", ())]
    except TOLD as error:
        raise refused(operation, "", error) from error


def parameter_names(state: Any) -> dict[int, Named]:
    """Return the names of all parameters of modules in a state, by `id`, see `Adapter.names`."""
    found: dict[int, Named] = {}
    for place, value in _objects(state, "", ()):
        for name, param in named_parameters(value):
            found.setdefault(id(param), Named(place, name, joined(place, name)))
    return found


def _objects(value: Any, name: str, within: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list | tuple):
        if id(value) not in within and len(within) < DEEPEST:
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, each in items:
                yield from _objects(each, joined(name, key), (*within, id(value)))
    elif not (value is None or isinstance(value, bool | int | float | str | np.ndarray | np.generic | Sharded)):
        yield name, value


class _Flattening:
    def __init__(self, world: World, names: Mapping[int, Named]) -> None:
        self._world, self._names = world, names
        self.held: list[Held] = []
        self.error: HpcdpError | None = None
        self._within: list[int] = []  # identities of what is being looked into
        self._own = False

    def node(self, value: Any, name: str, copies: int, copy: int) -> Form:
        try:
            return self._node(value, name, copies, copy)
        except TOLD as error:  # goes on, or others would wait for this rank
            self.error = self.error or refused("save", name, error)
            return None

    def _node(self, value: Any, name: str, copies: int, copy: int) -> Form:
        if _is_too_long(value):
            raise UnsupportedError("save", where=name or "the state", expected=f"integers of at most {_DIGITS} digits",
                                   got="a longer one")  # fmt: skip
        if value is None or isinstance(value, bool | int | str):
            return str.__str__(value) if isinstance(value, str) else value  # that of an enum gives a name
        if isinstance(value, np.generic):
            return self._tensor(value, name, copies, copy)
        if isinstance(value, float):
            return float_node(value)
        if id(value) in self._within:
            raise UnsupportedError("save", where=name or "the state", expected="no state within itself", got="one")
        if len(self._within) == DEEPEST:
            raise UnsupportedError("save", where=name[:80], expected=f"at most {DEEPEST} levels", got="more")
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
            return {"dict": [[key, self.node(each, joined(name, key), copies, copy)]
                             for key, each in _checked(value, name).items()]}  # fmt: skip
        if isinstance(value, list | tuple):
            nodes = [self.node(each, joined(name, at), copies, copy) for at, each in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": nodes}
        if isinstance(value, Sharded):
            whole = plain("save", name, value)
            parts = tuple(
                part if is_host(part.values) else Part(part.first, copied_to_host(part.values)) for part in whole.parts
            )
            check_parts("save", name, whole, parts)
            dtype = np.dtype(whole.dtype)
            stored = bits(native(np.empty(0, dtype))).dtype
            if not _has_a_place_in_files(stored):
                got = f"a Sharded of {dtype}"
                raise UnsupportedError("save", where=name or "the state", expected=_SAVABLE, got=got)
            name = name or _ROOT
            kept = tuple(Part(part.first, bits(native(part.values))) for part in parts)
            is_copied = not any(is_host(part.values) for part in whole.parts)
            return self._hold(
                Held(name, whole.shape, dtype.name, stored, kept, whole.copies, whole.copy, self._own, is_copied)
            )
        stateful = stateful_of(value, self._world, self._names)
        if stateful is not None:
            return self.node(stateful.state_dict(), name, copies, copy)
        return self._tensor(value, name, copies, copy)

    def _hold(self, held: Held) -> Form:
        """The node of a tensor of this rank."""
        if not is_utf8(held.name):
            where = ascii(held.name)[1:-1]
            raise UnsupportedError("save", where=where, expected="a name that is Unicode", got="a lone surrogate")
        if len(held.shape) > MOST_AXES:
            expected = f"at most {MOST_AXES} dimensions"
            raise UnsupportedError("save", where=held.name, expected=expected, got=len(held.shape))
        self.held.append(held)
        return {"tensor": held.name}

    def _tensor(self, value: Any, name: str, copies: int, copy: int) -> Form:
        view = as_array(value)
        if view is None or not _has_a_place_in_files(view.array.dtype):
            got = type(value).__name__ if view is None else f"an array of {view.array.dtype}"
            remedy = _of_torch(value)
            if isinstance(value, np.ma.MaskedArray):
                remedy = "save its data and its mask as two arrays"
            raise UnsupportedError("save", where=name or "the state", expected=_SAVABLE, got=got, remedy=remedy)
        array, part = view.array, Part(0, view.array.reshape(-1))
        held = Held(name or _ROOT, array.shape, view.dtype, array.dtype, (part,), copies, copy, self._own,
                    view.write_back is not None)  # fmt: skip
        node = self._hold(held)
        return node | ({"kind": view.kind} if view.kind else {})


def _has_a_place_in_files(stored: np.dtype) -> bool:
    """Whether elements can be saved as this dtype; what other libraries add may call itself a float, too."""
    return stored.kind in "biufc" and stored.num < _OTHERS


def _of_torch(value: object) -> str | None:
    """How to save an object of PyTorch that cannot be saved as it is."""
    if type(value).__module__.partition(".")[0] != "torch":
        return None
    ours, name = sys.modules.get("hpcdp.torch"), type(value).__name__
    if ours is None:
        return "import hpcdp.torch, too"
    return f"hpcdp.torch.{name} has a state" if hasattr(ours, name) else None


def joined(name: str, key: object) -> str:
    """The name of what stands under ``key`` of what is called ``name``."""
    return f"{name}/{quoted(key)}" if name else quoted(key)


def _checked(value: Mapping[Any, Any], name: str) -> Mapping[Any, Any]:
    odd = [key for key in value if type(key) not in (str, int) or _is_too_long(key)]
    if odd:
        got = f"an integer of over {_DIGITS} digits" if _is_too_long(odd[0]) else repr(odd[0])
        raise UnsupportedError("save", where=name or "the state", expected="keys that are str or int", got=got)
    by_text: dict[str, Any] = {}
    for key in value:
        if str(key) in by_text:
            got = " and ".join(shortened(repr(each), 40) for each in (by_text[str(key)], key))
            raise UnsupportedError("save", where=name or "the state", expected="keys that differ as text", got=got)
        by_text[str(key)] = key
    return value


def float_node(value: float) -> Form:
    """A float as a node: JSON has no NaN and no infinities."""
    return float(value) if math.isfinite(value) else {"float": str(float(value))}


def own_nodes(form: Form) -> list[Form]:
    """What a rank has for itself in its form: the nodes of each `PerRank`, in order."""
    if not isinstance(form, dict):
        return []
    ((tag, content), *_) = form.items()
    if tag == "ranks":
        return [content]
    nodes = [node for _, node in content] if tag == "dict" else content if tag in ("list", "tuple") else []
    return [own for node in nodes for own in own_nodes(node)]


def with_ranks(form: Form, everyone: Sequence[Iterator[Form]]) -> Form:
    """The form of all ranks, of that of one of them and the `own_nodes` of each."""
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
    """What of a form must be the same on all ranks, a line a node."""
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
    """Name and node of all that is no dict, list or tuple."""
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
    """As `leaves`, and what is per rank stands under the name that each rank's has."""
    for inner, node in leaves(form, name):
        if isinstance(node, dict) and "ranks" in node:
            for rank, each in enumerate(node["ranks"]):
                yield from entries(each, joined(inner, f"rank-{rank}"))
        else:
            yield inner, node


def below(form: Form, name: str) -> Form:
    """The node of that name, None where there is none."""
    for key in name.split("/"):
        tag, content = _opened(form)
        if tag == "dict":
            form = next((node for each, node in content if quoted(each) == key), None)
        elif tag in ("list", "tuple") and key.isdecimal() and int(key) < len(content):
            form = content[int(key)]
        else:
            return None
    return form


def without_ranks(form: Form) -> Form:
    """A form without what is per rank: left out of dicts, None elsewhere."""
    tag, content = _opened(form)
    if tag == "ranks":
        return None
    if tag == "dict":
        kept = [[key, node] for key, node in content if not (isinstance(node, dict) and "ranks" in node)]
        return {"dict": [[key, without_ranks(node)] for key, node in kept]}
    if tag in ("list", "tuple"):
        return {tag: [without_ranks(node) for node in content]}
    return form


def built(form: Form, tensor: Callable[[str], Any]) -> Any:
    """The nested state of a form without what is per rank.

    Args:
        tensor: makes what stands in the place of a tensor, from its name.
    """
    tag, content = _opened(form)
    if tag == "dict":
        return {key: built(node, tensor) for key, node in content}
    if tag in ("list", "tuple"):
        return (list if tag == "list" else tuple)(built(node, tensor) for node in content)
    return tensor(content) if tag == "tensor" else value_of(form)


def _opened(form: Form) -> tuple[str, Any]:
    return next(iter(form.items())) if isinstance(form, dict) else ("", form)


def value_of(node: Form) -> Any:
    """The value of a leaf that is no tensor."""
    return float(node["float"]) if isinstance(node, dict) else node
