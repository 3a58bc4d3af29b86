"""Restoring of checkpoints at any number of ranks.

Other names for what a form has, before it is restored: parts of a state that are called otherwise now.

From a checkpoint back into arrays and objects: which elements this rank reads, and what becomes of the rest.

Which checkpoint of a folder is restored: the one that was asked for, or the newest that is undamaged.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..autograd import waitall
from ..comm import World
from ..comm.consistency import on_every_rank, on_rank_0, require_same
from ..core.arrays import bits, from_host, is_host, of_bits
from ..core.checks import instance
from ..core.state import FitsSaved, Part, PerRank, Saved, Sharded, Stateful, unquoted
from ..errors import ConfigError, DataError, HpcdpError, listed, type_named, warn
from . import directory, flatten
from . import manifest as checkpoint_manifest
from .flatten import MAKERS, TOLD, Form, as_array, check_parts, plain, quoted, raised, refused, stateful_of
from .hdf5_file import ShardReader, failing
from .inspect import read_elements, widened
from .manifest import Manifest, StoredTensor


def new_names(form: Form, rename: Mapping[str, str] | Callable[[str], str] | None) -> dict[str, str]:
    """The names of a form that are to be others, by what they are.

    Args:
        rename: a function of a name, or new names by old ones, which stand for all that begins with them, too, and has
            no longer one among them.

    Raises:
        ConfigError: ``rename`` is neither, an old name is none of the form's, or a new one is no text.
    """
    if rename is None:
        return {}
    names = ["/".join(map(quoted, path)) for path, _ in _paths(form, ())]
    if callable(rename):
        try:
            given = {name: rename(name) for name in names}
        except TOLD as error:
            raise raised("restore", "rename", "a function of a name", error) from error
    else:
        instance("restore", "rename", rename, Mapping, "a dict of names, or a function")
        for old in rename:
            if not isinstance(old, str) or not any(f"{name}/".startswith(f"{old}/") for name in names):
                expected = "names of the checkpoint outside of lists, or what stands before a slash in them"
                raise ConfigError("restore", where="rename", expected=expected, got=repr(old))
        given = {name: _moved(name, rename) for name in names}
    odd = next((name for name, new in given.items() if not isinstance(new, str) or not new), None)
    if odd is not None:
        raise ConfigError("restore", where="rename", expected=f"a name for {odd!r}", got=repr(given[odd]))
    return {name: new for name, new in given.items() if new != name}


def renamed(form: Form, names: Mapping[str, str]) -> Form:
    """A form whose names are others, as `new_names` says.

    Raises:
        ConfigError: two would have one name.
    """
    if not names:
        return form
    root: dict[Any, Any] = {}
    for path, node in _paths(form, ()):
        now = names.get("/".join(map(quoted, path)))
        keys: tuple[Any, ...] = path if now is None else tuple(map(unquoted, now.split("/")))
        place = root
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ConfigError("restore", where="rename", expected="names that do not meet",
                                  got=repr("/".join(map(str, keys))))  # fmt: skip
        if keys[-1] in place:
            raise ConfigError(
                "restore", where="rename", expected="names that do not meet", got=f"{'/'.join(map(str, keys))!r} twice"
            )
        place[keys[-1]] = _Leaf(node)
    return _form_of(root)


@dataclass
class _Leaf:
    node: Form


def _paths(form: Form, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Form]]:
    if isinstance(form, dict) and "dict" in form and form["dict"]:
        for key, node in form["dict"]:
            yield from _paths(node, (*path, key))
    else:
        yield path, form


def _moved(name: str, rename: Mapping[str, str]) -> str:
    fitting = [old for old in rename if name == old or name.startswith(f"{old}/")]
    if not fitting:
        return name
    old = max(fitting, key=len)
    return f"{rename[old]}{name[len(old) :]}" if isinstance(rename[old], str) else rename[old]


def _form_of(value: Any) -> Form:
    if isinstance(value, _Leaf):
        return value.node
    return {"dict": [[key, _form_of(each)] for key, each in value.items()]}


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

    tensor: StoredTensor
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
        self, manifest: Manifest, form: flatten.Form, world: World, into: Any, strict: bool, renamed: Mapping[str, str]
    ) -> None:
        self._manifest, self._world, self._strict = manifest, world, strict
        self._names, self._into = flatten.parameter_names(into), into
        names = [name for name, _ in flatten.leaves(form)]
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

    def _plan(self, template: Any, node: flatten.Form, name: str, takes: _Takes) -> Value:
        try:
            return self._planned(template, node, name, takes)
        except TOLD as error:  # goes on, or others would wait for this rank
            self._error = self._error or refused("restore", name, error)
            return lambda: template

    def _planned(self, template: Any, node: flatten.Form, name: str, takes: _Takes) -> Value:
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

    def _per_rank(self, template: Any, nodes: list[flatten.Form], name: str, takes: _Takes) -> Value:
        inner = template.value if isinstance(template, PerRank) else template
        if len(nodes) == self._world.size:
            rank = self._world.rank
            return self._plan(inner, nodes[rank], flatten.joined(name, f"rank-{rank}"), takes)
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
            inner = flatten.joined(name, key)
            if str(key) in names:
                own = names.pop(str(key))
                planned[own] = self._plan(template[own], node, inner, takes)
            elif as_saved or takes is _Takes.ALL:
                planned[key] = self._plan(_NOTHING, node, inner, _Takes.ALL)
            else:
                self.left_over += [each for each, _ in flatten.leaves(node, inner)]
        for key in () if as_saved else names.values():
            inner, shares = flatten.joined(name, key), _shares(template[key])
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
            flatten.below(form, f"param_groups/{number}/param_names") for number in range(len(template["param_groups"]))
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
        planned = [self._plan(each, node, flatten.joined(name, at), takes)
                   for at, (each, node) in enumerate(zip(template, content, strict=True))]  # fmt: skip
        return lambda: kind(value() for value in planned)

    def _tensor(self, node: flatten.Form, name: str) -> StoredTensor:
        if not (isinstance(node, dict) and "tensor" in node):
            raise _misfit(name, "a tensor", node)
        return self._manifest.tensors[node["tensor"]]

    def _made(self, template: Any, node: flatten.Form, name: str, takes: _Takes) -> Value:
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

    def _filled(self, template: Any, tensor: StoredTensor, name: str) -> Value:
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

    def _sharded(self, template: Sharded, tensor: StoredTensor, name: str) -> Value:
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

    def _part(self, tensor: StoredTensor, part: Part, name: str, rows: int | None = None) -> None:
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
        own = [flatten.joined(name, key) for key, value in items if hasattr(value, "shape")]
        known = set(own)
        then = [each for each in saved if each in known]
        if then != [each for each in own if each in set(then)]:
            return True
    elif isinstance(into, Mapping):
        return False
    return any(_is_in_other_order(value, flatten.joined(name, key), saved) for key, value in items)


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


_MOST_REMOVED = 10
"""So many checkpoints may be removed by another job while they are read."""


def restore(path: Path, world: World, which: int | list[int], into: Any, strict: bool, rename: Any) -> Restored:
    """See `Manager.restore`.

    Args:
        path: of all checkpoints.
        which: the step, or all of which one may be taken, in order: the newest that is undamaged.
    """
    waitall()  # asynchronous calls under way may read what is filled
    asked = isinstance(which, int)
    steps = [which] if isinstance(which, int) else [*which]
    lost = [] if asked else [Path(each) for each in on_rank_0(world.comm, lambda: _lost(path, steps))]
    if not steps:
        got = f"{lost[-1].name} without {checkpoint_manifest.NAME}" if lost else "none"
        raise DataError("restore", where=path, expected="a complete checkpoint", got=got)
    for each in lost if world.rank == 0 else ():
        if directory.step_of(each) > steps[-1]:
            where = each / checkpoint_manifest.NAME
            warn(f"restore [{where}]: expected a file, got none: taking step {steps[-1]} instead")
    damaged: DataError | None = None
    read, removed = set[int](), 0
    while True:
        step = steps.pop()
        try:
            return _restore(path, world, step, into, strict, rename, bool(steps))
        except DataError as error:
            if asked:
                error.remedy = on_rank_0(world.comm, lambda: _offer(path, step))  # noqa: B023
                raise
            there: list[int] = on_rank_0(world.comm, lambda: [*found("restore", path)])
            read.add(step)
            steps = [each for each in there if each not in read]
            if step not in there:  # a job that saves here does not keep it; what that has saved since is there
                removed += 1
                if steps and removed < _MOST_REMOVED:
                    continue
                error.remedy = "another job removes checkpoints here before they are read: let it keep more"
                raise
            if not steps:
                if len(read) > 1:
                    error.remedy = f"no other is left: all {len(read)} checkpoints are damaged"
                raise
            if world.rank == 0:
                warn(f"{error}: taking step {steps[-1]} instead")
            damaged = error
        except ConfigError as error:
            if damaged is None:
                raise
            damaged.remedy = f"step {step} was to be taken instead: {error}"
            raise damaged from error  # of which there may be elements in ``into``, where nothing else has changed it


def found(operation: str, path: Path) -> dict[int, Path]:
    """See `folder.find`; a folder that cannot be listed is a `DataError`."""
    with failing(operation, lambda: path):
        return directory.find(path)


def best(operation: str, path: Path, metric: str) -> int:
    """See `folder.best_step`; of a folder that has no checkpoint a `DataError`, too."""
    return directory.best_step(operation, path, found(operation, path), metric)


def _lost(path: Path, complete: list[int]) -> list[str]:
    """What `folder.without_manifest` finds, the newest last."""
    with failing("restore", lambda: path):
        return [str(each) for _, each in sorted(directory.without_manifest(path, complete).items())]


def _offer(path: Path, damaged: int) -> str | None:
    """Which other checkpoint can be taken."""
    other = directory.another(found("restore", path), damaged)
    return None if other is None else f"restore(step={other}) takes another checkpoint"


def _restore(path: Path, world: World, step: int, into: Any, strict: bool, rename: Any, others: bool) -> Restored:
    comm, place = world.comm, directory.path_of(path, step)
    text, real_place = on_rank_0(comm, lambda: _read_manifest(path, step))
    saved = checkpoint_manifest.parse(text.encode(), place / checkpoint_manifest.NAME)
    names, outline = on_every_rank(comm, lambda: (new_names(saved.state, rename), flatten.outline("restore", into)))
    items = [f"{strict=}", *(f"{old} is called {new}" for old, new in names.items()), *outline]
    require_same(comm, "restore", items, "restore into the same on all ranks, by the same names")
    form = renamed(saved.state, names)
    filling = on_every_rank(comm, lambda: Filling(saved, form, world, into, strict, names))
    if others and not strict:  # which may lack names, of which this one must leave nothing where it is damaged
        on_every_rank(comm, lambda: filling.check(Path(real_place)))
    on_every_rank(comm, lambda: filling.read(Path(real_place)))
    state = on_every_rank(comm, filling.finish)
    return Restored(saved.step, state, place, saved.metrics, saved.config, filling.missing, filling.left_over,
                    filling.kept)  # fmt: skip


def _read_manifest(path: Path, step: int) -> tuple[str, str]:
    """On rank 0: the manifest's text, and the folder that it lies in, where all files have the size that it says."""
    place = found("restore", path).get(step)
    if place is None:
        raise DataError("restore", where=path, expected=f"a complete checkpoint of step {step}", got="none")
    content = checkpoint_manifest.content_of(place)
    for file in checkpoint_manifest.of_folder(content, place).files:
        try:
            _check_size(place / file.name, file.nbytes)
        except DataError as error:
            if file.name != checkpoint_manifest.INDEX_NAME:
                raise
            warn(f"{error}: restoring all the same, which does not need it; other programs do")
    return content.decode(), str(place)


def _check_size(path: Path, nbytes: int) -> None:
    with failing("restore", lambda: path):
        size = path.stat().st_size
    if size != nbytes:
        raise DataError("restore", where=path, expected=f"{nbytes} bytes", got=size)
