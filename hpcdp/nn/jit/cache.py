"""A module's plans: which one a call takes, when one is made, and when a call goes without.

Plans of whole steps of training: forward, backward and update, without a tape in between.

On the host a plan's calls are followed by its pullbacks, in an order that was found once; where a parameter's gradient
is complete its hook is called, so that reductions begin while backward goes on; then comes the update. On a GPU all
that is captured as one CUDA graph, the update with it where it needs nothing of other ranks. Where hooks launch
reductions it is cut, so that they are called while what is before runs, and what comes behind is launched.

What the module returns are losses, one a sample, and outputs that go with them: see `hpcdp.train.TrainStep`.
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
from ...kernels.cuda.capture import between, warmed_up
from ..microbatch import entered_shard
from .cuda_graph import CudaPlan, warn_without_graph
from .executor import Plan, Shortcut
from .fusion import Moving
from .graph import Graph, Meta, Result, rewritten
from .tracing import TracingRun, array_of, state, takes_any_batch, with_pauses

if TYPE_CHECKING:
    from ..module import Module

_KEYS_KEPT = 16
"""Plans for so many combinations of shapes, dtypes and modes are kept a thread; those used longest ago go first."""
_MOST_AT_ONCE = 64
"""So many calls can wait for their backward at once; more of them go without a plan."""

Key = tuple[Any, ...]


class _Known:
    """A traced graph, as it is planned, and its plans: several where a call came before the backward of another."""

    def __init__(self, traced: Graph, given: Sequence[Tensor], recording: bool) -> None:
        self.traced = traced
        self._types = _types_of(traced)
        kinds = {*self._types, *(_kind_of(each.data) for each in given)}
        self.is_on_host = kinds <= {np.ndarray}
        records_by_itself = not recording and any(node.is_recorded for node in traced.nodes)
        self.is_planned = all(map(_is_planned_kind, kinds)) and not records_by_itself
        """Whether there can be plans: they know no tape where the caller records none. Not after one has failed."""
        self.graph = rewritten(traced, recording) if self.is_on_host else traced
        self.plans: list[Plan | CudaPlan] = []

    def still_fits(self) -> bool:
        """Whether the network's tensors have the shapes, dtypes and kinds of arrays with which it was traced, and lists
        the numbers."""
        kinds = [(each.shape, each.dtype) for each in self.traced.held]
        return kinds == self.traced.kinds and _types_of(self.traced) == self._types and self.traced.has_its_lists()


class _Here(threading.local):
    """The plans of one thread; modes, and what is on the tape, are a thread's own."""

    def __init__(self) -> None:
        self.known: OrderedDict[Key, _Known] = OrderedDict()
        self.modules: object = None
        """The state of all modules at which ``attributes`` were the network's."""
        self.attributes: list[Any] = []
        self.parameter: Any = None
        """The network's first one, where the others are, too."""
        self.needs_all_ranks = False
        """Whether one of its parts does."""
        self.shortcut: Shortcut | None = None
        """To the plan of the last call, until another is taken."""


class Hybrid:
    """The plans of ``module``. What calls do with them besides is for `step_plan.HybridStep` to say."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._here = _Here()
        self._name = type(module).__name__

    def _forward(self, given: Sequence[Tensor]) -> Any:
        """What a call without a plan does."""
        return self._module.forward(*given)

    def _plan(self, graph: Graph, given: Sequence[Tensor], is_on_host: bool) -> Plan | CudaPlan:
        """A new plan, for inputs like ``given``."""
        return (Plan if is_on_host else CudaPlan)(graph, given, modes.recording)

    def _mode(self, given: Sequence[Tensor]) -> Key:
        """What a plan depends on besides shapes and dtypes of what it is ``given``."""
        return modes.recording, modes.training

    def __reduce__(self) -> tuple[Any, ...]:
        return Hybrid, (self._module,)  # a copy traces for itself

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """What ``forward`` returns."""
        here = self._here
        shortcut = here.shortcut
        if shortcut is not None and len(inputs) == 1:
            result = shortcut.replay(inputs[0])
            if result is not None:
                return result
        given = [as_tensor(x) for x in inputs]
        if modes.tracer is not None:
            return self._forward(given)
        if here.modules is not state.modules:
            self._look_at_attributes(here)
        with on_device_of(first_on_gpu(*given, array_of(here.parameter))):  # where operators compute that are called
            return self._called(given, here)

    def _called(self, given: Sequence[Tensor], here: _Here) -> Any:
        # Layers of all ranks talk to the others, and virtual shards change what layers draw and note.
        if modes.training and (here.needs_all_ranks or entered_shard() is not None):
            return self._forward(given)
        key = (*self._mode(given), *[_described(x) for x in given])
        known = here.known.get(key)
        if known is None:
            if not all(_is_planned(x.data) for x in given) or not self._is_traceable():
                return self._forward(given)
            return self._trace(key, given, here)
        for plan in known.plans:
            if not plan.is_busy():
                if plan.fits():
                    here.shortcut = plan.shortcut()
                    return plan.replay(given)
                known.plans.remove(plan)
                break
        else:
            if len(known.plans) >= _MOST_AT_ONCE:
                return self._forward(given)
        if not known.still_fits():
            del here.known[key]
            return self._trace(key, given, here)
        here.known.move_to_end(key)
        new = self._planned(known, given)
        if new is None:
            return self._forward(given)
        known.plans.append(new)
        return new.first(given)

    def _planned(self, known: _Known, given: Sequence[Tensor]) -> Plan | CudaPlan | None:
        """A new plan, for inputs like ``given``; None where there can be none."""
        if not known.is_planned:
            return None
        if known.is_on_host:
            return self._plan(known.graph, given, True)
        try:
            return self._plan(known.graph, given, False)
        except Exception as error:  # also CUDA's, as where a graph finds no memory
            warn_without_graph(self._name, error)
            known.is_planned = False
            return None

    def graph(self) -> Graph:
        """The graph of this thread's last prediction of which there is one.

        Raises:
            ConfigError: there is none, or a part of the network cannot be traced.
        """
        here = self._here
        if here.modules is not state.modules:
            self._look_at_attributes(here)
        unknown = sorted({type(each).__name__ for each in _parts(self._module) if not each.is_traceable})
        if unknown:
            raise ConfigError(
                "hybridize", where=type(self._module).__name__, expected="parts that can be traced",
                got=", ".join(unknown),
            )  # fmt: skip
        for key, known in reversed(here.known.items()):
            if key[:2] == (False, False):
                return known.traced
        raise ConfigError(
            "hybridize", where=type(self._module).__name__,
            expected="a call before, outside of record() and of asynchronous(), within which nothing is planned",
            got="none since the module was made or changed",
            remedy="leave asynchronous(), " * (modes.tracer is not None)
            + "call net(x), and again if that call has found out shapes",
        )  # fmt: skip

    def for_export(self, graph: Graph) -> Graph:
        """``graph``, one of predictions, with what tracing the forward again finds out: whether it takes any batch, and
        what is computed within ``pause()``."""

        def trace(given: Sequence[Tensor]) -> Graph:
            return self._traced(given)[0]

        return with_pauses(replace(graph, any_batch=takes_any_batch(graph, trace)), trace)

    def _is_traceable(self) -> bool:
        """Not while layers are still to find out their shapes, for which some assign attributes."""
        from ..module import lacks_shapes

        return all(each.is_traceable for each in _parts(self._module)) and not lacks_shapes(self._module)

    def _look_at_attributes(self, here: _Here) -> None:
        """Forget all plans if an attribute of the module or of its parts is another object."""
        now = state.modules
        attributes = [value for each in self._module.modules() for value in (each, *vars(each).values())]
        same = len(attributes) == len(here.attributes)
        if not same or any(a is not b for a, b in zip(attributes, here.attributes, strict=True)):
            here.known.clear()
            here.shortcut = None
            here.attributes = attributes
            here.parameter = next((held for _, held in attributes_of(self._module) if hasattr(held, "held")), None)
            here.needs_all_ranks = any(each.needs_all_ranks for each in self._module.modules())
        here.modules = now

    def _trace(self, key: Key, given: Sequence[Tensor], here: _Here) -> Any:
        graph, result = self._traced(given)
        here.known[key] = _Known(graph, given, modes.recording)
        while len(here.known) > _KEYS_KEPT:
            here.known.popitem(last=False)
        return result

    def _traced(self, given: Sequence[Tensor]) -> tuple[Graph, Any]:
        run = TracingRun(attributes_of(self._module), given)
        with self._warmed_up(given):
            result = run.run(self._module.forward, given)
        return run.graph, result

    @contextlib.contextmanager
    def _warmed_up(self, given: Sequence[Tensor]) -> Iterator[None]:
        """What runs inside may be captured later, if it is on a GPU."""
        array = first_on_gpu(*given, *(array_of(x) for _, x in attributes_of(self._module)))
        with on_device_of(array), contextlib.nullcontext() if array is None else warmed_up():
            yield


def _parts(module: Module) -> Iterator[Module]:
    """The module and all its parts, also those that pass for what they hold, as `Replicas` do."""
    yield module
    for value in vars(module).values():
        if hasattr(value, "is_traceable"):
            yield from _parts(value)


def _described(x: Tensor) -> Key:
    array = x.data
    wants_gradient = x.node is not None or x.grad_req != "null"
    layout = None if array.flags.c_contiguous else array.strides
    device = array.device.id if is_cupy(array) else None
    return array.shape, array.dtype, wants_gradient, layout, device


def _is_planned(x: Array) -> bool:
    """Not an array that is repeated along an axis: sums over it have an order that they have in no memory of a plan.

    One without elements is none, though NumPy may give it strides of 0."""
    is_repeated = x.size and any(n > 1 and not step for n, step in zip(x.shape, x.strides, strict=True))
    return _is_planned_kind(_kind_of(x)) and not is_repeated


def _is_planned_kind(kind: type) -> bool:
    return kind is np.ndarray or kind.__module__.partition(".")[0] == "cupy"


def _kind_of(x: Array) -> type:
    """The type of ``x``; what NumPy makes of an array without axes passes for one."""
    return np.ndarray if isinstance(x, np.generic) else type(x)


def _types_of(graph: Graph) -> list[type]:
    return [_kind_of(array_of(each)) for each in graph.held]


def attributes_of(module: Module) -> list[tuple[str, Any]]:
    """Path and value of what a forward may take beside its inputs."""
    return [
        (prefix + name, value)
        for prefix, each in module._modules("")
        for name, value in vars(each).items()
        if isinstance(value, (Tensor, np.ndarray)) or is_cupy(value)
    ]


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
