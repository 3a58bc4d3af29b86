"""PyTorch's side of `alone`: the same networks, forward, backward and update, on the same GPU.

Products of float32 go without TF32, as here, and convolutions by what cuDNN finds fastest. Once operation by operation,
once the whole step as one CUDA graph.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

from ..harness.torch_models import MODELS, training_step

_NAMES = {"lenet": "lenet", "resnet18_cifar": "resnet18"}
"""PyTorch's network by the name of ours."""
_WARM_UP = 11
"""Steps before a capture: cuDNN's choice, memory, and the state of the rule are there then."""


def is_there() -> bool:
    """Whether PyTorch is installed and sees a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    torch: Any = importlib.import_module("torch")
    return bool(torch.cuda.is_available())


def steps(name: str, dtype: str, x: Any, labels: Any) -> dict[str, Callable[[], Any]]:
    """What trains on one batch, ``x`` of shape ``(batch, *image)`` and ``labels`` as NumPy arrays, on PyTorch's current
    GPU, its default stream; by key: ``torch``, and ``torch_graphs``, which replays a graph of that."""
    torch: Any = importlib.import_module("torch")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    net = MODELS[_NAMES[name]].net(torch.nn).to("cuda", getattr(torch, dtype))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    images, classes = torch.from_numpy(x).to("cuda", getattr(torch, dtype)), torch.from_numpy(labels).cuda()
    step = partial(training_step(net, optimizer, [(images, classes)]), 0)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return {"torch": step, "torch_graphs": graph.replay}
