"""Errors that every rank raises together, so that none is left waiting for one that has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hpcdp import errors
from hpcdp.comm import World
from hpcdp.errors import HpcdpError

T = TypeVar("T")
_PARTS = ("operation", "where", "expected", "got", "remedy")


def on_every_rank(world: World, fn: Callable[[], T]) -> T:
    """``fn()`` of this rank; every rank must call.

    Where it raised an `HpcdpError` on some rank, every rank raises the error of the lowest such rank, which is named
    unless all ranks failed. Other exceptions pass, and so end the job.
    """
    value, error = _outcome(fn)
    reports = world.comm.allgather_json(_described(error))
    _raise_first(reports, error)
    return value  # type: ignore[return-value]


def on_rank_0(world: World, fn: Callable[[], T]) -> T:
    """What ``fn()``, called on rank 0 alone, returned or raised (`HpcdpError`); every rank must call.

    The result goes to the other ranks as JSON.
    """
    value, error = _outcome(fn) if world.rank == 0 else (None, None)
    report, value = world.comm.allgather_json((_described(error), value))[0]
    _raise_first([report], error)
    return value


def _outcome(fn: Callable[[], T]) -> tuple[T | None, HpcdpError | None]:
    try:
        return fn(), None
    except HpcdpError as error:
        return None, error


def _described(error: HpcdpError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    parts = {name: getattr(error, name) for name in _PARTS}
    kind = next(base.__name__ for base in type(error).__mro__ if hasattr(errors, base.__name__))
    return {"kind": kind} | {k: None if v is None else str(v) for k, v in parts.items()}


def _raise_first(reports: list[dict[str, Any] | None], own: HpcdpError | None) -> None:
    failed = [rank for rank, report in enumerate(reports) if report is not None]
    if not failed:
        return
    report = reports[failed[0]]
    assert report is not None
    kind = getattr(errors, report["kind"])
    rank = failed[0] if len(failed) < len(reports) else None
    raise kind(**{name: report[name] for name in _PARTS}, rank=rank) from own
