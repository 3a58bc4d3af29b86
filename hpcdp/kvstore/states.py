"""The optimizer's state of a store as a file: one array a key and name, whoever updated it.

A NumPy .npz archive, read with pickles refused. Names are ``"int:3/momentum"`` and ``"str:weight/momentum"``;
of keys with ``%``, NUL or halves of surrogate pairs these are escaped by ``%``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import archive
from ..arrays import to_host
from ..errors import DataError
from ..optim import Optimizer
from .arguments import Key

_HEADER = "hpcdp/kvstore"
_SURROGATE = re.compile("[\ud800-\udfff]")
States = dict[tuple[Key, str], np.ndarray]
"""By key and name of the state, in the key's shape."""


def _name(key: Key) -> str:
    text = str(key).replace("%", "%25").replace("\0", "%00")  # where names in archives end
    return f"{type(key).__name__}:{_SURROGATE.sub(lambda found: f'%u{ord(found[0]):04x}', text)}"


def write_states(
    path: Path, optimizer: Optimizer, steps: Mapping[Key, int], states: States, names: Mapping[Key, str]
) -> None:
    """Write states and how often each key was updated, to a file that replaces ``path`` whole.

    Args:
        names: what keys that number parameters are called, see `read_states`; may be empty.

    Raises:
        DataError: it cannot be written.
    """
    header: dict[str, Any] = {"version": 1, "optimizer": optimizer.config()["name"]}
    header["steps"] = {_name(key): steps[key] for key in steps}
    header["names"] = {_name(key): name for key, name in names.items()}
    arrays = {f"{_name(key)}/{name}": to_host(array) for (key, name), array in states.items()}
    archive.write("save_optimizer_states", path, _HEADER, header, arrays)


def read_states(
    path: Path, optimizer: Optimizer, shapes: Mapping[Key, tuple[int, ...]], names: Mapping[Key, str]
) -> tuple[dict[Key, int], States]:
    """How often each key was updated, and its states.

    Args:
        shapes: of the store's keys.
        names: what keys that number parameters are called: where the file has names, too, they say which key is which.

    Raises:
        DataError: the file is missing, damaged, or of another optimizer, or other keys or shapes.
    """
    fields = {"optimizer": str, "steps": dict}
    header, arrays = archive.read("load_optimizer_states", path, _HEADER, fields, "save_optimizer_states")
    updated, saved_by, mine = header["steps"], header["optimizer"], optimizer.config()["name"]
    if saved_by != mine:
        raise DataError("load_optimizer_states", where=path, expected=f"states of {mine}", got=f"states of {saved_by}")
    keys = {_name(key): key for key in shapes}
    called = header.get("names") if names else None
    if isinstance(called, dict) and called:
        keys_by_name = {name: key for key, name in names.items()}
        keys = {key: keys_by_name[name] for key, name in called.items() if name in keys_by_name}
    strange = next((name for name in updated if name not in keys), None)
    if strange is not None:
        raise DataError("load_optimizer_states", where=path, expected="states of this store's keys", got=strange)
    states: States = {}
    for name in updated:
        for each in optimizer.state_names():
            array = arrays.pop(f"{name}/{each}", None)
            if array is None or array.shape != tuple(shapes[keys[name]]):
                got = "none" if array is None else f"shape {array.shape}"
                where = f"{path}, {name}/{each}"
                raise DataError("load_optimizer_states", where=where, expected=f"shape {shapes[keys[name]]}", got=got)
            states[keys[name], each] = array
    if arrays:
        raise DataError("load_optimizer_states", where=path, expected="no other arrays", got=next(iter(arrays)))
    return {keys[name]: int(count) for name, count in updated.items()}, states
