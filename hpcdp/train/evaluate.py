"""How well a network does on a data set, over all ranks."""

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
from ..core.arrays import Array, to_host
from ..core.checks import whole_number
from ..core.devices import values_on_device_of
from ..data import Dataset
from ..data.datasets import piece_bounds, require_dataset
from ..errors import ConfigError, UnsupportedError, type_named
from ..nn import Module
from ..nn.functional import require_per_sample, softmax_cross_entropy
from ..nn.module import shape_of
from .metrics import BatchSums


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`, alike on every rank; ``correct`` as `metrics.number_correct` counts, NaN of a
    regression."""

    accuracy: float
    loss: float
    correct: float
    count: int

    @property
    def perplexity(self) -> float:
        """``exp(loss)``: among how many equally likely labels the network is as unsure."""
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """``exp(loss)``, infinite where no float is as large: a network that diverges is to end its run by its report."""
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
    """Accuracy and mean loss of a network; every rank must call.

    Each rank evaluates its part of ``dataset``, which all have whole (contiguous, sizes differ by at most one, maybe
    none), ``batch_size`` samples at once; then the numbers of correct answers and of samples are summed over ranks (the
    document's section 12.5, exercise 4). An empty data set gives 0 for all. Batches are brought to where the
    parameters are.

    Args:
        own_data: each rank has samples of its own, as of ``read_csv(num_parts=..., part_index=...)``, and evaluates all
            of them. Not with ``num_parts``.
        loss: per sample, shape ``(batch,)``, as in `fit`: of what ``net`` gives and labels; softmax cross-entropy takes
            the first output. The accuracy is NaN where labels are no integers ``(batch, ...)``.
        num_parts: cut ``dataset`` into so many parts, and give each rank a run of them: a reproducible `Trainer` 's
            ``virtual_shards``, for a result alike to the bit on any number of ranks. None: one a rank.

    Raises:
        ConfigError: no network, no data set; ``own_data`` with ``num_parts``; a loss of another shape.
        UnsupportedError: softmax cross-entropy was asked of labels that are no integers, or of other shapes.
        MismatchError: the ranks' data sets differ in length, or in their first sample, without ``own_data``, or only
            some say it; on all.
    """
    require_world("evaluate", world)
    world = init() if world is None else world
    if not isinstance(net, Module):
        raise ConfigError("evaluate", where="net", expected="a network", got=type_named(net))
    require_dataset("evaluate", dataset)
    if own_data and num_parts is not None:
        raise ConfigError("evaluate", where="num_parts", expected="none with own_data", got=num_parts)
    said = ["data of each rank's own"] if own_data else _described(dataset)
    require_same(world.comm, "evaluate", said, "give all ranks the whole data set, or say own_data=True on all")
    whole_number("evaluate", "batch_size", batch_size, 1)
    num_parts = world.size if num_parts is None else whole_number("evaluate", "num_parts", num_parts, 1)
    own, ends = piece_bounds(num_parts, world.size), piece_bounds(len(dataset), num_parts)
    if own_data:
        ends = [0, *[0] * world.rank, *[len(dataset)] * (world.size - world.rank)]
    if not callable(loss):
        raise ConfigError("evaluate", where="loss", expected="a function of output and labels", got=type_named(loss))
    there = place_of(net)
    counted = BatchSums(num_parts)
    with predict_mode():
        for part in range(own[world.rank], own[world.rank + 1]):
            for first in range(ends[part], ends[part + 1], batch_size):
                x, y = dataset[np.arange(first, min(first + batch_size, ends[part + 1]))]
                x, y = brought_to(x, there), brought_to(y, there)
                output = net(x)
                first_of = first_output("evaluate", output)
                losses = _losses(loss, first_of if loss is softmax_cross_entropy else output, y)
                counted.add(part, losses.data, first_of.data, y)
    sums = np.array(counted.rows)
    allreduce(sums, world=world)  # exact: in each row one rank's numbers and zeros
    total, correct, count = (float(value) for value in sums.sum(axis=0))
    return Evaluation(correct / max(count, 1), total / max(count, 1), correct, int(count))


def _losses(loss: Callable[[Tensor, Any], Tensor], output: Any, y: Any) -> Tensor:
    try:
        losses = loss(output, y)
    except UnsupportedError as error:
        if loss is softmax_cross_entropy and error.remedy is None:
            error.remedy = "pass evaluate(loss=...), with the loss that fit trains with"
        raise
    require_per_sample("evaluate", losses, len(y))
    return losses


def place_of(net: Module) -> Array | None:
    """An array that lies where the parameters do, the first of these; None where none of them has values yet."""
    return next((param.data for param in net.parameters() if None not in shape_of(param)), None)


def brought_to(x: Any, there: Array | None) -> Any:
    """``x`` of a batch where the array ``there`` is: itself, if it is there already, or is a tensor."""
    return x if there is None or isinstance(x, Tensor) else values_on_device_of(x, there)


def first_output(operation: str, output: Any) -> Tensor:
    """What a network has returned, or the first of several: that of which accuracy is told."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        expected = "a network that returns a tensor, or several of which the first is one"
        raise ConfigError(operation, where="net", expected=expected, got=type_named(first))
    return first


def _described(dataset: Dataset) -> list[str]:
    """What ranks that have the same data set say of it."""
    said = [f"a data set of {len(dataset)} samples"]
    if len(dataset):
        first = zlib.crc32(b"".join(to_host(each).tobytes() for each in dataset[np.zeros(1, np.int64)]))
        said.append(f"a first sample with CRC-32 {first:08x}")
    return said
