"""Peers: gloo's and the MPI library's allreduce on the same ranks, and PyTorch's models and training steps."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpcdp import comm
from hpcdp.bench.measure import FreshData, MeasuredCollective
from hpcdp.errors import ConfigError


class Gloo:
    """PyTorch's gloo process group over the ranks of ``world``; every rank must make it, and close it.

    Args:
        world: all ranks on one machine.

    Raises:
        ModuleNotFoundError: PyTorch is not installed.
    """

    def __init__(self, world: comm.World) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.torch.set_num_threads(1)
        self._world = world
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-") if world.rank == 0 else None
        store = world.comm.allgather_json(self._folder.name if self._folder else "")[0]
        self._group: Any = importlib.import_module("torch.distributed")
        self._group.init_process_group(
            "gloo", init_method=(Path(store) / "store").as_uri(), rank=world.rank, world_size=world.size
        )

    def exchange(self, data: FreshData, x: np.ndarray) -> MeasuredCollective:
        """Sum ``x`` over all ranks in place."""
        tensor = self.torch.from_numpy(x)
        return MeasuredCollective("gloo", data, x, x, lambda: self._group.all_reduce(tensor))

    def close(self) -> None:
        """Leave the group."""
        self._group.barrier()
        self._group.destroy_process_group()
        self._world.comm.barrier()  # a rank that finds the store's file gone looks for it for five minutes
        if self._folder:
            self._folder.cleanup()


def mpi_exchanges(world: comm.World, data: FreshData, x: np.ndarray, out: np.ndarray) -> list[MeasuredCollective]:
    """Return the MPI library's sums of ``x``, in place and into ``out``; which is faster depends on the size.

    Thread ranks have no MPI library, and so an empty list.
    """
    library = getattr(world.comm, "mpi", None)
    if library is None:
        return []
    return [
        MeasuredCollective("MPI in place", data, x, x, lambda: world.comm.native_allreduce(x, "sum")),
        MeasuredCollective("MPI", data, x, out, lambda: library.Allreduce(x, out)),
    ]


def check_python(what: str, python: str) -> None:
    """Refuse an interpreter, of an environment with MPICH, that cannot be run.

    Raises:
        ConfigError: there is none.
    """
    if shutil.which(python) is None:
        raise ConfigError(what, expected="a Python that can be run", got=repr(python))


def require_torch(what: str) -> None:
    """Refuse what cannot be measured without PyTorch.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(what, expected="PyTorch in the environment of hpcdp", got="none")


def gloo_or_reason(world: comm.World) -> tuple[Gloo | None, str]:
    """Gloo, or None and why not; the same on all ranks, all of which must call."""
    has_torch = importlib.util.find_spec("torch") is not None
    if getattr(world.comm, "mpi", None) is None:
        return None, "gloo: ranks are threads of one process"
    if not all(world.comm.allgather_json(has_torch)):
        return None, "gloo: PyTorch is not installed"
    return Gloo(world), ""


CLASSES = 10
CONTEXT, VOCABULARY = 64, 256
"""Of the GPT: tokens a sample, and how many there are."""


@dataclass(frozen=True)
class Model:
    """A network and its samples.

    Args:
        net: makes it.
        sample: shape of one sample of float32; None: `CONTEXT` tokens, each to be followed by the next.
        batches: samples a rank.
    """

    title: str
    net: Callable[[Any], Any]
    sample: tuple[int, ...] | None
    batches: tuple[int, ...]


def _wide(nn: Any) -> Any:
    sizes = [256, *(2048,) * 6]
    hidden = [layer for n, m in itertools.pairwise(sizes) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], CLASSES))


def _lenet(nn: Any) -> Any:
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, CLASSES),
    )  # fmt: skip


def _resnet18(nn: Any) -> Any:
    class Block(nn.Module):  # type: ignore[misc]
        """Two convolutions and a shortcut around them (He et al., 2016, section 3.3)."""

        def __init__(self, before: int, after: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
                nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
            )  # fmt: skip
            is_identity = before == after and stride == 1
            self.around = nn.Identity() if is_identity else nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )  # fmt: skip

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.body(x) + self.around(x))

    layers = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for after in (64, 128, 256, 512):
        layers += [Block(before, after, 1 if after == 64 else 2), Block(after, after, 1)]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


def gpt(nn: Any, context: int = CONTEXT, width: int = 192, heads: int = 6, layers: int = 4) -> Any:
    """Return a decoder of characters, whose attention is PyTorch's fused one."""
    torch: Any = importlib.import_module("torch")

    class GPT(nn.Module):  # type: ignore[misc]
        """A decoder of characters (Radford et al., 2019, section 2.3)."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
            layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
            self.head = nn.Linear(width, VOCABULARY)

        def forward(self, x: Any) -> Any:
            hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], hidden.device, hidden.dtype)
            return self.head(self.body(hidden, mask=mask, is_causal=True)).flatten(0, 1)

    return GPT()


def _bert(nn: Any) -> Any:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        max_position_embeddings=CONTEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    class Bert(nn.Module):  # type: ignore[misc]
        """An encoder that names each token (Devlin et al., 2019, section 3)."""

        def __init__(self) -> None:
            super().__init__()
            self.net = transformers.BertForMaskedLM(config)

        def forward(self, x: Any) -> Any:
            return self.net(x).logits.flatten(0, 1)

    return Bert()


def sharded(net: Any, mesh: Any) -> Any:
    """Shard each layer of ``net``, and the rest of it, by FSDP2 over the ranks of ``mesh``; return ``net``."""
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    layers = [layer for layer in net.children() if next(layer.parameters(), None) is not None]
    for layer in layers if len(layers) > 1 else ():
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def training_step(model: Any, optimizer: Any, batches: list[tuple[Any, Any]]) -> Callable[[int], Any]:
    """Return a function that trains on batch ``i`` and returns this rank's loss, without waiting for a GPU."""
    torch: Any = importlib.import_module("torch")

    def step(i: int) -> Any:
        x, y = batches[i % len(batches)]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


MODELS = {
    "wide": Model("wide MLP, 21.5 M parameters", _wide, (256,), (16, 64)),
    "lenet": Model("LeNet, 0.13 M parameters", _lenet, (1, 28, 28), (64,)),
    "resnet18": Model("ResNet-18 on 32 x 32 images, 11 M parameters", _resnet18, (3, 32, 32), (8, 32)),
    "gpt": Model("GPT of 4 layers, 1.9 M parameters", gpt, None, (8,)),
    "gpt6": Model("GPT of 6 layers, 10.9 M parameters", partial(gpt, width=384, layers=6), None, (8,)),
}
if importlib.util.find_spec("transformers") is not None:
    MODELS["bert"] = Model("BERT of Hugging Face, 4 layers, 3.4 M parameters", _bert, None, (8,))
