"""CUDA graphs: a plan's operators captured as one graph for forward and one for backward, and launched again.

Forward is captured on the second call of a kind; the first call, which was traced, has compiled its kernels. The plan
keeps the tape of the capture. A recorded replay puts one node for the whole plan on the thread's tape, and one for each
output. The first backward runs the plan's tape, which compiles kernels; the second captures it. Gradients of parameters
are written to their buckets, and their hooks run in the usual order after the graph.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ...autograd import Gradient, Tensor, pause
from ...autograd.tape import CALLS, Pullback, add_gradients, leaves_below, modes
from ...core.arrays import Array, array_namespace
from ...errors import UnsupportedError
from ...kernels.cuda.capture import Capturer, CudaGraph, warmed_up
from .executor import Shortcut, SplicedNode, copied, source_of
from .graph import Graph, GraphNode, Input, Result, Source, call
from .tracing import HeldArrays

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

    def __init__(self, graph: Graph, given: Sequence[Tensor], keeps: bool) -> None:
        self.graph = graph
        self._keeps = keeps
        self._token = object()
        self._held = HeldArrays(graph)
        self._frozen = self._held.without_gradients()
        self._capturer = Capturer()
        self._places = [Tensor(array_namespace(x.data).empty(x.shape, dtype=x.dtype)) for x in given]
        for place, x in zip(self._places, given, strict=True):
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

    def first(self, given: Sequence[Tensor]) -> Any:
        """Return the network's result for ``given``, for which the plan was created."""
        return self.replay(given)

    def replay(self, given: Sequence[Tensor]) -> Any:
        """Return the network's result for ``given``, which must have the plan's shapes and dtypes."""
        self._held.wait_for_updates()
        for place, x in zip(self._places, given, strict=True):
            place.data[...] = x.data
        self._launch()
        return self._returned(given)

    def _launch(self) -> None:
        self._graph.launch()

    def _returned(self, given: Sequence[Tensor]) -> Any:
        """Return copies of the last run's outputs, on the tape if this thread records."""
        outputs = {source: Tensor(copied(x.data, array_namespace(x.data))) for source, x in self._results.items()}
        if self._backward is not None:
            self._backward.splice(list(outputs.values()), given, self._token)
        return self.graph.returned_with(outputs, given)

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
            expected = "launches alone, which wait for nothing"
            got = f"{type(error).__name__}: {error}"
            raise UnsupportedError("CUDA graph", where=node.operator, expected=expected, got=got) from error
        listed = result if isinstance(result, tuple) else (result,)
        return {Result(number, i): x if isinstance(x, Tensor) else Tensor(x) for i, x in enumerate(listed)}


def warn_without_graph(name: str, error: Exception) -> None:
    """Warn that ``what``, a module or its backward, runs without a CUDA graph; results are the same."""
    problem = str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"
    warnings.warn(f"hybridize: {name} goes without a CUDA graph; {problem}", RuntimeWarning, stacklevel=2)


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

    def splice(self, outputs: list[Tensor], given: Sequence[Tensor], token: object) -> None:
        """Put the last replay, with these ``outputs``, on the tape."""
        self._received.clear()
        if not self._heads:
            return
        sources = tuple(
            source_of(given[self._inputs[id(leaf)]]) if id(leaf) in self._inputs else leaf for leaf in self._leaves
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
        wanted = {
            leaf: gradient for leaf, gradient in zip(self._leaves, gradients, strict=True) if gradient is not None
        }
        homes = [self._home(leaf, gradient) for leaf, gradient in wanted.items()]
        begun = tuple([gradient.value is not None for gradient in wanted.values()])
        key = tuple(received), tuple(map(id, wanted)), tuple(map(id, homes)), begun
        if key not in self._graphs:  # the first time compiles kernels
            self._graphs[key] = None, homes
            if len(self._graphs) > _BACKWARDS_KEPT:
                self._graphs.popitem(last=False)
            with warmed_up():
                self._add_gradients(received, wanted)
            return
        graph = self._graphs[key][0]
        if graph is None and self._is_captured(wanted):
            graph = self._capture(received, wanted)
            self._graphs[key] = graph, homes
        if graph is None:
            self._add_gradients(received, wanted)
            return
        for (leaf, gradient), home in zip(wanted.items(), homes, strict=True):
            if home is None and gradient.value is not None:
                self._sums[leaf][...] = gradient.value
        graph.launch()
        for (leaf, gradient), home in zip(wanted.items(), homes, strict=True):
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

    def _add_gradients(self, received: list[int], wanted: dict[Tensor, Gradient]) -> None:
        add_gradients([self._heads[i] for i in received], [self._seeds[i] for i in received], wanted)

    def _is_captured(self, wanted: dict[Tensor, Gradient]) -> bool:
        """Return False after a failed capture, or if two leaves of the plan are one tensor outside."""
        return not self._is_refused and len({id(gradient) for gradient in wanted.values()}) == len(wanted)

    def _capture(self, received: list[int], wanted: dict[Tensor, Gradient]) -> CudaGraph | None:
        """Capture a graph that adds to the gradients in place; warn and return None if that fails."""
        into = {}
        for leaf, gradient in wanted.items():
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
