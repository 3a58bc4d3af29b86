"""LeNet is trained by every framework that is installed, with the same losses from the same weights."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpcdp.benchmarks import train_lenet
from hpcdp.comm import World, threads

HAS_TORCH = importlib.util.find_spec("torch") is not None


def test_against_torch_where_it_is_installed() -> None:
    found = threads.run(1, lambda world: train_lenet.against_torch(world, 8, 2, 0.01))[0]
    assert set(found["samples_s"]) == ({"hpcdp", "torch"} if HAS_TORCH else {"hpcdp"})
    assert min(found["samples_s"].values()) > 0
    if HAS_TORCH:
        assert found["ratio"] > 0
        assert found["loss_difference"] < 1e-3
    else:
        assert found["ratio"] is None


def test_the_network_is_trained() -> None:
    def each(world: World) -> list[float]:
        step, initial, _ = train_lenet.hpcdp_step(world, train_lenet.random_batches(16, world.rank)[:1])
        assert sum(param.size for param in initial) == 129_068
        return [step(i) for i in range(12)]

    losses = np.array(threads.run(2, each))
    assert (losses[:, -1] < losses[:, 0] - 0.1).all()
    assert losses[0, 0] != losses[1, 0]


@pytest.mark.parametrize("framework", ["hpcdp", "torch"])
def test_all_ranks_under_mpirun(framework: str, tmp_path: Path) -> None:
    if framework == "torch" and not HAS_TORCH:
        pytest.skip("PyTorch is not installed")
    report = tmp_path / "report.json"
    options = ["--framework", framework, "--batch", "4", "--turns", "2", "--seconds", "0.02", "--json", str(report)]
    command = [sys.executable, "-m", "hpcdp.benchmarks.train_lenet", *options]
    launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--"]
    done = subprocess.run([*launch, *command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert (found["framework"], found["ranks"], found["batch"]) == (framework, 2, 4)
    assert found["samples_s"] > 0
    assert found["unequal"] is None if framework == "torch" else 0.3 < found["unequal"] <= 1
