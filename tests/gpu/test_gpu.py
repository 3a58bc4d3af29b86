"""Ranks on a real GPU with ``HPCDP_TEST_GPU=1`` (``make test-gpu``), each job with a deadline; else on the stand-in."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import gpu_cases
import gpu_on_host
import pytest

from hpcdp.comm import thread_comm
from hpcdp.comm import world as comm_world
from hpcdp.comm.world import Gpu
from hpcdp.core.arrays import gpu
from hpcdp.launch.process_monitor import adopt, end_orphans

ON_GPU = os.environ.get("HPCDP_TEST_GPU", "") not in ("", "0")
THOROUGH = os.environ.get("HPCDP_TEST_THOROUGH")
TESTS = Path(__file__).parents[1]
LIMIT_S = 240
"""Of a job. The first ones compile what no cache keeps yet, each rank by NVRTC and Numba, which may take two minutes;
a test has 300 s (``tests/conftest.py``)."""


@dataclass(frozen=True)
class Job:
    """A case on so many ranks, with ``ranks_per_node`` on each virtual node, None: one node; on so many GPUs."""

    case: str
    ranks: int
    ranks_per_node: int | None = None
    gpus: int = 1

    def __str__(self) -> str:
        on = f" in nodes of {self.ranks_per_node}" * (self.ranks_per_node is not None)
        return f"{self.case} by {self.ranks}{on} on {self.gpus}"


JOBS = [
    Job("nccl", 1), Job("nccl", 2, gpus=2), Job("cuda_ipc", 2), Job("cuda_ipc", 3), Job("reducer", 2),
    Job("reducer", 2, 1), Job("reducer", 4, 2), Job("reducer", 2, gpus=2), Job("reducer", 3, gpus=2),
    Job("delivery", 1), Job("stores", 1), Job("stores", 2), Job("stores", 2, 1),
    Job("stores", 3, gpus=2), Job("states", 1), Job("overflow", 1), Job("overflow", 2), Job("overflow", 4, 2),
    Job("overflow", 2, gpus=2),
    Job("training", 1), Job("training", 2), Job("training", 4, 2), Job("training", 2, gpus=2),
]  # fmt: skip
FEW = [
    Job("nccl", 2, gpus=2), Job("cuda_ipc", 3), Job("reducer", 4, 2), Job("reducer", 2, gpus=2), Job("delivery", 1),
    Job("stores", 3, gpus=2), Job("states", 1), Job("overflow", 2), Job("training", 4, 2), Job("training", 2, gpus=2),
]  # fmt: skip
"""Cases of ordinary runs without a GPU, each once; tests/data_parallel and tests/kvstore have more numbers of ranks."""
GRAPHS = [Job("graphs", 1), Job("graphs", 2), Job("graphs", 4, 2), Job("graphs", 2, gpus=2), Job("graphs", 3, gpus=2)]


def run_on_gpu(job: Job) -> None:
    seen = comm_world.visible()
    if len(seen) < job.gpus:
        pytest.skip(f"needs {job.gpus} NVIDIA GPUs" if seen else "no NVIDIA GPU, or no driver")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(each.index) for each in seen)).split(",")
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ",".join(shown[: job.gpus])}
    if job.ranks_per_node is not None:
        environ["HPCDP_RANKS_PER_NODE"] = str(job.ranks_per_node)
    launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(job.ranks), "--", sys.executable]
    process = subprocess.Popen(
        [*launch, TESTS / "gpu_cases.py", job.case], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        adopt()
        os.killpg(process.pid, signal.SIGKILL)
        end_orphans()  # ranks may be in process groups of their own
        said, _ = process.communicate()
        pytest.fail(f"no end after {LIMIT_S} s: {said}")
    assert process.returncode == 0, said
    if said.startswith("skipped: "):
        pytest.skip(said.removeprefix("skipped: ").strip())


def run_on_host(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(job.gpus))
    monkeypatch.setattr(comm_world, "visible", lambda: found)
    monkeypatch.setattr(gpu_cases, "COUNT", 1003)
    if not THOROUGH:  # each job trains by one rule, the next by the next: what rules compute knows no ranks
        rules = list(gpu_cases.RULES.items())
        monkeypatch.setattr(gpu_cases, "RULES", dict([rules[JOBS.index(job) % len(rules)]]))

    def rank(world: object) -> None:
        world.device.use()  # type: ignore[attr-defined]
        gpu_cases.CASES[job.case](world)

    with gpu_on_host.installed(monkeypatch):
        thread_comm.run(job.ranks, rank, job.ranks_per_node)


@pytest.mark.parametrize(
    "job", [pytest.param(job, marks=() if ON_GPU or job in FEW else pytest.mark.thorough) for job in JOBS], ids=str
)
@pytest.mark.filterwarnings("ignore:gradients on GPUs", "ignore:invalid value")
def test_what_ranks_do_on_a_gpu(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    if ON_GPU:
        run_on_gpu(job)
    else:
        run_on_host(monkeypatch, job)


@pytest.mark.parametrize("job", [*GRAPHS, Job("convolution", 1), Job("torch_ddp", 2)], ids=str)
def test_what_other_stand_ins_do_on_a_gpu(job: Job) -> None:
    """``tests/train/test_train_step_ranks.py``, ``tests/torch/test_torch_on_gpus.py``, and that of the next test."""
    if not ON_GPU:
        pytest.skip("make test-gpu runs it on a GPU")
    run_on_gpu(job)


def test_a_folder_of_tests_called_torch_is_not_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    with pytest.raises(gpu_cases.Skipped, match="PyTorch is not installed"):
        gpu_cases.torch_ddp(None)


def test_the_body_of_the_convolutions(gpus_on_host: object) -> None:
    gpu_cases.check_convolutions(gpu(0))
