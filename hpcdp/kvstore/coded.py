"""A round of pushes that are encoded: the node's memory holds codes, and codes go from node to node.

Every rank encodes its push by itself, part by part. The owner of a part sends the codes of its node's ranks to the
owners of the same part on the other nodes, receives theirs, and adds up what all ranks' codes say, in the order of the
ranks: all nodes get the same bits, and nothing is encoded twice.

Sent per round, for w bytes of codes of one rank: (nodes - 1) w for every rank.

Source: MXNet's kvstore, where workers encode and servers decode and add; the owners as in `sync`.
"""

from __future__ import annotations

import numpy as np

from ..collectives.progress import Steps
from ..comm.shared import NodeMemory
from ..compression import Compression
from ..gradients.lane import Turn
from ..gradients.rail import Rail
from .compress import Codes
from .rows import FILLED, Rows


class Coded:
    """Of one key. Every rank of the node must make it.

    Args:
        rail: see `SyncStore`.
        members: for every rank of the rail the ranks of its node, as the world numbers them.
    """

    def __init__(
        self, compression: Compression, rows: Rows, memory: NodeMemory, rail: Rail | None, members: list[list[int]]
    ) -> None:
        self.codes = Codes(compression, rows.ends.tolist(), rows.flat.dtype)
        self._rows, self._me, self._rail, self._members = rows, memory.rank, rail, members
        self._wires = memory.alloc((memory.size, self.codes.nbytes), np.uint8)

    def sum(self, value: np.ndarray, number: int, turn: Turn | None) -> Steps:
        """Encode this rank's push in round ``number``, and sum its part of all ranks' pushes into its own row."""
        self.codes.encode(value.reshape(-1), self._wires[self._me])
        yield [self._rows.post(number, FILLED)]
        first, last = self._rows.bucket.shard
        if last == first:
            return
        own = np.ascontiguousarray(self._wires[:, self.codes.places[self._me]])
        of_nodes = [own]
        if self._rail is not None:
            if turn is not None:
                yield [turn]
            comm, tag = self._rail.comm, self._rail.tag(self._rows.bucket)
            of_nodes = [np.empty((len(ranks), own.shape[1]), np.uint8) for ranks in self._members]
            of_nodes[comm.rank] = own
            others = [node for node in range(comm.size) if node != comm.rank]
            sends = [comm.isend(own.reshape(-1), node, tag) for node in others]
            yield [*sends, *(comm.irecv(of_nodes[node].reshape(-1), node, tag) for node in others)]
        ranks = [rank for node in self._members for rank in node]
        everyone = [codes for node in of_nodes for codes in node]
        in_order = (everyone[at] for at in np.argsort(ranks))
        self.codes.add(in_order, self._rows.bucket.mine[first:last])
