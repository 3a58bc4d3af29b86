"""A network that was exported: its graph and its parameters, without the class that it was made by."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ..autograd import Tensor, pause
from ..autograd.tape import CALLS
from ..core import hdf5
from ..core.arrays import bits, dtype_of
from ..core.files import own_part_of, replaced
from ..errors import ConfigError, DataError, HpcdpError
from .jit.graph import (
    CapturedTensor,
    Graph,
    Input,
    Literal,
    Reader,
    Result,
    Source,
    arrays_of,
    as_json,
    call,
    with_held,
)
from .module import Module
from .parameter import Parameter


def export(graph: Graph, path: str | Path) -> tuple[Path, Path]:
    """Write ``graph`` to ``path`` with ``.json`` and what its network holds to ``path`` with ``.h5``; their paths.

    They replace an older pair when both are complete, and the first says what the second must hold.

    Raises:
        DataError: they cannot be written.
        ConfigError: the graph has something that cannot be written down, or ``path`` has no name.
    """
    description, parameters = _files("export", path)
    arrays = arrays_of(graph)
    text = json.dumps(as_json(graph, arrays), indent=1)
    try:
        with replaced(description, own_part_of) as part:
            part.write_text(text + "\n")
            hdf5.write_arrays(parameters, arrays)
    except OSError as error:
        raise DataError("export", where=description, expected="a file that can be written", got=error) from error
    return description, parameters


def _files(operation: str, path: str | Path) -> tuple[Path, Path]:
    if os.path.basename(path) in ("", ".", ".."):  # files beside the folder would surprise
        expected = "a path that ends in a name, such as folder/net"
        raise ConfigError(operation, where=path, expected=expected, got="that of a folder")
    base = Path(path)
    if base.suffix == ".json":
        base = base.with_suffix("")
    return base.with_name(base.name + ".json"), base.with_name(base.name + ".h5")


class _Part(Module):
    """What holds tensors of a `SymbolBlock` whose names have several parts."""


class SymbolBlock(Module):
    """A network from the files of `Module.export`, made by `load`.

    It computes what the exported network predicted, to the bit; its parameters have the same names, get gradients, and
    can be trained further (layers go on as in prediction: batch normalisation by running statistics, no dropout). It
    takes batches of any size, unless its forward made numbers of the batch's, as the divisor of a mean over it is one;
    all else is as it was when exported.

    Source: the model is that of Gluon's ``SymbolBlock.imports``.
    """

    def __init__(self, graph: Graph) -> None:
        self.__graph = graph  # by a name that no part of a network has
        for name, value in zip(graph.names, graph.held, strict=True):
            *parts, last = name.split(".")
            place: Module = self
            for part in parts:
                if part not in vars(place):
                    setattr(place, part, _Part())
                place = vars(place)[part]
            setattr(place, last, value)

    @classmethod
    def load(cls, path: str | Path) -> SymbolBlock:
        """The network that was exported to ``path``, with or without ``.json``. Its class is not needed.

        Raises:
            ConfigError: ``path`` is a folder's.
            DataError: a file is missing, damaged, or not of the same export; names it.
        """
        description, parameters = _files("load", path)
        try:
            read = json.loads(description.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise DataError("load", where=description, expected="a graph that was exported", got=error) from error
        graph, tensors = Reader(description, read).graph()
        arrays = hdf5.read_arrays(
            parameters, {each["name"]: (each["meta"].shape, each["meta"].dtype) for each in tensors}
        )
        held: list[Any] = []
        for each in tensors:
            array = arrays[each["name"]]
            if zlib.crc32(bits(np.ascontiguousarray(array)).data) != each["crc32"]:
                raise DataError(
                    "load", where=f"{parameters}:{each['name']}", expected="what was exported with the graph",
                    got="other values", remedy="copy both files, or export again",
                )  # fmt: skip
            held.append({"parameter": Parameter, "buffer": Tensor}.get(each["kind"], np.asarray)(array))
            _require_name(description, each["name"])
        _try(graph := with_held(graph, held), description)
        return cls(graph)

    def forward(self, *inputs: Any) -> Any:
        graph = self.__graph
        any_batch = graph.any_batch
        given = [(each.ndim, tuple(each.shape[any_batch:]), str(each.dtype)) for each in inputs]
        expected = [(len(each.shape), each.shape[any_batch:], each.dtype) for each in graph.inputs]
        if given != expected:
            shape_of = _any_batch if any_batch else tuple
            shapes = ", ".join(f"{each.dtype} of shape {shape_of(each.shape)}" for each in graph.inputs)
            got = ", ".join(f"{each.dtype} of shape {tuple(each.shape)}" for each in inputs)
            raise ConfigError("SymbolBlock", where="inputs", expected=shapes, got=got or "none")
        return _computed(graph, inputs)

    def describe(self) -> str:
        return f"{len(self.__graph.nodes)} operations"


def _computed(graph: Graph, inputs: Any, check: bool = False) -> Any:
    """The outputs of ``graph``; with ``check`` a `ValueError` for a node that gives something else than it says."""
    results: list[list[Any]] = []

    def value(source: Source) -> Any:
        if isinstance(source, Input):
            return inputs[source.number]
        if isinstance(source, CapturedTensor):
            held = graph.held[source.number]
            return held.data if source.is_detached and isinstance(held, Tensor) else held
        if isinstance(source, Result):
            return results[source.node][source.output]
        return source.operand() if isinstance(source, Literal) else None

    for number, node in enumerate(graph.nodes):
        found = call(node, [value(each) for each in node.inputs], CALLS)
        results.append(list(found) if isinstance(found, tuple) else [found])
        declared = [(each.shape, each.dtype) for each in node.outputs]
        if check and declared != [(tuple(each.shape), str(each.dtype)) for each in results[-1]]:
            raise ValueError(f"node {number} ({node.operator}), which gives other shapes or dtypes than it says")
    return graph.returned(value)


def _try(graph: Graph, where: Path) -> None:
    """Compute once on zeros: then a graph that was tampered with is refused now, by name."""
    try:
        zeros = [Tensor(np.zeros(each.shape, dtype_of(each.dtype))) for each in graph.inputs]
        with pause(), np.errstate(all="ignore"):
            _computed(graph, zeros, check=True)
    except (HpcdpError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, MemoryError) as error:
        raise DataError("load", where=where, expected="a graph that can be computed", got=error) from error


def _any_batch(shape: tuple[int, ...]) -> str:
    return f"({', '.join(['batch', *map(str, shape[1:])])})" if shape else "()"


def _require_name(where: Path, name: str) -> None:
    """No tensor may take the place of what networks are made of."""
    parts = name.split(".")
    if any(hasattr(Module, part) or part.startswith("_SymbolBlock__") for part in parts):
        raise DataError("load", where=where, expected="names of a network's tensors", got=repr(name))
