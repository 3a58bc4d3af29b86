"""Whether anything that plans depend on may have changed since they last looked: one comparison instead of many.

A new object stands for a new state, so that threads that change something at once cannot miss each other's changes.
"""

from __future__ import annotations

from ...autograd.modes import TRACING, modes


class _State:
    modules: object = object()
    parameters: object = object()


state = _State()
"""What stands for the attributes of all modules, and for the arrays and hooks of all parameters."""


class Look:
    """Tells once after each change whether a module may have changed, and at first."""

    def __init__(self) -> None:
        self._seen: object = None

    def is_due(self) -> bool:
        now = state.modules
        before, self._seen = self._seen, now
        return before is not now


def in_module(module: object, name: str) -> None:
    """An attribute of a module is about to change.

    Raises:
        HpcdpError: this thread traces: a replay would not change it.
    """
    if modes.signature & TRACING:
        from .tracing import refusal, users_line

        raise refusal(
            users_line()[0], "a forward that only computes", f"one that assigns {type(module).__name__}.{name}",
            "return what is to be kept, or call hybridize(False)",
        )  # fmt: skip
    state.modules = object()


def in_parameters() -> None:
    """A parameter has another array or hook."""
    state.parameters = object()
