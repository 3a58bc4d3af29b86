"""Plans of whole steps of training: forward, backward and update, without a tape in between.

On the host a plan's calls are followed by its pullbacks, in an order that was found once; where a parameter's gradient
is complete its hook is called, so that reductions begin while backward goes on; then comes the update. On a GPU all
that is captured as one CUDA graph, the update with it where it needs nothing of other ranks. Where hooks launch
reductions it is cut, so that they are called while what is before runs, and what comes behind is launched.

What the module returns are losses, one a sample, and outputs that go with them: see `hpcdp.train.TrainStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ...autograd import Gradient, Tensor, pause
from ...autograd.tape import add_gradients, leaves_below
from ...autograd.tensor import RepeatedBackward
from ...core.arrays import Array, array_namespace, dtype_of, is_cupy
from ...kernels.cuda.capture import between
from .cache import Hybrid, Key, attributes_of
from .cuda_graph import CudaPlan
from .executor import Plan
from .fusion import Moving
from .graph import Graph, Meta, Result
from .guards import array_of

if TYPE_CHECKING:
    from ..module import Module


class GraphUpdate(Protocol):
    """An update that a CUDA graph can have at its end."""

    def capture(self) -> None:
        """Launch it, within a capture."""
        ...

    def still_fits(self) -> bool:
        """Whether a launch of what was captured is still the update that is to be made."""
        ...

    def step(self, count: int, launch: Callable[[], None]) -> None:
        """What the trainer's ``step(count)`` does, of which ``launch`` is the update, and all before it."""
        ...


class Stepping(Protocol):
    """What a step's plan needs of a trainer."""

    loss_scale: float
    step_count: int
    accumulation: tuple[bool, bool]
    """Whether backward adds to gradients, and whether further ones follow before the update."""

    def step(self, count: int) -> int:
        """Reduce the gradients and update; see `hpcdp.Trainer.step`."""
        ...

    def graph_update(self, leaves: Sequence[Any]) -> GraphUpdate | None:
        """The update from the gradients of ``leaves``, if a CUDA graph can have it as the trainer is now."""
        ...

    def launching(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Of ``leaves``, whose gradients are complete in this order, those whose hooks launch what runs beside
        backward."""
        ...


class Phases(NamedTuple):
    """Contexts that the parts of a step are computed in, each entered anew in every step. What is one launch of a CUDA
    graph counts as the last of its parts."""

    forward: AbstractContextManager[None] = nullcontext()
    backward: AbstractContextManager[None] = nullcontext()
    step: AbstractContextManager[None] = nullcontext()


UNOBSERVED = Phases()


def finish(trainer: Stepping, phases: Phases, returned: Sequence[Any]) -> list[Any]:
    """Backward from the first of what was ``returned``, and the update; all of it, off the tape."""
    losses = returned[0]
    with phases.backward:
        losses.backward(trainer.loss_scale)
    with phases.step:
        trainer.step(len(losses))
    return [off_the_tape(each) for each in returned]


def off_the_tape(x: Any) -> Any:
    """``x``, what a network returns, with tensors over the same arrays that are on no tape."""
    if isinstance(x, dict):
        return {name: off_the_tape(each) for name, each in x.items()}
    if isinstance(x, (tuple, list)):
        return like(x, map(off_the_tape, x))
    return Tensor(x.data) if isinstance(x, Tensor) else x


def like(x: Any, values: Iterable[Any]) -> Any:
    """``values`` as a tuple or list of the type of ``x``."""
    return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)


class HybridStep(Hybrid):
    """The plans of the step called ``name``: ``module`` returns a tuple, of losses, one a sample, and of outputs."""

    def __init__(self, module: Module, trainer: Stepping, phases: Phases, name: str) -> None:
        super().__init__(module)
        self._trainer, self._phases, self._name = trainer, phases, name
        self._first = next((held for _, held in attributes_of(module)), None)

    def _forward(self, given: Sequence[Tensor]) -> Any:
        with self._phases.forward:
            returned = self._module.forward(*[each.data for each in given])  # arrays, as a step that is not hybridized
        return self._finished(returned)

    def _trace(self, key: Key, given: Sequence[Tensor], here: Any) -> Any:
        trainer, before = self._trainer, self._trainer.step_count
        try:
            with self._warmed_up(given):
                with self._phases.forward:
                    returned = super()._trace(key, given, here)
                return self._finished(returned)
        finally:
            if trainer.step_count == before and not trainer.accumulation[1]:
                here.known.pop(key, None)  # a capture would be the first to load the update's kernels

    def _finished(self, returned: Sequence[Tensor]) -> list[Tensor]:
        with pause():
            return finish(self._trainer, self._phases, returned)

    def _plan(self, graph: Graph, given: Sequence[Tensor], is_on_host: bool) -> Plan | CudaPlan:
        return (StepPlan if is_on_host else CudaStepPlan)(graph, given, self._trainer, self._phases)

    def _mode(self, given: Sequence[Tensor]) -> Key:
        # Graphs on a GPU either add to gradients or write them; tokens may be in host memory.
        on_gpu = is_cupy(array_of(self._first)) or any(is_cupy(each.data) for each in given)
        return (*super()._mode(given), *(self._trainer.accumulation if on_gpu else ()))


class _Seeds:
    """The gradients of losses: the trainer's loss scale each."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self._scale: float | None = None

    def set(self, scale: float) -> Array:
        """The array, with these values."""
        if scale != self._scale:
            self.array[...] = self._scale = scale
        return self.array


class StepPlan(Plan):
    """A `Plan` whose replay is a whole step."""

    def __init__(self, graph: Graph, given: Sequence[Tensor], trainer: Stepping, phases: Phases) -> None:
        super().__init__(graph, given, keeps=True)
        self._trainer, self._phases = trainer, phases
        self._frozen = self._held.without_gradients()
        source = _losses_of(graph)
        losses = Tensor(self._outputs[source])
        losses.node = self._spliced(given)[source.node]
        self._count = len(losses)
        self._backward, self._seeds = RepeatedBackward(losses), _Seeds(np.empty(losses.shape, losses.dtype))

    def is_busy(self) -> bool:
        """Never between two calls: nobody gets the tape."""
        return False

    def fits(self) -> bool:
        """Also whether the same parameters get gradients."""
        return super().fits() and self._held.without_gradients() == self._frozen

    def _returned(self, given: Sequence[Tensor]) -> Any:
        """What the network has returned, off the tape; after backward and update."""
        with pause():
            with self._phases.backward:
                self._backward.run(self._seeds.set(self._trainer.loss_scale))
            with self._phases.step:
                self._trainer.step(self._count)
        for place in self._places:
            if isinstance(place, Moving):
                place.array = None  # it may be large, and nobody needs it any more
        return self._copies(given, None)

    def _compute(self, given: Sequence[Tensor]) -> None:
        with self._phases.forward:
            super()._compute(given)


class CudaStepPlan(CudaPlan):
    """A `CudaPlan` of whole steps: one graph for forward, backward and, where the trainer allows it, the update. It is
    cut behind each gradient whose hook launches something."""

    def __init__(self, graph: Graph, given: Sequence[Tensor], trainer: Stepping, phases: Phases) -> None:
        self._trainer, self._phases = trainer, phases
        losses = _meta_of(graph, _losses_of(graph))
        self._count = losses.shape[0]
        xp = array_namespace(*(each.data for each in graph.held if isinstance(each, Tensor)))
        self._seeds = _Seeds(xp.empty(losses.shape, dtype=dtype_of(losses.dtype)))
        for each in graph.held:
            if isinstance(each, Tensor) and each.grad_req != "null" and each.grad is None:
                each.grad = xp.zeros(each.shape, dtype=each.dtype)  # not in the memory of the graph
        self._leaves: list[Tensor] = []
        self._homes: list[tuple[Array, str]] = []
        """Where their gradients lie, and what is to be done to them."""
        self._behind: list[Tensor] = []
        """Leaves whose hooks are called behind the graph."""
        self._update: GraphUpdate | None = None
        super().__init__(graph, given, keeps=True)

    def _way_back(self) -> None:
        """None: the graph has gone it."""

    def _run(self) -> None:
        """Call every operator, then what backward and update call."""
        super()._run()
        losses = self._results[_losses_of(self.graph)]
        self._leaves = leaves_below([losses])
        self._homes = [(leaf.grad, leaf.grad_req) for leaf in self._leaves]
        into = {
            leaf: Gradient(leaf, array_namespace(home), home=home, adds=grad_req == "add")
            for leaf, (home, grad_req) in zip(self._leaves, self._homes, strict=True)
        }
        launching = set(self._trainer.launching(self._leaves))

        def completed(leaf: Tensor) -> None:
            self._behind.append(leaf)
            if leaf in launching and leaf is not self._leaves[-1]:  # behind the last one nothing is left to cut off
                between(partial(_call_hooks, self._behind))
                self._behind = []

        with pause():
            add_gradients([losses], [self._seeds.array], into, completed)
            self._update = self._trainer.graph_update(self._leaves)
            if self._update is not None:
                self._update.capture()
        for each in self._results.values():
            each.node = None  # what backward has read may be written over by the next launch

    def is_busy(self) -> bool:
        return not self._capturer.is_current()

    def fits(self) -> bool:
        """Also whether gradients go where they did, and the update is what was captured."""
        for leaf, (home, grad_req) in zip(self._leaves, self._homes, strict=True):
            if leaf.grad is not home or leaf.grad_req != grad_req:
                return False
        return super().fits() and (self._update is None or self._update.still_fits())

    def _launch(self) -> None:
        self._seeds.set(self._trainer.loss_scale)
        with pause():
            if self._update is None:
                with self._phases.backward:
                    super()._launch()
                    _call_hooks(self._behind)
                with self._phases.step:
                    self._trainer.step(self._count)
            else:
                with self._phases.step:
                    _call_hooks(self._behind)
                    self._update.step(self._count, super()._launch)


def _call_hooks(leaves: Sequence[Tensor]) -> None:
    for leaf in leaves:
        if leaf.grad_hook is not None:
            leaf.grad_hook(leaf)


def _losses_of(graph: Graph) -> Result:
    source = graph.outputs[0]
    assert isinstance(source, Result)  # backward has gone through it
    return source


def _meta_of(graph: Graph, source: Result) -> Meta:
    return graph.nodes[source.node].outputs[source.output]
