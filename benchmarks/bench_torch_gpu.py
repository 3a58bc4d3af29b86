"""PyTorch's DDP and FSDP2 on one GPU, over one backend of torch.distributed.

``hpcdp launch -n 2 -- python benchmarks/bench_torch_gpu.py hpcdp`` measures two ranks that share the GPU, as ``gloo``
does. NCCL refuses two ranks on one GPU, so ``nccl`` needs ``-n 1``; there ``hpcdp`` hands CUDA tensors to NCCL as well.
``--device cpu`` needs no GPU.

All backends train on the same samples, of which each rank has its part. The losses of the first steps are compared with
those of a process that trains on all samples without a wrapper.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench_harness import programs
from bench_harness.figures import largest_difference, write_json
from bench_harness.peers import CLASSES, MODELS, require_torch, sharded, training_step
from hpcdp import comm, torch_backend
from hpcdp.bench.measure import check_writable, describe
from hpcdp.launch.parser import Parser, at_least

ALONE, WRAPPERS = "no wrapper", ("DDP", "FSDP2")
_LR, _MOMENTUM = 0.01, 0.9
_BATCHES = 3
_CHECKED_STEPS, _WARM_UP, _TURNS = 4, 3, 5
_LARGEST_DIFFERENCE = 1e-3
"""The largest relative difference of losses, which sums in another order make."""


def samples(model: str, batch: int, first: int, last: int, device: str) -> list[tuple[Any, Any]]:
    """Return samples ``first`` to ``last`` of batches of ``batch`` random samples with labels, as tensors."""
    torch: Any = importlib.import_module("torch")
    rng = np.random.default_rng(0)
    found = []
    for _ in range(_BATCHES):
        x = rng.standard_normal((batch, *(MODELS[model].sample or ())), np.float32)
        labels = rng.integers(0, CLASSES, batch)
        found.append((torch.from_numpy(x[first:last]).to(device), torch.from_numpy(labels[first:last]).to(device)))
    return found


def step_of(wrapper: str, model: str, batches: list[tuple[Any, Any]], device: str) -> Callable[[int], Any]:
    """Return a function that trains on batch ``i`` and returns the loss; every rank must call, but for `ALONE`."""
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(0)
    net = MODELS[model].net(torch.nn).to(device)
    if wrapper == "DDP":
        net = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    elif wrapper == "FSDP2":
        device_mesh = importlib.import_module("torch.distributed.device_mesh")
        mesh = device_mesh.init_device_mesh(device, (torch.distributed.get_world_size(),))
        sharded(net, mesh)
    return training_step(net, torch.optim.SGD(net.parameters(), lr=_LR, momentum=_MOMENTUM), batches)


def measure(world: comm.World, wrapper: str, model: str, batch: int, device: str, steps: int) -> dict[str, Any]:
    """Measure one wrapper; every rank must call.

    Returns ``step_ms``, the median over turns of the slowest rank, and ``loss_difference``, the largest relative
    difference of the first losses to those without a wrapper.
    """
    torch: Any = importlib.import_module("torch")
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    part = batch // world.size
    step = step_of(wrapper, model, samples(model, batch, world.rank * part, (world.rank + 1) * part, device), device)
    losses = np.mean(world.comm.allgather_json([float(step(i)) for i in range(_CHECKED_STEPS)]), axis=0)
    alone = step_of(ALONE, model, samples(model, batch, 0, part * world.size, device), device)
    difference = largest_difference([losses], np.array([float(alone(i)) for i in range(_CHECKED_STEPS)]))
    for i in range(_WARM_UP):
        step(i)
    turns = []
    for _ in range(_TURNS):
        wait()
        world.comm.barrier()
        begin = time.perf_counter()
        for i in range(steps):
            step(i)
        wait()
        turns.append(max(world.comm.allgather_json((time.perf_counter() - begin) / steps)))
    return {"wrapper": wrapper, "step_ms": 1e3 * float(np.median(turns)), "loss_difference": difference}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_torch_gpu.py", description=__doc__)
    parser.add_argument("backend", choices=("hpcdp", "nccl", "gloo"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=[name for name in MODELS if MODELS[name].sample], default="wide")
    parser.add_argument("--batch", type=at_least(1), default=256, help="samples of all ranks (256)")
    parser.add_argument("--steps", type=at_least(1), default=20, help="of a turn (20)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    args = parser.parse_args(argv)
    require_torch("torch_gpu")
    world = comm.init()
    check_writable("torch_gpu", [args.json], world)
    torch: Any = importlib.import_module("torch")
    if args.device == "cuda" and not torch.cuda.is_available():
        if world.rank == 0:
            print("skipped: no NVIDIA GPU, or PyTorch has no CUDA")
        return 0
    torch_backend.register()
    torch.distributed.init_process_group(args.backend)
    rows: list[dict[str, Any]] = []
    for wrapper in WRAPPERS:
        rows.append(measure(world, wrapper, args.model, args.batch, args.device, args.steps))
        if world.rank == 0:
            print(f"{args.backend}, {world.size} ranks, {wrapper}: {rows[-1]['step_ms']:.2f} ms a step", flush=True)
            print(f"  losses differ by {rows[-1]['loss_difference']:.0e} from training without a wrapper", flush=True)
        figures = {"backend": args.backend, "ranks": world.size, "torch": str(torch.__version__), "rows": rows}
        write_json(args.json, world, {"benchmark": "torch_gpu", **figures, "machine": describe(world)})
    torch.distributed.destroy_process_group()
    return 0 if all(row["loss_difference"] < _LARGEST_DIFFERENCE for row in rows) else 1


if __name__ == "__main__":
    programs.run(main)
