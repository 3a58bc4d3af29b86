"""Which codec compresses the gradients, and where."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError, is_number
from .codecs import BFloat16, Codec, Float16, OneBit, TopK, TwoBit
from .feedback import ErrorFeedback, Zeros

_MXNET_THRESHOLD = {"2bit": 0.5, "1bit": 0.5}
"""Where a dict gives none."""

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Float16, BFloat16, TwoBit, OneBit, TopK)}
"""By name."""


@dataclass(frozen=True)
class Compression:
    """How gradients are compressed on their way between nodes.

    Args:
        codec: see `codecs`.
        feedback: how much of what was not sent is added to what is sent next, 0 to 1. None: what the codec needs, which
            is all of it but for 1 bit (0.7).
        inside_nodes: let the ranks of a node exchange compressed messages, too, instead of reading each other's memory.
            That costs time; it is for trying out a codec on one machine.
    """

    codec: Codec
    feedback: float | None = None
    inside_nodes: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.codec, type) or not hasattr(self.codec, "of_sum"):
            raise ConfigError(
                "compression", where="codec", expected="a codec, e.g. TwoBit()", got=repr(self.codec),
                remedy="Compression.of takes a name, e.g. '2bit'",
            )  # fmt: skip
        if not isinstance(self.inside_nodes, bool):
            got = repr(self.inside_nodes)
            raise ConfigError("compression", where="inside_nodes", expected="True or False", got=got)
        is_share = is_number(self.feedback) and 0 <= self.feedback <= 1
        if not (self.feedback is None or is_share):
            raise ConfigError("compression", where="feedback", expected="a share, 0 to 1", got=repr(self.feedback))

    @classmethod
    def of(cls, given: Settings) -> Compression | None:
        """From what a program gives: a name such as ``"2bit"`` or ``"topk:ratio=0.05"``, a codec, all settings, or a
        dict as MXNet takes, ``{"type": "2bit", "threshold": 0.5}``.

        Behind the colon stand the codec's settings, ``feedback=0.5`` and ``inside_nodes=on``, between commas.

        Raises:
            ConfigError: there is no such codec or setting; says which there are.
        """
        if given is None or isinstance(given, Compression):
            return given
        if isinstance(given, str):
            return cls._parse(given)
        if isinstance(given, Mapping):
            return cls._of_dict(given)
        if isinstance(given, tuple(CODECS.values())):
            return cls(given)
        raise ConfigError("compression", expected=f"one of {', '.join(CODECS)}", got=repr(given))

    @classmethod
    def _of_dict(cls, given: Mapping[str, Any]) -> Compression:
        name = given.get("type")
        if not isinstance(name, str):
            expected = "a dict such as {'type': '2bit', 'threshold': 0.5}"
            raise ConfigError("compression", expected=expected, got=repr(given))
        settings = {"threshold": _MXNET_THRESHOLD[name]} if name in _MXNET_THRESHOLD else {}
        settings |= {key: value for key, value in given.items() if key != "type"}
        return cls._parse(f"{name}:{','.join(f'{key}={value}' for key, value in settings.items())}")

    @classmethod
    def _parse(cls, text: str) -> Compression:
        name, _, rest = text.partition(":")
        if name not in CODECS:
            raise ConfigError("compression", expected=f"one of {', '.join(CODECS)}", got=repr(name))
        kind = CODECS[name]
        numbers = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
        settings: dict[str, float] = {}
        feedback, inside_nodes = None, False
        said: set[str] = set()
        for each in filter(None, rest.split(",")):
            key, _, value = each.partition("=")
            try:
                if key in said:
                    raise ValueError("twice")
                said.add(key)
                if each in ("inside_nodes=on", "inside_nodes=off"):
                    inside_nodes = value == "on"
                elif key == "feedback":
                    feedback = float(value)
                else:
                    settings[numbers[numbers.index(key)]] = float(value)
            except ValueError as error:
                valid = [f"{number}=NUMBER" for number in (*numbers, "feedback")] + ["inside_nodes=on|off"]
                raise ConfigError(
                    f"compression {name}", expected=f"{' or '.join(valid)}, each once", got=repr(each)
                ) from error
        return cls(kind(**settings), feedback, inside_nodes)

    def __str__(self) -> str:
        """What `of` makes the same of again."""
        numbers = {**dataclasses.asdict(self.codec), "feedback": self.feedback}  # type: ignore[call-overload]
        settings = [f"{key}={float(value)!r}" for key, value in numbers.items() if value is not None]  # NumPy's, too
        settings += ["inside_nodes=on"] if self.inside_nodes else []
        return self.codec.name + (f":{','.join(settings)}" if settings else "")

    def for_array(self, count: int, dtype: np.dtype, zeros: Zeros = np.zeros) -> ErrorFeedback:
        """What encodes an array of ``count`` elements; ``zeros`` is where that is, see `ErrorFeedback`."""
        return ErrorFeedback(self.codec, count, dtype, self.feedback, zeros)


Settings = Mapping[str, Any] | Compression | Codec | str | None
"""What `Compression.of` takes; None: nothing is compressed."""
