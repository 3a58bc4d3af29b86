"""Stores over hosts: exact numbers on links that are whole, and on one that is cut for a while (R9)."""

import threading
import time

import pytest
from runs_on_hosts import wait_for

from bench_harness.cluster import Cluster

pytestmark = pytest.mark.cluster

PUSHES = """
import time
from pathlib import Path
from hpcdp import kvstore, optim

store = kvstore.create({kind!r})
keys = list(range(6))
store.init(keys, [np.zeros(60_000 if key else 1_500_000, "f4") for key in keys])
store.set_optimizer(optim.SGD(lr=1.0))
began, rounds, longest = time.monotonic(), {rounds}, 0.0
for turn in range(rounds):
    before = time.monotonic()
    if turn == 3:
        Path(sys.argv[1]).with_name("pushing").touch()
    for key in keys:
        store.push(key, np.full_like(np.asarray(store.pull(key)), -(world.rank + 1)))
    store.wait()
    longest = max(longest, time.monotonic() - before)
    time.sleep({nap_s})
store.barrier()
answer["seconds"], answer["longest"] = time.monotonic() - began, longest
answer["values"] = [[float(x.min()), float(x.max())] for x in (np.asarray(each) for each in store.pull(keys))]
store.barrier()
"""


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_the_numbers_over_hosts(two_hosts: Cluster, run, kind: str) -> None:
    for answer in run(two_hosts, [2, 1], PUSHES.format(kind=kind, rounds=3, nap_s=0)):
        assert answer["values"] == [[18.0, 18.0]] * 6


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_link_that_is_cut_for_five_seconds(two_hosts: Cluster, run, kind: str) -> None:
    """Every push counts once, and the job goes on where it was."""
    pushing = two_hosts.folder / "pushing"
    pushing.unlink(missing_ok=True)

    def cut() -> None:
        wait_for(pushing.exists, "the first rounds")
        two_hosts.cut(2)
        try:
            time.sleep(5)
        finally:
            two_hosts.join(2)

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        answers = run(two_hosts, 1, PUSHES.format(kind=kind, rounds=60, nap_s=0.05))
    finally:
        cutting.join()
    for answer in answers:
        assert answer["values"] == [[180.0, 180.0]] * 6
    assert max(answer["longest"] for answer in answers) > 3  # it was cut while the job ran
