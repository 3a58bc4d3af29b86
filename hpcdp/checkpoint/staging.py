"""Where a state is copied to that is written behind training, which changes it meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .plan import Piece
from .shard import failing

_LINE_NBYTES = 64


class Staging:
    """Memory that is used for each save again."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """How much of it there is."""
        return self._memory.nbytes

    def copied(self, pieces: Iterable[Piece]) -> list[Piece]:
        """What training may change, copied, until the next call; the rest as it is.

        Raises:
            DataError: there is not so much memory.
        """
        pieces = list(pieces)
        nbytes = sum(_in_lines(piece.values.nbytes) for piece in pieces if not piece.is_copied)
        if self.nbytes < nbytes:
            with failing("save", lambda: "a copy of the state"):
                self._memory = np.empty(nbytes, np.uint8)
        copied, at = [], 0
        for piece in pieces:
            if piece.is_copied:
                copied.append(piece)
                continue
            place = self._memory[at : at + piece.values.nbytes].view(piece.values.dtype)
            np.copyto(place, piece.values)
            copied.append(piece._replace(values=place))
            at += _in_lines(piece.values.nbytes)
        return copied


def _in_lines(nbytes: int) -> int:
    return -(-nbytes // _LINE_NBYTES) * _LINE_NBYTES
