"""What `hpcdp checkpoint show` prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checkpoint import names, tree
from ..checkpoint.manifest import Manifest, Tensor
from ..checkpoint.statistics import Statistics
from ..errors import ConfigError
from . import texts

_NO_VALUE = object()
_SHAPE_WIDTH = 32


class _Placeholder:
    """So that what stands beside tensors in a list keeps its number."""

    def __repr__(self) -> str:
        return "(tensors)"


_TENSORS = _Placeholder()


def whole(found: Manifest, path: Path) -> Iterator[str]:
    """All there is to say of a checkpoint."""
    nbytes = sum(file.nbytes for file in found.files)
    ranks, nodes = (found.world.get(name, "?") for name in ("size", "num_nodes"))
    yield from texts.fact("checkpoint", str(path))
    yield from texts.fact("step", f"{found.step}, written {texts.local_time(found.written)}")
    yield from texts.fact("world", f"ranks {ranks}, nodes {nodes}")
    tensors, files = texts.counted(len(found.tensors), "tensor"), texts.counted(len(found.files), "file")
    yield from texts.fact(
        "size", f"{texts.size(found.nbytes)} of elements in {tensors}, {texts.size(nbytes)} in {files}"
    )
    yield from texts.fact(
        "versions", ", ".join(f"{name} {' '.join(what.split())}" for name, what in found.versions.items())
    )
    if found.metrics:
        yield from texts.fact("metrics", texts.numbers(found.metrics))
    yield from _section("config", texts.tree(found.config, 2))
    yield from part(found, "")


def part(found: Manifest, name: str) -> Iterator[str]:
    """The tensors and values that lie below a name; "": all."""
    form = tree.below(found.state, name) if name else found.state
    named = [(each, node["tensor"]) for each, node in tree.entries(form, name)
             if isinstance(node, dict) and "tensor" in node]  # fmt: skip
    tensors = [(each, found.tensors[key]) for each, key in named]
    if tensors:
        yield from [""] if not name else []
        rows = [
            (each or "state", texts.shape(of.shape, _SHAPE_WIDTH), of.dtype, f"{of.nbytes:,}", f"{len(of.parts)}")
            for each, of in tensors
        ]
        yield from texts.table(("tensor", "shape", "dtype", "bytes", "parts"), rows, (3, 4))
    values = _values(form)
    if isinstance(values, dict):
        yield from _section("values", texts.tree(values, 2))
    elif values is not _NO_VALUE:
        yield from _section("values", texts.tree({name.rpartition("/")[2] or "state": values}, 2))


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    made = list(lines)
    if made:
        yield from ["", title, *made]


def _values(form: tree.Form) -> Any:
    """The nested values of a form, without tensors and what holds nothing else; of what is per rank, rank 0's."""
    if not isinstance(form, dict):
        return form
    ((tag, content), *_) = form.items()
    if tag == "tensor":
        return _NO_VALUE
    if tag == "float":
        return float(content)
    if tag == "ranks":
        first = _values(content[0]) if content else _NO_VALUE
        return first if first is _NO_VALUE else {f"rank 0 of {len(content)}": first}
    if tag == "dict":
        kept = {key: _values(node) for key, node in content}
        kept = {key: value for key, value in kept.items() if value is not _NO_VALUE}
        return kept if kept or not content else _NO_VALUE
    listed = [*map(_values, content)]
    if content and all(value is _NO_VALUE for value in listed):
        return _NO_VALUE
    return (tuple if tag == "tuple" else list)(_TENSORS if value is _NO_VALUE else value for value in listed)


def tensor_called(found: Manifest, name: str) -> Tensor | None:
    """The tensor of that name, None where other things lie below it.

    Raises:
        ConfigError: there is nothing of that name.
    """
    nodes = dict(tree.entries(found.state))
    if name in nodes:
        node = nodes[name]
        return found.tensors[node["tensor"]] if isinstance(node, dict) and "tensor" in node else None
    if any(each.startswith(f"{name}/") for each in nodes):
        return None
    raise ConfigError("show", expected="a name of the state", got=repr(name),
                      remedy=names.remedy(found.state, name) or "without a name it shows all")  # fmt: skip


def one(name: str, tensor: Tensor, of: Statistics) -> Iterator[str]:
    """One tensor and its statistics."""
    yield from texts.fact("tensor", name)
    yield from texts.fact("shape", f"{texts.shape(tensor.shape)} {tensor.dtype}, {texts.size(tensor.nbytes)}")
    files = [f"{part.file} {part.dataset} ({part.count:,} elements)" for part in tensor.parts]
    more = [f"and {len(files) - 4} more"] if len(files) > 4 else []
    for number, file in enumerate([*files[:4], *more]):
        yield from texts.fact("" if number else "parts", file)
    if of.count:
        about = " of absolute values" if tensor.dtype.startswith("complex") else ""
        yield from texts.fact("range", f"{of.smallest:.6g} to {of.largest:.6g}{about}")
        yield from texts.fact("mean", f"{of.mean:.6g}, standard deviation {of.deviation:.6g}")
        yield from texts.fact("zeros", f"{of.zeros:,} of {tensor.count:,}")
    yield from texts.fact("NaNs", f"{of.nans:,}, infinities {of.infinities:,}")
