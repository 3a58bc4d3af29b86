"""Plans: a traced network's calls on preallocated memory, replayed without the network's Python.

Forward is a list of functions with their arguments. Backward is the tape's own: every recorded replay puts the plan's
nodes on the tape, with the pullbacks of the first run. Gradients and hooks therefore come in the same order as without
a plan. Without backward, the memory of a result is reused as soon as its last reader is done.

A `CudaPlan` captures a plan's operators as one CUDA graph for forward and one for backward, and launches them again.
Forward is captured on the second call of a kind; the first call, which was traced, has compiled its kernels. The plan
keeps the tape of the capture. A recorded replay puts one node for the whole plan on the thread's tape, and one for each
output. The first backward runs the plan's tape, which compiles kernels; the second captures it. Gradients of parameters
are written to their buckets, and their hooks run in the usual order after the graph.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...autograd import Gradient, Tensor, pause
from ...autograd.tape import (
    CALLS,
    OPERATORS,
    Again,
    Call,
    Node,
    Operator,
    Pullback,
    add_gradients,
    calls_of,
    captured,
    leaves_below,
    modes,
)
from ...autograd.tensor import value_of
from ...core.arrays import Array, array_namespace
from ...errors import UnsupportedError
from ...kernels import empty
from ...kernels.cuda import Capturer, CudaGraph, warmed_up
from .fusion import ChainLink, Moving, chained, direct, join, link, nowhere, reads_of
from .graph import CapturedTensor, Graph, GraphNode, Input, Result, Source, call
from .tracing import HeldArrays, state, wait_for_update

_ALIGNMENT = 64
_WASTE = 4
"""A free block larger than this multiple of a request is kept for larger results."""


class _Memory:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
        self._offset = -self._memory.ctypes.data % _ALIGNMENT

    def as_array(self, like: np.ndarray) -> np.ndarray:
        if like.flags.f_contiguous and not like.flags.c_contiguous:
            return np.ndarray(like.shape, like.dtype, self._memory, self._offset, order="F")
        return np.ndarray(like.shape, like.dtype, self._memory, self._offset)


class Arena:
    """Memory blocks of one plan."""

    def __init__(self) -> None:
        self._free: list[_Memory] = []
        self._of: dict[int, _Memory] = {}
        self.nbytes = 0
        """Bytes of all blocks."""

    def take(self, number: int, like: np.ndarray) -> np.ndarray:
        """Return uninitialized memory for the result of a node, with shape, dtype and memory order of ``like``."""
        most = _WASTE * max(like.nbytes, _ALIGNMENT)
        fitting = [block for block in self._free if like.nbytes <= block.nbytes <= most]
        if fitting:
            block = min(reversed(fitting), key=lambda block: block.nbytes)  # the block freed last may be cached
            self._free.remove(block)
        else:
            block = _Memory(like.nbytes)
            self.nbytes += block.nbytes
        self._of[number] = block
        return block.as_array(like)

    def release(self, last: Sequence[int], number: int) -> None:
        """Free the memory of results whose ``last`` reader has at most the node number ``number``."""
        for node in [node for node in self._of if last[node] <= number]:
            self._free.append(self._of.pop(node))


_MOVES_FROM = 64 * 1024
"""Bytes from which passing the address of an input or output is faster than copying it."""


class SplicedNode(Node):
    """Tape node of a replay. While its token lives, backward may still need the plan's results."""

    __slots__ = ("token",)

    def __init__(self, value: Array, inputs: tuple[Any, ...], pullback: Pullback, token: object) -> None:
        super().__init__(value, inputs, pullback)
        self.token: object = token

    def free(self) -> None:
        """Release the node's references and its token."""
        super().free()
        self.token = None


class _Step:
    """Calls, pullback and memory of one node."""

    __slots__ = ("calls", "kept", "params", "pullback", "sources", "value")

    def __init__(self) -> None:
        self.value: Array = None
        """The result; a placeholder by `nowhere` if a chain never writes it to memory."""
        self.calls: list[Call] = []
        self.kept: list[Array] = []
        """Arrays that calls refer to by address, kept alive here."""
        self.params: list[Any] = []
        """Parameters that the node reads."""
        self.sources: tuple[Source, ...] = ()
        self.pullback: Pullback | None = None


class Shortcut:
    """Replay of one input and one output without a tape: at batch size 1, selecting a plan costs as much as a layer.

    Args:
        place: the array that the input is copied to.
        calls: the plan's calls.
        output: the array of the result.
        seen: stamp of all parameters at which the shortcut is valid.
    """

    def __init__(self, place: Array, calls: list[Call], output: Array, seen: object) -> None:
        self._place, self._calls, self._output = place, calls, output
        self._shape, self._dtype = place.shape, place.dtype
        self._seen, self._modules, self._signature = seen, state.modules, modes.signature

    def replay(self, x: Any) -> Tensor | None:
        """Return the network's result for ``x``, or None if ``x`` or this thread's modes do not fit the plan."""
        if type(x) is Tensor:
            x = x.data
        if (
            type(x) is np.ndarray
            and x.shape == self._shape
            and x.dtype is self._dtype
            and x.flags.c_contiguous
            and self._seen is state.parameters
            and self._modules is state.modules
            and self._signature == modes.signature
        ):
            self._place[...] = x
            for function, args in self._calls:
                function(*args)
            return Tensor(copied(self._output))
        return None


class Plan:
    """Computation of ``graph`` for inputs of its shapes; its construction computes a first result, for ``given``.

    Args:
        graph: the rewritten graph.
        given: the inputs.
        keeps: whether backward may follow. If so, nothing it needs is overwritten, else memory is reused as soon as
            possible.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Tensor], keeps: bool) -> None:
        self.graph = graph
        self._keeps = keeps
        self._token = object()
        self._places: list[Any] = [np.empty_like(x.data) for x in inputs]
        """Arrays that inputs are copied to; `Moving` for large inputs that are used where they are."""
        self._moving_outputs: dict[Result, Moving] = {}
        self._arena = None if keeps else Arena()
        self._steps: list[_Step] = []
        for place, x in zip(self._places, inputs, strict=True):
            place[...] = x.data
        self._build()
        for step in self._steps:
            step.calls = [direct(call) for call in step.calls]
        self._calls = [call for step in self._steps for call in step.calls]
        self._held = HeldArrays(graph)
        self._outputs = {output: self._values[output] for output in graph.outputs if isinstance(output, Result)}
        for result, moving in self._moving_outputs.items():
            moving.array = copied(moving.array)
            self._steps[result.node].value = self._outputs[result] = self._values[result] = nowhere(moving.array)

    def _build(self) -> None:
        """Call every operator once, in this plan's memory."""
        last, uses = self.graph.last_uses(), self.graph.num_uses()
        links: list[ChainLink | None] = []
        self._values: dict[Source, Array] = {}
        tensors: dict[Source, Any] = {Input(i): Tensor(place) for i, place in enumerate(self._places)}
        roots = list(range(len(self.graph.nodes)))
        """For each node the node that owns its result's memory."""
        origin: dict[int, Source] = {id(tensor): source for source, tensor in tensors.items()}
        alive: list[Any] = []  # keeps ids unique
        for number, node in enumerate(self.graph.nodes):
            step = _Step()
            operands = [self.graph.operand(source, tensors) for source in node.inputs]
            alive += operands
            for source, operand in zip(node.inputs, operands, strict=True):
                if isinstance(operand, Tensor):
                    origin[id(operand)] = source
            results, noted = _called(OPERATORS[node.operator], operands, node.attributes)
            value = np.asarray(results[0].data)
            is_operand = any(x is results[0] for x in operands)
            if not is_operand and any(value is value_of(x) for x in operands):
                value = value.view()  # chains identify operands by array; a detached one must differ
            viewed = [operand for operand in operands if _shares(value, operand)]
            if noted is not None:
                inputs, pullback, again = noted
                step.sources = tuple(origin.get(id(x)) for x in inputs)
                step.pullback = pullback if self._keeps and node.is_recorded else None
                if not viewed:
                    if self._arena is not None and _is_elementwise(again):  # it may overwrite its operands
                        self._arena.release(last, number)
                    value = self._place(value)
                    step.calls = list(_calls(again, value, node.operator))
            results[0].data = step.value = value
            links.append(link(step, node.operator, uses[number], operands, self._keeps, self.graph.held))
            for result in node.results():
                if viewed and any(tensors[result] is view for view in viewed):
                    roots[number] = roots[result.node]
                    last[roots[number]] = max(last[roots[number]], last[number])
            step.params = [x for x in operands if hasattr(x, "held")]
            for i, tensor in enumerate(results):
                tensors[Result(number, i)], self._values[Result(number, i)] = tensor, tensor.data
            self._steps.append(step)
            if self._arena is not None:
                self._arena.release(last, number)
        self._join(links)

    def _join(self, links: list[ChainLink | None]) -> None:
        """Join consecutive links to chains."""
        numbers = {id(op): number for number, op in enumerate(links)}
        chains = chained(self._steps, links)
        moving = self._moving_in(chains)
        for chain in chains:
            first, last = (numbers[id(chain[i])] for i in (0, -1))
            join(chain, self._keeps, moving)
            self._steps[first].params = [param for step in self._steps[first : last + 1] for param in step.params]
        for number, step in enumerate(self._steps):
            if step.value is not self._values.get(Result(number), step.value):
                del self._values[Result(number)]

    def _moving_in(self, chains: list[list[ChainLink]]) -> dict[int, Moving]:
        """Return the `Moving` addresses by the ids of their arrays.

        They are large inputs that only ``chains`` read, and large outputs that only ``chains`` compute.
        """
        addresses: dict[int, Moving] = {}
        sources = [*(source for node in self.graph.nodes for source in node.inputs), *self.graph.outputs]
        read = Counter(source for source in sources if isinstance(source, (Input, Result)))
        for number, place in enumerate(self._places):
            reads = sum(reads_of(chain, place) for chain in chains)
            if place.nbytes >= _MOVES_FROM and 0 < reads == read[Input(number)]:
                addresses[id(place)] = self._places[number] = Moving(place)
        for result in {output for output in self.graph.outputs if isinstance(output, Result)}:
            value = self._values[result]
            computed = [(chain, link) for chain in chains for link in chain if link.value is value]
            if not computed or value.nbytes < _MOVES_FROM or self.graph.outputs.count(result) != 1:
                continue
            chain, op = computed[0]
            if self._keeps and op.relu:
                continue  # the pullback of a product with a ReLU reads the original array
            if read[result] == reads_of(chain, value) + 1:
                addresses[id(value)] = self._moving_outputs[result] = Moving(value)
        return addresses

    def _place(self, value: Array) -> Array:
        """Return the memory of a node's result, filled with ``value``."""
        if self._arena is None:
            return value
        place = self._arena.take(len(self._steps), value)
        place[...] = value
        return place

    @property
    def nbytes(self) -> int:
        """Bytes of results and input copies that the plan holds."""
        places = sum(place.nbytes for place in self._places if not isinstance(place, Moving))
        if self._arena is not None:
            return places + self._arena.nbytes
        arrays = {id(value.base if value.base is not None else value): value for value in self._values.values()}
        return places + sum(array.nbytes for array in arrays.values())

    def is_busy(self) -> bool:
        """Return whether a tape still needs the results of the last replay."""
        return sys.getrefcount(self._token) > 2

    def fits(self) -> bool:
        """Return whether the network's tensors and lists are still those of the plan."""
        return self._held.still_hold()

    def first(self, inputs: Sequence[Tensor]) -> Any:
        """Return the network's result for ``inputs``, for which the plan was created."""
        return self._returned(inputs)

    def replay(self, inputs: Sequence[Tensor]) -> Any:
        """Return the network's result for ``inputs``, which must have the plan's shapes and dtypes."""
        self._compute(inputs)
        return self._returned(inputs)

    def _compute(self, inputs: Sequence[Tensor]) -> None:
        for place, x in zip(self._places, inputs, strict=True):
            if isinstance(place, Moving):
                place.array = _as_kernels_take_it(x.data)
            else:
                place[...] = x.data
        for moving in self._moving_outputs.values():
            moving.array = empty(moving.array.shape, moving.array.dtype)
        if self._held.are_settled:
            for function, args in self._calls:
                function(*args)
        else:
            self._run_behind_updates()
        if not self._keeps:
            for place in self._places:
                if isinstance(place, Moving):
                    place.array = None  # free a possibly large array

    def shortcut(self) -> Shortcut | None:
        """Return a `Shortcut` for the next replay, if the plan permits one now."""
        simple = not self._keeps and len(self._outputs) == 1 and self.graph.form == "one" and not self.graph.lists
        moves = bool(self._moving_outputs) or any(isinstance(place, Moving) for place in self._places)
        if not simple or len(self._places) != 1 or moves:
            return None
        if not (self._held.are_parameters_only and self._held.are_settled):
            return None
        place, output = self._places[0], next(iter(self._outputs.values()))
        if not (place.flags.c_contiguous and output.flags.c_contiguous):
            return None
        return Shortcut(place, self._calls, output, self._held.seen)

    def _run_behind_updates(self) -> None:
        """Wait before each step for updates of the parameters that it reads, as operators do."""
        for step in self._steps:
            for param in step.params:
                wait_for_update(param)
            for function, args in step.calls:
                function(*args)

    def _returned(self, inputs: Sequence[Tensor]) -> Any:
        """Return copies of the last run's outputs, on the tape if this thread records."""
        return self._copies(inputs, self._spliced(inputs) if self._keeps else None)

    def _copies(self, inputs: Sequence[Tensor], nodes: list[Node | None] | None) -> Any:
        """Return copies of the last run's outputs, with their tape ``nodes`` if given."""
        outputs: dict[Source, Any] = {}
        for source, value in self._outputs.items():
            moving = self._moving_outputs.get(source)
            outputs[source] = result = Tensor(copied(value) if moving is None else moving.array)
            if nodes is not None and source.output == 0:
                result.node = nodes[source.node]
        return self.graph.returned_with(outputs, inputs)

    def _spliced(self, inputs: Sequence[Tensor]) -> list[Node | None]:
        """Put this replay on the tape and return its nodes."""
        nodes: list[Node | None] = []
        for step in self._steps:
            node = None
            if step.pullback is not None:
                sources = tuple(self._on_tape(source, nodes, inputs) for source in step.sources)
                if any(source is not None for source in sources):
                    node = SplicedNode(step.value, sources, step.pullback, self._token)
            nodes.append(node)
        return nodes

    def _on_tape(self, source: Source, nodes: list[Node | None], inputs: Sequence[Tensor]) -> Any:
        if isinstance(source, Result):
            return nodes[source.node] if source.output == 0 else None
        if isinstance(source, Input):
            tensor: Any = inputs[source.number]
        elif isinstance(source, CapturedTensor) and not source.is_detached:
            tensor = self.graph.held[source.number]
        else:
            return None
        return source_of(tensor) if isinstance(tensor, Tensor) else None


def source_of(tensor: Tensor) -> Any:
    """Return the tape source of ``tensor``: its node, itself if it is a leaf with a gradient, or None."""
    return tensor.node if tensor.node is not None else tensor if tensor.grad_req != "null" else None


def _called(called: Operator, operands: list[Any], attributes: dict[str, Any]) -> tuple[list[Tensor], Any]:
    """Call an operator; return its results as tensors, and the inputs, pullback and calls it passed to `on_tape`."""
    with captured() as noted:
        if called.takes_many:
            result = called.function(*operands, **attributes)
        else:
            result = called.function(**dict(zip(called.inputs, operands, strict=True)), **attributes)
    listed = list(result) if isinstance(result, tuple) else [result]
    return [result if isinstance(result, Tensor) else Tensor(result) for result in listed], noted[0] if noted else None


def _calls(again: Again | None, value: Array, name: str) -> Sequence[Call]:
    if again is None:
        raise UnsupportedError("plan", where=name, expected="an operator that can be recomputed")
    return calls_of(again, value)


def _is_elementwise(again: Again | None) -> bool:
    return isinstance(again, tuple) and getattr(np, again[0]).signature is None  # matmul has one


def copied(value: Array, xp: Any = np) -> Array:
    """Return a copy in memory from the pool of reused buffers, which is faster than new memory for large arrays.

    CuPy's ``copy`` takes twice as long as copying into a buffer; ``xp`` is its namespace.
    """
    if not value.flags.c_contiguous:
        return value.copy("K")
    copy = empty(value.shape, value.dtype, xp)
    copy[...] = value
    return copy


def _as_kernels_take_it(x: Array) -> Array:
    """Return ``x`` or a contiguous, aligned copy, since kernels know an array by its address alone."""
    return x if x.flags.c_contiguous and x.flags.aligned else x.copy("C")


def _shares(value: Array, operand: Any) -> bool:
    return isinstance(operand, Tensor) and np.may_share_memory(value, operand.data)


_BACKWARDS_KEPT = 8
"""Graphs of backward kept for this many combinations of outputs and gradient arrays."""


class CudaPlan:
    """Captured computation of ``graph`` on the current GPU, for inputs of the shapes of ``given``.

    Inputs on the host stay there; each launch copies them to the GPU as operators need them.

    Args:
        graph: the traced graph.
        given: the inputs.
        keeps: whether backward may follow.

    Raises:
        UnsupportedError: an operator cannot be captured, or see `_Backward`; nothing was computed.
        Exception: an error of CUDA, e.g. out of memory; nothing was computed.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Tensor], keeps: bool) -> None:
        self.graph = graph
        self._keeps = keeps
        self._token = object()
        self._held = HeldArrays(graph)
        self._frozen = self._held.without_gradients()
        self._capturer = Capturer()
        self._places = [Tensor(array_namespace(x.data).empty(x.shape, dtype=x.dtype)) for x in inputs]
        for place, x in zip(self._places, inputs, strict=True):
            place.grad_req = "null" if not keeps or source_of(x) is None else "write"
        self._results: dict[Source, Tensor] = {}
        self._held.wait_for_updates()
        self._graph = self._capturer.capture(self._run)
        self._backward = self._way_back() if keeps else None

    def _way_back(self) -> _Backward | None:
        """Create the backward through the tape of the capture."""
        return _Backward(self._capturer, list(self._results.values()), self._places)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that the plan holds."""
        return self._capturer.nbytes

    def is_busy(self) -> bool:
        """Return whether a tape still needs the last replay's results, or another stream is current."""
        return sys.getrefcount(self._token) > 2 or not self._capturer.is_current()

    def fits(self) -> bool:
        """Return whether the network's tensors have the plan's arrays and the same gradients enabled."""
        return self._held.still_hold() and (not self._keeps or self._held.without_gradients() == self._frozen)

    def shortcut(self) -> Shortcut | None:
        """Return None: selecting a plan takes little time beside launching it."""
        return None

    def first(self, inputs: Sequence[Tensor]) -> Any:
        """Return the network's result for ``inputs``, for which the plan was created."""
        return self.replay(inputs)

    def replay(self, inputs: Sequence[Tensor]) -> Any:
        """Return the network's result for ``inputs``, which must have the plan's shapes and dtypes."""
        self._held.wait_for_updates()
        for place, x in zip(self._places, inputs, strict=True):
            place.data[...] = x.data
        self._launch()
        return self._returned(inputs)

    def _launch(self) -> None:
        self._graph.launch()

    def _returned(self, inputs: Sequence[Tensor]) -> Any:
        """Return copies of the last run's outputs, on the tape if this thread records."""
        outputs = {source: Tensor(copied(x.data, array_namespace(x.data))) for source, x in self._results.items()}
        if self._backward is not None:
            self._backward.splice(list(outputs.values()), inputs, self._token)
        return self.graph.returned_with(outputs, inputs)

    def _run(self) -> None:
        """Call every operator."""
        last = self.graph.last_uses()
        tensors: dict[Source, Any] = {Input(i): place for i, place in enumerate(self._places)}
        for number, node in enumerate(self.graph.nodes):
            tensors |= self._called(number, node, tensors)
            for source in [key for key in tensors if isinstance(key, Result) and last[key.node] <= number]:
                del tensors[source]  # frees its memory, unless backward needs it
        self._results = {output: tensors[output] for output in self.graph.outputs if isinstance(output, Result)}

    def _called(self, number: int, node: GraphNode, tensors: dict[Source, Any]) -> dict[Source, Any]:
        operands = [self.graph.operand(source, tensors) for source in node.inputs]
        try:
            with contextlib.nullcontext() if node.is_recorded or not modes.recording else pause(modes.training):
                result = call(node, operands, CALLS)
        except Exception as error:
            expected = "kernel launches that do not wait for the GPU"
            got = f"{type(error).__name__}: {error}"
            raise UnsupportedError("CUDA graph", where=node.operator, expected=expected, got=got) from error
        listed = result if isinstance(result, tuple) else (result,)
        return {Result(number, i): x if isinstance(x, Tensor) else Tensor(x) for i, x in enumerate(listed)}


def warn_without_graph(name: str, error: Exception) -> None:
    """Warn that ``what``, a module or its backward, runs without a CUDA graph; results are the same."""
    problem = str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"
    warnings.warn(f"hybridize: {name} runs without a CUDA graph; {problem}", RuntimeWarning, stacklevel=2)


class _Backward:
    """Backward through a plan's tape.

    Args:
        capturer: the plan's capturer.
        results: the outputs of nodes, on the tape of the capture if they have gradients.
        places: the inputs.

    Raises:
        UnsupportedError: outputs depend on different parameters or inputs, so a backward from some would not reach all.
    """

    def __init__(self, capturer: Capturer, results: list[Tensor], places: list[Tensor]) -> None:
        self._capturer = capturer
        self._heads = {number: head for number, head in enumerate(results) if head.node is not None}
        self._leaves = leaves_below(list(self._heads.values()))
        if any(len(leaves_below([head])) < len(self._leaves) for head in self._heads.values()):
            expected = "outputs that all depend on the same parameters and inputs"
            raise UnsupportedError("CUDA graph", where="backward", expected=expected)
        self._inputs = {id(place): number for number, place in enumerate(places)}
        self._seeds = {number: head.data.copy() for number, head in self._heads.items()}
        """The gradients of the outputs."""
        self._nothing = next((seed.reshape(-1)[:0] for seed in self._seeds.values()), None)
        """The gradient of the whole plan's node, an empty array that only marks its presence."""
        self._received: list[int] = []
        """Numbers of the outputs that have received a gradient."""
        self._sums: dict[Tensor, Array] = {}
        """Gradients of leaves without an array of their own."""
        self._graphs: OrderedDict[Any, tuple[CudaGraph | None, list[Array | None]]] = OrderedDict()
        """Graphs by outputs with gradients, leaves that need gradients, their arrays, and whether they accumulate.
        The arrays are kept so that their ids stay unique."""
        self._is_refused = False

    def splice(self, outputs: list[Tensor], inputs: Sequence[Tensor], token: object) -> None:
        """Put the last replay, with these ``outputs``, on the tape."""
        self._received.clear()
        if not self._heads:
            return
        sources = tuple(
            source_of(inputs[self._inputs[id(leaf)]]) if id(leaf) in self._inputs else leaf for leaf in self._leaves
        )
        plan_node = SplicedNode(self._nothing, sources, self._pull_back, token)
        for number in self._heads:
            outputs[number].node = SplicedNode(outputs[number].data, (plan_node,), self._receiver(number), token)

    def _receiver(self, number: int) -> Pullback:
        """Return the pullback of an output: it stores the gradient for the plan's node, whose pullback runs last."""

        def pullback(gy: Array, of_whole: Gradient | None) -> None:
            self._seeds[number][...] = gy
            self._received.append(number)
            if of_whole is not None and of_whole.value is None:
                of_whole.add(self._nothing)

        return pullback

    def _pull_back(self, _: Array, *gradients: Gradient | None) -> None:
        received = sorted(self._received)
        self._received.clear()
        by_leaf = {
            leaf: gradient for leaf, gradient in zip(self._leaves, gradients, strict=True) if gradient is not None
        }
        homes = [self._home(leaf, gradient) for leaf, gradient in by_leaf.items()]
        begun = tuple([gradient.value is not None for gradient in by_leaf.values()])
        key = tuple(received), tuple(map(id, by_leaf)), tuple(map(id, homes)), begun
        if key not in self._graphs:  # the first time compiles kernels
            self._graphs[key] = None, homes
            if len(self._graphs) > _BACKWARDS_KEPT:
                self._graphs.popitem(last=False)
            with warmed_up():
                self._add_gradients(received, by_leaf)
            return
        graph = self._graphs[key][0]
        if graph is None and self._is_captured(by_leaf):
            graph = self._capture(received, by_leaf)
            self._graphs[key] = graph, homes
        if graph is None:
            self._add_gradients(received, by_leaf)
            return
        for (leaf, gradient), home in zip(by_leaf.items(), homes, strict=True):
            if home is None and gradient.value is not None:
                self._sums[leaf][...] = gradient.value
        graph.launch()
        for (leaf, gradient), home in zip(by_leaf.items(), homes, strict=True):
            if home is not None:
                gradient.replace(home)
            elif gradient.home is None:
                gradient.replace(self._sums[leaf].copy())
            else:
                gradient.home[...] = self._sums[leaf]
                gradient.replace(gradient.home)

    def _home(self, leaf: Tensor, gradient: Gradient) -> Array | None:
        """Return the array of a parameter's gradient; None for inputs, which are new tensors in each call."""
        return None if id(leaf) in self._inputs else gradient.home

    def _add_gradients(self, received: list[int], by_leaf: dict[Tensor, Gradient]) -> None:
        add_gradients([self._heads[i] for i in received], [self._seeds[i] for i in received], by_leaf)

    def _is_captured(self, by_leaf: dict[Tensor, Gradient]) -> bool:
        """Return False after a failed capture, or if two leaves of the plan are one tensor outside."""
        return not self._is_refused and len({id(gradient) for gradient in by_leaf.values()}) == len(by_leaf)

    def _capture(self, received: list[int], by_leaf: dict[Tensor, Gradient]) -> CudaGraph | None:
        """Capture a graph that adds to the gradients in place; warn and return None if that fails."""
        into = {}
        for leaf, gradient in by_leaf.items():
            xp, home = array_namespace(leaf.data), self._home(leaf, gradient)
            if home is None:
                home = self._sums.setdefault(leaf, xp.empty(leaf.shape, dtype=leaf.dtype))
            into[leaf] = Gradient(leaf, xp, home=home, adds=gradient.value is not None)
        try:
            return self._capturer.capture(lambda: self._add_gradients(received, into))
        except Exception as error:
            self._is_refused = True
            warn_without_graph("backward", error)
            return None
