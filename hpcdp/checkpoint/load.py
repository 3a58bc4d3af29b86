"""Restoring of checkpoints on any number of ranks, into arrays and objects, with renamed entries.

`restore` chooses the checkpoint: that of a step, or the newest undamaged one. `Filling` plans which elements this rank
reads, and reads them.
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
from . import complete_steps, flatten
from . import manifest as checkpoint_manifest
from .flatten import MAKERS, TOLD, Form, as_array, check_parts, plain, quoted, raised, refused, stateful_of
from .hdf5_file import ShardReader, failing
from .manifest import Manifest, StoredTensor, read_elements, widened


def new_names(form: Form, rename: Mapping[str, str] | Callable[[str], str] | None) -> dict[str, str]:
    """Return new names of a form's entries by old ones, for entries that are renamed.

    Args:
        form: the form of the checkpoint's state.
        rename: a function of a name, or new names by old ones, for an entry and all below it; the longest old name
            wins.

    Raises:
        ConfigError: ``rename`` is neither, an old name is not in the form, or a new one is not a text.
    """
    if rename is None:
        return {}
    names = ["/".join(map(quoted, path)) for path, _ in _paths(form, ())]
    if callable(rename):
        try:
            new_by_old = {name: rename(name) for name in names}
        except TOLD as error:
            raise raised("restore", "rename", "a function of a name", error) from error
    else:
        instance("restore", "rename", rename, Mapping, "a dict of names, or a function")
        for old in rename:
            if not isinstance(old, str) or not any(f"{name}/".startswith(f"{old}/") for name in names):
                expected = "names of the checkpoint outside of lists, or their parts before a slash"
                raise ConfigError("restore", where="rename", expected=expected, got=repr(old))
        new_by_old = {name: _moved(name, rename) for name in names}
    odd = next((name for name, new in new_by_old.items() if not isinstance(new, str) or not new), None)
    if odd is not None:
        raise ConfigError("restore", where="rename", expected=f"a name for {odd!r}", got=repr(new_by_old[odd]))
    return {name: new for name, new in new_by_old.items() if new != name}


def renamed(form: Form, names: Mapping[str, str]) -> Form:
    """Return a form with the new names of `new_names`.

    Raises:
        ConfigError: two entries would have one name, or one would contain the other.
    """
    if not names:
        return form
    root: dict[Any, Any] = {}
    for path, node in _paths(form, ()):
        now = names.get("/".join(map(quoted, path)))
        keys: tuple[Any, ...] = path if now is None else tuple(map(unquoted, now.split("/")))
        place, text = root, "/".join(map(str, keys))
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ConfigError("restore", where="rename", expected="distinct names", got=f"{text!r} below an entry")
        if keys[-1] in place:
            raise ConfigError("restore", where="rename", expected="distinct names", got=f"{text!r} twice")
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
    return {"dict": [[key, _form_of(inner)] for key, inner in value.items()]}


Value = Callable[[], Any]
"""A function that returns the restored value once elements are read, when objects load their states."""
_NOTHING = object()
"""Template of an entry without an object or array to restore into."""


class _Takes(enum.Enum):
    """Owners of a part of a state, by their use of entries that only the checkpoint has."""

    NAMED = "the program: names must fit, but dicts and lists of plain values may differ in length"
    FITTING = "an object that restores its own entries alone"
    ALL = "an object that also gets further entries"


@dataclass
class Restored:
    """The result of `Manager.restore`."""

    step: int
    state: Any
    """The state as it was saved: dicts, lists, numbers and arrays, with the arrays and objects of ``into``."""
    path: Path
    metrics: dict[str, float]
    config: dict[str, Any]
    missing: list[str] = field(default_factory=list)
    """Names of entries of ``into`` that the checkpoint does not have, and that are unchanged."""
    left_over: list[str] = field(default_factory=list)
    """Names of entries of the checkpoint that were not restored."""
    kept: list[str] = field(default_factory=list)
    """Names of entries per rank that are unchanged, because the checkpoint is of another number of ranks."""


class _Span(NamedTuple):
    """A run of elements to read."""

    tensor: StoredTensor
    first: int
    out: np.ndarray
    """Array for the elements, shape ``(count,)``."""
    rows: int | None = None
    """Divisor of the sum over the tensor's rows, if that is read."""


class Filling:
    """The plan of the elements to read for a state, and its execution.

    Args:
        manifest: the manifest of the checkpoint.
        form: the form of its state, with new names.
        world: the ranks.
        into: the state to restore into; None: make whole arrays.
        strict: whether missing and left-over entries are errors.
        renamed: new names by old ones.

    Raises:
        ConfigError: an entry does not fit, or with ``strict`` is missing or left over; nothing is changed.
        UnsupportedError: a part of a `Sharded` is not a run of its elements.
    """

    def __init__(
        self, manifest: Manifest, form: flatten.Form, world: World, into: Any, strict: bool, renamed: Mapping[str, str]
    ) -> None:
        self._manifest, self._world, self._strict = manifest, world, strict
        self._names, self._into = flatten.parameter_names(into), into
        names = [name for name, _ in flatten.leaves(form)]
        self._saved = Saved(names, renamed, lambda tensor: manifest.tensors[tensor].shape)
        self._reads: list[_Span] = []
        self._write_back: list[tuple[str, Callable[[], object]]] = []
        """Names and functions that copy read elements to arrays that cannot be read into."""
        self.missing: list[str] = []
        self.left_over: list[str] = []
        self.kept: list[str] = []
        self._error: HpcdpError | None = None
        self._value = self._plan(_NOTHING if into is None else into, form, "", _Takes.NAMED)
        if self._error is not None:
            raise self._error
        if strict and (self.missing or self.left_over):
            both = (("only in into", self.missing), ("only in the checkpoint", self.left_over))
            wrong = [f"{listed(names)} {where}" for where, names in both if names]
            raise ConfigError(
                "restore", expected="the same names in `into` and the checkpoint", got=", ".join(wrong),
                remedy="pass strict=False to restore the common names, or rename={old: new}",
            )  # fmt: skip

    def check(self, path: Path) -> None:
        """Read all elements without changing anything.

        Raises:
            DataError: a file is missing or damaged.
        """
        with ShardReader(path) as reader:
            for run in self._reads:
                _read(reader, run._replace(out=np.empty_like(run.out)))

    def read(self, path: Path) -> None:
        """Read all elements from the folder of the checkpoint.

        Raises:
            DataError: a file is missing or damaged; other elements may have been read.
            HpcdpError: an array of the program has raised when it was written.
        """
        with ShardReader(path) as reader:
            for run in self._reads:
                _read(reader, run)
        for name, write in self._write_back:
            try:
                write()
            except TOLD as error:
                raise refused("restore", name, error) from error

    def finish(self) -> Any:
        """Let objects load their states, and return the whole state.

        Raises:
            HpcdpError: an object has raised; the others have loaded their states.
        """
        value = self._value()
        if self._error is not None:
            raise self._error
        return value

    def _plan(self, template: Any, node: flatten.Form, name: str, takes: _Takes) -> Value:
        try:
            return self._planned(template, node, name, takes)
        except TOLD as error:  # go on, because other ranks would wait for this one
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
                return lambda: self._loaded(template, stateful, inner(), name)
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
            raise _misfit(name, _kind_text(template), repr(value))
        kinds = _kind(template), _kind(value)
        if takes is _Takes.NAMED and template is not _NOTHING and None not in kinds and kinds[0] != kinds[1]:
            raise _misfit(name, kinds[0], repr(value))
        return lambda: value

    def _loaded(self, template: Any, stateful: Stateful, state: Any, name: str) -> Any:
        try:
            stateful.load_state_dict(state)
        except TOLD as error:  # go on, because the next objects may load collectively
            self._error = self._error or refused("restore", name, error)
        return template

    def _per_rank(self, template: Any, nodes: list[flatten.Form], name: str, takes: _Takes) -> Value:
        inner = template.value if isinstance(template, PerRank) else template
        if len(nodes) == self._world.size:
            rank = self._world.rank
            return self._plan(inner, nodes[rank], flatten.joined(name, f"rank-{rank}"), takes)
        self.kept.append(name)
        if takes is not _Takes.NAMED or inner is _NOTHING:
            return lambda: None  # an object handles None, see `PerRank`
        return lambda: inner

    def _dict(self, template: Any, content: list[Any], name: str, takes: _Takes) -> Value:
        if template is _NOTHING or template is None:
            return self._dict({}, content, name, _Takes.ALL)
        if not isinstance(template, Mapping):
            raise _misfit(name, _kind_text(template), "a dict")
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
                self.left_over += [leaf for leaf, _ in flatten.leaves(node, inner)]
        for key in () if as_saved else names.values():
            inner, shares = flatten.joined(name, key), _shares(template[key])
            if shares is None:
                self.missing.append(inner)
            else:
                self._write_back += [(inner, partial(_clear, share)) for share in shares]
            planned[key] = _as_is(template[key])
        return lambda: {key: value() for key, value in planned.items()}

    def _require_order(self, template: Mapping[Any, Any], content: list[Any], name: str) -> None:
        """Raise `ConfigError` for a state dict of a PyTorch optimizer that numbers parameters in another order.

        Such a dict identifies parameters by number, not by name.
        """
        form = {"dict": content}
        names = (
            flatten.below(form, f"param_groups/{number}/param_names") for number in range(len(template["param_groups"]))
        )
        saved = [node["list"] for node in names if isinstance(node, dict) and "list" in node]
        own = [[*group["param_names"]] for group in template["param_groups"] if "param_names" in group]
        moved = saved != own if saved and own else _is_in_other_order(self._into, "", self._saved.names)
        if moved:
            raise ConfigError(
                "restore", where=name or "the state", expected="parameters in the order of the checkpoint",
                got="another order, in which parameters would get each other's states",
                remedy="restore into the module and the optimizer themselves, which match by name",
            )  # fmt: skip

    def _list(self, template: Any, content: list[Any], name: str, takes: _Takes, kind: type) -> Value:
        is_nothing = template is _NOTHING or template is None
        if not (is_nothing or takes is _Takes.ALL or isinstance(template, list | tuple)):
            raise _misfit(name, _kind_text(template), f"a {kind.__name__}")
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
        planned = [self._plan(item, node, flatten.joined(name, at), takes)
                   for at, (item, node) in enumerate(zip(template, content, strict=True))]  # fmt: skip
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
        self._reads.append(_Span(tensor, 0, array.reshape(-1)))
        if isinstance(template, bool | int | float):
            shape = tensor.shape if takes is _Takes.ALL else ()
            return lambda: widened(array, tensor.dtype).reshape(shape)[()]
        make = MAKERS.get(node.get("kind", ""), MAKERS[""])
        return lambda: make(array, tensor.dtype)

    def _filled(self, template: Any, tensor: StoredTensor, name: str) -> Value:
        view = as_array(template)
        if view is None:
            raise _misfit(name, _kind_text(template), f"a tensor of shape {tensor.shape}")
        if (view.array.shape, view.dtype) != (tensor.shape, tensor.dtype):
            raise _misfit(name, f"shape {view.array.shape} {view.dtype}", f"shape {tensor.shape} {tensor.dtype}")
        if isinstance(template, np.generic):
            array = np.empty(tensor.shape, tensor.stored_dtype)
            self._reads.append(_Span(tensor, 0, array.reshape(-1)))
            return lambda: of_bits(array, tensor.dtype)[()]
        _require_writable(template, name)
        if view.overlaps:
            raise ConfigError(
                "restore", where=name or "the state", expected="a writable array",
                got="an array whose elements share memory", remedy="restore into a copy of it",
            )  # fmt: skip
        self._reads.append(_Span(tensor, 0, view.array.reshape(-1)))
        if view.write_back is not None:
            write, array = view.write_back, view.array
            self._write_back.append((name, lambda: write(array)))
        return lambda: template

    def _sharded(self, template: Sharded, tensor: StoredTensor, name: str) -> Value:
        own = plain("restore", name, template)
        parts = own.parts
        check_parts("restore", name, own, [part for part in parts if is_host(part.values)])
        shapes, dtype = (own.shape, tensor.shape), np.dtype(own.dtype).name
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
            self._reads.append(_Span(tensor, part.first, bits(place), rows))
        else:
            out = np.empty(place.shape, tensor.stored_dtype)
            self._reads.append(_Span(tensor, part.first, out, rows))
            self._write_back.append(
                (name, lambda: place.__setitem__(..., from_host(of_bits(out, tensor.dtype), place)))
            )


def _is_numbered(template: Mapping[Any, Any]) -> bool:
    """Return whether a dict is the state dict of a PyTorch optimizer, which numbers parameters."""
    groups = template.get("param_groups")
    return "state" in template and isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)


def _is_in_other_order(into: Any, name: str, saved: Sequence[str]) -> bool:
    """Return whether a dict of arrays within ``into`` has its names in another order than the checkpoint."""
    if not isinstance(into, Mapping | list | tuple):
        return False
    items = [*(into.items() if isinstance(into, Mapping) else enumerate(into))]
    if isinstance(into, Mapping) and not _is_numbered(into):
        own = [flatten.joined(name, key) for key, value in items if hasattr(value, "shape")]
        known = set(own)
        then = [saved_name for saved_name in saved if saved_name in known]
        if then != [own_name for own_name in own if own_name in set(then)]:
            return True
    elif isinstance(into, Mapping):
        return False
    return any(_is_in_other_order(value, flatten.joined(name, key), saved) for key, value in items)


def _require_writable(array: Any, name: str) -> None:
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ConfigError("restore", where=name or "the state", expected="a writable array", got="a read-only array",
                          remedy="restore into a copy of it")  # fmt: skip


def _misfit(name: str, expected: object, got: object) -> ConfigError:
    return ConfigError(
        "restore", where=name or "the state", expected=expected, got=f"{got} in the checkpoint",
        remedy="restore into what the state was saved from, or rename={old: new}",
    )  # fmt: skip


def _kind(value: Any) -> str | None:
    """Return the kind of value that may replace ``value``; None if any may."""
    if value is None:
        return None
    if isinstance(value, str):
        return "a text"
    return "a number" if isinstance(value, bool | int | float) else _kind_text(value)


def _is_plain(template: Any) -> bool:
    """Return whether ``template`` has only plain values, which cannot be filled in place."""
    if isinstance(template, Mapping | list | tuple):
        return all(map(_is_plain, template.values() if isinstance(template, Mapping) else template))
    return template is None or isinstance(template, bool | int | float | str)


def _shares(template: Any) -> list[Sharded] | None:
    """Return the values of a dict of `Sharded` with ``shares``; None for anything else.

    A checkpoint without them is of ranks without shares, as one node has no compression residuals: the sums are zero.
    """
    shares = list(template.values()) if isinstance(template, Mapping) else []
    return shares if shares and all(isinstance(share, Sharded) and share.shares for share in shares) else None


def _clear(share: Sharded) -> None:
    for part in share.parts:
        part.values[...] = 0


def _kind_text(template: Any) -> str:
    view = None if isinstance(template, Mapping | list | tuple) else as_array(template)
    return type_named(template) if view is None else f"shape {view.array.shape} {view.dtype}"


def _as_is(template: Any) -> Value:
    value = template.value if isinstance(template, PerRank) else template
    return lambda: value


def _read(reader: ShardReader, read: _Span) -> None:
    if read.rows is None:
        read_elements(reader, read.tensor, read.first, read.out)
    elif read.out.size:
        _read_shares(reader, read)


def _read_shares(reader: ShardReader, read: _Span) -> None:
    """Read the sum over all rows of a tensor at some columns, divided by ``read.rows``."""
    columns = math.prod(read.tensor.shape[1:])
    row, dtype = np.empty_like(read.out), read.tensor.dtype
    total = np.zeros_like(widened(row, dtype))
    for number in range(read.tensor.shape[0]):
        read_elements(reader, read.tensor, number * columns + read.first % columns, row)
        total += widened(row, dtype)
    total /= read.rows
    of_bits(read.out, dtype)[...] = total


_MOST_REMOVED = 10
"""Most checkpoints that another job may remove while they are read."""


def restore(path: Path, world: World, which: int | list[int], into: Any, strict: bool, rename: Any) -> Restored:
    """Restore a checkpoint; see `Manager.restore`.

    ``which`` is a step, or a list of steps in order, of which the newest undamaged one is restored.
    """
    waitall()  # asynchronous calls under way may read the arrays that are filled
    is_chosen = isinstance(which, int)
    steps = [which] if isinstance(which, int) else [*which]
    lost = [] if is_chosen else [Path(folder) for folder in on_rank_0(world.comm, lambda: _lost(path, steps))]
    if not steps:
        got = f"{lost[-1].name} without {checkpoint_manifest.NAME}" if lost else "none"
        raise DataError("restore", where=path, expected="a complete checkpoint", got=got)
    for folder in lost if world.rank == 0 else ():
        if complete_steps.step_of(folder) > steps[-1]:
            where = folder / checkpoint_manifest.NAME
            warn(f"restore [{where}]: expected a file, got none: taking step {steps[-1]} instead")
    damaged: DataError | None = None
    read, removed = set[int](), 0
    while True:
        step = steps.pop()
        try:
            return _restore(path, world, step, into, strict, rename, bool(steps))
        except DataError as error:
            if is_chosen:
                error.remedy = on_rank_0(world.comm, lambda: _offer(path, step))  # noqa: B023
                raise
            present: list[int] = on_rank_0(world.comm, lambda: [*found("restore", path)])
            read.add(step)
            steps = [other for other in present if other not in read]
            if step not in present:  # another job has removed it, and may have saved newer ones
                removed += 1
                if steps and removed < _MOST_REMOVED:
                    continue
                error.remedy = "raise keep of the job that saves here, which removes checkpoints before they are read"
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
            raise damaged from error  # elements of the damaged checkpoint may be in `into`


def found(operation: str, path: Path) -> dict[int, Path]:
    """Return `complete_steps.find`; a folder that cannot be listed is a `DataError`."""
    with failing(operation, lambda: path):
        return complete_steps.find(path)


def best(operation: str, path: Path, metric: str) -> int:
    """Return `complete_steps.best_step`; a folder without checkpoints is a `DataError`, too."""
    return complete_steps.best_step(operation, path, found(operation, path), metric)


def _lost(path: Path, complete: list[int]) -> list[str]:
    """Return the folders of `complete_steps.without_manifest`, the newest last."""
    with failing("restore", lambda: path):
        return [str(folder) for _, folder in sorted(complete_steps.without_manifest(path, complete).items())]


def _offer(path: Path, damaged: int) -> str | None:
    """Return the remedy that names another checkpoint; None without one."""
    other = complete_steps.another(found("restore", path), damaged)
    return None if other is None else f"call restore(step={other}) for another checkpoint"


def _restore(path: Path, world: World, step: int, into: Any, strict: bool, rename: Any, has_older: bool) -> Restored:
    comm, place = world.comm, complete_steps.path_of(path, step)
    text, real_place = on_rank_0(comm, lambda: _read_manifest(path, step))
    saved = checkpoint_manifest.parse(text.encode(), place / checkpoint_manifest.NAME)
    names, outline = on_every_rank(comm, lambda: (new_names(saved.state, rename), flatten.outline("restore", into)))
    items = [f"{strict=}", *(f"{old} is called {new}" for old, new in names.items()), *outline]
    require_same(comm, "restore", items, "restore into the same objects with the same names on all ranks")
    form = renamed(saved.state, names)
    filling = on_every_rank(comm, lambda: Filling(saved, form, world, into, strict, names))
    if has_older and not strict:  # an older checkpoint may lack entries, which a damaged one must not have changed
        on_every_rank(comm, lambda: filling.check(Path(real_place)))
    on_every_rank(comm, lambda: filling.read(Path(real_place)))
    state = on_every_rank(comm, filling.finish)
    return Restored(saved.step, state, place, saved.metrics, saved.config, filling.missing, filling.left_over,
                    filling.kept)  # fmt: skip


def _read_manifest(path: Path, step: int) -> tuple[str, str]:
    """Return the manifest's text and its folder, after a check of the sizes of all files; on rank 0."""
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
            warn(f"{error}: ignored, because only other programs need the index")
    return content.decode(), str(place)


def _check_size(path: Path, nbytes: int) -> None:
    with failing("restore", lambda: path):
        size = path.stat().st_size
    if size != nbytes:
        raise DataError("restore", where=path, expected=f"{nbytes} bytes", got=size)
