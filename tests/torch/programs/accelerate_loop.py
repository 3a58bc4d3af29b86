"""Train with Accelerate's Accelerator; print the sum of the parameters."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1])

from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = torch.utils.data.TensorDataset(torch.randn(16, 4))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
for (x,) in loader:
    optimizer.zero_grad()
    accelerator.backward(model(x).pow(2).mean())
    optimizer.step()
ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
total = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
if accelerator.is_main_process:
    print(f"RESULT {ranks} {type(model).__name__} {total:.5f}")
dist.destroy_process_group()
