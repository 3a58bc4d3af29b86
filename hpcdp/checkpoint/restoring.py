"""From a checkpoint back into arrays and objects: which elements this rank reads, and what becomes of the rest."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..arrays import bits, from_host, is_host, of_bits
from ..comm import World
from ..errors import ConfigError, HpcdpError, listed, type_named
from ..state import FitsSaved, Part, PerRank, Saved, Sharded, Stateful
from . import tree
from .leaves import MAKERS, as_array, stateful_of
from .manifest import Manifest, Tensor
from .reading import read_elements, widened
from .refused import TOLD, refused
from .shard_reader import ShardReader
from .sharded import check_parts, plain

Value = Callable[[], Any]
"""Gives what is restored, once elements have been read: objects take over their state then."""
_NOTHING = object()
"""There is nothing to restore into."""


class _Takes(enum.Enum):
    """What the owner of a part of a state does with what the checkpoint has and it has not."""

    NAMED = "the program: names must fit, but dicts and lists of plain values are as long as they were"
    FITTING = "an object that knows what it has"
    ALL = "an object that is given it, too"


@dataclass
class Restored:
    """What `Manager.restore` has done."""

    step: int
    state: Any
    """As it was saved: dicts, lists, numbers and arrays; where there was something to restore into, that."""
    path: Path
    metrics: dict[str, float]
    config: dict[str, Any]
    missing: list[str] = field(default_factory=list)
    """What the checkpoint does not have, and so has stayed as it was, by name."""
    left_over: list[str] = field(default_factory=list)
    """What it has and nobody took, by name."""
    kept: list[str] = field(default_factory=list)
    """What each rank has for itself, and has stayed as it was because there were other numbers of ranks, by name."""


class _Read(NamedTuple):
    """Elements to be read."""

    tensor: Tensor
    first: int
    out: np.ndarray
    """Shape ``(count,)``."""
    rows: int | None = None
    """What is wanted is the sum over the tensor's rows, divided by so many."""


class Filling:
    """Plans what to read for a state, then reads it.

    Args:
        manifest: of the checkpoint.
        form: of its state.
        world: the ranks.
        into: what to restore into; `None`: whole arrays are made.
        renamed: the names of ``form`` that are others than in the checkpoint, by those.

    Raises:
        ConfigError: something does not fit, is missing or left over (unless not ``strict``); nothing is changed.
        UnsupportedError: a `Sharded` whose parts are no parts of it.
    """

    def __init__(
        self, manifest: Manifest, form: tree.Form, world: World, into: Any, strict: bool, renamed: Mapping[str, str]
    ) -> None:
        self._manifest, self._world, self._strict = manifest, world, strict
        self._names, self._into = tree.parameter_names(into), into
        names = [name for name, _ in tree.leaves(form)]
        self._saved = Saved(names, renamed, lambda tensor: manifest.tensors[tensor].shape)
        self._reads: list[_Read] = []
        self._write_back: list[tuple[str, Callable[[], object]]] = []
        """By name: copies to what cannot be read into, once everything has been read."""
        self.missing: list[str] = []
        self.left_over: list[str] = []
        self.kept: list[str] = []
        self._error: HpcdpError | None = None
        self._value = self._plan(_NOTHING if into is None else into, form, "", _Takes.NAMED)
        if self._error is not None:
            raise self._error
        if strict and (self.missing or self.left_over):
            both = (("missing", self.missing), ("left over", self.left_over))
            wrong = [f"{listed(names)} {what}" for what, names in both if names]
            raise ConfigError(
                "restore", expected="the names of the checkpoint", got=", ".join(wrong),
                remedy="restore(strict=False) takes what there is, rename={old: new} gives names",
            )  # fmt: skip

    def check(self, path: Path) -> None:
        """As `read`, but nothing is changed.

        Raises:
            DataError: a file is missing or damaged.
        """
        with ShardReader(path) as reader:
            for each in self._reads:
                _read(reader, each._replace(out=np.empty_like(each.out)))

    def read(self, path: Path) -> None:
        """Read all elements, from the folder of the checkpoint.

        Raises:
            DataError: a file is missing or damaged; some elements may have been read by then.
            HpcdpError: what an array has raised that was to be written to.
        """
        with ShardReader(path) as reader:
            for each in self._reads:
                _read(reader, each)
        for name, write in self._write_back:
            try:
                write()
            except TOLD as error:
                raise refused("restore", name, error) from error

    def finish(self) -> Any:
        """Let objects take over their states; the whole state.

        Raises:
            HpcdpError: what the first of them has raised; the others have theirs.
        """
        value = self._value()
        if self._error is not None:
            raise self._error
        return value

    def _plan(self, template: Any, node: tree.Form, name: str, takes: _Takes) -> Value:
        try:
            return self._planned(template, node, name, takes)
        except TOLD as error:  # goes on, or others would wait for this rank
            self._error = self._error or refused("restore", name, error)
            return lambda: template

    def _planned(self, template: Any, node: tree.Form, name: str, takes: _Takes) -> Value:
        tag, content = next(iter(node.items())) if isinstance(node, dict) else ("", node)
        if tag == "ranks":
            return self._per_rank(template, content, name, takes)
        if isinstance(template, PerRank):
            return self._plan(template.value, node, name, takes)
        if tag == "tensor" and (template is _NOTHING or template is None or isinstance(template, bool | int | float)):
            return self._made(template, node, name, takes)
        if isinstance(template, Sharded):
            return self._sharded(template, self._tensor(node, name), name)
        if not (template is _NOTHING or template is None or isinstance(template, Mapping | list | tuple | np.ndarray)):
            stateful = stateful_of(template, self._world, self._names)
            if isinstance(stateful, FitsSaved):
                node = stateful.fitted(node, self._saved)
                tag, content = next(iter(node.items())) if isinstance(node, dict) else ("", node)
            if stateful is not None:
                more = _Takes.ALL if getattr(stateful, "takes_more", True) else _Takes.FITTING
                inner = self._plan(stateful.state_dict(), node, name, more)
                return lambda: self._taken_over(template, stateful, inner(), name)
        if tag == "dict":
            return self._dict(template, content, name, takes)
        if tag in ("list", "tuple"):
            return self._list(template, content, name, takes, list if tag == "list" else tuple)
        if tag == "tensor":
            return self._filled(template, self._tensor(node, name), name)
        value = float(content) if tag == "float" else content
        if template is not _NOTHING and (
            isinstance(template, Mapping | list | tuple) or as_array(template) is not None
        ):
            raise _misfit(name, _told(template), repr(value))
        kinds = _kind(template), _kind(value)
        if takes is _Takes.NAMED and template is not _NOTHING and None not in kinds and kinds[0] != kinds[1]:
            raise _misfit(name, kinds[0], repr(value))
        return lambda: value

    def _taken_over(self, template: Any, stateful: Stateful, state: Any, name: str) -> Any:
        try:
            stateful.load_state_dict(state)
        except TOLD as error:  # goes on: the next ones may do that together
            self._error = self._error or refused("restore", name, error)
        return template

    def _per_rank(self, template: Any, nodes: list[tree.Form], name: str, takes: _Takes) -> Value:
        inner = template.value if isinstance(template, PerRank) else template
        if len(nodes) == self._world.size:
            rank = self._world.rank
            return self._plan(inner, nodes[rank], tree.joined(name, f"rank-{rank}"), takes)
        self.kept.append(name)
        if takes is not _Takes.NAMED or inner is _NOTHING:
            return lambda: None  # for an object, which knows what that means
        return lambda: inner

    def _dict(self, template: Any, content: list[Any], name: str, takes: _Takes) -> Value:
        if template is _NOTHING or template is None:
            return self._dict({}, content, name, _Takes.ALL)
        if not isinstance(template, Mapping):
            raise _misfit(name, _told(template), "a dict")
        if takes is _Takes.NAMED and _is_numbered(template):
            self._require_order(template, content, name)
        as_saved = takes is _Takes.NAMED and name != "" and _is_plain(template)
        names = {str(key): key for key in template}
        planned: dict[Any, Value] = {}
        for key, node in content:
            inner = tree.joined(name, key)
            if str(key) in names:
                own = names.pop(str(key))
                planned[own] = self._plan(template[own], node, inner, takes)
            elif as_saved or takes is _Takes.ALL:
                planned[key] = self._plan(_NOTHING, node, inner, _Takes.ALL)
            else:
                self.left_over += [each for each, _ in tree.leaves(node, inner)]
        for key in () if as_saved else names.values():
            inner, shares = tree.joined(name, key), _shares(template[key])
            if shares is None:
                self.missing.append(inner)
            else:
                self._write_back += [(inner, partial(_clear, each)) for each in shares]
            planned[key] = _as_is(template[key])
        return lambda: {key: value() for key, value in planned.items()}

    def _require_order(self, template: Mapping[Any, Any], content: list[Any], name: str) -> None:
        """Raise where a state dict of torch's optimizers, given as a dict, numbers parameters in another order.

        They go by number, unlike a module's parameters beside them.
        """
        form = {"dict": content}
        names = (
            tree.below(form, f"param_groups/{number}/param_names") for number in range(len(template["param_groups"]))
        )
        saved = [each["list"] for each in names if isinstance(each, dict) and "list" in each]
        own = [[*group["param_names"]] for group in template["param_groups"] if "param_names" in group]
        moved = saved != own if saved and own else _is_in_other_order(self._into, "", self._saved.names)
        if moved:
            raise ConfigError(
                "restore", where=name or "the state", expected="parameters in the order of the checkpoint",
                got="another order, in which a state dict would give states to others",
                remedy="restore into the module and the optimizer themselves, which match by name",
            )  # fmt: skip

    def _list(self, template: Any, content: list[Any], name: str, takes: _Takes, kind: type) -> Value:
        is_nothing = template is _NOTHING or template is None
        if not (is_nothing or takes is _Takes.ALL or isinstance(template, list | tuple)):
            raise _misfit(name, _told(template), f"a {kind.__name__}")
        if is_nothing or not isinstance(template, list | tuple) or (takes is _Takes.NAMED and _is_plain(template)):
            template = [_NOTHING] * len(content)
        if len(template) != len(content):
            if takes is _Takes.ALL:
                template = [_NOTHING] * len(content)
            elif takes is _Takes.NAMED and not self._strict:
                self.missing.append(name)
                self.left_over.append(name)
                return _as_is(template)
            else:
                raise _misfit(name, f"{len(template)} elements", len(content))
        planned = [self._plan(each, node, tree.joined(name, at), takes)
                   for at, (each, node) in enumerate(zip(template, content, strict=True))]  # fmt: skip
        return lambda: kind(value() for value in planned)

    def _tensor(self, node: tree.Form, name: str) -> Tensor:
        if not (isinstance(node, dict) and "tensor" in node):
            raise _misfit(name, "a tensor", node)
        return self._manifest.tensors[node["tensor"]]

    def _made(self, template: Any, node: tree.Form, name: str, takes: _Takes) -> Value:
        tensor = self._tensor(node, name)
        if isinstance(template, bool | int | float) and takes is not _Takes.ALL and tensor.count != 1:
            raise _misfit(name, "a number", f"shape {tensor.shape} {tensor.dtype}")
        array = np.empty(tensor.shape, tensor.stored_dtype)
        self._reads.append(_Read(tensor, 0, array.reshape(-1)))
        if isinstance(template, bool | int | float):
            shape = tensor.shape if takes is _Takes.ALL else ()
            return lambda: widened(array, tensor.dtype).reshape(shape)[()]
        make = MAKERS.get(node.get("kind", ""), MAKERS[""])
        return lambda: make(array, tensor.dtype)

    def _filled(self, template: Any, tensor: Tensor, name: str) -> Value:
        view = as_array(template)
        if view is None:
            raise _misfit(name, _told(template), f"a tensor of shape {tensor.shape}")
        if (view.array.shape, view.dtype) != (tensor.shape, tensor.dtype):
            raise _misfit(name, f"shape {view.array.shape} {view.dtype}", f"shape {tensor.shape} {tensor.dtype}")
        if isinstance(template, np.generic):
            array = np.empty(tensor.shape, tensor.stored_dtype)
            self._reads.append(_Read(tensor, 0, array.reshape(-1)))
            return lambda: of_bits(array, tensor.dtype)[()]
        _require_writable(template, name)
        if view.overlaps:
            raise ConfigError(
                "restore", where=name or "the state", expected="an array to write to",
                got="one whose elements share memory", remedy="restore into a copy of it",
            )  # fmt: skip
        self._reads.append(_Read(tensor, 0, view.array.reshape(-1)))
        if view.write_back is not None:
            write, array = view.write_back, view.array
            self._write_back.append((name, lambda: write(array)))
        return lambda: template

    def _sharded(self, template: Sharded, tensor: Tensor, name: str) -> Value:
        whole = plain("restore", name, template)
        parts = whole.parts
        check_parts("restore", name, whole, [part for part in parts if is_host(part.values)])
        shapes, dtype = (whole.shape, tensor.shape), np.dtype(whole.dtype).name
        if template.shares and shapes[0] != shapes[1] and shapes[0][1:] == shapes[1][1:] and dtype == tensor.dtype:
            for part in parts:
                self._part(tensor, part, name, shapes[0][0])
        elif shapes[0] != shapes[1] or dtype != tensor.dtype:
            raise _misfit(name, f"shape {shapes[0]} {dtype}", f"shape {tensor.shape} {tensor.dtype}")
        else:
            for part in parts:
                self._part(tensor, part, name)
        return lambda: template

    def _part(self, tensor: Tensor, part: Part, name: str, rows: int | None = None) -> None:
        place = part.values
        if is_host(place):
            _require_writable(place, name)
        if is_host(place) and place.dtype.isnative:
            self._reads.append(_Read(tensor, part.first, bits(place), rows))
        else:
            out = np.empty(place.shape, tensor.stored_dtype)
            self._reads.append(_Read(tensor, part.first, out, rows))
            self._write_back.append(
                (name, lambda: place.__setitem__(..., from_host(of_bits(out, tensor.dtype), place)))
            )


def _is_numbered(template: Mapping[Any, Any]) -> bool:
    """Return whether it is a state dict of torch's optimizers, which numbers parameters."""
    groups = template.get("param_groups")
    return "state" in template and isinstance(groups, list) and all(isinstance(each, Mapping) for each in groups)


def _is_in_other_order(into: Any, name: str, saved: Sequence[str]) -> bool:
    """Return whether a dict of arrays within ``into`` has its names in another order than the checkpoint."""
    if not isinstance(into, Mapping | list | tuple):
        return False
    items = [*(into.items() if isinstance(into, Mapping) else enumerate(into))]
    if isinstance(into, Mapping) and not _is_numbered(into):
        own = [tree.joined(name, key) for key, value in items if hasattr(value, "shape")]
        known = set(own)
        then = [each for each in saved if each in known]
        if then != [each for each in own if each in set(then)]:
            return True
    elif isinstance(into, Mapping):
        return False
    return any(_is_in_other_order(value, tree.joined(name, key), saved) for key, value in items)


def _require_writable(array: Any, name: str) -> None:
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ConfigError("restore", where=name or "the state", expected="an array to write to", got="a read-only one")


def _misfit(name: str, expected: object, got: object) -> ConfigError:
    return ConfigError(
        "restore", where=name or "the state", expected=expected, got=f"{got} in the checkpoint",
        remedy="restore into what the state was saved from, or rename={old: new}",
    )  # fmt: skip


def _kind(value: Any) -> str | None:
    """What may stand in for each other, None where everything may."""
    if value is None:
        return None
    return "a text" if isinstance(value, str) else "a number" if isinstance(value, bool | int | float) else _told(value)


def _is_plain(template: Any) -> bool:
    """Whether nothing of it could be filled in place."""
    if isinstance(template, Mapping | list | tuple):
        return all(map(_is_plain, template.values() if isinstance(template, Mapping) else template))
    return template is None or isinstance(template, bool | int | float | str)


def _shares(template: Any) -> list[Sharded] | None:
    """The shares of sums that ``template`` has by name, None where it has anything else. A checkpoint without those
    names is of ranks that had no shares, as one node has no gradients that it has not sent, so the sums are zero."""
    found = list(template.values()) if isinstance(template, Mapping) else []
    return found if found and all(isinstance(each, Sharded) and each.shares for each in found) else None


def _clear(share: Sharded) -> None:
    for part in share.parts:
        part.values[...] = 0


def _told(template: Any) -> str:
    view = None if isinstance(template, Mapping | list | tuple) else as_array(template)
    return type_named(template) if view is None else f"shape {view.array.shape} {view.dtype}"


def _as_is(template: Any) -> Value:
    value = template.value if isinstance(template, PerRank) else template
    return lambda: value


def _read(reader: ShardReader, read: _Read) -> None:
    if read.rows is None:
        read_elements(reader, read.tensor, read.first, read.out)
    elif read.out.size:
        _read_shares(reader, read)


def _read_shares(reader: ShardReader, read: _Read) -> None:
    """What all rows of a tensor have together at some columns, divided."""
    columns = math.prod(read.tensor.shape[1:])
    row, dtype = np.empty_like(read.out), read.tensor.dtype
    total = np.zeros_like(widened(row, dtype))
    for number in range(read.tensor.shape[0]):
        read_elements(reader, read.tensor, number * columns + read.first % columns, row)
        total += widened(row, dtype)
    total /= read.rows
    of_bits(read.out, dtype)[...] = total
