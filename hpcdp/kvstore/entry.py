"""One key of a store."""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays import Array
from ..engine import Variable
from .arguments import Key


@dataclass
class Entry:
    """One key."""

    key: Key
    stored: Array
    """In the key's shape. Read and written by tasks of the engine alone, or by who holds the variable."""
    variable: Variable
    """Written when a push has taken effect."""
    pushes: int = 0
    """Of this worker, so far."""
    spared_nbytes: int = 0
    """By encoding them."""

    @property
    def plain_nbytes(self) -> int:
        """Of this worker's pushes so far, if none was encoded."""
        return self.pushes * int(self.stored.nbytes)

    def count(self, sent_nbytes: int | None = None) -> None:
        """One push more, of so many bytes; None: it is not encoded."""
        self.pushes += 1
        if sent_nbytes is not None:
            self.spared_nbytes += int(self.stored.nbytes) - sent_nbytes
