"""PyTorch models over several ranks, measured: what is said, what is judged, and that it runs."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from raises import raises

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import bench_torch_ddp as torch_ddp
from bench_harness import peers, report
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError


def place(share: float, ratio: float) -> dict[str, Any]:
    names = [torch_ddp.DDP, torch_ddp.RANK, torch_ddp.SHARD, torch_ddp.ALONE]
    row = {
        "key": "wide",
        "model": "a wide model",
        "batch": 64,
        "step_ms": dict(zip(names, (40.0, 30.0, 25.0, 24.0), strict=True)),
        "ratio": dict(zip(names, (1.0, ratio, 1.6, 1.7), strict=True)),
        "share": dict(zip(names, (0.6, 0.8, share, 1.0), strict=True)),
        "unequal": 0.97,
        "loss_difference": 1e-7,
        "apart": 1e-3,
    }
    return {"hosts": 1, "ranks_per_node": 2, "rate": None, "torch": "2", "machine": {"ranks": 2, "nodes": 1}} | {
        "rows": [row]
    }


def test_the_verdicts_are_those_of_the_target() -> None:
    def met(share: float, ratio: float) -> list[bool]:
        found = report.verdicts({"torch": [{"places": [place(share, ratio)]}]})
        return [each.met for each in found if each.target == "S4"]

    assert met(0.96, 1.41) == [True, True]
    assert met(0.94, 1.39) == [False, False]
    assert max(map(len, torch_ddp.table(place(0.96, 1.31)).splitlines())) <= 80


def test_losses_that_are_not_numbers_of_one_candidate_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {torch_ddp.RANK: 1.0, torch_ddp.SHARD: float("nan"), torch_ddp.ALONE: 1.1}
    monkeypatch.setattr(torch_ddp, "step_of", lambda name, *_: lambda i: losses[name])
    (found,) = thread_comm.run(1, lambda world: torch_ddp.measure(world, "lenet", 2, 1, 1e-6))
    assert math.isnan(found["loss_difference"]) and found["apart"] == pytest.approx(0.1)


@pytest.mark.parametrize("name", list(peers.MODELS))
def test_models_are_of_the_size_that_they_say(name: str) -> None:
    model = peers.MODELS[name]
    net = model.net(torch.nn)
    millions = sum(param.numel() for param in net.parameters()) / 1e6
    said = float(model.title.split(" M parameters")[0].split()[-1])
    assert millions == pytest.approx(said, rel=0.05)
    (x, y), *_ = torch_ddp.batches_of(model, 2, 0)
    assert torch.nn.functional.cross_entropy(net(x), y).item() > 0


@pytest.mark.thorough
def test_a_job_of_two_ranks(tmp_path: Path) -> None:
    found = tmp_path / "report.json"
    options = ["--hosts", "1", "--models", "lenet", "--turns", "1", "--seconds", "0.02", "--json", str(found)]
    command = [sys.executable, torch_ddp.__file__, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(found.read_text())["places"][0]["rows"]
    assert row["loss_difference"] < 0.02 * row["apart"]
    assert list(row["step_ms"]) == [torch_ddp.DDP, torch_ddp.BACKEND, torch_ddp.RANK, torch_ddp.SHARD, torch_ddp.ALONE]


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (["--hosts", "0"], {"operation": "torch_ddp", "where": "--hosts", "expected": 1}),
        (["--models", "lenett"], {"operation": "unknown model 'lenett'", "remedy": "lenet"}),
    ],
)
def test_misuse_is_refused(given: list[str], fields: dict[str, object]) -> None:
    with raises(ConfigError, **fields):
        torch_ddp.main(given)
