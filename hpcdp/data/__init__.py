"""Floor 3: data, data sets, samplers and the loader. Imports: engine, streams, state, devices, replacing,
interpreter, kernels, arrays, errors.

Knows nothing of ranks: samplers take ``num_parts`` and ``part_index`` as numbers. The only importer of h5py beside
checkpoint, when a file is opened.
"""

from .augment import Augmentation, RandomCrop, RandomFlip
from .catalog import load
from .cifar import read_cifar10
from .csv import read_csv
from .datasets import ArrayDataset, Dataset, ImageDataset
from .hdf5 import HDF5Dataset
from .idx import read_idx
from .loader import DataLoader
from .samplers import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    ShardedSampler,
    VirtualShardSampler,
)
from .shared_sampler import SharedSampler
from .split import split_and_load, split_batch
from .text import TextDataset

__all__ = [
    "ArrayDataset",
    "Augmentation",
    "BatchSampler",
    "DataLoader",
    "Dataset",
    "HDF5Dataset",
    "ImageDataset",
    "RandomCrop",
    "RandomFlip",
    "RandomSampler",
    "SequentialSampler",
    "ShardedSampler",
    "SharedSampler",
    "TextDataset",
    "VirtualShardSampler",
    "load",
    "read_cifar10",
    "read_csv",
    "read_idx",
    "split_and_load",
    "split_batch",
]
