"""Graphs of traced networks: their nodes, rewriting passes, summary and drawing, and JSON serialization.

Rewriting merges operators that need fewer passes over memory, with the same bits. A graph read from JSON is checked
before anything is computed with it.
"""

from __future__ import annotations

import math
import textwrap
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...autograd import Tensor
from ...autograd.tape import OPERATORS
from ...core.arrays import bits, dtype_of, is_float, to_host
from ...core.checks import file_name
from ...errors import ConfigError, DataError, HpcdpError


@dataclass(frozen=True)
class Input:
    """Input of the network, by number."""

    number: int


@dataclass(frozen=True)
class CapturedTensor:
    """Tensor or array that the network has as an attribute, by number."""

    number: int
    is_detached: bool = False
    """True if only the tensor's array is meant, through which no gradient flows."""


@dataclass(frozen=True)
class Result:
    """Output of an earlier node."""

    node: int
    output: int = 0


@dataclass(frozen=True)
class Literal:
    """Number, or nested lists of numbers, of a NumPy dtype, or of Python if that is None."""

    value: Any
    dtype: str | None = None

    def operand(self) -> Any:
        """Return the value as operators take it."""
        return self.value if self.dtype is None else _of_type(dtype_of(self.dtype).type, self.value)


def _of_type(kind: Callable[[Any], Any], value: Any) -> Any:
    return [_of_type(kind, element) for element in value] if isinstance(value, list) else kind(value)


Source = Input | CapturedTensor | Result | Literal | None


@dataclass(frozen=True)
class Meta:
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class GraphNode:
    """One call of an operator."""

    operator: str
    inputs: tuple[Source, ...]
    attributes: dict[str, Any]
    outputs: tuple[Meta, ...]
    is_recorded: bool = True
    """True if the call was put on the tape if the network's was: not inside ``with autograd.pause()``."""

    def results(self) -> Iterator[Result]:
        """Return an iterator over the results that it reads."""
        return (meta for meta in self.inputs if isinstance(meta, Result))


@dataclass
class Graph:
    """Nodes of a traced network in the order of their calls.

    ``form`` says how ``outputs`` were returned: "one", "tuple" or "list".
    """

    inputs: tuple[Meta, ...]
    held: list[Any] = field(default_factory=list)
    """Tensors and arrays of the network."""
    names: list[str] = field(default_factory=list)
    """Paths of ``held`` in the network."""
    kinds: list[tuple[tuple[int, ...], Any]] = field(default_factory=list)
    """Shape and dtype of each of ``held``."""
    lists: list[tuple[Any, Any]] = field(default_factory=list)
    """Lists of numbers in the program that became literals, each with a copy of its traced content."""
    nodes: list[GraphNode] = field(default_factory=list)
    outputs: tuple[Source, ...] = ()
    form: str = "one"
    any_batch: bool = False
    """True if the graph is known to be valid for any batch size, not only that of ``inputs``."""

    def summary(self) -> str:
        """Return a table of the operations: operands, shape and bytes of results, parameters at their first reader."""
        counted: set[int] = set()
        rows = [("", "operation", "reads", "shape", "parameters", "bytes")]
        rows += [
            ("", f"input {i}", "", _shape(meta.shape), "", f"{meta.nbytes:,}") for i, meta in enumerate(self.inputs)
        ]
        for number, node in enumerate(self.nodes):
            count = _count_new(self, node, counted)
            reads = ", ".join(filter(None, (_name(self, source) for source in node.inputs)))
            out = node.outputs[0]
            rows.append(
                (str(number), title(node), reads, _shape(out.shape), f"{count:,}" if count else "", f"{out.nbytes:,}")
            )
        table = [line for row in rows for line in _wrapped(row, _reads_width(rows))]
        widths = [max(len(row[i]) for row in table) for i in range(len(rows[0]))]
        lines = []
        for row in table:
            sized = enumerate(zip(row, widths, strict=True))
            cells = [cell.ljust(width) if 1 <= i <= 3 else cell.rjust(width) for i, (cell, width) in sized]
            lines.append("  ".join(cells).rstrip())
        total = sum(math.prod(shape) for held, (shape, _) in zip(self.held, self.kinds, strict=True) if _learnt(held))
        nbytes = sum(node.outputs[0].nbytes for node in self.nodes)
        outputs = ", ".join(_name(self, output) for output in self.outputs)
        totals = f"{len(self.nodes)} operations, {total:,} parameters, {nbytes:,} bytes of results; returns {outputs}"
        return "\n".join([*lines, *textwrap.wrap(totals, _COLUMNS)])

    def draw(self, path: str | Path) -> None:
        """Draw the operations from top to bottom into a PNG, SVG or PDF, replacing the file.

        A box shows an operation, its result's shape and the parameters it reads; arrows show the results it reads.

        Args:
            path: the file; its suffix selects the format.

        Raises:
            ConfigError: another suffix, or a missing folder.
            OSError: the file cannot be written.
        """
        path = file_name("draw", "path", path, _ENDINGS)
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyBboxPatch

        places = _places(self)
        columns = [x for x, _ in places.values()]
        depth = max(y for _, y in places.values()) + 1
        width, height = (max(columns) - min(columns) + 1) * _STEP[0] + 0.6, depth * _STEP[1] + 0.2
        figure = Figure((min(width, _MOST_INCHES), min(height, _MOST_INCHES)))
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim((min(columns) - 0.5) * _STEP[0] - 0.3, (max(columns) + 0.5) * _STEP[0] + 0.3)
        axes.set_ylim(-(depth - 0.5) * _STEP[1] - 0.1, 0.5 * _STEP[1] + 0.1)
        axes.set_axis_off()
        middle = {source: (x * _STEP[0], -y * _STEP[1]) for source, (x, y) in places.items()}
        for number, node in enumerate(self.nodes):
            target = Result(number)
            for operand in node.inputs:
                source = Result(operand.node) if isinstance(operand, Result) else operand
                if source in middle:
                    _arrow(axes, middle[source], middle[target], places[target][1] - places[source][1])
        counted: set[int] = set()
        for source, (x, y) in middle.items():
            lines, color = _texts(self, source, counted)
            corner = x - _BOX[0] / 2, y - _BOX[1] / 2
            axes.add_patch(FancyBboxPatch(corner, *_BOX, boxstyle="round,pad=0,rounding_size=0.09", facecolor=color,
                                          edgecolor="#555555", linewidth=0.8, zorder=2))  # fmt: skip
            offset = (len(lines) - 1) / 2
            for i, line in enumerate(lines):
                axes.text(x, y + (offset - i) * 0.17, line, ha="center", va="center", fontsize=8 if i == 0 else 7,
                          color="#111111" if i == 0 else "#444444", zorder=3)  # fmt: skip
        figure.savefig(path, dpi=110)

    def has_its_lists(self) -> bool:
        """Return whether the program's lists still have their traced content; it may have changed them in place."""
        return all(now == before for now, before in self.lists)

    def last_uses(self) -> list[int]:
        """Return for each node the number of its last reader, or the number of nodes if the network returns it."""
        last = list(range(len(self.nodes)))
        for number, node in enumerate(self.nodes):
            for result in node.results():
                last[result.node] = number
        for output in self.outputs:
            if isinstance(output, Result):
                last[output.node] = len(self.nodes)
        return last

    def num_uses(self) -> list[int]:
        """Return how often each node is read or returned."""
        uses = [0] * len(self.nodes)
        for source in [*(result for node in self.nodes for result in node.results()), *self.outputs]:
            if isinstance(source, Result):
                uses[source.node] += 1
        return uses

    def changed_to(self, nodes: list[GraphNode | None], moved: dict[int, int]) -> Graph:
        """Return the graph with the ``nodes`` that are not None, one entry for each old node.

        ``moved`` maps the number of a removed node to the node that now computes its result.
        """
        numbers: dict[int, int] = {}
        remaining: list[GraphNode] = []
        for number, node in enumerate(nodes):
            if node is not None:
                numbers[number] = len(remaining)
                remaining.append(node)
        for number, target in moved.items():
            numbers[number] = numbers[target]

        def renumbered(source: Source) -> Source:
            return replace(source, node=numbers[source.node]) if isinstance(source, Result) else source

        remaining = [replace(node, inputs=tuple(map(renumbered, node.inputs))) for node in remaining]
        return replace(self, nodes=remaining, outputs=tuple(map(renumbered, self.outputs)))

    def without_unused(self) -> Graph:
        """Return the graph without nodes that have neither readers nor side effects."""
        needed: set[int] = {output.node for output in self.outputs if isinstance(output, Result)}
        for number in reversed(range(len(self.nodes))):
            node = self.nodes[number]
            if OPERATORS[node.operator].has_effect:
                needed.add(number)
            if number in needed:
                needed |= {result.node for result in node.results()}
        return self.changed_to([node if i in needed else None for i, node in enumerate(self.nodes)], {})

    def operand(self, source: Source, tensors: Mapping[Source, Any]) -> Any:
        """Return the operand that ``source`` denotes; ``tensors`` has those of inputs and results."""
        if isinstance(source, CapturedTensor):
            held = self.held[source.number]
            return Tensor(held.data) if source.is_detached and isinstance(held, Tensor) else held
        if isinstance(source, Literal):
            return source.operand()
        return None if source is None else tensors[source]

    def returned(self, values: Callable[[Source], Any]) -> Any:
        """Return the outputs in the form in which the network returned them."""
        outputs = [values(output) for output in self.outputs]
        return outputs[0] if self.form == "one" else tuple(outputs) if self.form == "tuple" else outputs

    def returned_with(self, results: Mapping[Source, Any], inputs: Sequence[Any]) -> Any:
        """Return the outputs, given the ``results`` of nodes and the inputs."""

        def value(source: Source) -> Any:
            if isinstance(source, Input):
                return inputs[source.number]
            return self.held[source.number] if isinstance(source, CapturedTensor) else results[source]

        return self.returned(value)


_TAKES_ACTIVATION = ("affine", "conv2d", "dense")


def rewritten(graph: Graph) -> Graph:
    """Return the graph as plans compute it."""
    return with_activations(with_biases(graph))


def with_biases(graph: Graph) -> Graph:
    """Merge products with the bias that the next operator adds, if it is their only reader."""
    uses = graph.num_uses()
    nodes: list[GraphNode | None] = list(graph.nodes)
    moved = {}
    for number, node in enumerate(graph.nodes):
        before = graph.nodes[number - 1] if number else node
        if node.operator != "add" or before.operator != "matmul" or uses[number - 1] != 1:
            continue
        bias = next((source for source in node.inputs if source != Result(number - 1)), None)
        if before.is_recorded == node.is_recorded and _is_bias(graph, bias, before.outputs[0]):
            inputs = (*before.inputs, bias)
            nodes[number - 1] = replace(before, operator="affine", inputs=inputs, attributes={"activation": None})
            nodes[number] = None
            moved[number] = number - 1
    return graph.changed_to(nodes, moved)


def _is_bias(graph: Graph, source: Source, product: Meta) -> bool:
    if not isinstance(source, CapturedTensor) or dtype_of(product.dtype).char not in "fd":
        return False
    shape, dtype = graph.kinds[source.number]
    return shape == product.shape[-1:] != () and str(dtype) == product.dtype


def with_activations(graph: Graph) -> Graph:
    """Merge convolutions, dense layers and products with a bias with the ReLU that is their only reader.

    The merged node keeps the place of the first, so backward sums gradients in the same order.
    """
    uses = graph.num_uses()
    nodes: list[GraphNode | None] = list(graph.nodes)
    moved = {}
    for number, node in enumerate(graph.nodes):
        source = node.inputs[0] if node.operator == "relu" else None
        if not isinstance(source, Result) or uses[source.node] != 1:
            continue
        before = graph.nodes[source.node]
        if (
            before.operator in _TAKES_ACTIVATION
            and before.attributes["activation"] is None
            and before.is_recorded == node.is_recorded
        ):
            nodes[source.node] = replace(before, attributes={**before.attributes, "activation": "relu"})
            nodes[number] = None
            moved[number] = source.node
    return graph.changed_to(nodes, moved)


_BOX = (1.9, 0.62)
_STEP = (2.3, 1.05)
"""Inches from one box to the next, horizontally and vertically."""
_COLORS = {
    **dict.fromkeys(("dense", "conv2d", "matmul"), "#d7e5f7"),
    **dict.fromkeys(("batch_norm", "batch_norm_by_running"), "#f6ead2"),
    "input": "#e3f1df",
}
_MOST_INCHES = 200.0
_ENDINGS = (".png", ".svg", ".pdf")
_COLUMNS = 80
_READS, _LEAST_READS = 2, 16
"""The column of a table that is wrapped if a line is too long, and its least width."""


def _reads_width(rows: Sequence[tuple[str, ...]]) -> int:
    """Return the width left for the column of operands."""
    widths = [max(len(row[i]) for row in rows) + 2 for i in range(len(rows[0])) if i != _READS]
    return max(_COLUMNS - sum(widths), _LEAST_READS)


def _wrapped(row: tuple[str, ...], width: int) -> Iterator[tuple[str, ...]]:
    words = " ".join(_cut(word, width) for word in row[_READS].split())
    first, *more_lines = textwrap.wrap(words, width, break_on_hyphens=False) or [""]
    yield (*row[:_READS], first, *row[_READS + 1 :])
    for more in more_lines:
        yield tuple(more if i == _READS else "" for i in range(len(row)))


def _cut(path: str, width: int) -> str:
    """Insert blanks after dots of a path that is too long for a line."""
    if len(path) <= width:
        return path
    return " ".join(line.replace(". ", ".") for line in textwrap.wrap(path.replace(".", ". "), width))


def title(node: GraphNode) -> str:
    """Return the operator with the attributes that distinguish this call."""
    attributes = node.attributes
    text = str(attributes["name"]) if node.operator == "compare" else node.operator.replace("_", " ")
    if attributes.get("activation") is not None:
        text += f" + {attributes['activation']}"
    if node.operator == "conv2d":
        text += f", stride {'x'.join(map(str, _pair(attributes['stride'])))}"
    return text


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _learnt(held: Any) -> bool:
    return hasattr(held, "held")


def _count_new(graph: Graph, node: GraphNode, counted: set[int]) -> int:
    count = 0
    for source in node.inputs:
        if isinstance(source, CapturedTensor) and source.number not in counted and _learnt(graph.held[source.number]):
            counted.add(source.number)
            count += math.prod(graph.kinds[source.number][0])
    return count


def _name(graph: Graph, source: Source) -> str:
    if isinstance(source, Input):
        return f"input {source.number}"
    if isinstance(source, CapturedTensor):
        return graph.names[source.number]
    if isinstance(source, Literal):
        return f"number {source.value:g}" if isinstance(source.value, float) else f"number {source.value}"
    return "" if source is None else str(source.node)


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "number"


def _texts(graph: Graph, source: Source, counted: set[int]) -> tuple[list[str], str]:
    """Return the lines in a box, and its color."""
    if isinstance(source, Input):
        return [f"input {source.number}", _shape(graph.inputs[source.number].shape)], _COLORS["input"]
    assert isinstance(source, Result)
    node = graph.nodes[source.node]
    lines = [title(node), _shape(node.outputs[0].shape)]
    count = _count_new(graph, node, counted)
    if count:
        lines.append(f"{count:,} parameters")
    if source.node in [output.node for output in graph.outputs if isinstance(output, Result)]:
        lines[0] += " (returned)"
    return lines, _COLORS.get(node.operator, "#f4f4f4")


def _arrow(axes: Any, source: tuple[float, float], target: tuple[float, float], steps: int) -> None:
    """Draw an arrow from the lower edge of one box to the upper edge of another, around boxes between them."""
    begin, end = (source[0], source[1] - _BOX[1] / 2), (target[0], target[1] + _BOX[1] / 2)
    bend = "arc3,rad=0"
    if steps > 1:
        side = _BOX[0] / 2
        begin, end = (source[0] + side, source[1]), (target[0] + side, target[1])
        bend = f"arc3,rad={-min(0.55, 1.1 / (steps + 1)):.2f}"
    axes.annotate("", end, begin, zorder=1, arrowprops={
        "arrowstyle": "-|>", "color": "#777777", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0, "connectionstyle": bend,
    })  # fmt: skip


def _places(graph: Graph) -> dict[Source, tuple[float, int]]:
    """Return column and row of every input and node.

    A node is below its operands. A node without inputs is just above its first reader.
    """
    rows: dict[Source, int] = {Input(i): 0 for i in range(len(graph.inputs))}
    readers: dict[int, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        above = [rows[key] for source in node.inputs
                 if (key := Result(source.node) if isinstance(source, Result) else source) in rows]  # fmt: skip
        for result in node.results():
            readers.setdefault(result.node, []).append(number)
        if above:
            rows[Result(number)] = max(above) + 1
    for number in reversed(range(len(graph.nodes))):
        if Result(number) not in rows:
            rows[Result(number)] = min((rows[Result(reader)] for reader in readers.get(number, [])), default=1) - 1

    def reads_only_parameters(source: Source) -> bool:  # such nodes are right of others
        return isinstance(source, Result) and not any(True for _ in graph.nodes[source.node].results())

    lowest = min(rows.values(), default=0)
    members: dict[int, list[Source]] = {}
    for source, row in rows.items():
        members.setdefault(row - lowest, []).append(source)
    return {
        source: (place - (len(sources) - 1) / 2, row)
        for row, sources in members.items()
        for place, source in enumerate(sorted(sources, key=reads_only_parameters))
    }


FORMAT, VERSION = "hpcdp graph", 1
_AS_IT_WAS = 0
"""First dimension of a reshape that stands for the batch size."""


def arrays_of(graph: Graph) -> dict[str, np.ndarray]:
    """Return the network's tensors by name, in host memory."""
    values = [held.data if isinstance(held, Tensor) else held for held in graph.held]
    return {name: np.asarray(to_host(value), order="C") for name, value in zip(graph.names, values, strict=True)}


def as_json(graph: Graph, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the graph of a prediction as JSON data; `ConfigError` if an attribute or operand cannot be serialized."""
    calls = calls_as_json(graph)
    nodes = zip(calls["nodes"], graph.nodes, strict=True)
    return {
        "format": FORMAT,
        "version": VERSION,
        "any_batch": graph.any_batch,
        "inputs": [_meta(meta) for meta in graph.inputs],
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
        "nodes": [{**call, "outputs": [_meta(meta) for meta in node.outputs]} for call, node in nodes],
    }


def calls_as_json(graph: Graph) -> dict[str, Any]:
    """Return the operator calls as JSON data, without shapes and dtypes."""
    return {
        "nodes": [
            {
                "operator": node.operator,
                "inputs": [_source(source, node) for source in node.inputs],
                "attributes": {name: _value(node, value) for name, value in _attributes(graph, node).items()},
            }
            for node in graph.nodes
        ],
        "outputs": [_source(output) for output in graph.outputs],
        "form": graph.form,
    }


def _attributes(graph: Graph, node: GraphNode) -> dict[str, Any]:
    """Return the attributes of ``node``; a new shape that begins with the batch size becomes valid for any batch."""
    if node.operator != "reshape":
        return node.attributes
    source, shape = node.inputs[0], node.attributes["shape"]
    old_shape: tuple[int, ...] = ()
    if isinstance(source, Result):
        old_shape = graph.nodes[source.node].outputs[source.output].shape
    elif isinstance(source, Input):
        old_shape = graph.inputs[source.number].shape
    return {"shape": (_AS_IT_WAS, *shape[1:]) if old_shape[:1] == shape[:1] != () else shape}


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
        return {"slice": [_value(node, bound) for bound in (value.start, value.stop, value.step)]}
    if isinstance(value, tuple):
        return {"tuple": [_value(node, element) for element in value]}
    if isinstance(value, np.generic) and isinstance(value.item(), float):
        return {"number": [value.item(), str(value.dtype)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise _not_written(node.operator, "numbers, texts and slices as attributes", value)


def _not_written(where: str, expected: str, got: Any) -> ConfigError:
    return ConfigError("export", where=where, expected=expected, got=type(got).__name__)


class Reader:
    """Reader of the JSON data that `as_json` returns; ``where`` is the file named in errors."""

    def __init__(self, where: object, read: Any) -> None:
        self._where, self._read = where, read

    def graph(self) -> tuple[Graph, list[dict[str, Any]]]:
        """Return the graph without ``held``, and the metadata of its tensors; `DataError` for inconsistent data."""
        read = self._read
        self._require(isinstance(read, dict) and read.get("format") == FORMAT, f"a file of {FORMAT}")
        self._require(read.get("version") == VERSION, f"version {VERSION}", read.get("version"))
        try:
            graph = Graph(tuple(map(self._meta, read["inputs"])), form=read["form"], any_batch=read["any_batch"])
            self._require(type(graph.any_batch) is bool, "any_batch true or false", graph.any_batch)
            tensors = [self._tensor(entry) for entry in read["tensors"]]
            graph.names = [entry["name"] for entry in tensors]
            self._require(len(set(graph.names)) == len(tensors), "a name for each tensor", graph.names)
            self._require(graph.form in ("one", "tuple", "list"), "form one, tuple or list", graph.form)
            for entry in read["nodes"]:
                graph.nodes.append(self._node(entry, graph))
            graph.outputs = tuple(self._input(entry, graph) for entry in read["outputs"])
        except HpcdpError:
            raise
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
        attributes = {name: self._value(value) for name, value in read["attributes"].items()}
        self._require(
            set(attributes) == set(operator.attributes) and "generator" not in attributes,
            f"attributes of {operator.name}", ", ".join(attributes),
        )  # fmt: skip
        inputs = tuple(self._input(source, graph) for source in read["inputs"])
        fits = len(inputs) == len(operator.inputs) or operator.takes_many
        self._require(fits, f"{len(operator.inputs)} inputs of {operator.name}", len(inputs))
        return GraphNode(operator.name, inputs, attributes, tuple(map(self._meta, read["outputs"])))

    def _value(self, read: Any) -> Any:
        if isinstance(read, dict):
            ((kind, value),) = read.items()
            if kind == "ellipsis":
                return Ellipsis
            self._require(kind in ("slice", "tuple", "number"), "attributes", read)
            values = [self._value(element) for element in value]
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
    """Compute ``node`` from ``operands`` with ``functions``, such as `autograd.tape.CALLS`."""
    operator, attributes = OPERATORS[node.operator], node.attributes
    if node.operator == "reshape" and attributes["shape"][:1] == (_AS_IT_WAS,):
        attributes = {"shape": (operands[0].shape[0], *attributes["shape"][1:])}
    if operator.takes_many:
        return functions[node.operator](*operands, **attributes)
    return functions[node.operator](**dict(zip(operator.inputs, operands, strict=True)), **attributes)


def with_held(graph: Graph, held: list[Any]) -> Graph:
    """Return a graph that was read, with its network's tensors."""
    return replace(graph, held=held, kinds=[(value.shape, value.dtype) for value in held])
