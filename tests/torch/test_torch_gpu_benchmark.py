"""The benchmark of DDP and FSDP2 on a GPU, on two ranks of this processor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from bench_harness import programs


@pytest.mark.thorough  # test_torch_process_group.py has both wrappers
@pytest.mark.parametrize("backend", ["hpcdp", "gloo"])
def test_both_wrappers_train_like_one_process(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", sys.executable]
    options = ["--device", "cpu", "--model", "lenet", "--batch", "8", "--steps", "1", "--json", str(path)]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    words = [*command, str(programs.path_of("torch_gpu")), backend, *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert (found["backend"], found["ranks"]) == (backend, 2)
    assert [row["wrapper"] for row in found["rows"]] == ["DDP", "FSDP2"]
    assert all(row["step_ms"] > 0 and row["loss_difference"] < 1e-4 for row in found["rows"])
