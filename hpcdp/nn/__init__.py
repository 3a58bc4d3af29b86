"""Layers and models of one process."""

from . import functional, init, models
from .layers import (
    GELU,
    LSTM,
    AvgPool2D,
    BatchNorm,
    CausalSelfAttention,
    Conv2D,
    Dense,
    Dropout,
    Embedding,
    Flatten,
    GlobalAvgPool2D,
    LayerNorm,
    MaxPool2D,
    ReLU,
    Sigmoid,
    Tanh,
)
from .models import SymbolBlock
from .module import HybridConcurrent, Module, Parameter, Sequential
from .replicate import Replicas
from .virtual_shards import VirtualShard, entered_shard

__all__ = [
    "GELU", "LSTM", "AvgPool2D", "BatchNorm", "CausalSelfAttention", "Conv2D", "Dense", "Dropout", "Embedding",
    "Flatten", "GlobalAvgPool2D", "HybridConcurrent", "LayerNorm", "MaxPool2D", "Module", "Parameter", "ReLU",
    "Replicas", "Sequential", "Sigmoid", "SymbolBlock", "Tanh", "VirtualShard", "entered_shard", "functional", "init",
    "models",
]  # fmt: skip
