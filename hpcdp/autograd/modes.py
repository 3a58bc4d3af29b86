"""Whether this thread records operations, and whether layers behave as in training.

Both flags are a thread's own: ranks that are threads of one process would otherwise mix their tapes.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from .registry import Tracer
    from .tape import NumberHeads


TRACING = 4
"""What tracing adds to the signature of a thread's modes."""
_NODES_OF_A_CALL = 1 << 20
"""More than one operator puts on the tape."""


class _Modes(threading.local):
    recording = False
    training = False
    signature = 0
    """One number for the modes: 1 while recording, 2 while training, and 4 more while a thread traces."""
    tracer: Tracer | None = None
    """What takes this thread's operators, while it traces or calls them asynchronously."""
    numbers = itertools.count(0, _NODES_OF_A_CALL)
    """Of the nodes that this thread puts on the tape: those of an operator that is computed later are numbered on from
    one that was drawn when it was called."""
    number_heads: NumberHeads | None = None
    """The heads of the backward that this thread is in, where each is a single number."""
    capture: Callable[..., Any] | None = None
    """What is told how an operator's result is computed again, in place of the tape, while this thread plans."""


modes = _Modes()
"""The flags of the calling thread."""


def is_recording() -> bool:
    """Whether operations of this thread are put on the tape."""
    return modes.recording


def is_training() -> bool:
    """Whether dropout drops and batch normalisation uses the batch's statistics in this thread."""
    return modes.training


class _Set(contextlib.ContextDecorator):
    """Sets what is not None inside the ``with`` block. Written out: a generator would take 2 us more of a step."""

    def __init__(self, recording: bool | None = None, training: bool | None = None) -> None:
        self._recording, self._training = recording, training
        self._before: list[tuple[bool, bool, int]] = []

    def _recreate_cm(self) -> Self:  # of a decorated function, which several threads may call at once
        return type(self)(self._recording, self._training)

    def __enter__(self) -> None:
        here = modes
        self._before.append((here.recording, here.training, here.signature))
        if self._recording is not None:
            here.recording = self._recording
        if self._training is not None:
            here.training = self._training
        here.signature = (here.signature & TRACING) + here.recording + 2 * here.training

    def __exit__(self, *_: object) -> None:
        modes.recording, modes.training, modes.signature = self._before.pop()


def record(train_mode: bool = True) -> contextlib.AbstractContextManager[None]:
    """Put this thread's operations on the tape inside the ``with`` block; layers train if ``train_mode`` is true."""
    return _Set(recording=True, training=train_mode)


def pause(train_mode: bool = False) -> contextlib.AbstractContextManager[None]:
    """Keep this thread's operations off the tape inside the ``with`` block."""
    return _Set(recording=False, training=train_mode)


def train_mode() -> contextlib.AbstractContextManager[None]:
    """Let layers behave as in training inside the ``with`` block; recording stays as it is."""
    return _Set(training=True)


def predict_mode() -> contextlib.AbstractContextManager[None]:
    """Let layers behave as in prediction inside the ``with`` block; recording stays as it is."""
    return _Set(training=False)
