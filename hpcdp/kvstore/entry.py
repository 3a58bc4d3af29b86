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
    sent_nbytes: int = 0
    """Of this worker's pushes so far, encoded or not."""
    plain_nbytes: int = 0
    """What they would be if none was encoded."""

    def count(self, sent_nbytes: int | None = None) -> None:
        """One push more, of so many bytes; None: it is not encoded."""
        nbytes = int(self.stored.nbytes)
        self.pushes += 1
        self.plain_nbytes += nbytes
        self.sent_nbytes += nbytes if sent_nbytes is None else sent_nbytes
