"""Checkpoints of ranks on several hosts, in a folder that all see: restored elsewhere, by other numbers of ranks."""

import pytest
from runs_on_hosts import checkpoints_of, hpcdp, numbers

from bench_harness.cluster import Cluster

pytestmark = pytest.mark.cluster

# A tensor of which every rank holds a run of elements, one that all have, and what each has for itself.
SAVE = """
import zlib
from hpcdp import checkpoint
from hpcdp.checkpoint import PerRank, Sharded
from hpcdp.core.state import Part

def runs(size, rank):
    edges = np.linspace(0, 1000, size + 1).astype(int)
    return [Part(int(edges[rank]), np.arange(edges[rank], edges[rank + 1], dtype=np.float64) ** 0.5)]

state = {{
    "whole": np.random.default_rng(7).standard_normal((300, 40)),
    "shards": Sharded((1000,), np.dtype(np.float64), runs(world.size, world.rank)),
    "own": PerRank(100 + world.rank),
    "epoch": 3,
}}
with checkpoint.Manager({folder!r}, keep=2) as manager:
    manager.save(12, state)
"""

RESTORE = """
from hpcdp import checkpoint

with checkpoint.Manager({folder!r}) as manager:
    restored = manager.restore()
    answer["step"] = restored.step
    answer["epoch"] = restored.state["epoch"]
    answer["shards"] = bool((restored.state["shards"] == np.arange(1000.0) ** 0.5).all())
    answer["whole"] = bool((restored.state["whole"] == np.random.default_rng(7).standard_normal((300, 40))).all())
"""


@pytest.mark.parametrize(("saved_by", "restored_by"), [([2, 2], [0, 2]), ([1, 2], [2, 2]), ([1, 0], [1, 1])])
def test_saved_on_some_hosts_and_restored_on_others(two_hosts: Cluster, run, saved_by, restored_by) -> None:
    folder = two_hosts.folder / f"saved-{sum(saved_by)}"
    run(two_hosts, saved_by, SAVE.format(folder=str(folder)))
    expected = {"step": 12, "epoch": 3, "shards": True, "whole": True}
    assert run(two_hosts, restored_by, RESTORE.format(folder=str(folder))) == [expected] * sum(restored_by)
    verified = two_hosts.on(2, hpcdp("checkpoint", "verify", folder))
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_a_run_of_four_ranks_on_two_hosts_goes_on_as_two_on_one(two_hosts: Cluster) -> None:
    whole, parts = two_hosts.folder / "whole", two_hosts.folder / "parts"
    settings = ("--data", "digits", "--batch-size", "48", "--reproducible", "--schedule", "constant")
    for ranks_per_node, folder, epochs in (([2, 0], whole, 4), (2, parts, 2), ([0, 2], parts, 4)):
        arguments = ("train", "mlp", *settings, "--epochs", str(epochs), "--run-dir", folder, "--resume", "auto")
        done = two_hosts.mpirun(ranks_per_node, hpcdp(*arguments), 240)
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"resuming {parts}\n" in done.stdout
    assert {"step-0000000060", "step-0000000120"} <= set(checkpoints_of(parts))  # a slow run saves at times between
    assert numbers(parts) == numbers(whole)


def test_a_damaged_file_is_named_on_every_host(two_hosts: Cluster, run) -> None:
    folder = two_hosts.folder / "damaged"
    run(two_hosts, 2, SAVE.format(folder=str(folder)))
    (checkpoint,) = folder.glob("step-*")
    shard = max(checkpoint.glob("*.h5"), key=lambda path: (path.name != "index.h5", path.stat().st_size))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    for host in (1, 2):
        verified = two_hosts.on(host, hpcdp("checkpoint", "verify", folder))
        assert verified.returncode == 1
        assert shard.name in verified.stdout + verified.stderr
