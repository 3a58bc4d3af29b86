"""Caches of plans: which plan a call uses, and when one is created; and plans of training steps.

On the host, a step's plan runs the forward calls and then the pullbacks, in an order found once. The hook of a
parameter runs when its gradient is complete, so reductions overlap with backward; the update follows. On a GPU the step
is captured as one CUDA graph, with the update if it needs no other rank. The graph is cut where hooks launch
reductions: they are called while earlier parts run, and later parts are launched after them.

The module returns per-sample losses and outputs: see `hpcdp.train.TrainStep`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ...autograd import Gradient, Tensor, as_tensor, pause
from ...autograd.tape import add_gradients, first_on_gpu, leaves_below, modes
from ...autograd.tensor import RepeatedBackward
from ...core.arrays import Array, array_namespace, dtype_of, is_cupy, on_device_of
from ...errors import ConfigError
from ...kernels.cuda import between, warmed_up
from ..virtual_shards import entered_shard
from .executor import CudaPlan, Plan, Shortcut, warn_without_graph
from .fusion import Moving
from .graph import Graph, Result, rewritten
from .tracing import TracingRun, array_of, state, takes_any_batch, with_pauses

if TYPE_CHECKING:
    from ..module import Module

_KEYS_KEPT = 16
"""Least recently used eviction keeps the plans of this many combinations of shapes, dtypes and modes a thread."""
_MOST_AT_ONCE = 64
"""Calls that can wait for their backward at once; further calls run without a plan."""

Key = tuple[Any, ...]


class _TracedGraph:
    """Traced graph and its plans: several if a call precedes the backward of another."""

    def __init__(self, traced: Graph, inputs: Sequence[Tensor], recording: bool) -> None:
        self.traced = traced
        self._types = _types_of(traced)
        kinds = {*self._types, *(_kind_of(x.data) for x in inputs)}
        self.is_on_host = kinds <= {np.ndarray}
        records_by_itself = not recording and any(node.is_recorded for node in traced.nodes)
        self.is_planned = all(map(_is_planned_kind, kinds)) and not records_by_itself
        """True if plans are possible: they record nothing by themselves. False after a plan has failed."""
        self.graph = rewritten(traced) if self.is_on_host else traced
        self.plans: list[Plan | CudaPlan] = []

    def still_fits(self) -> bool:
        """Return whether shapes, dtypes and array types of the network's tensors, and lists, are as traced."""
        kinds = [(held.shape, held.dtype) for held in self.traced.held]
        return kinds == self.traced.kinds and _types_of(self.traced) == self._types and self.traced.has_its_lists()


class _ThreadPlans(threading.local):
    """Plans of one thread; modes and the tape are thread-local."""

    def __init__(self) -> None:
        self.known: OrderedDict[Key, _TracedGraph] = OrderedDict()
        self.modules: object = None
        """Stamp of all modules at which ``attributes`` were checked."""
        self.attributes: list[Any] = []
        self.parameter: Any = None
        """The network's first parameter, which determines the device."""
        self.needs_all_ranks = False
        """True if one of the network's parts needs all ranks."""
        self.shortcut: Shortcut | None = None
        """Shortcut to the plan of the last call."""


class Hybrid:
    """Cache of the plans of ``module``; `HybridStep` overrides how they are created and called."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._here = _ThreadPlans()
        self._name = type(module).__name__

    def _forward(self, inputs: Sequence[Tensor]) -> Any:
        """Run a call without a plan."""
        return self._module.forward(*inputs)

    def _plan(self, graph: Graph, inputs: Sequence[Tensor], is_on_host: bool) -> Plan | CudaPlan:
        """Create a plan for inputs like ``inputs``."""
        return (Plan if is_on_host else CudaPlan)(graph, inputs, modes.recording)

    def _mode(self, inputs: Sequence[Tensor]) -> Key:
        """Return the key of a plan besides shapes and dtypes of the inputs."""
        return modes.recording, modes.training

    def __reduce__(self) -> tuple[Any, ...]:
        return Hybrid, (self._module,)  # a copy creates its own plans

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Return the result of ``forward`` for ``inputs``."""
        here = self._here
        shortcut = here.shortcut
        if shortcut is not None and len(inputs) == 1:
            result = shortcut.replay(inputs[0])
            if result is not None:
                return result
        tensors = [as_tensor(x) for x in inputs]
        if modes.tracer is not None:
            return self._forward(tensors)
        if here.modules is not state.modules:
            self._look_at_attributes(here)
        with on_device_of(first_on_gpu(*tensors, array_of(here.parameter))):
            return self._called(tensors, here)

    def _called(self, inputs: Sequence[Tensor], here: _ThreadPlans) -> Any:
        # Layers that need all ranks communicate, and virtual shards change random numbers and statistics.
        if modes.training and (here.needs_all_ranks or entered_shard() is not None):
            return self._forward(inputs)
        key = (*self._mode(inputs), *[_described(x) for x in inputs])
        known = here.known.get(key)
        if known is None:
            if not all(_is_planned(x.data) for x in inputs) or not self._is_traceable():
                return self._forward(inputs)
            return self._trace(key, inputs, here)
        for plan in known.plans:
            if not plan.is_busy():
                if plan.fits():
                    here.shortcut = plan.shortcut()
                    return plan.replay(inputs)
                known.plans.remove(plan)
                break
        else:
            if len(known.plans) >= _MOST_AT_ONCE:
                return self._forward(inputs)
        if not known.still_fits():
            del here.known[key]
            return self._trace(key, inputs, here)
        here.known.move_to_end(key)
        new = self._planned(known, inputs)
        if new is None:
            return self._forward(inputs)
        known.plans.append(new)
        return new.first(inputs)

    def _planned(self, known: _TracedGraph, inputs: Sequence[Tensor]) -> Plan | CudaPlan | None:
        """Create a plan for inputs like ``inputs``, or return None if there can be none."""
        if not known.is_planned:
            return None
        if known.is_on_host:
            return self._plan(known.graph, inputs, True)
        try:
            return self._plan(known.graph, inputs, False)
        except Exception as error:  # also CUDA's, e.g. out of memory
            warn_without_graph(self._name, error)
            known.is_planned = False
            return None

    def graph(self) -> Graph:
        """Return the graph of this thread's last prediction that was traced.

        Raises:
            ConfigError: there is none, or a part of the network cannot be traced.
        """
        here = self._here
        if here.modules is not state.modules:
            self._look_at_attributes(here)
        unknown = sorted({type(part).__name__ for part in _parts(self._module) if not part.is_traceable})
        if unknown:
            raise ConfigError(
                "hybridize", where=type(self._module).__name__, expected="traceable parts",
                got=", ".join(unknown),
            )  # fmt: skip
        for key, known in reversed(here.known.items()):
            if key[:2] == (False, False):
                return known.traced
        raise ConfigError(
            "hybridize", where=type(self._module).__name__,
            expected="a prediction outside record() and asynchronous()",
            got="none since the module was created or changed",
            remedy="leave asynchronous(), " * (modes.tracer is not None)
            + "call net(x), and again if the first call sets deferred shapes",
        )  # fmt: skip

    def for_export(self, graph: Graph) -> Graph:
        """Return the prediction ``graph`` with `with_pauses`, and whether it accepts any batch size."""

        def trace(inputs: Sequence[Tensor]) -> Graph:
            return self._traced(inputs)[0]

        return with_pauses(replace(graph, any_batch=takes_any_batch(graph, trace)), trace)

    def _is_traceable(self) -> bool:
        """Return whether all parts can be traced and no layer waits for its shape, for which some assign attributes."""
        from ..module import lacks_shapes

        return all(part.is_traceable for part in _parts(self._module)) and not lacks_shapes(self._module)

    def _look_at_attributes(self, here: _ThreadPlans) -> None:
        """Drop all plans if an attribute of the module or of its parts is another object."""
        now = state.modules
        attributes = [value for part in self._module.modules() for value in (part, *vars(part).values())]
        same = len(attributes) == len(here.attributes)
        if not same or any(a is not b for a, b in zip(attributes, here.attributes, strict=True)):
            here.known.clear()
            here.shortcut = None
            here.attributes = attributes
            here.parameter = next((held for _, held in attributes_of(self._module) if hasattr(held, "held")), None)
            here.needs_all_ranks = any(part.needs_all_ranks for part in self._module.modules())
        here.modules = now

    def _trace(self, key: Key, inputs: Sequence[Tensor], here: _ThreadPlans) -> Any:
        graph, result = self._traced(inputs)
        here.known[key] = _TracedGraph(graph, inputs, modes.recording)
        while len(here.known) > _KEYS_KEPT:
            here.known.popitem(last=False)
        return result

    def _traced(self, inputs: Sequence[Tensor]) -> tuple[Graph, Any]:
        run = TracingRun(attributes_of(self._module), inputs)
        with self._warmed_up(inputs):
            result = run.run(self._module.forward, inputs)
        return run.graph, result

    @contextlib.contextmanager
    def _warmed_up(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Run the context as a warm-up for a later CUDA capture, if the network is on a GPU."""
        array = first_on_gpu(*inputs, *(array_of(x) for _, x in attributes_of(self._module)))
        with on_device_of(array), contextlib.nullcontext() if array is None else warmed_up():
            yield


def _parts(module: Module) -> Iterator[Module]:
    """Yield the module and all its parts, also those hidden from `Module.modules`, as in `Replicas`."""
    yield module
    for value in vars(module).values():
        if hasattr(value, "is_traceable"):
            yield from _parts(value)


def _described(x: Tensor) -> Key:
    array: Array = x.data
    wants_gradient = x.node is not None or x.grad_req != "null"
    layout = None if array.flags.c_contiguous else array.strides
    device = array.device.id if is_cupy(array) else None
    return array.shape, array.dtype, wants_gradient, layout, device


def _is_planned(x: Array) -> bool:
    """Return whether an input can be planned.

    Arrays repeated along an axis cannot: sums over it have another order than in a plan's memory. An empty array is not
    repeated, though NumPy may give it strides of 0.
    """
    is_repeated = x.size and any(n > 1 and not step for n, step in zip(x.shape, x.strides, strict=True))
    return _is_planned_kind(_kind_of(x)) and not is_repeated


def _is_planned_kind(kind: type) -> bool:
    return kind is np.ndarray or kind.__module__.partition(".")[0] == "cupy"


def _kind_of(x: Array) -> type:
    """Return the type of ``x``; NumPy scalars count as arrays."""
    return np.ndarray if isinstance(x, np.generic) else type(x)


def _types_of(graph: Graph) -> list[type]:
    return [_kind_of(array_of(held)) for held in graph.held]


def attributes_of(module: Module) -> list[tuple[str, Any]]:
    """Return path and value of each tensor and array that a forward may use beside its inputs."""
    return [
        (prefix + name, value)
        for prefix, part in module._modules("")
        for name, value in vars(part).items()
        if isinstance(value, (Tensor, np.ndarray)) or is_cupy(value)
    ]


class CapturedUpdate(Protocol):
    """Update that can be captured at the end of a CUDA graph."""

    def capture(self) -> None:
        """Launch the update, within a capture."""
        ...

    def still_fits(self) -> bool:
        """Return whether the captured update is still the one to be made."""
        ...

    def step(self, count: int, launch: Callable[[], None]) -> None:
        """Run the trainer's ``step(count)``; ``launch`` performs the update and everything before it."""
        ...


class Stepping(Protocol):
    """Interface of the trainer that a step's plan uses."""

    loss_scale: float
    step_count: int
    accumulation: tuple[bool, bool]
    """True if backward adds to gradients, and whether further gradients follow before the update."""

    def step(self, count: int) -> int:
        """Reduce the gradients and update; see `hpcdp.Trainer.step`."""
        ...

    def graph_update(self, leaves: Sequence[Any]) -> CapturedUpdate | None:
        """Return the update from gradients of ``leaves``, if a CUDA graph can hold it at present."""
        ...

    def launching(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the ``leaves``, in order of completed gradients, whose hooks launch work beside backward."""
        ...


class Phases(NamedTuple):
    """Contexts for the phases of a step. A single CUDA graph launch counts as its last phase."""

    forward: AbstractContextManager[None] = nullcontext()
    backward: AbstractContextManager[None] = nullcontext()
    step: AbstractContextManager[None] = nullcontext()


UNOBSERVED = Phases()


def finish(trainer: Stepping, phases: Phases, returned: Sequence[Any]) -> list[Any]:
    """Run backward from the losses, the first of ``returned``, and the update; return the results off the tape."""
    losses = returned[0]
    with phases.backward:
        losses.backward(trainer.loss_scale)
    with phases.step:
        trainer.step(len(losses))
    return [off_the_tape(value) for value in returned]


def off_the_tape(x: Any) -> Any:
    """Return a network's result ``x`` with tensors over the same arrays that are on no tape."""
    if isinstance(x, dict):
        return {name: off_the_tape(value) for name, value in x.items()}
    if isinstance(x, (tuple, list)):
        return like(x, map(off_the_tape, x))
    return Tensor(x.data) if isinstance(x, Tensor) else x


def like(x: Any, values: Iterable[Any]) -> Any:
    """Return ``values`` as a tuple or list of the type of ``x``."""
    return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)


class HybridStep(Hybrid):
    """Cache of plans of the step called ``name``, whose ``module`` returns per-sample losses and outputs."""

    def __init__(self, module: Module, trainer: Stepping, phases: Phases, name: str) -> None:
        super().__init__(module)
        self._trainer, self._phases, self._name = trainer, phases, name
        self._first = next((held for _, held in attributes_of(module)), None)

    def _forward(self, inputs: Sequence[Tensor]) -> Any:
        with self._phases.forward:
            returned = self._module.forward(*[x.data for x in inputs])  # arrays, as in a step without plans
        return self._finished(returned)

    def _trace(self, key: Key, inputs: Sequence[Tensor], here: Any) -> Any:
        trainer, before = self._trainer, self._trainer.step_count
        try:
            with self._warmed_up(inputs):
                with self._phases.forward:
                    returned = super()._trace(key, inputs, here)
                return self._finished(returned)
        finally:
            if trainer.step_count == before and not trainer.accumulation[1]:
                here.known.pop(key, None)  # the update's kernels are not loaded yet, as a capture requires

    def _finished(self, returned: Sequence[Tensor]) -> list[Tensor]:
        with pause():
            return finish(self._trainer, self._phases, returned)

    def _plan(self, graph: Graph, inputs: Sequence[Tensor], is_on_host: bool) -> Plan | CudaPlan:
        return (StepPlan if is_on_host else CudaStepPlan)(graph, inputs, self._trainer, self._phases)

    def _mode(self, inputs: Sequence[Tensor]) -> Key:
        # Graphs on a GPU either add to gradients or write them. Inputs such as tokens may be in host memory.
        on_gpu = is_cupy(array_of(self._first)) or any(is_cupy(x.data) for x in inputs)
        return (*super()._mode(inputs), *(self._trainer.accumulation if on_gpu else ()))


class _Seeds:
    """Gradients of the losses: the trainer's loss scale for each."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self._scale: float | None = None

    def set(self, scale: float) -> Array:
        """Fill the array with ``scale`` if necessary, and return it."""
        if scale != self._scale:
            self.array[...] = self._scale = scale
        return self.array


class StepPlan(Plan):
    """`Plan` whose replay is a complete training step."""

    def __init__(self, graph: Graph, inputs: Sequence[Tensor], trainer: Stepping, phases: Phases) -> None:
        super().__init__(graph, inputs, keeps=True)
        self._trainer, self._phases = trainer, phases
        self._frozen = self._held.without_gradients()
        source = _losses_of(graph)
        losses = Tensor(self._outputs[source])
        losses.node = self._spliced(inputs)[source.node]
        self._count = len(losses)
        self._backward, self._seeds = RepeatedBackward(losses), _Seeds(np.empty(losses.shape, losses.dtype))

    def is_busy(self) -> bool:
        """Return False: no caller holds the tape between two calls."""
        return False

    def fits(self) -> bool:
        """Return whether the plan fits, and the same parameters get gradients."""
        return super().fits() and self._held.without_gradients() == self._frozen

    def _returned(self, inputs: Sequence[Tensor]) -> Any:
        """Run backward and update; return the network's results off the tape."""
        with pause():
            with self._phases.backward:
                self._backward.run(self._seeds.set(self._trainer.loss_scale))
            with self._phases.step:
                self._trainer.step(self._count)
        for place in self._places:
            if isinstance(place, Moving):
                place.array = None  # free a possibly large array
        return self._copies(inputs, None)

    def _compute(self, inputs: Sequence[Tensor]) -> None:
        with self._phases.forward:
            super()._compute(inputs)


class CudaStepPlan(CudaPlan):
    """`CudaPlan` of training steps: one graph of forward, backward and, if the trainer allows it, the update.

    It is cut after each gradient whose hook launches work.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Tensor], trainer: Stepping, phases: Phases) -> None:
        self._trainer, self._phases = trainer, phases
        source = _losses_of(graph)
        losses = graph.nodes[source.node].outputs[source.output]
        self._count = losses.shape[0]
        xp = array_namespace(*(held.data for held in graph.held if isinstance(held, Tensor)))
        self._seeds = _Seeds(xp.empty(losses.shape, dtype=dtype_of(losses.dtype)))
        for held in graph.held:
            if isinstance(held, Tensor) and held.grad_req != "null" and held.grad is None:
                held.grad = xp.zeros(held.shape, dtype=held.dtype)  # allocated outside the graph's memory pool
        self._leaves: list[Tensor] = []
        self._homes: list[tuple[Array, str]] = []
        """The leaves' gradients and ``grad_req``."""
        self._behind: list[Tensor] = []
        """Leaves whose hooks are called after the graph."""
        self._update: CapturedUpdate | None = None
        super().__init__(graph, inputs, keeps=True)

    def _way_back(self) -> None:
        """Return None: the graph includes backward."""

    def _run(self) -> None:
        """Call every operator, then backward and the update."""
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
            if leaf in launching and leaf is not self._leaves[-1]:  # nothing to cut after the last one
                between(partial(_call_hooks, self._behind))
                self._behind = []

        with pause():
            add_gradients([losses], [self._seeds.array], into, completed)
            self._update = self._trainer.graph_update(self._leaves)
            if self._update is not None:
                self._update.capture()
        for result in self._results.values():
            result.node = None  # the next launch overwrites what backward reads

    def is_busy(self) -> bool:
        """Return whether another stream than the capture's is current."""
        return not self._capturer.is_current()

    def fits(self) -> bool:
        """Return whether the plan fits, gradients have the same arrays, and the update is the captured one."""
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
    assert isinstance(source, Result)  # backward started from it
    return source
