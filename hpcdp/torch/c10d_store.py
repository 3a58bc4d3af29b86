"""c10d's key-value store on MPI: rank 0 keeps the keys, and a thread of it answers the other ranks.

c10d needs a store to make a process group, and NCCL to exchange its identifiers. This one opens no port.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..collectives.objects import decoded, encoded
from ..comm import World, init
from ..comm.communicator import Communicator
from ..comm.consistency import on_rank_0
from ..errors import TimeLimitError

_REQUEST, _REPLY = 1, 2
_LEAVE = "leave"
"""The request of a rank whose program ends."""
_DEFAULT_TIMEOUT = timedelta(minutes=5)
_NAPS_S = (50e-6, 10e-3)
"""Seconds of the first and the longest nap of a thread that waits for a message."""
_LEAST_LIMIT_S = 60.0
"""The shortest wait for an answer of rank 0, which may run code that holds the GIL."""


def open_store(timeout: timedelta | None = None) -> tuple[Any, int, int, str | None]:
    """Open the store of a new default process group; every rank must call.

    Returns:
        The store, this rank, the number of ranks, and the name of rank 0's host; None in place of the name if all ranks
        are on one node.
    """
    world = init()
    store = world.keep(MpiStore, lambda: MpiStore(world))
    if timeout is not None:
        store.set_timeout(timeout)
    store.opened += 1  # keys of an earlier default group must not be found
    host = on_rank_0(world.comm, socket.gethostname) if world.num_nodes > 1 else None
    return dist.PrefixStore(str(store.opened), store), world.rank, world.size, host


class Keys:
    """The keys and values of the store, on rank 0; its methods are the requests."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def run(self, name: str, *args: Any) -> Any:
        """Run a request."""
        with self._lock:
            return getattr(self, f"_{name}")(*args)

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def _get(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values of all ``keys``; None if one is missing."""
        return [self._values[key] for key in keys] if self._check(keys) else None

    def _check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def _append(self, key: str, value: bytes) -> None:
        self._values[key] = self._values.get(key, b"") + value

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        if key not in self._values:
            if expected:
                return expected
            self._values[key] = desired
        elif self._values[key] == expected:
            self._values[key] = desired
        return self._values[key]

    def _delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _num_keys(self) -> int:
        return len(self._values)

    def _list_keys(self) -> list[str]:
        return list(self._values)


class MpiStore(dist.Store):  # type: ignore[misc]
    """A store of torch.distributed; made by `open_store`, on every rank."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.opened = 0
        """The number of default process groups that have used it."""
        self._limit = _DEFAULT_TIMEOUT
        self._comm = world.comm.duplicate()
        self._keys = Keys() if world.rank == 0 else None
        self._busy = threading.Lock()
        if self._keys is None:
            world.endings.add(self._leave)
        elif world.size > 1:
            server = _Server(self._comm, self._keys)
            world.kept[_Server] = server
            world.endings.add(server.end)

    def _leave(self) -> None:
        """Let rank 0 end, too."""
        self._comm.isend_whole(encoded([_LEAVE], "store"), 0, _REQUEST).wait()

    def _ask(self, name: str, *args: Any) -> Any:
        if self._keys is not None:
            return self._keys.run(name, *args)
        with self._busy:
            request = self._comm.isend_whole(encoded([name, *args], "store"), 0, _REQUEST)
            limit_s = max(self._limit.total_seconds(), _LEAST_LIMIT_S)
            poll = functools.partial(self._comm.irecv_any, _REPLY)
            _, reply, receiving = _found(poll, limit_s, "an answer of rank 0")
            receiving.wait()
            request.wait()
            return decoded(reply)

    def _values(self, keys: Sequence[str], limit: timedelta | None) -> list[bytes]:
        keys, limit_s = list(keys), (limit or self._limit).total_seconds()
        return _found(lambda: self._ask("get", keys), limit_s, f"the keys {', '.join(keys)}")  # type: ignore[no-any-return]

    @property
    def timeout(self) -> timedelta:
        """The timeout of `get` and `wait`."""
        return self._limit

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of `get` and `wait`."""
        self._limit = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask("set", key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        """Return a key's value; block until it is set."""
        return self._values([key], None)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys; block until all are set."""
        return self._values(keys, None)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum."""
        return int(self._ask("add", key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._ask("append", key, _as_bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key that has the value ``expected``, or is missing if that is empty; return its value."""
        return self._ask("compare_set", key, _as_bytes(expected), _as_bytes(desired))  # type: ignore[no-any-return]

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether there was one."""
        return bool(self._ask("delete_key", key))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are set."""
        self._values(keys, timeout)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._ask("num_keys"))

    def list_keys(self) -> list[str]:
        """Return the keys."""
        return list(self._ask("list_keys"))

    deleteKey, getNumKeys = delete_key, num_keys  # as C++ calls them, in a PrefixStore

    def has_extended_api(self) -> bool:
        """Return whether it has `append`, `multi_get` and `multi_set`."""
        return True


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class _Server:
    """The thread of rank 0 that answers requests until the programs of all other ranks end."""

    def __init__(self, comm: Communicator, keys: Keys) -> None:
        self._comm, self._keys = comm, keys
        self._thread = threading.Thread(target=self._serve, name="hpcdp-torch-store", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait for the end of the other ranks, because they may use the store after the program of rank 0 has ended."""
        self._thread.join()

    def _serve(self) -> None:
        nap_s, ranks = _NAPS_S[0], self._comm.size - 1
        while ranks:
            time.sleep(nap_s)
            message = self._comm.irecv_any(_REQUEST)
            if message is None:
                nap_s = min(2 * nap_s, _NAPS_S[1])
                continue
            rank, data, request = message
            request.wait()
            name, *args = decoded(data)
            if name == _LEAVE:
                ranks -= 1
                continue
            answer = encoded(self._keys.run(name, *args), "store")
            self._comm.isend_whole(answer, rank, _REPLY).wait()
            nap_s = _NAPS_S[0]


def _found(poll: Callable[[], Any], limit_s: float, expected: str) -> Any:
    """Return what ``poll()`` returns once it is not None; `TimeLimitError` after ``limit_s`` seconds."""
    began_s, nap_s = time.monotonic(), _NAPS_S[0]
    while (found := poll()) is None:
        if time.monotonic() - began_s > limit_s:
            raise TimeLimitError("torch.distributed store", expected=f"{expected} within {limit_s:g} s", got="none")
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _NAPS_S[1])
    return found
