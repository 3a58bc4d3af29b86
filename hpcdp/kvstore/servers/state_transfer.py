"""How what an asynchronous store keeps is read and written as a whole, by workers that have met for it."""

from __future__ import annotations

import numpy as np

from ...collectives.progress import drive
from ...state import Part, Sharded
from ..updaters import state_dtype
from .cell import Cell
from .table import Item
from .transfer import Own, Transfer
from .wire import NO_STATE, VALUE, Kind


class StateTransfer(Transfer):
    """See `Transfer`."""

    def read_state(self, item: Item, which: int) -> tuple[np.ndarray, int]:
        """One of the optimizer's states of a key, in its shape, and how often the key was updated."""
        whole, steps = np.zeros(item.count, state_dtype(item.dtype)), 0
        for number, (part, cell) in enumerate(zip(item.parts, item.cells, strict=True)):
            if cell is None:
                message = self._message(Kind.READ_STATE, item, number, which=which)
                answer = self._ask_and_wait(part.server, message)
                steps, state = answer.number, answer.payload
            else:
                steps, state = cell.steps, None if which == NO_STATE else cell.states[sorted(cell.states)[which]]
            if state is not None and which != NO_STATE:
                whole[part.first : part.last] = state
        return whole.reshape(item.shape), steps

    def write_steps(self, item: Item, steps: int) -> None:
        """Set how often a key was updated."""
        for number in range(len(item.parts)):
            self._write(item, number, NO_STATE, None, steps)

    def write(self, item: Item, which: int, values: Sharded) -> None:
        """Set one of the optimizer's states of a key, or its `VALUE`, where ``values`` has parts, which are whole ones
        of the key's."""
        for given in values.parts:
            for number, part in enumerate(item.parts):
                first, last = part.first - given.first, part.last - given.first
                if first >= 0 and last <= given.values.size:
                    self._write(item, number, which, np.ascontiguousarray(given.values[first:last]))

    def _write(self, item: Item, part: int, which: int, values: np.ndarray | None, steps: int = 0) -> None:
        message = self._message(Kind.WRITE_STATE, item, part, number=steps, which=which)
        message.payload = values
        cell = item.cells[part]
        if cell is None:
            self._ask_and_wait(item.parts[part].server, message)
        else:
            self._table.write_state(cell, message)

    def held(self, own: Own, which: int) -> Sharded:
        """What this worker gives to a state: copies of the parts that it serves; the first one all that servers keep.

        Args:
            which: of the optimizer's states, or `VALUE`.
        """
        item, table = own.item, self._table
        dtype = item.dtype if which == VALUE else state_dtype(item.dtype)
        parts: list[Part] = []
        if table.servers[0] < table.num_workers:
            for part, cell in zip(item.parts, item.cells, strict=True):
                if part.server == self._worker and cell is not None:
                    parts.append(Part(part.first, _copied(cell, which)))
        elif self._worker == 0:
            whole = np.empty(item.shape, dtype)
            if which == VALUE:
                drive(self.pull(own, whole, None, [], None))
            else:
                whole = self.read_state(item, which)[0]
            parts.append(Part(0, whole.reshape(-1)))
        return Sharded(item.shape, dtype, parts)


def _copied(cell: Cell, which: int) -> np.ndarray:
    if which != VALUE:
        return cell.states[sorted(cell.states)[which]].copy()
    found = np.empty_like(cell.flat)
    cell.read(lambda flat: np.copyto(found, flat))
    return found
