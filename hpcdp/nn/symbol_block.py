"""Exported networks: a graph and its tensors, usable without the class that defined them."""

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
from .module import Module, Parameter


def export(graph: Graph, path: str | Path) -> tuple[Path, Path]:
    """Write ``graph`` and its network's tensors; see `Module.export`.

    An older pair is replaced once both files are complete. The JSON file holds checksums of the tensors in the other.
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
    if os.path.basename(path) in ("", ".", ".."):
        expected = "a path that ends in a name, such as folder/net"
        raise ConfigError(operation, where=path, expected=expected, got="a folder")
    base = Path(path)
    if base.suffix == ".json":
        base = base.with_suffix("")
    return base.with_name(base.name + ".json"), base.with_name(base.name + ".h5")


class _TensorHolder(Module):
    """Container for tensors of a `SymbolBlock` with dotted names."""


class SymbolBlock(Module):
    """Network loaded from the files of `Module.export`; create it with `load`.

    It predicts the same bits as the exported network. Its parameters have the same names, get gradients, and can be
    trained further. Layers stay in prediction mode: batch normalization uses running statistics, and dropout is
    inactive. It accepts any batch size, unless the forward used the batch size as a number, e.g. as the divisor of a
    mean. All other shapes are fixed.

    Source: the interface is that of Gluon's ``SymbolBlock.imports``.
    """

    def __init__(self, graph: Graph) -> None:
        self.__graph = graph  # mangled, so that no child has this name
        for name, value in zip(graph.names, graph.held, strict=True):
            *parts, last = name.split(".")
            parent: Module = self
            for part in parts:
                if part not in vars(parent):
                    setattr(parent, part, _TensorHolder())
                parent = vars(parent)[part]
            setattr(parent, last, value)

    @classmethod
    def load(cls, path: str | Path) -> SymbolBlock:
        """Return the network exported to ``path``, given with or without ``.json``.

        Raises:
            ConfigError: ``path`` is a folder.
            DataError: a file is missing, damaged, or from another export. The error names it.
        """
        description, parameters = _files("load", path)
        try:
            content = json.loads(description.read_text())
        except OSError as error:
            raise DataError("load", where=description, expected="an exported graph", got=error.strerror) from error
        except (ValueError, RecursionError) as error:
            raise DataError("load", where=description, expected="an exported graph", got=error) from error
        graph, tensors = Reader(description, content).graph()
        arrays = hdf5.read_arrays(
            parameters, {entry["name"]: (entry["meta"].shape, entry["meta"].dtype) for entry in tensors}
        )
        held: list[Any] = []
        for entry in tensors:
            array = arrays[entry["name"]]
            if zlib.crc32(bits(np.ascontiguousarray(array)).data) != entry["crc32"]:
                raise DataError(
                    "load", where=f"{parameters}:{entry['name']}", expected="the values exported with the graph",
                    got="a different checksum", remedy="copy both files of one export, or export again",
                )  # fmt: skip
            held.append({"parameter": Parameter, "buffer": Tensor}.get(entry["kind"], np.asarray)(array))
            _require_name(description, entry["name"])
        _try(graph := with_held(graph, held), description)
        return cls(graph)

    def forward(self, *inputs: Any) -> Any:
        """Compute the exported network; inputs need the exported shapes and dtypes."""
        graph = self.__graph
        any_batch = graph.any_batch
        given = [(meta.ndim, tuple(meta.shape[any_batch:]), str(meta.dtype)) for meta in inputs]
        expected = [(len(meta.shape), meta.shape[any_batch:], meta.dtype) for meta in graph.inputs]
        if given != expected:
            shape_of = _any_batch if any_batch else tuple
            shapes = ", ".join(f"{meta.dtype} of shape {shape_of(meta.shape)}" for meta in graph.inputs)
            got = ", ".join(f"{meta.dtype} of shape {tuple(meta.shape)}" for meta in inputs)
            raise ConfigError("SymbolBlock", where="inputs", expected=shapes, got=got or "none")
        return _computed(graph, inputs)

    def describe(self) -> str:
        """Return the number of operations, shown in ``repr``."""
        return f"{len(self.__graph.nodes)} operations"


def _computed(graph: Graph, inputs: Any, check: bool = False) -> Any:
    """Return the outputs of ``graph``; with ``check`` raise `ValueError` if a result contradicts its metadata."""
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
        result = call(node, [value(source) for source in node.inputs], CALLS)
        results.append(list(result) if isinstance(result, tuple) else [result])
        declared = [(meta.shape, meta.dtype) for meta in node.outputs]
        if check and declared != [(tuple(output.shape), str(output.dtype)) for output in results[-1]]:
            raise ValueError(f"node {number} ({node.operator}), whose shapes or dtypes differ from the file")
    return graph.returned(value)


def _try(graph: Graph, where: Path) -> None:
    """Compute once on zeros, so that an inconsistent or manipulated graph is refused now, by name."""
    try:
        zeros = [Tensor(np.zeros(meta.shape, dtype_of(meta.dtype))) for meta in graph.inputs]
        with pause(), np.errstate(all="ignore"):
            _computed(graph, zeros, check=True)
    except (HpcdpError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, MemoryError) as error:
        raise DataError("load", where=where, expected="a computable graph", got=error) from error


def _any_batch(shape: tuple[int, ...]) -> str:
    return f"({', '.join(['batch', *map(str, shape[1:])])})" if shape else "()"


def _require_name(where: Path, name: str) -> None:
    """Raise `DataError` if a tensor's name would replace an attribute of `Module`."""
    parts = name.split(".")
    if any(hasattr(Module, part) or part.startswith("_SymbolBlock__") for part in parts):
        raise DataError("load", where=where, expected="tensor names that a network can have", got=repr(name))
