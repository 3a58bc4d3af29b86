"""What programs may give a `Manager`, checked before ranks do anything together."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import manifest
from .compressed import COMPRESSIONS
from .shard import failing
from .tree import is_utf8


def absolute(path: str | os.PathLike[str]) -> Path:
    """A folder by a name that stays the same where the program goes on in another one.

    Raises:
        ConfigError: it is no path.
        DataError: the folder that the program is in is gone.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text:
        raise ConfigError("Manager", where="path", expected="a folder, as a str or a Path", got=repr(path))
    with failing("Manager", lambda: path):
        return Path(os.path.abspath(text))


def check_retention(keep: object, keep_every: object, best: object) -> None:
    """Raise `ConfigError` unless they say which checkpoints stay, see `Manager`."""
    for name, number in (("keep", keep), ("keep_every", keep_every)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ConfigError("Manager", where=name, expected="an integer >= 1, or None", got=repr(number))
    if best is not None and not (isinstance(best, str) and best.removeprefix("-")):
        raise ConfigError("Manager", where="best", expected="'metric', '-metric', or None", got=repr(best))
    if keep is None and (keep_every is not None or best is not None):
        raise ConfigError("Manager", where="keep", expected="a number with keep_every or best", got=None)


def check_ways_to_write(compression: object, atomic_rename: object) -> None:
    """Raise `ConfigError` unless files can be written so, see `Manager`."""
    if compression not in (None, *COMPRESSIONS):
        raise ConfigError("Manager", where="compression", expected=f"one of {', '.join(COMPRESSIONS)}, or None",
                          got=repr(compression))  # fmt: skip
    if not isinstance(atomic_rename, bool):
        raise ConfigError("Manager", where="atomic_rename", expected="True or False", got=repr(atomic_rename))


def step_number(operation: str, step: object) -> int:
    """A step, as a plain integer.

    Raises:
        ConfigError: it is none.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 10**18:
        raise ConfigError(operation, where="step", expected="an integer from 0 to 10**18 - 1", got=repr(step))
    return number


def metric_to_restore(best: object, own: str | None, step: object) -> str | None:
    """Return by which metric `Manager.restore` chooses, None where it does not.

    Args:
        best: what it was given.
        own: the manager's ``best``.
        step: what it was given.

    Raises:
        ConfigError: ``best`` is none, or asks for the manager's own, which has none; a step is given, too.
    """
    if best is False or best is None:
        return None
    if step is not None:
        raise ConfigError("restore", where="best", expected="none with a step", got=repr(best))
    if best is True and own is None:
        raise ConfigError("restore", where="best", expected="a Manager made with best=...", got="True",
                          remedy="name the metric: best='test_accuracy', best='-test_loss'")  # fmt: skip
    found = own if best is True else best
    if not isinstance(found, str) or not found.removeprefix("-"):
        raise ConfigError("restore", where="best", expected="True, 'metric' or '-metric'", got=repr(best))
    return found


def numbers(metrics: object, best: str | None) -> dict[str, float]:
    """Metrics as plain numbers, by name; none of None.

    Args:
        best: see `Manager`.

    Raises:
        ConfigError: they are none, or that of ``best`` is not among them.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise ConfigError("save", where="metrics", expected="a dict of numbers by name", got=repr(metrics))
    odd = next((name for name in metrics if not is_utf8(name)), None)
    if odd is not None:
        raise ConfigError("save", where="metrics", expected="names that are Unicode", got=ascii(odd))
    found = {name: _number(name, value) for name, value in metrics.items()}
    decides = None if best is None else best.removeprefix("-")
    if decides is not None and decides not in found:
        raise ConfigError("save", where="metrics", expected=f"{decides!r}, which decides what is best", got=found)
    return found


def _number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except Exception:  # of a library's number it may be anything
        pass
    text = type(value).__name__ if isinstance(value, int) else repr(value)  # too long to be shown
    raise ConfigError("save", where=f"metric {name}", expected="a number that a float can be", got=text)


def settings(config: object) -> dict[str, Any]:
    """A copy of a configuration that JSON can carry, as it comes back: a save behind may take a while.

    Raises:
        ConfigError: it cannot.
    """
    try:
        manifest.check_config(config)
        copied: dict[str, Any] = json.loads(json.dumps(dict(config)))  # type: ignore[call-overload]
    except (TypeError, ValueError, RecursionError) as error:
        expected = "a dict of what JSON can carry, with keys that are str"
        raise ConfigError("save", where="config", expected=expected, got=error) from error
    return copied


def told_alike(metrics: Mapping[str, float], config: Mapping[str, Any]) -> list[str]:
    """What of a save's arguments must be the same on all ranks, a line each, whatever their order."""
    values = [f"metric {name} = {value!r}" for name, value in metrics.items()]
    entries = [f"config {name} = {json.dumps(value, sort_keys=True)}" for name, value in config.items()]
    return sorted(values) + sorted(entries)
