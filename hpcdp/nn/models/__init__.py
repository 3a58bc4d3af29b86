"""Networks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import ConfigError
from ..module import Module
from .char_lstm import char_lstm
from .gpt import gpt
from .lenet import lenet
from .mlp import mlp
from .resnet import resnet18, resnet18_cifar

MODELS: dict[str, Callable[..., Module]] = {
    "char_lstm": char_lstm,
    "gpt": gpt,
    "lenet": lenet,
    "mlp": mlp,
    "resnet18": resnet18,
    "resnet18_cifar": resnet18_cifar,
}


def create(name: str, **kwargs: Any) -> Module:
    """The network called ``name``, e.g. ``create("lenet", input_shape=(1, 28, 28), num_classes=10, seed=0)``.

    Raises:
        ConfigError: there is no such network, or it does not take an argument or input of that kind.
    """
    if name not in MODELS:
        raise ConfigError("model", expected=f"one of {', '.join(MODELS)}", got=repr(name))
    try:
        return MODELS[name](**kwargs)
    except TypeError as error:
        raise ConfigError("model", where=name, got=f"{kwargs}: {error}") from error


__all__ = ["MODELS", "char_lstm", "create", "gpt", "lenet", "mlp", "resnet18", "resnet18_cifar"]
