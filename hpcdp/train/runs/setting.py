"""What one setting is: a dataclass field with its help text and what is valid for it, which is checked here."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ...errors import ConfigError, check_name

_TYPE_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def setting(
    default: Any,
    about: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    above: bool = False,
    most: float | None = None,
    word: str | None = None,
):
    """A dataclass field with its help text, its valid names, or its smallest value (itself excluded if ``above``) and
    its largest.

    A number may be the ``word`` instead.
    """
    metadata = {"help": about, "choices": choices, "least": least, "above": above, "most": most, "word": word}
    return dataclasses.field(default=default, metadata=metadata)


def parsed(field: dataclasses.Field[Any], kind: type, text: str | bool) -> Any:
    """The value that ``text`` of a command line is for a setting of the type ``kind``; `ConfigError` for another's."""
    if text == field.metadata["word"]:
        return text
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"setting {field.name}", expected=_expected(field, kind), got=repr(text)) from error


def typed(field: dataclasses.Field[Any], kind: type, value: Any) -> Any:
    """``value`` as the setting's type: an int serves as float, nothing else is converted.

    Raises:
        ConfigError: it is of another type, or not finite.
    """
    if kind is float and type(value) is int:
        return float(value)
    given: type = type(value)
    if given is str and value == field.metadata["word"]:
        return value
    if given is not kind:
        raise ConfigError(f"setting {field.name}", expected=_expected(field, kind), got=repr(value))
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"setting {field.name}", expected="a finite number", got=value)
    return value


def _expected(field: dataclasses.Field[Any], kind: type) -> str:
    word = field.metadata["word"]
    return _TYPE_NAMES[kind] + (f" or {word!r}" if word else "")


def check_range(field: dataclasses.Field[Any], value: Any) -> None:
    """Raises `ConfigError` unless ``value`` is one of the setting's names, or in its range."""
    if value == "":
        raise ConfigError(f"setting {field.name}", expected="a name", got="''")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"setting {field.name}", expected="a name, which has no NUL", got=repr(value))
    if field.metadata["choices"]:
        check_name(field.name, value, field.metadata["choices"])
    least, most, above = (field.metadata[name] for name in ("least", "most", "above"))
    if isinstance(value, str):
        return
    if least is not None and (value < least or (above and value == least)):
        bound = f"{'more than' if above else 'at least'} {least:g}"
        raise ConfigError(f"setting {field.name}", expected=bound, got=value)
    if most is not None and value > most:
        raise ConfigError(f"setting {field.name}", expected=f"at most {most:g}", got=value)


def toml_value(value: Any) -> str:
    """As TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    return repr(value)
