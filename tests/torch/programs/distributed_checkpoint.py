"""Save a sharded model with torch.distributed.checkpoint, or load one saved by another number of ranks."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

backend, action, folder = sys.argv[1:]
dist.init_process_group(backend)
torch.manual_seed(0 if action == "save" else 1)
model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
torch.manual_seed(5)
for _step in range(2 if action == "save" else 1):
    model(torch.randn(4, 7)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
weights, states = get_state_dict(model, optimizer)
if action == "save":
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
else:
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
total = sum(p.detach().full_tensor().double().abs().sum().item() for p in model.parameters())
total += sum(optimizer.state[p]["exp_avg"].full_tensor().double().abs().sum().item() for p in model.parameters())
if dist.get_rank() == 0:
    print(f"RESULT {total:.6f}")
dist.destroy_process_group()
