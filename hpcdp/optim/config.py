"""Objects that travel as a name and arguments.

Optimizers and schedules are dataclasses registered by name. Their ``config()`` is plain JSON, so nothing is pickled to
send one to another rank or to keep it in a checkpoint.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, ClassVar, TypeVar

from ..core.checks import one_of
from ..errors import ConfigError, is_number

Kind = TypeVar("Kind", bound="Configurable")


@dataclasses.dataclass
class Configurable:
    """A dataclass whose fields are its configuration. ``name`` is the word that users write."""

    name: ClassVar[str]

    def config(self) -> dict[str, Any]:
        """``{"name": ..., argument: value, ...}``, of JSON types only; the inverse of ``from_config``."""
        config: dict[str, Any] = {"name": self.name}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Configurable):
                value = value.config()
            elif is_number(value):  # a number of NumPy's may be assigned
                value = int(value) if isinstance(value, numbers.Integral) else float(value)
            config[field.name] = list(value) if isinstance(value, tuple) else value
        return config


def build(kinds: dict[str, type[Kind]], family: str, name: object, args: dict[str, Any]) -> Kind:
    """The object called ``name`` of a family ("optimizer", "schedule"), made with ``args``.

    Raises:
        ConfigError: no such name (the valid ones are listed), an unknown or missing argument, a wrong value.
    """
    kind = kinds[one_of(family, None, name, sorted(kinds))]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(args) - set(fields))
    if unknown:
        raise ConfigError(family, where=name, expected=f"arguments {', '.join(fields)}", got=", ".join(unknown))
    missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in args]
    if missing:
        raise ConfigError(family, where=name, expected=f"an argument {', '.join(missing)}", got="none")
    return kind(**args)


def split_config(family: str, config: object) -> tuple[object, dict[str, Any]]:
    """A config's name and its other entries.

    Raises:
        ConfigError: it is no dict with a "name".
    """
    if not isinstance(config, dict) or "name" not in config:
        raise ConfigError(family, expected='a dict with a "name"', got=repr(config))
    return config["name"], {key: value for key, value in config.items() if key != "name"}
