"""The arrays of a network's tensors that a plan reads, as long as they are those."""

from __future__ import annotations

from typing import Any

from ...autograd import Tensor
from ...errors import HpcdpError
from .changed import state
from .graph import Graph


def array_of(held: Any) -> Any:
    """The array behind what a network has as an attribute, without waiting for an update of it."""
    return held.held() if hasattr(held, "held") else held.data if isinstance(held, Tensor) else held


class HeldArrays:
    """The arrays of the tensors and arrays of a network that ``graph`` holds, and the lists that it was traced with."""

    def __init__(self, graph: Graph) -> None:
        self._all = graph.held
        pairs = [(each, array_of(each)) for each in graph.held]
        self.parameters = [pair for pair in pairs if hasattr(pair[0], "held")]
        self._buffers = [pair for pair in pairs if isinstance(pair[0], Tensor) and not hasattr(pair[0], "held")]
        self._has_its_lists = graph.has_its_lists if graph.lists else None
        self.are_parameters_only = not self._buffers
        self.seen: object = None
        """The state of all parameters at which these had no hooks and these arrays."""

    def still_hold(self) -> bool:
        """Whether the tensors still have these arrays, and the lists these numbers."""
        now = state.parameters
        if self.seen is not now:
            if any(param.held() is not array for param, array in self.parameters):
                return False
            if all(param.data_hook is None for param, _ in self.parameters):
                self.seen = now
        if self._has_its_lists is not None and not self._has_its_lists():
            return False
        return all(buffer.data is array for buffer, array in self._buffers)

    def without_gradients(self) -> list[bool]:
        """Which of the network's tensors and arrays get no gradient."""
        return [getattr(each, "grad_req", "null") == "null" for each in self._all]

    @property
    def are_settled(self) -> bool:
        """Whether no update of a parameter may be under way."""
        return self.seen is state.parameters

    def wait_for_updates(self) -> None:
        """Wait for the updates of all parameters."""
        if not self.are_settled:
            for param, _ in self.parameters:
                wait_for_update(param)


def wait_for_update(param: Any) -> None:
    """Wait until nothing changes the values of ``param``, whose array must stay the same."""
    before = param.held()
    if param.data is not before:
        raise HpcdpError("replay", where=param.name, expected="an update in place", got="another array")
