"""NCCL without a GPU, for ranks that are threads: its collectives are work on the streams of `gpu_on_host`.

What the real one answers with an error, with a hang or with nonsense is an error here: collectives in different orders,
also of two communicators, two ranks on one GPU, a communicator that is destroyed while others have something under way,
or have given up.
"""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

import numpy as np

from hpcdp.core.arrays import dtype_of


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL_ERROR_{status}: stand-in")


class _Clique:
    """The ranks of one NCCL communicator, and where each is among its collectives."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.devices: dict[int, int] = {}
        self.calls: dict[int, dict[int, tuple[Any, ...]]] = {}
        self.done: set[int] = set()


_WORDS = {0: "i1", 1: "u1", 2: "i4", 3: "u4", 4: "i8", 5: "u8", 6: "f2", 7: "f4", 8: "f8", 9: "bfloat16"}


class NcclCommunicator:
    """NCCL's, over arrays in host memory; a group's calls are one piece of work."""

    gpus: Any
    """See `streams.Gpus`."""
    cliques: dict[bytes, _Clique]
    made: list[NcclCommunicator]
    running: dict[int, tuple[NcclCommunicator, int]]
    """By GPU the kernel that has begun there and waits for others of its kind: no room is left for those of another
    communicator, as on a GPU that has much to do."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        assert isinstance(commId, bytes) and len(commId) == 128
        with self.gpus.lock:
            self._clique = self.cliques.setdefault(commId, _Clique(ndev))
            self._clique.devices[rank] = self.gpus.current()
        self.gpus.wait_until(lambda: len(self._clique.devices) == ndev)
        if len(set(self._clique.devices.values())) < ndev:
            raise NcclError(5)
        self._rank, self._number, self._left = rank, 0, 0
        self.failed = self.aborted = self.destroyed = False
        self.made.append(self)

    def _call(self, stream: int, name: str, *call: Any) -> None:
        if self.failed:
            raise NcclError(1)
        assert not self.aborted and not self.destroyed
        self.gpus.of_thread.group.append((self, stream, name, call))

    def enqueue(self, stream: int, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        number, self._number = self._number, self._number + 1
        self._left += 1
        clique, rank = self._clique, self._rank
        device, me = clique.devices[rank], (self, number)

        def ready() -> bool:
            if self.running.setdefault(device, me) != me and not self.aborted:
                return False
            met = clique.calls.setdefault(number, {})
            met[rank] = tuple((name, call[2:]) for name, call in calls), calls
            if any(alike != met[rank][0] for alike, _ in met.values()):
                self.gpus.fault = f"NCCL's collectives are not alike: {sorted(str(alike) for alike, _ in met.values())}"
            return len(met) == clique.size or self.aborted

        def run() -> None:
            self._left -= 1
            if self.running.get(device) == me:
                del self.running[device]
            if number not in clique.done and not self.aborted:
                clique.done.add(number)
                met = clique.calls[number]
                for at, (name, _) in enumerate(calls):
                    _collective(name, [met[each][1][at][1] for each in range(clique.size)])

        self.gpus.push(stream, run, ready, "nccl " + " ".join(name for name, _ in calls))

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        self._call(stream, "reduceScatter", sendbuf, recvbuf, recvcount, datatype, op)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._call(stream, "allGather", sendbuf, recvbuf, count, datatype)

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._call(stream, "allReduce", sendbuf, recvbuf, count, datatype, op)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        if root >= self._clique.size:
            raise NcclError(4)
        self._call(stream, "reduce", sendbuf, recvbuf, count, datatype, op, root)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._call(stream, "broadcast", sendbuff, recvbuff, count, datatype, root)

    def check_async_error(self) -> None:
        if self.failed:
            raise NcclError(6)

    def abort(self) -> None:
        assert not self.aborted and not self.destroyed, "aborted after its end: its memory is freed twice"
        self.aborted = True

    def destroy(self) -> None:
        assert not self.destroyed, "destroyed twice"
        every = [each for each in self.made if each._clique is self._clique]
        assert not any(each._left for each in every), "ended while ranks have something under way: it may hang"
        assert not any(each.aborted for each in every), "ended while another has given up: it waits for that for ever"
        self.destroyed = True


def _at(ptr: int, count: int, datatype: int) -> np.ndarray:
    dtype = dtype_of(_WORDS[datatype])
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(ptr), dtype)


def _collective(name: str, calls: list[tuple[Any, ...]]) -> None:
    """``calls`` by rank; sums in the order of the ranks."""
    size, (_, _, count, kind, *more) = len(calls), calls[0]
    sent = [_at(each[0], count * (size if name == "reduceScatter" else 1), kind).copy() for each in calls]
    if name == "reduceScatter":
        for rank, each in enumerate(calls):
            _at(each[1], count, kind)[...] = sum(x[rank * count : (rank + 1) * count] for x in sent)
    elif name == "allGather":
        for each in calls:
            _at(each[1], count * size, kind)[...] = np.concatenate(sent)
    elif name == "allReduce":
        for each in calls:
            _at(each[1], count, kind)[...] = sum(sent)
    elif name == "reduce":
        _at(calls[more[1]][1], count, kind)[...] = sum(sent)
    else:
        for each in calls:
            _at(each[1], count, kind)[...] = sent[more[0]]


def module(gpus: Any) -> ModuleType:
    """That takes the place of ``cupy.cuda.nccl``; ``gpus`` is a `streams.Gpus`."""
    made = ModuleType("cupy.cuda.nccl")

    def groupStart() -> None:
        gpus.of_thread.group = []

    def groupEnd() -> None:
        calls, gpus.of_thread.group = gpus.of_thread.group, None
        for comm, stream in {(comm, stream) for comm, stream, _, _ in calls}:
            comm.enqueue(stream, [(name, call) for _, _, name, call in calls])

    vars(made).update(
        available=True, get_version=lambda: 22501, NcclError=NcclError, groupStart=groupStart, groupEnd=groupEnd,
        get_unique_id=lambda: next(gpus.numbers).to_bytes(128, "little"),
        NcclCommunicator=type(
            "NcclCommunicator", (NcclCommunicator,), {"gpus": gpus, "cliques": {}, "made": [], "running": {}}
        ),
    )  # fmt: skip
    return made
