"""Compute an accuracy and a mean over ranks with torchmetrics; print them."""

import sys

import torch
import torch.distributed as dist
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

dist.init_process_group(sys.argv[1])
rank = dist.get_rank()
accuracy, mean = MulticlassAccuracy(num_classes=3, average="micro"), MeanMetric()
for batch in range(rank + 1):  # ranks have different numbers of batches
    labels = torch.arange(6) % 3
    accuracy.update((labels + (torch.arange(6) < rank + batch)) % 3, labels)
    mean.update(torch.tensor(float(10 * rank + batch)))
values = [float(accuracy.compute()), float(mean.compute())]
gathered = [None] * dist.get_world_size()
dist.all_gather_object(gathered, values)
assert all(entry == values for entry in gathered)
if rank == 0:
    print(f"RESULT {values}")
dist.destroy_process_group()
