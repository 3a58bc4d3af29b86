"""Bounded delay: a push that leads by too much waits, wherever its key lies, and its worker is told for whom.

Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013.
"""

from __future__ import annotations

import time

from .cell import Cell
from .table import Table

REPORTED_S = 5.0
"""A worker that is held back so long says by whom, once a push."""


class Delay:
    """Of one push, where its key's order is kept.

    Args:
        cell: the first part of the key.
        worker: who pushes.
    """

    def __init__(self, table: Table, cell: Cell, worker: int) -> None:
        self._table, self._cell, self.worker = table, cell, worker
        self._began, self._told = time.monotonic(), False
        self.held_s = 0.0
        """For how long it was held back so far."""

    def may_go_on(self) -> bool:
        """Whether the bound lets the push take effect."""
        may = self._table.may_go_on(self._cell, self.worker)
        if not may or self.held_s:
            self.held_s = time.monotonic() - self._began
        return may

    def to_report(self) -> list[int]:
        """The workers that hold it back, once when that has lasted; else none."""
        if self._told or self.held_s < REPORTED_S:
            return []
        self._told = True
        return self._cell.behind(self.worker, self._table.staleness or 0)
