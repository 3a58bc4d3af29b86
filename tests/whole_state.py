"""The state of all ranks as one, and back to any number of ranks: what checkpoints do, without files."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from hpcdp.core.arrays import to_host
from hpcdp.core.state import Part, PerRank, Sharded


def held(value: Any) -> Any:
    """A copy of what this rank has of a state."""
    if isinstance(value, dict):
        return {key: held(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(held(each) for each in value)
    if isinstance(value, PerRank):
        return PerRank(held(value.value))
    if isinstance(value, Sharded):
        parts = [Part(part.first, np.array(to_host(part.values))) for part in value.parts]
        return Sharded(value.shape, value.dtype, parts, value.copies, value.copy, value.shares)
    return held(value.state_dict()) if hasattr(value, "state_dict") else copy.deepcopy(value)


def joined(ranks: list[Any]) -> Any:
    """One state of those of all ranks, which `held` gave: whole arrays. Asserts that they are what they say."""
    first = ranks[0]
    if isinstance(first, dict):
        assert all(list(each) == list(first) for each in ranks), "states of ranks have other keys"
        return {key: joined([each[key] for each in ranks]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(joined(list(each)) for each in zip(*ranks, strict=True))
    if isinstance(first, PerRank):
        return PerRank([each.value for each in ranks])
    if isinstance(first, Sharded):
        return _whole(ranks)
    if isinstance(first, np.ndarray):
        for each in ranks:
            np.testing.assert_array_equal(each, first)
    else:
        assert all(each == first for each in ranks), ranks
    return first


def _whole(ranks: list[Sharded]) -> np.ndarray:
    whole, covered = np.zeros(ranks[0].count, ranks[0].dtype), np.zeros(ranks[0].count, int)
    copies = {(part.first, part.values.size): [] for each in ranks for part in each.parts}
    for each in ranks:
        assert (each.shape, each.dtype, each.shares) == (ranks[0].shape, ranks[0].dtype, ranks[0].shares)
        for part in each.parts:
            assert part.values.ndim == 1 and part.values.dtype == each.dtype
            run = slice(part.first, part.first + part.values.size)
            if copies[part.first, part.values.size]:
                np.testing.assert_array_equal(whole[run], part.values)
            copies[part.first, part.values.size].append((each.copy, each.copies))
            whole[run] = part.values
            covered[run] += each.copy == 0
    assert (covered == 1).all(), "not every element is held once"
    for found in copies.values():
        assert sorted(found) == [(copy, len(found)) for copy in range(len(found))], "copies are not what they say"
    return whole.reshape(ranks[0].shape)


def restore(into: Any, whole: Any, world: Any) -> None:
    """Restore an object in place, by parts of what `joined` gave; every rank must call."""
    into.load_state_dict(_filled(into.state_dict(), copy.deepcopy(whole), world))


def _filled(own: Any, whole: Any, world: Any) -> Any:
    if isinstance(own, dict) and isinstance(whole, dict):
        return {key: _filled(own.get(key), each, world) for key, each in whole.items()}
    if isinstance(own, PerRank):
        return own if len(whole.value) != world.size else _filled(own.value, whole.value[world.rank], world)
    if isinstance(own, Sharded):
        if own.shares and len(whole) != own.shape[0]:
            whole = np.stack([whole.sum(axis=0) / own.shape[0]] * own.shape[0]).astype(own.dtype)
        assert whole.shape == own.shape
        for part in own.parts:
            part.values[...] = whole.reshape(-1)[part.first : part.first + part.values.size]
        return own
    if isinstance(own, np.ndarray):
        own[...] = whole
        return own
    if hasattr(own, "state_dict"):
        restore(own, whole, world)
        return own
    return whole
