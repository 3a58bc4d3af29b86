"""Data sets, samplers and the loader.

Knows nothing of ranks: samplers take ``num_parts`` and ``part_index`` as numbers.
"""

from .catalog import load, read_cifar10, read_idx
from .datasets import (
    ArrayDataset,
    Dataset,
    HDF5Dataset,
    ImageDataset,
    TextDataset,
    read_csv,
    split_and_load,
    split_batch,
)
from .loader import Augmentation, DataLoader, RandomCrop, RandomFlip
from .samplers import BatchSampler, RandomSampler, SequentialSampler, ShardedSampler, SharedSampler, VirtualShardSampler

__all__ = [
    "ArrayDataset", "Augmentation", "BatchSampler", "DataLoader", "Dataset", "HDF5Dataset", "ImageDataset",
    "RandomCrop", "RandomFlip", "RandomSampler", "SequentialSampler", "ShardedSampler", "SharedSampler", "TextDataset",
    "VirtualShardSampler", "load", "read_cifar10", "read_csv", "read_idx", "split_and_load", "split_batch",
]  # fmt: skip
