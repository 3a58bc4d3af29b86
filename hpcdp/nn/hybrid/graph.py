"""The graph of a network: which operators are called with what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays import dtype_of
from ...autograd import Tensor
from ...autograd.registry import OPERATORS


@dataclass(frozen=True)
class Input:
    """An input of the network."""

    number: int


@dataclass(frozen=True)
class Held:
    """A tensor or array that the network has as an attribute."""

    number: int
    is_detached: bool = False
    """Whether the array of the tensor is meant, through which no gradient goes."""


@dataclass(frozen=True)
class Result:
    """What an earlier node has computed."""

    node: int
    output: int = 0


@dataclass(frozen=True)
class Literal:
    """A number, or numbers in lists, of a NumPy dtype or, where that is None, of Python."""

    value: Any
    dtype: str | None = None

    def operand(self) -> Any:
        """As operators take it."""
        return self.value if self.dtype is None else _of_type(dtype_of(self.dtype).type, self.value)


def _of_type(kind: Callable[[Any], Any], value: Any) -> Any:
    return [_of_type(kind, each) for each in value] if isinstance(value, list) else kind(value)


Source = Input | Held | Result | Literal | None


@dataclass(frozen=True)
class Meta:
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class Node:
    """One call of an operator."""

    operator: str
    inputs: tuple[Source, ...]
    attributes: dict[str, Any]
    outputs: tuple[Meta, ...]
    is_recorded: bool = True
    """Whether the call was put on the tape, if the network's was: not inside ``with autograd.pause()``."""

    def results(self) -> Iterator[Result]:
        """The earlier nodes that it reads."""
        return (each for each in self.inputs if isinstance(each, Result))


@dataclass
class Graph:
    """Nodes in the order of their calls.

    ``form`` says what ``outputs`` were returned as: "one", "tuple" or "list".
    """

    inputs: tuple[Meta, ...]
    held: list[Any] = field(default_factory=list)
    """Tensors and arrays of the network."""
    names: list[str] = field(default_factory=list)
    """Their paths in it."""
    kinds: list[tuple[tuple[int, ...], Any]] = field(default_factory=list)
    """Shape and dtype of each."""
    lists: list[tuple[Any, Any]] = field(default_factory=list)
    """The program's lists of numbers that became literals, and what each was."""
    nodes: list[Node] = field(default_factory=list)
    outputs: tuple[Source, ...] = ()
    form: str = "one"
    any_batch: bool = False
    """Whether it is known to be the network's for any number of rows, and not only for that of ``inputs``."""

    def summary(self) -> str:
        """A table: a line for every operation, with what it reads, the shape and bytes of its result, parameters."""
        from .overview import summary

        return summary(self)

    def draw(self, path: str | Path) -> None:
        """Draw the operations from top to bottom into a PNG, SVG or PDF, which is replaced.

        Raises:
            ConfigError: a name with another ending, or of no folder that is there.
            OSError: it cannot be written.
        """
        from .overview import draw

        draw(self, path)

    def has_its_lists(self) -> bool:
        """Whether the program's lists are as they were traced; it may have changed them since, in place."""
        return all(now == before for now, before in self.lists)

    def last_uses(self) -> list[int]:
        """For each node the number of the last one that reads it; the number of nodes where the network returns it."""
        last = list(range(len(self.nodes)))
        for number, node in enumerate(self.nodes):
            for each in node.results():
                last[each.node] = number
        for output in self.outputs:
            if isinstance(output, Result):
                last[output.node] = len(self.nodes)
        return last

    def num_uses(self) -> list[int]:
        """How often each node is read or returned."""
        uses = [0] * len(self.nodes)
        for each in [*(each for node in self.nodes for each in node.results()), *self.outputs]:
            if isinstance(each, Result):
                uses[each.node] += 1
        return uses

    def changed_to(self, nodes: list[Node | None], moved: dict[int, int]) -> Graph:
        """The graph of those of ``nodes``, one for each old one, that are not None.

        Args:
            moved: for a node that is gone, by number, the one that computes what it did.
        """
        numbers: dict[int, int] = {}
        kept: list[Node] = []
        for number, node in enumerate(nodes):
            if node is not None:
                numbers[number] = len(kept)
                kept.append(node)
        for number, target in moved.items():
            numbers[number] = numbers[target]

        def renumbered(source: Source) -> Source:
            return replace(source, node=numbers[source.node]) if isinstance(source, Result) else source

        kept = [replace(node, inputs=tuple(map(renumbered, node.inputs))) for node in kept]
        return replace(self, nodes=kept, outputs=tuple(map(renumbered, self.outputs)))

    def without_unused(self) -> Graph:
        """The graph without nodes whose results nobody needs and that do nothing else."""
        needed: set[int] = {each.node for each in self.outputs if isinstance(each, Result)}
        for number in reversed(range(len(self.nodes))):
            node = self.nodes[number]
            if OPERATORS[node.operator].has_effect:
                needed.add(number)
            if number in needed:
                needed |= {each.node for each in node.results()}
        return self.changed_to([node if i in needed else None for i, node in enumerate(self.nodes)], {})

    def operand(self, source: Source, tensors: Mapping[Source, Any]) -> Any:
        """What an operator is called with; ``tensors`` are those of inputs and results."""
        if isinstance(source, Held):
            held = self.held[source.number]
            return Tensor(held.data) if source.is_detached and isinstance(held, Tensor) else held
        if isinstance(source, Literal):
            return source.operand()
        return None if source is None else tensors[source]

    def returned(self, values: Callable[[Source], Any]) -> Any:
        """The outputs in the form in which the network returned them."""
        found = [values(each) for each in self.outputs]
        return found[0] if self.form == "one" else tuple(found) if self.form == "tuple" else found

    def returned_with(self, results: Mapping[Source, Any], given: Sequence[Any]) -> Any:
        """`returned`, of ``results`` of nodes, inputs and the network's own tensors."""

        def value(source: Source) -> Any:
            if isinstance(source, Input):
                return given[source.number]
            return self.held[source.number] if isinstance(source, Held) else results[source]

        return self.returned(value)
