"""Evaluation of a network on a data set, over all ranks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..autograd import Tensor, predict_mode
from ..collectives import allreduce
from ..comm import World, init
from ..comm.consistency import require_same
from ..comm.world import require_world
from ..core.arrays import Array, to_host, values_on_device_of
from ..core.checks import function, instance, whole_number
from ..data import Dataset
from ..data.datasets import piece_bounds, require_dataset
from ..errors import ConfigError, UnsupportedError, type_named
from ..nn import Module
from ..nn.functional import require_per_sample, softmax_cross_entropy
from ..nn.module import shape_of
from .metrics import BatchSums


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`, the same on every rank."""

    accuracy: float
    """``correct / count``; NaN for a regression."""
    loss: float
    """The mean loss of a sample."""
    correct: float
    """The number of correct samples, see `metrics.number_correct`; NaN for a regression."""
    count: int
    """The number of samples."""

    @property
    def perplexity(self) -> float:
        """``exp(loss)``: the number of equally likely labels with the same uncertainty."""
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """Return ``exp(loss)``, or infinity if that exceeds a float, so that a diverged run can still end with a report."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def evaluate(
    net: Module,
    dataset: Dataset,
    world: World | None = None,
    batch_size: int = 256,
    num_parts: int | None = None,
    own_data: bool = False,
    loss: Callable[[Tensor, Any], Tensor] = softmax_cross_entropy,
) -> Evaluation:
    """Return the accuracy and the mean loss of a network; every rank must call.

    Each rank evaluates a contiguous part of the data set; the parts differ in size by at most one sample and may be
    empty. The sums over samples are then reduced over ranks ("Dive into Deep Learning", section 12.5, exercise 4). An
    empty data set gives 0 for all numbers. Batches are copied to the device of the parameters.

    Args:
        net: the network, called with one input.
        dataset: the whole data set, on every rank; see ``own_data``.
        world: the ranks; default `hpcdp.init()`.
        batch_size: samples per batch of a rank.
        num_parts: cut ``dataset`` into this many parts, and give each rank a contiguous range of them. With the
            ``virtual_shards`` of a reproducible `Trainer`, the result has the same bits on any number of ranks. None:
            one part per rank.
        own_data: each rank has its own samples, as from ``read_csv(num_parts=..., part_index=...)``, and evaluates all
            of them. Not with ``num_parts``.
        loss: a function of the network's output and labels, per sample, shape ``(batch,)``, as in `fit`. Softmax
            cross-entropy takes the first output. The accuracy is NaN unless labels are integers ``(batch, ...)``.

    Raises:
        ConfigError: an argument is invalid; ``own_data`` with ``num_parts``; the loss has another shape.
        UnsupportedError: softmax cross-entropy got labels that are not integers, or of another shape.
        MismatchError: the ranks' data sets differ in length or in their first sample, or ranks differ in
            ``own_data``; on every rank.
    """
    require_world("evaluate", world)
    world = init() if world is None else world
    instance("evaluate", "net", net, Module, "a network")
    require_dataset("evaluate", dataset)
    if own_data and num_parts is not None:
        raise ConfigError("evaluate", where="num_parts", expected="None with own_data", got=num_parts)
    data_description = ["data of each rank's own"] if own_data else _described(dataset)
    remedy = "pass the whole data set on all ranks, or own_data=True on all ranks"
    require_same(world.comm, "evaluate", data_description, remedy)
    whole_number("evaluate", "batch_size", batch_size, 1)
    num_parts = world.size if num_parts is None else whole_number("evaluate", "num_parts", num_parts, 1)
    own, ends = piece_bounds(num_parts, world.size), piece_bounds(len(dataset), num_parts)
    if own_data:
        ends = [0, *[0] * world.rank, *[len(dataset)] * (world.size - world.rank)]
    function("evaluate", "loss", loss, "a function of output and labels")
    target = place_of(net)
    counted = BatchSums(num_parts)
    with predict_mode():
        for part in range(own[world.rank], own[world.rank + 1]):
            for first in range(ends[part], ends[part + 1], batch_size):
                x, y = dataset[np.arange(first, min(first + batch_size, ends[part + 1]))]
                x, y = brought_to(x, target), brought_to(y, target)
                output = net(x)
                first_of = first_output("evaluate", output)
                losses = _losses(loss, first_of if loss is softmax_cross_entropy else output, y)
                counted.add(part, losses.data, first_of.data, y)
    sums = np.array(counted.rows)
    allreduce(sums, world=world)  # exact: only one rank has non-zero numbers in a row
    total, correct, count = (float(value) for value in sums.sum(axis=0))
    return Evaluation(correct / max(count, 1), total / max(count, 1), correct, int(count))


def _losses(loss: Callable[[Tensor, Any], Tensor], output: Any, y: Any) -> Tensor:
    try:
        losses = loss(output, y)
    except UnsupportedError as error:
        if loss is softmax_cross_entropy and error.remedy is None:
            error.remedy = "pass evaluate(loss=...) with the loss of fit"
        raise
    require_per_sample("evaluate", losses, len(y))
    return losses


def place_of(net: Module) -> Array | None:
    """Return the first parameter array, which shows the device; None if no parameter has values yet."""
    return next((param.data for param in net.parameters() if None not in shape_of(param)), None)


def brought_to(x: Any, target: Array | None) -> Any:
    """Copy ``x`` of a batch to the device of ``target``; return it unchanged if it is there, or is a tensor."""
    return x if target is None or isinstance(x, Tensor) else values_on_device_of(x, target)


def first_output(operation: str, output: Any) -> Tensor:
    """Return the output of a network, or the first of several outputs, from which the accuracy is computed."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        expected = "a network that returns a tensor, or a sequence that begins with one"
        raise ConfigError(operation, where="net", expected=expected, got=type_named(first))
    return first


def _described(dataset: Dataset) -> list[str]:
    """Describe a data set in words that are equal on ranks with the same data set."""
    lines = [f"a data set of {len(dataset)} samples"]
    if len(dataset):
        first = zlib.crc32(b"".join(to_host(array).tobytes() for array in dataset[np.zeros(1, np.int64)]))
        lines.append(f"a first sample with CRC-32 {first:08x}")
    return lines
