"""In what two checkpoints differ: names, shapes, dtypes, elements, values. Read piece by piece, from both at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import shortened
from . import manifest, tree
from .manifest import Tensor
from .plan import PADDED
from .reading import pieces, widened
from .shard_reader import ShardReader

_MOST_VALUES = 8
"""So many of one list are told one by one."""


class Difference(NamedTuple):
    """One entry of a state that is not the same."""

    name: str
    what: str
    """In words."""
    is_value: bool = False
    """Whether neither is a tensor."""


def differences(
    first: Path, second: Path, rtol: float = 0.0, atol: float = 0.0, tell: Callable[[int], object] = lambda nbytes: None
) -> Iterator[Difference]:
    """In what the states of two checkpoints differ, in the order of the first.

    Args:
        rtol, atol: numbers that are no further apart than ``atol + rtol * abs(that of the second)`` are the same. If
            both are 0 the bits of elements must be the same.
        tell: is called with the number of bytes that have been compared, of one of the two.

    Raises:
        DataError: a file is missing or damaged.
    """
    one, other = manifest.read(first), manifest.read(second)
    nodes = [dict(tree.entries(each.state)) for each in (one, other)]
    with ShardReader(first, "diff") as a, ShardReader(second, "diff") as b:
        for name in dict.fromkeys([*nodes[0], *nodes[1]]):
            if name not in nodes[1] or name not in nodes[0]:
                place = 0 if name in nodes[0] else 1
                node = nodes[place][name]
                only = f"only in {'AB'[place]}: {_told(node, (one, other)[place])}"
                yield Difference(name, only, not _is_tensor(node))
                continue
            x, y = nodes[0][name], nodes[1][name]
            if not (_is_tensor(x) and _is_tensor(y)):
                if not _same(x, y, rtol, atol):
                    is_value = not (_is_tensor(x) or _is_tensor(y))
                    yield Difference(name, f"{_told(x, one)} and {_told(y, other)}", is_value)
                continue
            tensors = one.tensors[x["tensor"]], other.tensors[y["tensor"]]
            if tensors[0].shape != tensors[1].shape or tensors[0].dtype != tensors[1].dtype:
                yield Difference(name, f"{_told(x, one)} and {_told(y, other)}")
            else:
                what = _compared(a, b, tensors, rtol, atol, tell)
                if what is not None:
                    yield Difference(name, what)


def folded(found: Iterable[Difference]) -> Iterator[Difference]:
    """Those of many values of one list as one: the state of a random generator has hundreds."""
    for within, group in itertools.groupby(found, _list_of):
        of = list(group)
        if within is None or len(of) <= _MOST_VALUES:
            yield from of
        else:
            first = of[0].name.rpartition("/")[2]
            yield Difference(within, f"{len(of):,} values, the first is number {first}: {of[0].what}", True)


def _list_of(each: Difference) -> str | None:
    """The name of the list, or the dict of numbers, that a value is in."""
    within, _, key = each.name.rpartition("/")
    return within if each.is_value and key.isdecimal() else None


def _is_tensor(node: tree.Form) -> bool:
    return isinstance(node, dict) and "tensor" in node


def _told(node: tree.Form, of: manifest.Manifest) -> str:
    if _is_tensor(node):
        tensor = of.tensors[node["tensor"]]
        return f"shape {tensor.shape} {tensor.dtype}"
    return shortened(repr(tree.value_of(node)), 40)


def _same(x: tree.Form, y: tree.Form, rtol: float, atol: float) -> bool:
    if _is_tensor(x) or _is_tensor(y):
        return False
    a, b = tree.value_of(x), tree.value_of(y)
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= atol + rtol * abs(b) < math.inf
    return type(a) is type(b) and bool(a == b)


class _Apart:
    """How far two tensors are apart, of what has been seen of them."""

    def __init__(self) -> None:
        self.count, self.absolute, self.relative = 0, 0.0, 0.0

    def add(self, x: np.ndarray, y: np.ndarray, differ: np.ndarray) -> None:
        self.count += int(np.count_nonzero(differ))
        x, y = (_as_float(each[differ]) for each in (x, y))
        with np.errstate(all="ignore"):
            delta = np.abs(x - y)
            delta[(x == y) | (np.isnan(x) & np.isnan(y))] = 0
            delta[np.isnan(delta)] = np.inf
            largest = np.maximum(np.abs(x), np.abs(y))
            relative = np.where(delta == 0, 0, delta / largest)
            relative[np.isnan(relative)] = np.inf
        self.absolute = max(self.absolute, float(delta.max()))
        self.relative = max(self.relative, float(relative.max()))


def _as_float(x: np.ndarray) -> np.ndarray:
    if x.dtype.kind in "iu":
        return x.astype(np.longdouble)  # whose digits are enough for 64 bits
    return x if x.dtype.kind in "fc" and x.dtype.itemsize >= 8 else x.astype(np.float64)


def _compared(
    a: ShardReader, b: ShardReader, tensors: tuple[Tensor, Tensor], rtol: float, atol: float, tell: Callable[[int], Any]
) -> str | None:
    apart = _Apart()
    for x, y in zip(pieces(a, tensors[0]), pieces(b, tensors[1]), strict=True):
        tell(x.nbytes)
        if np.array_equal(x.view(np.uint8), y.view(np.uint8)):
            continue
        differ = _bits_differ(x, y)
        x, y = (widened(each, tensors[0].dtype) for each in (x, y))
        if rtol or atol:
            with np.errstate(over="ignore"):
                differ &= ~np.isclose(_as_float(x), _as_float(y), rtol, atol, equal_nan=True)
        if differ.any():
            apart.add(x, y, differ)
    if not apart.count:
        return None
    told = f"{apart.count:,} of {tensors[0].count:,} elements differ"
    if not apart.absolute:
        return f"{told}, in bits alone (signs of zeros, kinds of NaN)"
    return f"{told}, by at most {apart.absolute:.3g} (relative {apart.relative:.3g})"


def _bits_differ(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which elements are not the same, bit by bit."""
    if x.dtype.char in PADDED:
        return (x != y) & ~(np.isnan(x) & np.isnan(y))
    bits = [each.view(np.uint8).reshape(each.size, each.itemsize) for each in (x, y)]
    return np.any(bits[0] != bits[1], axis=1)
