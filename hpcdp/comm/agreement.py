"""The same error on every rank: where they hold different things, or where one of them has failed.

So that none is left waiting for one that has given up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .. import errors
from ..errors import HpcdpError, MismatchError, listed
from .communicator import Communicator

T = TypeVar("T")
_LONG = 160
"""Characters of two texts that differ, above which an error shows the words that differ alone."""
_PARTS = ("operation", "where", "expected", "got", "remedy")


_BUILT_ALIKE = "build the same model with the same options on every rank"


def require_same(comm: Communicator, operation: str, items: Sequence[str], remedy: str = _BUILT_ALIKE) -> None:
    """Check that every rank passes the same ``items``; every rank must call.

    One hash a rank is exchanged; the items themselves only where hashes differ.

    Args:
        comm: the ranks to compare.
        operation: what the error says was attempted.
        items: one line each, e.g. ``"0.weight (20, 1, 3, 3) float32"``.
        remedy: what the error says to do.

    Raises:
        MismatchError: on every rank alike; it names the ranks and the first difference.
    """
    digests = _exchanged(comm, f"require_same of {operation}", _digest(items))
    _raise_first_difference(comm, operation, items, remedy, digests)


def _digest(items: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(items)).encode()).hexdigest()


def _raise_first_difference(
    comm: Communicator, operation: str, items: Sequence[str], remedy: str, digests: Sequence[str]
) -> None:
    """Where the ``digests`` of all ranks' items differ: every rank must call."""
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not odd:
        return
    everything = comm.allgather_json(list(items) if comm.rank in (0, odd[0]) else None)
    alike = [rank for rank in odd if digests[rank] == digests[odd[0]]]
    raise first_difference(operation, everything[0], everything[odd[0]], alike, remedy)


def first_difference(
    operation: str, first: Sequence[str], other: Sequence[str], odd: Sequence[int], remedy: str
) -> MismatchError:
    """Return the error for ranks of which rank 0 has the items ``first``, and the ranks ``odd`` have ``other``."""
    at = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    longer, most = (0, len(first)) if at < len(first) else (odd[0], len(other))
    wanted, found = _around_difference(_item(first, at), _item(other, at))
    error = MismatchError(
        operation,
        where=f"item {at + 1} of {most} on rank {longer}",
        expected=f"{wanted} as on rank 0",
        got=f"{found} on rank{'s' if len(odd) > 1 else ''} {listed(odd, 8)}",
        remedy=remedy,
    )
    error.is_on_every_rank = True
    return error


def _around_difference(first: str, other: str) -> tuple[str, str]:
    """Return two texts, or of long ones the words that differ: the line of an error is cut in its middle."""
    if len(first) + len(other) <= _LONG:
        return first, other
    words = first.split(" "), other.split(" ")
    shorter = min(map(len, words))
    begin = next((i for i in range(shorter) if words[0][i] != words[1][i]), shorter)
    kept = next((i for i in range(shorter - begin) if words[0][-1 - i] != words[1][-1 - i]), shorter - begin)
    if kept and shorter - kept == begin:  # a text has nothing in the place of the other's words: what follows is shown
        kept -= 1
    begin = max(begin - 1, 0)  # a word before, which may be the name of what differs
    cut = [" ".join(each[begin : len(each) - kept]) for each in words]
    before, after = "... " if begin else "", " ..." if kept else ""
    return f"{before}{cut[0]}{after}", f"{before}{cut[1]}{after}"


def _item(items: Sequence[str], at: int) -> str:
    return items[at] if at < len(items) else "nothing more"


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What a call on this rank has returned, or the error that it has raised."""

    value: T | None = None
    error: HpcdpError | None = None

    @classmethod
    def of(cls, fn: Callable[[], T]) -> Outcome[T]:
        """Call ``fn``. What is no `HpcdpError` passes."""
        try:
            return cls(fn())
        except HpcdpError as error:
            return cls(error=error)

    def get(self) -> T:
        """The value; raises the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def on_every_rank(comm: Communicator, fn: Callable[[], T]) -> T:
    """``fn()`` of this rank; every rank must call.

    Where it raised an `HpcdpError` on some rank, every rank raises the error of the lowest such rank, which is named
    unless all ranks failed. Other exceptions pass, and so end the job. A rank that does something else together with
    others meanwhile is a `MismatchError` on all.
    """
    return told_to_all(comm, Outcome.of(fn))


def told_to_all(
    comm: Communicator, outcome: Outcome[T], operation: str = "", alike: Sequence[tuple[Sequence[str], str]] = ()
) -> T:
    """`on_every_rank` for what has been called already; and `require_same`, in the same exchange.

    Args:
        operation: what a `MismatchError` says was attempted.
        alike: items that must be the same on all ranks where none has failed, with what the error says to do; as many
            on each rank that has not failed.
    """
    mine = [_described(outcome.error), *([_digest(items) for items, _ in alike] if outcome.error is None else [])]
    try:
        everyone = _exchanged(comm, "on_every_rank", mine)
    except MismatchError as error:  # others are elsewhere, perhaps since this rank has failed
        raise outcome.error or error from (error if outcome.error else error.__cause__)
    _raise_first([report for report, *_ in everyone], outcome.error)
    for number, (items, remedy) in enumerate(alike, 1):
        _raise_first_difference(comm, operation, items, remedy, [each[number] for each in everyone])
    return outcome.value  # type: ignore[return-value]


def on_rank_0(comm: Communicator, fn: Callable[[], T]) -> T:
    """What ``fn()``, called on rank 0 alone, returned or raised (`HpcdpError`); every rank must call.

    The result goes to the other ranks as JSON.
    """
    own = Outcome.of(fn) if comm.rank == 0 else Outcome()
    call = f"on_rank_0 of {getattr(fn, '__qualname__', type(fn).__name__).partition('.<locals>')[0]}"
    report, value = _exchanged(comm, call, (_described(own.error), own.value))[0]
    _raise_first([report], own.error)
    return value  # type: ignore[no-any-return]


def _exchanged(comm: Communicator, call: str, value: Any) -> list[Any]:
    """Every rank's ``value``, where all ranks make the same ``call``; else `MismatchError`, on all that are here."""
    everyone = comm.allgather_json({"call": call, "value": value})
    calls = [each.get("call") if isinstance(each, dict) else None for each in everyone]
    odd = next((rank for rank, each in enumerate(calls) if each != calls[0]), None)
    if odd is not None:
        raise MismatchError(
            "what ranks do together", expected=f"{calls[0] or 'another call'} as on rank 0",
            got=f"{calls[odd] or 'another call'} on rank {odd}",
            remedy="call what every rank must call on all ranks, in the same order",
        )  # fmt: skip
    return [each["value"] for each in everyone]


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
    error = kind(**{name: report[name] for name in _PARTS}, rank=rank)
    error.is_on_every_rank = True
    raise error from own
