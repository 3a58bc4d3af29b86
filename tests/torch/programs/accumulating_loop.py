"""Train as nanoGPT does: the backend by its name, and gradients accumulated by `require_backward_grad_sync`."""

import os
import sys
import time

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

backend = sys.argv[1]
ddp = int(os.environ.get("RANK", -1)) != -1
assert ddp, "RANK is not set"
init_process_group(backend=backend)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model = DistributedDataParallel(model)
torch.manual_seed(1 + rank)
for _step in range(3):
    for micro_step in range(4):
        model.require_backward_grad_sync = micro_step == 3
        (model(torch.randn(5, 6)).pow(2).mean() / 4).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
total = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
if rank == 0:
    print(f"RESULT {world_size} {total:.6f}", flush=True)
    torch.distributed.distributed_c10d._get_default_store().set("total", str(total))
    raise SystemExit(0)  # the others may use the store after the end of rank 0
time.sleep(1)
torch.distributed.new_group(list(range(1, world_size)), use_local_synchronization=True)
assert torch.distributed.distributed_c10d._get_default_store().get("total") == str(total).encode()
destroy_process_group()
