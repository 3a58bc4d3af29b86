"""Graphs as JSON, and back; what comes back is checked before anything is computed by it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...autograd import Tensor
from ...autograd.dispatch import OPERATORS
from ...core.arrays import bits, dtype_of, is_float, to_host
from ...errors import ConfigError, DataError
from .graph import CapturedTensor, Graph, GraphNode, Input, Literal, Meta, Result, Source

FORMAT, VERSION = "hpcdp graph", 1
_AS_IT_WAS = 0
"""The first number of a new shape that is the batch, whatever its size."""


def arrays_of(graph: Graph) -> dict[str, np.ndarray]:
    """What the graph's network holds, by name, in host memory."""
    values = [each.data if isinstance(each, Tensor) else each for each in graph.held]
    return {name: np.asarray(to_host(value), order="C") for name, value in zip(graph.names, values, strict=True)}


def as_json(graph: Graph, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The graph of a prediction, of which `arrays_of` are saved beside it.

    Raises:
        ConfigError: an operator has something that cannot be written down.
    """
    calls = calls_as_json(graph)
    nodes = zip(calls["nodes"], graph.nodes, strict=True)
    return {
        "format": FORMAT,
        "version": VERSION,
        "any_batch": graph.any_batch,
        "inputs": [_meta(each) for each in graph.inputs],
        "tensors": [
            {
                "name": name,
                "kind": "parameter" if hasattr(held, "held") else "buffer" if isinstance(held, Tensor) else "array",
                **_meta(Meta(arrays[name].shape, str(arrays[name].dtype))),
                "crc32": zlib.crc32(bits(arrays[name]).data),
            }
            for name, held in zip(graph.names, graph.held, strict=True)
        ],
        **calls,
        "nodes": [{**call, "outputs": [_meta(each) for each in node.outputs]} for call, node in nodes],
    }


def calls_as_json(graph: Graph) -> dict[str, Any]:
    """What `as_json` has of the graph beside shapes and dtypes: which operators are called with what.

    Raises as that does.
    """
    return {
        "nodes": [
            {
                "operator": node.operator,
                "inputs": [_source(each, node) for each in node.inputs],
                "attributes": {name: _value(node, each) for name, each in _attributes(graph, node).items()},
            }
            for node in graph.nodes
        ],
        "outputs": [_source(each) for each in graph.outputs],
        "form": graph.form,
    }


def _attributes(graph: Graph, node: GraphNode) -> dict[str, Any]:
    """Those of ``node``; a new shape that begins with the batch does so for any batch."""
    if node.operator != "reshape":
        return node.attributes
    source, shape = node.inputs[0], node.attributes["shape"]
    had: tuple[int, ...] = ()
    if isinstance(source, Result):
        had = graph.nodes[source.node].outputs[source.output].shape
    elif isinstance(source, Input):
        had = graph.inputs[source.number].shape
    return {"shape": (_AS_IT_WAS, *shape[1:]) if had[:1] == shape[:1] != () else shape}


def _meta(meta: Meta) -> dict[str, Any]:
    return {"shape": list(meta.shape), "dtype": meta.dtype}


def _source(source: Source, node: GraphNode | None = None) -> dict[str, Any] | None:
    if isinstance(source, Input):
        return {"input": source.number}
    if isinstance(source, CapturedTensor):
        return {"tensor": source.number, "detached": source.is_detached}
    if isinstance(source, Result):
        return {"node": source.node, "output": source.output}
    if source is None:
        return None
    if not isinstance(source.value, (bool, int, float, list)):
        raise _not_written("output" if node is None else node.operator, "numbers of at most 64 bits", source.value)
    return {"number": source.value, "dtype": source.dtype}


def _value(node: GraphNode, value: Any) -> Any:
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, slice):
        return {"slice": [_value(node, each) for each in (value.start, value.stop, value.step)]}
    if isinstance(value, tuple):
        return {"tuple": [_value(node, each) for each in value]}
    if isinstance(value, np.generic) and isinstance(value.item(), float):
        return {"number": [value.item(), str(value.dtype)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise _not_written(node.operator, "numbers, texts and slices as attributes", value)


def _not_written(where: str, expected: str, got: Any) -> ConfigError:
    return ConfigError("export", where=where, expected=expected, got=type(got).__name__)


class Reader:
    """Reads what `as_json` has written.

    Args:
        where: what errors call the file.
    """

    def __init__(self, where: object, read: Any) -> None:
        self._where, self._read = where, read

    def graph(self) -> tuple[Graph, list[dict[str, Any]]]:
        """The graph, whose ``held`` is empty, and what it says of each tensor that belongs there.

        Raises:
            DataError: the file is of another kind, or does not fit itself.
        """
        read = self._read
        self._require(isinstance(read, dict) and read.get("format") == FORMAT, f"a file of {FORMAT}")
        self._require(read.get("version") == VERSION, f"version {VERSION}", read.get("version"))
        try:
            graph = Graph(tuple(map(self._meta, read["inputs"])), form=read["form"], any_batch=read["any_batch"])
            self._require(type(graph.any_batch) is bool, "any_batch true or false", graph.any_batch)
            tensors = [self._tensor(each) for each in read["tensors"]]
            graph.names = [each["name"] for each in tensors]
            self._require(len(set(graph.names)) == len(tensors), "a name for each tensor", graph.names)
            self._require(graph.form in ("one", "tuple", "list"), "form one, tuple or list", graph.form)
            for each in read["nodes"]:
                graph.nodes.append(self._node(each, graph))
            graph.outputs = tuple(self._input(each, graph) for each in read["outputs"])
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise self._error("an undamaged graph", f"{type(error).__name__}: {error}") from error
        self._require(len(graph.outputs) == 1 or graph.form != "one", "one output", len(graph.outputs))
        return graph, tensors

    def _error(self, expected: object, got: object = None) -> DataError:
        return DataError("read graph", where=self._where, expected=expected, got=got, remedy="export it again")

    def _require(self, holds: bool, expected: object, got: object = None) -> None:
        if not holds:
            raise self._error(expected, got)

    def _meta(self, read: Any) -> Meta:
        shape = tuple(read["shape"])
        self._require(all(type(n) is int and n >= 0 for n in shape), "shapes of whole numbers", shape)
        dtype = dtype_of(read["dtype"])
        self._require(dtype.kind in "biufc" or is_float(dtype), "dtypes of numbers", read["dtype"])
        return Meta(shape, str(dtype))

    def _tensor(self, read: Any) -> dict[str, Any]:
        self._require(read["kind"] in ("parameter", "buffer", "array"), "kinds of tensors", read["kind"])
        self._require(type(read["name"]) is str and all(read["name"].split(".")), "names of tensors", read["name"])
        self._require(type(read["crc32"]) is int, "checksums", read["crc32"])
        return {"name": read["name"], "kind": read["kind"], "meta": self._meta(read), "crc32": read["crc32"]}

    def _number(self, number: Any, below: int, what: str) -> int:
        self._require(type(number) is int and 0 <= number < below, f"a {what} from 0 to {below - 1}", number)
        return int(number)

    def _input(self, read: Any, graph: Graph) -> Source:
        if read is None:
            return None
        if "input" in read:
            return Input(self._number(read["input"], len(graph.inputs), "number of an input"))
        if "tensor" in read:
            return CapturedTensor(
                self._number(read["tensor"], len(graph.names), "number of a tensor"), bool(read["detached"])
            )
        if "node" in read:
            node = self._number(read["node"], len(graph.nodes), "number of an earlier node")
            return Result(node, self._number(read["output"], len(graph.nodes[node].outputs), "number of an output"))
        value, dtype = read["number"], read["dtype"]
        self._require(_is_numbers(value), "numbers", value)
        return Literal(value, None if dtype is None else str(dtype_of(dtype)))

    def _node(self, read: Any, graph: Graph) -> GraphNode:
        operator = OPERATORS.get(read["operator"])
        self._require(operator is not None, "operators of this version", read["operator"])
        assert operator is not None
        attributes = {name: self._value(each) for name, each in read["attributes"].items()}
        self._require(
            set(attributes) == set(operator.attributes) and "generator" not in attributes,
            f"attributes of {operator.name}", ", ".join(attributes),
        )  # fmt: skip
        inputs = tuple(self._input(each, graph) for each in read["inputs"])
        fits = len(inputs) == len(operator.inputs) or operator.takes_many
        self._require(fits, f"{len(operator.inputs)} inputs of {operator.name}", len(inputs))
        return GraphNode(operator.name, inputs, attributes, tuple(map(self._meta, read["outputs"])))

    def _value(self, read: Any) -> Any:
        if isinstance(read, dict):
            ((kind, value),) = read.items()
            if kind == "ellipsis":
                return Ellipsis
            self._require(kind in ("slice", "tuple", "number"), "attributes", read)
            values = [self._value(each) for each in value]
            if kind == "number":
                number, dtype = values[0], dtype_of(values[1])
                self._require(type(number) is float and is_float(dtype), "a number of floating point", read)
                return dtype.type(number)
            return slice(*values) if kind == "slice" else tuple(values)
        self._require(read is None or isinstance(read, (bool, int, float, str)), "attributes", read)
        return read


def _is_numbers(read: Any) -> bool:
    return all(map(_is_numbers, read)) if type(read) is list else isinstance(read, (bool, int, float))


def call(node: GraphNode, operands: list[Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
    """What ``node`` computes from ``operands``, by the functions of `registry.CALLS`."""
    operator, attributes = OPERATORS[node.operator], node.attributes
    if node.operator == "reshape" and attributes["shape"][:1] == (_AS_IT_WAS,):
        attributes = {"shape": (operands[0].shape[0], *attributes["shape"][1:])}
    if operator.takes_many:
        return functions[node.operator](*operands, **attributes)
    return functions[node.operator](**dict(zip(operator.inputs, operands, strict=True)), **attributes)


def with_held(graph: Graph, held: list[Any]) -> Graph:
    """The graph that was read, with its network's tensors."""
    return replace(graph, held=held, kinds=[(each.shape, each.dtype) for each in held])
