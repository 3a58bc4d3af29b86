"""Sizes in bytes as text: one, and a range of them."""

from __future__ import annotations

from ...errors import ConfigError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of ``"4"``, ``"64K"``, ``"16M"`` or ``"1G"`` (binary units, as OSU's and nccl-tests' flags have them).

    Raises:
        ConfigError: the text is none of these, or 0.
    """
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not digits.isdecimal() or unit not in _UNITS:
        raise ConfigError("size", expected="a number with K, M or G, e.g. 64K", got=repr(text))
    if int(digits) == 0:
        raise ConfigError("size", expected="1 byte or more", got=repr(text))
    return int(digits) * _UNITS[unit]


def format_size(nbytes: int) -> str:
    """The shortest of ``4``, ``64K``, ``16M``, ``1G``."""
    for unit in ("G", "M", "K"):
        if nbytes >= _UNITS[unit] and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)


def size_range(text: str, factor: int = 2) -> list[int]:
    """The sizes in bytes of ``"min:max"``, each ``factor`` times the one before.

    Raises:
        ConfigError: not ``min:max``, the minimum is zero or above the maximum, or the factor is below 2.
    """
    if factor < 2:
        raise ConfigError("size factor", expected="2 or more", got=factor)
    low, separator, high = text.partition(":")
    sizes = []
    size, last = (parse_size(low), parse_size(high)) if separator else (0, 0)
    while 0 < size <= last:
        sizes.append(size)
        size *= factor
    if not sizes:
        raise ConfigError("size range", expected="MIN:MAX with 0 < MIN <= MAX, e.g. 4:64M", got=repr(text))
    return sizes
