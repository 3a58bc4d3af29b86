"""The benchmark of key-value stores: what it reports, and that it sees a wrong sum."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdp import kvstore as stores
from hpcdp.benchmarks import kvstore
from hpcdp.comm import World, threads


@pytest.mark.parametrize("per_node", [None, 1])
def test_ratios_to_allreduce_on_one_node_and_on_several(per_node: int | None) -> None:
    def each(world: World) -> dict:
        return kvstore.compare(world, stores.create("dist_sync", world), 1 << 12, iterations=4, warmup=1)

    row = threads.run(2, each, ranks_per_node=per_node)[0]
    assert not any(row["wrong"].values())
    assert row["nbytes"] == 4096
    assert (kvstore.RING in row["ratio"]) == (kvstore.RING in row["median_us"]) == (per_node is not None)
    assert all(ratio > 0 for ratio in (*row["ratio"].values(), row["mpi_ratio"], row["copy_share"]))


def test_a_wrong_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(world: World) -> dict:
        store = stores.create("dist_sync", world)
        pull = store.pull
        monkeypatch.setattr(store, "pull", lambda key, out: (pull(key, out), out.__setitem__(0, 7)))
        return kvstore.compare(world, store, 64, iterations=4, warmup=1)["wrong"]

    found = threads.run(2, each)[0]
    assert found["push, then pull"] > 0
    assert sum(found.values()) == found["push, then pull"]


def test_under_mpirun(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "hpcdp.benchmarks.kvstore", "-m", "4:4K", "--factor", "32", "-i", "3", "-x", "1"]
    launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--"]
    done = subprocess.run(
        [*launch, *command, "--json", str(report)], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["benchmark"] == "kvstore"
    assert [row["nbytes"] for row in found["rows"]] == [4, 128, 4096]
    assert found["limits"]["all_cores_gb_s"] > 0
    assert max(map(len, done.stdout.splitlines())) <= 80
