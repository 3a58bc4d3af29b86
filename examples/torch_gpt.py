"""A small GPT in PyTorch learns hpcdp's own documentation, byte by byte, on any number of ranks.

    hpcdp launch -n 2 -- python examples/torch_gpt.py --steps 200

What is hpcdp's is marked: the world, the sampler, the wrapper, the optimizer and, at the end, one sum over ranks. With
--owner shard (the default) a node holds the parameters once and each rank updates its part of them.
"""

import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import hpcdp
import hpcdp.torch
from hpcdp.launch.parser import Program, at_least

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 256


class Block(nn.Module):
    """Attention to what came before, then a network for each place (Radford et al., 2019, section 2.3)."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.project(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norms[1](x))


class GPT(nn.Module):
    """For each byte of a text, scores of the one that follows."""

    def __init__(self, context, width, heads, layers):
        super().__init__()
        self.context = context
        self.bytes, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, VOCABULARY)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x):
        return self.head(self.blocks(self.bytes(x) + self.places(torch.arange(x.shape[1], device=x.device))))


class Windows(torch.utils.data.Dataset):
    """Pieces of a text that overlap by half, each with what follows every byte."""

    def __init__(self, text, context):
        self.text, self.context = text, context

    def __len__(self):
        return max(0, 2 * (len(self.text) - 1) // self.context - 1)

    def __getitem__(self, index):
        start = index * self.context // 2
        piece = self.text[start : start + self.context + 1]
        return piece[:-1], piece[1:]


def documentation():
    """README.md and docs/, as one tensor of bytes."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return torch.from_numpy(np.frombuffer(b"\n".join(page.read_bytes() for page in pages), np.uint8).astype(np.int64))


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def held_out(model, text, context, world):
    """Mean loss a byte, and the share of bytes foretold, over pieces that were not trained on: each on one rank."""
    windows = Windows(text, context)
    sums = np.zeros(3)
    with torch.no_grad():
        for index in range(world.rank, len(windows), world.size):
            x, y = windows[index]
            scores = model(x[None])[0]
            sums += float(nn.functional.cross_entropy(scores, y)), float((scores.argmax(-1) == y).float().mean()), 1
    hpcdp.allreduce(sums, "sum", world)  # hpcdp
    return sums[0] / sums[2], sums[1] / sums[2]


def continued(model, start, count):
    """``start`` and ``count`` more bytes, each the most likely one."""
    text = torch.tensor([list(start.encode())])
    with torch.no_grad():
        for _ in range(count):
            following = model(text[:, -model.context :])[0, -1].argmax()
            text = torch.cat([text, following.view(1, 1)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def train(world, args):
    """Returns the mean loss of the first steps and of the last, and that of text that was held out."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(max(1, world.cores // world.local_size))
    text = documentation()
    split = len(text) * 9 // 10
    windows = Windows(text[:split], args.context)
    sampler = hpcdp.torch.DistributedSampler(windows, seed=args.seed, world=world)  # hpcdp
    loader = torch.utils.data.DataLoader(windows, args.batch, sampler=sampler, drop_last=True)
    net = GPT(args.context, args.width, args.heads, args.layers)
    model = hpcdp.torch.DistributedDataParallel(net, world, owner=args.owner, compression=args.compression)  # hpcdp
    settings = {"lr": args.lr, "weight_decay": 0.01}
    if args.owner == "shard":
        optimizer = hpcdp.torch.ShardedOptimizer(model, torch.optim.AdamW, **settings)  # hpcdp
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)
    losses, epoch, began = [], 0, time.perf_counter()
    while len(losses) < args.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            if args.owner == "shard":
                optimizer.clip_grad_norm_(1.0)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
            if world.rank == 0 and len(losses) % args.every == 0:
                speed = len(losses) * args.batch * args.context * world.size / (time.perf_counter() - began)
                mean = np.mean(losses[-args.every :])
                print(f"step {len(losses):4}  loss {mean:.3f}  {speed:,.0f} bytes/s", flush=True)
            if len(losses) == args.steps or len(losses) % args.test_every == 0:
                tested, right = held_out(net, text[split:], args.context, world)
                if world.rank == 0:
                    print(f"step {len(losses):4}  held-out loss {tested:.4f}, {right:.2%} of bytes right", flush=True)
            if len(losses) == args.steps:
                break
    if world.rank == 0:
        print(f"{tested / np.log(2):.2f} bits per byte; ranks: {world.size}")
        print("a sample:", repr(continued(net, "Every rank ", 60)))
    return np.mean(losses[:5]), np.mean(losses[-5:]), tested


if __name__ == "__main__":
    parser = Program(description="a small GPT on hpcdp's documentation, data-parallel with PyTorch")
    parser.add_argument("--steps", type=at_least(1), default=200, help="training steps")
    parser.add_argument("--batch", type=at_least(1), default=8, help="pieces of text of each rank in a step")
    parser.add_argument("--context", type=at_least(1), default=128, help="bytes of a piece of text")
    parser.add_argument("--width", type=at_least(1), default=128, help="size of the embedding")
    parser.add_argument("--heads", type=at_least(1), default=4, help="attention heads; they must divide the width")
    parser.add_argument("--layers", type=at_least(1), default=3, help="transformer layers")
    parser.add_argument("--lr", type=at_least(0.0), default=3e-3, help="highest learning rate of the schedule")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the order of samples")
    parser.add_argument(
        "--owner", choices=("shard", "rank"), default="shard", help="every rank updates its shard, or all parameters"
    )
    parser.add_argument("--compression", help="codec of gradients between nodes: fp16, bf16, 2bit, 1bit or topk")
    parser.add_argument("--every", type=at_least(1), default=20, help="steps between two lines of output")
    parser.add_argument(
        "--test-every", type=at_least(1), default=10**9, help="steps between tests on held-out text (default: the end)"
    )
    with parser.settings() as args:
        if args.width % args.heads:
            parser.error(f"--heads: expected a number that divides the width {args.width}, got {args.heads}")
        train(hpcdp.init(), args)
