"""Floor 3: nn, layers and models, knowing nothing of ranks. Imports: autograd, data, kernels, arrays, errors."""

from . import functional, init, models
from .layers import AvgPool2D, Conv2D, Dense, Flatten, GlobalAvgPool2D, MaxPool2D, ReLU, Sigmoid, Tanh
from .module import HybridConcurrent, Module, Parameter, Sequential
from .regularisation import BatchNorm, Dropout
from .symbol_block import SymbolBlock
from .virtual_shard import VirtualShard, entered_shard

__all__ = [
    "AvgPool2D",
    "BatchNorm",
    "Conv2D",
    "Dense",
    "Dropout",
    "Flatten",
    "GlobalAvgPool2D",
    "HybridConcurrent",
    "MaxPool2D",
    "Module",
    "Parameter",
    "ReLU",
    "Sequential",
    "Sigmoid",
    "SymbolBlock",
    "Tanh",
    "VirtualShard",
    "entered_shard",
    "functional",
    "init",
    "models",
]
