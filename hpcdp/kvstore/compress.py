"""What is pushed in fewer bits: which codec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..compression import Codec, Compression
from ..errors import ConfigError, UnsupportedError

Settings = Mapping[str, Any] | Compression | Codec | str | None
"""What `KVStore.set_gradient_compression` takes."""

_THRESHOLD = {"2bit": 0.5, "1bit": 0.5}
"""MXNet's, where a dict gives none."""


def compression_of(settings: Settings) -> Compression | None:
    """See `KVStore.set_gradient_compression`.

    Raises:
        ConfigError: there is no such codec or setting; says which there are.
    """
    if not isinstance(settings, Mapping):
        return Compression.of(settings)
    if not isinstance(settings.get("type"), str):
        expected = "a dict such as {'type': '2bit', 'threshold': 0.5}"
        raise ConfigError("set_gradient_compression", expected=expected, got=repr(settings))
    name = settings["type"]
    others = {"threshold": _THRESHOLD[name]} if name in _THRESHOLD else {}
    others |= {key: value for key, value in settings.items() if key != "type"}
    return Compression.of(f"{name}:{','.join(f'{key}={value}' for key, value in others.items())}")


def check_compressible(key: object, dtype: np.dtype) -> None:
    """Raises `UnsupportedError` unless codecs take that dtype."""
    if dtype.kind != "f":
        raise UnsupportedError(
            "set_gradient_compression", where=f"key {key!r}", expected="float16, float32 or float64", got=dtype
        )
