"""Train and evaluate as timm's train.py does, on images that are made; print what it logs."""

import argparse
import os
import sys

import torch
import torch.distributed as dist

sys.path.append(os.path.join(sys.prefix, "timm"))  # where make test-torch-libraries installs it
for name in ("nms", "qnms"):  # torchvision's wheel has its operators for CUDA only
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from timm import create_model, utils
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

if sys.argv[1] == "gloo":  # timm takes only what a launcher has set
    dist.init_process_group("gloo")
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()), LOCAL_RANK=str(dist.get_rank()))
    dist.barrier()  # gloo ends with an error on a rank that still connects
    dist.destroy_process_group()
args = argparse.Namespace(device="cpu", dist_backend=sys.argv[1], dist_url=None)
device = utils.init_distributed_device(args)
utils.random_seed(0, args.rank)
torch.manual_seed(0)
model = create_model("test_resnet", num_classes=5, in_chans=3).to(device)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
ema = utils.ModelEmaV3(model, decay=0.9)
model = torch.nn.parallel.DistributedDataParallel(model)
scheduler = CosineLRScheduler(optimizer, t_initial=2)
loss_of = LabelSmoothingCrossEntropy(0.1)
images, labels = torch.randn(48, 3, 32, 32), torch.randint(0, 5, (48,))
data = torch.utils.data.TensorDataset(images, labels)
sampler = torch.utils.data.distributed.DistributedSampler(data, seed=0)
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
losses, hits = utils.AverageMeter(), utils.AverageMeter()
for epoch in range(2):
    model.train()
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        utils.dispatch_clip_grad(model.parameters(), 1.0)
        optimizer.step()
        ema.update(model.module)
        losses.update(utils.reduce_tensor(loss.detach(), args.world_size).item(), len(y))
    utils.distribute_bn(model, args.world_size, reduce=True)
    scheduler.step(epoch + 1)
model.eval()
with torch.no_grad():
    (top1,) = utils.accuracy(model(images[args.rank :: args.world_size]), labels[args.rank :: args.world_size])
hits.update(utils.reduce_tensor(top1, args.world_size).item())
means = sum(float(b.double().abs().sum()) for name, b in model.module.named_buffers() if "running" in name)
if utils.is_primary(args):
    print(f"RESULT {args.world_size} {losses.avg:.4f} {hits.avg:.3f} {means:.3f}")
dist.destroy_process_group()
