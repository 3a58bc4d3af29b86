"""Candidates, comparisons and files of figures that several programs share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdp import collectives
from hpcdp.bench.measure import FreshData, MeasuredCollective, as_json, write
from hpcdp.comm import World
from hpcdp.comm.consistency import on_rank_0


def ours(name: str, data: FreshData, x: np.ndarray, world: World, how: dict[str, Any]) -> MeasuredCollective:
    """Return hpcdp's allreduce of ``x`` in place as a candidate; ``how`` has its ``algorithm`` and ``op``."""
    return MeasuredCollective(name, data, x, x, lambda: collectives.allreduce(x, world=world, **how))


def largest_difference(actual: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Return the largest relative difference of elements; NaN if one is NaN, unlike Python's ``max``."""
    return float(np.max(np.abs(np.asarray(actual, np.float64) / np.asarray(expected, np.float64) - 1)))


def write_json(path: str | None, world: World, report: dict[str, Any]) -> None:
    """Write ``report`` on rank 0 unless ``path`` is None; every rank must call.

    Raises:
        ConfigError: the file cannot be written; on every rank.
    """
    if path:
        on_rank_0(world.comm, lambda: write(path, as_json(report)))
