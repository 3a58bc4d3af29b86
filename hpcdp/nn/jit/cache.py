"""A module's plans: which one a call takes, when one is made, and when a call goes without."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...autograd import Tensor, as_tensor
from ...autograd.dispatch import first_on_gpu, modes
from ...core.arrays import Array, is_cupy, on_device_of
from ...errors import ConfigError
from ...kernels.cuda.capture import warmed_up
from ..microbatch import entered_shard
from .cuda_graph import CudaPlan, warn_without_graph
from .executor import Plan, Shortcut
from .graph import Graph, rewritten
from .guards import array_of, state, takes_any_batch
from .tracing import TracingRun, with_pauses

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
