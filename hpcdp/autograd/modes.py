"""Whether operations are recorded, and whether layers behave as in training: per thread, changed by contexts."""

from __future__ import annotations

import threading
from types import TracebackType


class _Flags(threading.local):
    recording = False
    training = False


_flags = _Flags()


def is_recording() -> bool:
    """Whether operations of this thread are recorded."""
    return _flags.recording


def is_training() -> bool:
    """Whether layers with two behaviours (dropout, batch normalisation) train, on this thread."""
    return _flags.training


class _Mode:
    """A context that sets flags and restores them however it is left; None leaves a flag as it is."""

    def __init__(self, recording: bool | None, training: bool | None) -> None:
        self._wanted = (recording, training)
        self._before: list[tuple[bool, bool]] = []

    def __enter__(self) -> None:
        self._before.append((_flags.recording, _flags.training))
        recording, training = self._wanted
        if recording is not None:
            _flags.recording = recording
        if training is not None:
            _flags.training = training

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _flags.recording, _flags.training = self._before.pop()


def record(train_mode: bool = True) -> _Mode:
    """A context whose operations are recorded, so that `backward` can follow; layers train unless told otherwise."""
    return _Mode(True, train_mode)


def pause(train_mode: bool = False) -> _Mode:
    """A context inside `record` whose operations are not recorded; layers predict unless told otherwise."""
    return _Mode(False, train_mode)


def train_mode() -> _Mode:
    """A context in which layers train, recorded or not."""
    return _Mode(None, True)


def predict_mode() -> _Mode:
    """A context in which layers predict, recorded or not."""
    return _Mode(None, False)
