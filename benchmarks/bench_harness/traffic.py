"""The ranks of `bench_ingress`: timed pushes and pulls of an asynchronous store with servers on other hosts.

This is a separate module, because servers import the updater `add` from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hpcdp import comm, kvstore, optim
from hpcdp.bench.measure import FreshData, count_wrong, median_ratio
from hpcdp.bench.tune import link_rates
from hpcdp.kvstore.arguments import Key

KEY_NBYTES = 1 << 20
BOTH_WAYS = "push all, then pull all"
_RECEIVED = Path("/sys/class/net/eth0/statistics/rx_bytes")  # of the only link that a host has
_FLOAT = np.dtype(np.float32)


def add(key: Key, received: np.ndarray, stored: np.ndarray) -> None:
    """Update a key by a sum; an integer key gets the bytes that its server's host has received so far."""
    if stored.dtype == _FLOAT:
        stored += received
    else:
        stored[...] = int(_RECEIVED.read_text())


def link_turns(world: comm.World, keys: int, turns: int, repeats: int) -> dict[str, Any]:
    """Measure keys of 1 MB whose server is the other one of two ranks, with many requests in flight; both must call.

    Returns:
        ``link_mb_s``: the rates of the link, medians over turns; ``mb_s`` and ``share`` by what was done: payload each
        way at once, or one way, and that over the link's rate in the same turn; ``wrong`` elements.
    """
    count = KEY_NBYTES // _FLOAT.itemsize
    store = kvstore.create("dist_async", world)
    store.init(list(range(2 * keys)), [np.zeros(count, np.float32)] * (2 * keys))  # by turns on either rank
    store.set_optimizer(optim.SGD(lr=1.0))
    far = range(1 - world.rank, 2 * keys, world.size)
    x, out = np.full(count, world.rank + 1, np.float32), [np.empty(count, np.float32) for _ in far]
    pushes = 0

    def push() -> None:
        nonlocal pushes
        for key in far:
            store.push(key, x)
        pushes += 1

    def push_and_wait() -> None:
        push()
        store.wait()

    def pull() -> None:
        pulled = [store.pull(key) for key in far]
        for handle, place in zip(pulled, out, strict=True):
            place[:] = handle.wait()

    def push_all_then_pull_all() -> None:
        push()
        pull()

    # What is done, by how many of the two ranks, and how often its payload crosses the link in each direction then.
    exchanges: list[tuple[str, Callable[[], None], int, int]] = [
        ("push, one way", push_and_wait, 1, 1),
        ("pull, one way", pull, 1, 1),
        ("push", push_and_wait, 2, 1),
        ("pull", pull, 2, 1),
        (BOTH_WAYS, push_all_then_pull_all, 2, 2),
    ]
    rates: dict[str, list[float]] = {name: [] for name, *_ in exchanges}
    link: dict[str, list[float]] = {"one_way": [], "both_ways": []}
    for turn in range(turns + 1):
        for name, mb_s in link_rates(world).items():
            link[name].append(mb_s)
        for name, do, ranks, crossings in exchanges:
            store.barrier()
            begin = time.perf_counter()
            for _ in range(repeats if world.rank < ranks else 0):
                do()
            taken_s = max(world.comm.allgather_json(time.perf_counter() - begin))
            rates[name].append(crossings * repeats * keys * KEY_NBYTES / taken_s / 1e6)
        if turn == 0:  # new connections and new memory
            for series in (*rates.values(), *link.values()):
                series.clear()
    store.barrier()
    pull()
    wrong = sum(int((value != -pushes * (world.rank + 1)).sum()) for value in out)
    direction = {name: "one_way" if ranks == 1 else "both_ways" for name, _, ranks, _ in exchanges}
    return {
        "keys": keys,
        "link_mb_s": {name: float(np.median(series)) for name, series in link.items()},
        "mb_s": {name: float(np.median(series)) for name, series in rates.items()},
        "share": {name: median_ratio(series, link[direction[name]]) for name, series in rates.items()},
        "wrong": sum(world.comm.allgather_json(wrong)),
    }


def ingress(world: comm.World, servers: int, nbytes: int, keys: int, rounds: int) -> dict[str, Any]:
    """Workers push ``nbytes`` a round, in ``keys`` large keys, which are cut over ``servers``; every worker must call.

    Returns:
        ``received_mb``: what came to the host of each server in a round, as its link counts it; ``round_ms``: the
        median round of the slowest worker; ``wrong`` elements.
    """
    data = FreshData(world.rank, world.size)
    x = np.zeros((keys, nbytes // keys // _FLOAT.itemsize), np.float32)
    store = kvstore.create("dist_async", world)
    counters = range(keys, keys + servers)
    store.init(list(counters), [np.zeros(1, np.int64)] * servers)  # one on each server
    store.init(list(range(keys)), list(x))
    store.set_updater(add)

    def received() -> np.ndarray:
        store.barrier()
        if world.rank == 0:
            for key in counters:
                store.push(key, np.zeros(1, np.int64))
        return np.array([int(store.pull(key).wait()[0]) for key in counters])

    total = np.zeros_like(data.reduced(0))
    taken_ms = []
    before = received()
    for number in range(-1, rounds):
        data.write(x.reshape(-1), number)
        total += data.reduced(number)
        if number == 0:
            before = received()
        world.barrier()
        begin = time.perf_counter()
        for key in range(keys):
            store.push(key, x[key])
        store.wait()
        taken_ms.append(1e3 * max(world.comm.allgather_json(time.perf_counter() - begin)))
    after = received()
    values = np.concatenate([store.pull(key).wait() for key in range(keys)])
    return {
        "servers": servers,
        "received_mb": ((after - before) / rounds / 1e6).tolist() if world.rank == 0 else [],
        "round_ms": float(np.median(taken_ms[1:])),
        "wrong": sum(world.comm.allgather_json(count_wrong(values, total, 0.0))),
    }
