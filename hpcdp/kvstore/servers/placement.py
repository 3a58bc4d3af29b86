"""Which server keeps which part of a key: a pure function of the order in which keys are made.

Small keys lie whole on the server that keeps the fewest bytes; large ones are cut in equal parts, one a server, so that
each takes its share of what all workers send (Li et al., "Scaling distributed machine learning with the parameter
server", 2014, section 4.2; there by hashes, whose servers are unevenly loaded).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ...comm.communicator import bounds

SPLIT_NBYTES = 4 << 20
"""From so many bytes on a key is cut: below, agreeing on an order among servers costs more than sharing saves."""

MOST_NBYTES = 512 << 20
"""Of one part, so that a message of it counts its bytes in 32 bits."""


class Part(NamedTuple):
    """Elements ``first`` to ``last``, the latter excluded, of a flat key, and the server that keeps them."""

    server: int
    first: int
    last: int


class Placement:
    """Places one key after another.

    Args:
        servers: their ranks.
        splits: whether large keys are cut; in one node nobody is asked, and one lock is better than several.
    """

    def __init__(self, servers: Sequence[int], splits: bool) -> None:
        self._servers, self._splits = list(servers), splits
        self.nbytes = dict.fromkeys(servers, 0)
        """That each server keeps."""

    def place(self, count: int, itemsize: int, width: int = 1) -> list[Part]:
        """The parts of the next key, in order; at least one. They are cut between rows of ``width`` elements."""
        pieces = -(-count * itemsize // MOST_NBYTES) or 1
        if self._splits and count * itemsize >= SPLIT_NBYTES:
            pieces = -(-pieces // len(self._servers)) * len(self._servers)
        num_rows = count // width
        ends = [width * end for end in bounds(num_rows, min(pieces, max(num_rows, 1)))]
        parts = []
        for first, last in itertools.pairwise(ends):
            server = min(self._servers, key=self.nbytes.__getitem__)
            self.nbytes[server] += (last - first) * itemsize
            parts.append(Part(server, first, last))
        return parts
