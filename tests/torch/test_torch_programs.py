"""Programs for torch.distributed, and libraries on top of it, over the backends "hpcdp" and "gloo": same results.

`make test-torch-libraries` installs the libraries; elsewhere their tests are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
PROGRAMS = Path(__file__).with_name("programs")
LIMIT_S = 240


def run(program: str, *arguments: object, ranks: int = 2) -> str:
    """Return what a program prints behind RESULT."""
    command = [Path(sys.executable).with_name("hpcdp"), "launch", "-n", ranks, "--", sys.executable]
    words = [str(word) for word in [*command, PROGRAMS / f"{program}.py", *arguments]]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=environ)
    results = [line.split("RESULT ", 1)[1] for line in done.stdout.splitlines() if "RESULT " in line]
    assert done.returncode == 0 and len(results) == 1, done.stdout[-2000:] + done.stderr[-3000:]
    return results[0]


@pytest.mark.thorough  # test_torch_like_ddp.py accumulates, and test_torch_process_group.py has the backend
def test_a_loop_that_accumulates_gradients():
    assert run("accumulating_loop", "hpcdp") == run("accumulating_loop", "gloo")


@pytest.mark.thorough
def test_a_checkpoint_of_other_ranks(tmp_path):
    saved = run("distributed_checkpoint", "hpcdp", "save", tmp_path, ranks=3)
    assert run("distributed_checkpoint", "hpcdp", "load", tmp_path, ranks=2) == saved
    assert run("distributed_checkpoint", "gloo", "load", tmp_path, ranks=2) == saved


@pytest.mark.parametrize(
    "program, library",
    [
        ("hugging_face_trainer", "transformers"),
        ("accelerate_loop", "accelerate"),
        ("lightning_fit", "lightning"),
        ("torchmetrics_accuracy", "torchmetrics"),
        ("timm_training", "timm"),
    ],
)
def test_libraries(program: str, library: str):
    if importlib.util.find_spec(library) is None and not Path(sys.prefix, library).is_dir():
        pytest.skip(f"{library} is not installed: make test-torch-libraries")
    assert run(program, "hpcdp") == run(program, "gloo")
