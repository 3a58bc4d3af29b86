"""Where a trainer on a store has what it pushes, and where what it pulls goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...arrays import Array, array_namespace, on_device_of


def place_of(param: Any) -> Any:
    """Where a new value goes: to the parameter, where that can wait for it."""
    return param if hasattr(param, "data_hook") else param.data


def places_in_turn(arrays: Sequence[Array]) -> list[Array]:
    """For each array another one of its kind; those of a dtype share their memory, since a push leaves with a copy."""
    longest: dict[Any, Array] = {}
    for each in sorted(arrays, key=lambda array: array.size):
        longest[each.dtype] = each
    flat = {}
    for dtype, each in longest.items():
        with on_device_of(each):
            flat[dtype] = array_namespace(each).empty(each.size, dtype)
    return [flat[each.dtype][: each.size].reshape(each.shape) for each in arrays]
