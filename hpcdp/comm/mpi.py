"""A communicator over MPI, by mpi4py's buffer methods."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import UnsupportedError
from .communicator import check_op

MAX_ELEMENTS = 2**30
"""Arrays are passed to MPI in pieces of at most this many elements: Open MPI 5's Bcast fails at 2^31."""

_OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "prod": MPI.PROD}


class MpiRequest:
    """A request of MPI; the array is kept alive until it is complete."""

    def __init__(self, requests: list[MPI.Request], x: np.ndarray) -> None:
        self._requests = requests
        self._x: np.ndarray | None = x

    def test(self) -> bool:
        done = bool(MPI.Request.Testall(self._requests))
        if done:
            self._x = None
        return done

    def wait(self) -> None:
        MPI.Request.Waitall(self._requests)
        self._x = None


class MpiCommunicator:
    """The ranks of an MPI communicator (see `Communicator`).

    Args:
        comm: an intra-communicator that nothing else uses.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self.mpi = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()

    def barrier(self) -> None:
        self.mpi.Barrier()

    def isend(self, x: np.ndarray, dest: int, tag: int = 0) -> MpiRequest:
        return MpiRequest([self.mpi.Isend(piece, dest, tag) for piece in _pieces(_known(x))], x)

    def irecv(self, x: np.ndarray, source: int, tag: int = 0) -> MpiRequest:
        return MpiRequest([self.mpi.Irecv(piece, source, tag) for piece in _pieces(_known(x))], x)

    def native_allreduce(self, x: np.ndarray, op: str) -> None:
        check_op("allreduce", op, x.dtype)
        if x.dtype == np.float16:  # MPI has no half: reduced in single precision, rounded once
            wide = x.astype(np.float32)
            self.native_allreduce(wide, op)
            x[...] = wide
            return
        if x.dtype.kind not in "iuf" or not x.dtype.isnative:
            raise UnsupportedError("allreduce", where="dtype", expected="a native integer or float", got=x.dtype.str)
        nan = self._nan_on_any_rank(x) if op in ("min", "max") and x.dtype.kind == "f" else None
        for piece in _pieces(x):
            self.mpi.Allreduce(MPI.IN_PLACE, piece, _OPS[op])
        if nan is not None:
            x[nan] = np.nan
        if op == "mean":
            x /= x.dtype.type(self.size)

    def _nan_on_any_rank(self, x: np.ndarray) -> np.ndarray | None:
        """Where some rank has a NaN, which MPI's own minimum and maximum may drop; None where there is none at all."""
        nan = np.isnan(x)
        anywhere = np.array([nan.any()], np.uint8)
        self.mpi.Allreduce(MPI.IN_PLACE, anywhere, MPI.MAX)
        if not anywhere[0]:
            return None
        for piece in _pieces(nan.view(np.uint8)):
            self.mpi.Allreduce(MPI.IN_PLACE, piece, MPI.MAX)
        return nan

    def native_broadcast(self, x: np.ndarray, root: int) -> None:
        for piece in _pieces(_known(x)):
            self.mpi.Bcast(piece, root)

    def allgather_json(self, value: Any) -> list[Any]:
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self.mpi.Allgather(np.array([text.size], np.int64), lengths)
        gathered = np.empty(int(lengths.sum()), np.uint8)
        self.mpi.Allgatherv(text, [gathered, lengths])
        ends = np.cumsum(lengths)
        return [json.loads(gathered[end - n : end].tobytes()) for n, end in zip(lengths, ends, strict=True)]

    def abort(self, code: int) -> None:
        self.mpi.Abort(code)


def _known(x: np.ndarray) -> np.ndarray:
    """``x`` in a dtype that MPI can carry: float16 as its bits."""
    return x.view(np.uint16) if x.dtype == np.float16 else x


def _pieces(x: np.ndarray) -> list[np.ndarray]:
    flat = x.reshape(-1)  # a view: callers pass contiguous arrays
    if flat.size <= MAX_ELEMENTS:
        return [flat]
    return [flat[start : start + MAX_ELEMENTS] for start in range(0, flat.size, MAX_ELEMENTS)]
