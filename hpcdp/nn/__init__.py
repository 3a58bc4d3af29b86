"""Floor 3: nn, layers and models, knowing nothing of ranks. Imports: autograd, data, kernels, devices, holders, state,
replacing, replica, arrays, errors."""

from . import functional, init, models
from .layers import AvgPool2D, Conv2D, Dense, Flatten, GlobalAvgPool2D, MaxPool2D, ReLU, Sigmoid, Tanh
from .module import HybridConcurrent, Module, Sequential
from .parameter import Parameter
from .recurrent import LSTM
from .regularisation import BatchNorm, Dropout
from .replicas import Replicas
from .symbol_block import SymbolBlock
from .tokens import GELU, CausalSelfAttention, Embedding, LayerNorm
from .virtual_shard import VirtualShard, entered_shard

__all__ = [
    "GELU",
    "LSTM",
    "AvgPool2D",
    "BatchNorm",
    "CausalSelfAttention",
    "Conv2D",
    "Dense",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAvgPool2D",
    "HybridConcurrent",
    "LayerNorm",
    "MaxPool2D",
    "Module",
    "Parameter",
    "ReLU",
    "Replicas",
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
