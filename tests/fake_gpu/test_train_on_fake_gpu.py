"""``hpcdp train --device gpu`` on the fake GPU, through CuPy itself: each of these ends, without an error."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
MLP, LENET = "mlp --data digits --batch-size 512", "lenet --data digits --batch-size 512"
CODECS = ("fp16", "bf16", "2bit", "1bit", "topk")
ONE = {"FAKE_GPUS": "1"}
TWO = {"FAKE_GPUS": "2"}
TWO_NODES = {**ONE, "HPCDP_RANKS_PER_NODE": "2"}
COMPILING = re.compile("hpcdp: (compiling kernels that are new on this machine|waiting for another rank or job)")
"""What rank 0 says where the kernels of the host are new."""


def check(run: Run, folder: Path, arguments: str, **environ: str) -> None:
    command = f"-m hpcdp.cli train {arguments} --device gpu --epochs 1 --run-dir".split()
    done = run(*command, folder / "run", limit_s=250, **environ)  # where kernels of the host are new
    ranks = int(arguments.partition("--ranks ")[2].split()[0])
    assert done.returncode == 0, done.stderr
    seen = 2 if environ in (TWO, TWO_NODES) else 1 if environ == ONE else ranks
    assert f"{seen} x fake GPU" in done.stdout
    assert all(COMPILING.match(line) for line in done.stderr.splitlines()), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        f"{MLP} --ranks 2 --optimizer adamw --clip-norm 1",
        f"{LENET} --ranks 2 --optimizer lars",
        f"{LENET} --ranks 2 --dtype float16",
        f"{LENET} --ranks 2 --dtype bfloat16",
        f"{MLP} --ranks 2 --owner shard",
        f"{MLP} --ranks 2 --owner rank",
        f"{MLP} --ranks 1 --kv-store device",
        f"{MLP} --ranks 2 --kv-store dist_device_sync",
        f"{MLP} --ranks 2 --kv-store dist_sync",
        f"{MLP} --ranks 2 --kv-store dist_async",
        f"{LENET} --ranks 1 --optimizer adamw",
        f"{LENET} --ranks 1 --dtype float16",
        f"{MLP} --ranks 2 --dtype bfloat16 --no-hybridize",
        f"{LENET} --ranks 1 --no-hybridize",
        "gpt --batch-size 64 --ranks 2",
        "char_lstm --batch-size 256 --ranks 2",
        "resnet18_cifar --data digits --batch-size 512 --ranks 1",
    ],
)
def test_a_gpu_each(on_fake_gpu: Run, tmp_path: Path, arguments: str) -> None:
    """Where there are several ranks, NCCL is between them."""
    check(on_fake_gpu, tmp_path, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        f"{LENET} --ranks 3",
        f"{LENET} --ranks 2 --dtype bfloat16",
        f"{LENET} --ranks 3 --no-hybridize",
        f"{MLP} --ranks 2 --kv-store dist_device_sync",
    ],
)
def test_one_gpu_for_all(on_fake_gpu: Run, tmp_path: Path, arguments: str) -> None:
    """CUDA IPC is between them."""
    check(on_fake_gpu, tmp_path, arguments, **ONE)


@pytest.mark.parametrize("arguments", [f"{LENET} --ranks 3", f"{MLP} --ranks 4 --dtype bfloat16 --owner shard"])
def test_two_gpus_for_more_ranks(on_fake_gpu: Run, tmp_path: Path, arguments: str) -> None:
    """CUDA IPC is on each of them, NCCL between."""
    check(on_fake_gpu, tmp_path, arguments, **TWO)


@pytest.mark.parametrize(
    "arguments",
    [
        LENET,
        f"{MLP} --owner shard",
        f"{LENET} --no-hybridize",
        f"{LENET} --dtype bfloat16 --compression 2bit",
        *(f"{LENET} --compression {name}" for name in CODECS),
    ],
)
def test_two_nodes(on_fake_gpu: Run, tmp_path: Path, arguments: str) -> None:
    """CUDA IPC in each of two virtual nodes, staging through the host between them."""
    check(on_fake_gpu, tmp_path, f"{arguments} --ranks 4", **TWO_NODES)
