"""A checkpoint as a file for `torch.load`: nested as it was saved, so a part of it is the state dict of a module."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ..checkpoint import tree
from ..checkpoint.export import Chosen, Tell, read
from ..errors import ConfigError
from .state import tensor


def write(chosen: Chosen, path: Path, tell: Tell) -> None:
    """By `torch.save`, of dicts, lists, tuples, numbers and tensors, which `torch.load` takes with ``weights_only``.

    All elements must fit in memory.

    Raises:
        ConfigError: PyTorch has no such dtype.
        DataError: a file is missing or damaged.
        OSError: the file cannot be written.
    """
    wanted = [node["tensor"] for _, node in tree.leaves(chosen.form) if isinstance(node, dict) and "tensor" in node]
    tensors = {name: chosen.manifest.tensors[name] for name in wanted}
    for name, each in tensors.items():
        _made(name, np.empty(0, each.stored_dtype), each.dtype)  # refused before gigabytes are read
    arrays = dict(read(chosen.folder, tensors, tell))
    state = tree.built(chosen.form, lambda name: _made(name, arrays[name], tensors[name].dtype))
    try:
        with open(path, "wb") as file:
            torch.save(state, file)
    except RuntimeError as error:  # that the archive is torn; it was raised while this was:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _made(name: str, array: np.ndarray, dtype: str) -> torch.Tensor:
    try:
        return tensor(array, dtype)
    except TypeError as error:
        raise ConfigError("export", where=name, expected="a dtype that PyTorch has", got=dtype,
                          remedy="--format npz") from error  # fmt: skip
