"""What a run's settings name: the data set, the network and the update rule."""

from __future__ import annotations

import numpy as np

from ... import data, nn, optim
from ...comm.gpus import device_of
from ...devices import Device
from ...errors import ConfigError
from ...nn import models
from ..tracing import check_path
from .config import TrainConfig
from .device import require_gpu

_IMAGE_SIZE = {"digits": 28}
"""Data sets that are enlarged: the digits have 8x8 pixels, and LeNet's layers want 28x28."""


def datasets(config: TrainConfig) -> tuple[data.Dataset, data.Dataset]:
    """The training and the test set; this rank alone. Raises ConfigError or DataError."""
    train_set, test_set = (
        data.load(config.data, split=split, root=config.data_dir, image_size=_IMAGE_SIZE.get(config.data))
        for split in ("train", "test")
    )
    return train_set, test_set


def augmentation(config: TrainConfig, dataset: data.Dataset) -> data.Augmentation | None:
    """The random changes of training samples like those of ``dataset``, if any. Raises ConfigError."""
    changes: list[data.RandomCrop | data.RandomFlip] = []
    if config.shift:
        changes.append(data.RandomCrop(padding=config.shift))
    if config.flip:
        changes.append(data.RandomFlip())
    if not changes:
        return None
    if len(dataset.sample_shape) != 3:
        raise ConfigError(
            f"setting {'shift' if config.shift else 'flip'}", expected="data of images (channels, height, width)",
            got=f"samples of shape {tuple(dataset.sample_shape)} in {config.data}",
        )  # fmt: skip
    augment, no_samples = data.Augmentation(*changes, seed=config.seed), np.empty(0, np.int64)
    augment(dataset[no_samples][0], no_samples, epoch=0)  # raises where they are too small
    return augment


def network(config: TrainConfig, dataset: data.Dataset, device: Device | None = None) -> nn.Module:
    """The network for samples like those of ``dataset``, the same on every rank, on ``device``. Raises ConfigError."""
    net = models.create(
        config.model, input_shape=dataset.sample_shape, num_classes=dataset.num_classes, seed=config.seed
    )
    if config.dtype != "float32":
        net.to(config.dtype)
    return net if device is None or device.kind == "cpu" else net.to(device)


def optimizer(config: TrainConfig, steps: int, updates: int = 1) -> optim.Optimizer:
    """The update rule; its learning rate follows the schedule over epochs of ``steps`` steps.

    Args:
        updates: into how many the update of a global batch falls, each by the gradient of its samples over the count of
            all. Together they decay weights as one does, and go as far where the rule does not see a gradient's length.
    """
    base, decay = float(config.lr or 0), config.weight_decay
    if config.lr_batch_size is not None:
        base = optim.linear_scaling(base, config.batch_size, config.lr_batch_size)
    if config.optimizer != "sgd":
        base /= updates
    if config.optimizer != "adamw":  # whose decay is times the rate
        decay /= updates
    lr: float | optim.Schedule = base
    if config.schedule == "cosine":
        lr = optim.CosineSchedule(base, steps=config.epochs * steps)
    warmup_steps = round(config.warmup_epochs * steps)
    if warmup_steps:
        inner = lr if isinstance(lr, optim.Schedule) else optim.ConstantSchedule(lr)
        lr = optim.WarmupSchedule(inner, steps=warmup_steps)
    momentum = {"momentum": config.momentum} if config.optimizer in ("sgd", "lars") else {}
    return optim.create(config.optimizer, lr=lr, weight_decay=decay, **momentum)


def check(config: TrainConfig) -> None:
    """Makes the data sets, their augmentation and the network, for what they say: better by one process than by all.

    Looks for a GPU, where one is asked for, and tries out the name of the trace, too.
    """
    if config.device == "gpu":
        require_gpu(device_of(0))
    train_set, _ = datasets(config)
    network(config, train_set)
    augmentation(config, train_set)
    if config.trace is not None:
        check_path(config.trace)
