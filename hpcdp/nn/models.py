"""Models that hpcdp knows by name, and exported networks.

The models are LeNet, MLP, character LSTM, GPT and ResNet-18. LeNet and ResNet-18 follow "Dive into Deep Learning",
sections 12.5 and 12.6; `resnet18_cifar` is the CIFAR variant.

An exported network is a graph and its tensors, in two files. `SymbolBlock` loads it without the class that defined it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..autograd import Tensor, pause
from ..autograd.tape import CALLS
from ..core import hdf5
from ..core.arrays import bits, dtype_of
from ..core.checks import lengths, one_of, whole_number, whole_numbers
from ..core.files import own_part_of, replaced
from ..errors import ConfigError, DataError, HpcdpError, MissingFileError, UnsupportedError, reason
from .functional import relu
from .init import Initialiser, Normal, Xavier
from .jit.graph import (
    CapturedTensor,
    Graph,
    Input,
    Literal,
    Reader,
    Result,
    Source,
    arrays_of,
    as_json,
    call,
    with_held,
)
from .layers import (
    GELU,
    LSTM,
    AvgPool2D,
    BatchNorm,
    CausalSelfAttention,
    Conv2D,
    Dense,
    Embedding,
    Flatten,
    GlobalAvgPool2D,
    LayerNorm,
    ReLU,
)
from .module import Module, Parameter, Sequential

_SMALLEST, _INTENDED = 4, 28
_IMAGE = ("channels", "height", "width")


def lenet(input_shape: Sequence[int] = (1, 28, 28), num_classes: int = 10, seed: int | None = 0) -> Sequential:
    """Build LeNet: two convolutions with average pooling, and two dense layers.

    It has 129,068 parameters for input ``(1, 28, 28)`` and 10 classes. Images smaller than 28 x 28 are padded with
    zeros by the first convolution.

    Args:
        input_shape: (channels, height, width) of a sample, at least 4 x 4.
        num_classes: length of the output, ``(batch, num_classes)``.
        seed: seed of the initial weights; None takes fresh entropy.

    Raises:
        ConfigError: ``input_shape`` is not that of an image, or too small.
    """
    channels, height, width = lengths("lenet", "input_shape", input_shape, _IMAGE)
    whole_numbers("lenet", 1, num_classes=num_classes)
    whole_numbers("lenet", _SMALLEST, height=height, width=width)
    top, left = (max(0, (_INTENDED - size + 1) // 2) for size in (height, width))
    features = 50 * _pooled(height + 2 * top) * _pooled(width + 2 * left)
    weights = Xavier(seed)
    return Sequential(
        Conv2D(channels, 20, 3, padding=(top, left), activation="relu", weight_init=weights),
        AvgPool2D(2),
        Conv2D(20, 50, 5, activation="relu", weight_init=weights),
        AvgPool2D(2),
        Flatten(),
        Dense(features, 128, activation="relu", weight_init=weights),
        Dense(128, num_classes, weight_init=weights),
    )


def _pooled(size: int) -> int:
    """Return the height or width left by both convolutions and both poolings."""
    return ((size - 2) // 2 - 4) // 2


def mlp(
    input_shape: Sequence[int] | int = (784,),
    num_classes: int = 10,
    hidden: Sequence[int] = (256, 128),
    seed: int | None = 0,
) -> Sequential:
    """Build a multilayer perceptron: dense layers with ReLU between them, on flattened samples.

    Args:
        input_shape: shape of a sample with any number of axes, or its number of elements.
        num_classes: length of the output, ``(batch, num_classes)``.
        hidden: widths of the hidden layers.
        seed: seed of the initial weights; None takes fresh entropy.

    Raises:
        ConfigError: a width is below 1.
    """
    widths = [math.prod(np.atleast_1d(input_shape).tolist()), *hidden, num_classes]
    for width in widths:
        whole_number("mlp", "width", width, 1)
    weights = Xavier(seed)
    net = Sequential(Flatten())
    for number, (before, after) in enumerate(itertools.pairwise(widths), start=1):
        activation = "relu" if number < len(widths) - 1 else None
        net.add(Dense(before, after, activation=activation, weight_init=weights))
    return net


def char_lstm(
    input_shape: Sequence[int] = (64,),
    num_classes: int = 65,
    seed: int | None = 0,
    width: int = 64,
    size: int = 256,
    layers: int = 1,
) -> Sequential:
    """Build a language model: embedding, LSTMs and a dense layer (Graves 2013, section 2).

    It maps integer tokens ``(batch, time)`` to scores of the next token, ``(batch, time, num_classes)``, for any
    ``time``.

    Args:
        input_shape: (time,) of a sample.
        num_classes: number of tokens.
        seed: seed of the initial weights; None takes fresh entropy.
        width: width of the embedding.
        size: size of each LSTM.
        layers: number of LSTMs.

    Raises:
        ConfigError: ``input_shape`` is not that of a sequence, or a number is below 1.
    """
    lengths("char_lstm", "input_shape", input_shape, ("time",))
    whole_numbers("char_lstm", 1, num_classes=num_classes, width=width, size=size, layers=layers)
    weights = Xavier(seed)
    net = Sequential(Embedding(num_classes, width, Normal(1 / width**0.5, seed)))
    for number in range(layers):
        net.add(LSTM(size if number else width, size, weights))
    net.add(Dense(size, num_classes, weight_init=weights))
    return net


class Block(Module):
    """Transformer block: attention, then a feed-forward network, both residual (Radford et al. 2019, section 2.3)."""

    def __init__(self, width: int, heads: int, weight_init: Initialiser) -> None:
        self.norm1 = LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, weight_init)
        self.norm2 = LayerNorm(width)
        self.feed = Sequential(
            Dense(width, 4 * width, weight_init=weight_init), GELU(), Dense(4 * width, width, weight_init=weight_init)
        )

    def forward(self, x: Any) -> Any:
        """Map ``(batch, time, width)`` to ``(batch, time, width)``."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class GPT(Module):
    """Decoder-only transformer; see `gpt`."""

    def __init__(self, context: int, num_tokens: int, width: int, heads: int, layers: int, seed: int | None) -> None:
        weights = Normal(0.02, seed)
        self.tokens = Embedding(num_tokens, width, weights)
        self.places = Parameter(weights((context, width)))
        self.blocks = Sequential(*(Block(width, heads, weights) for _ in range(layers)))
        self.norm = LayerNorm(width)

    def forward(self, x: Any) -> Any:
        """Map integer tokens ``(batch, time)`` to scores of the next token, ``(batch, time, num_tokens)``."""
        if x.ndim != 2 or x.shape[1] > len(self.places):
            raise UnsupportedError(
                "forward", where="GPT", expected=f"tokens (batch, at most {len(self.places)})", got=tuple(x.shape)
            )
        hidden = self.tokens(x) + self.places[: x.shape[1]]
        return self.norm(self.blocks(hidden)) @ self.tokens.weight.T


def gpt(
    input_shape: Sequence[int] = (64,),
    num_classes: int = 65,
    seed: int | None = 0,
    width: int = 128,
    heads: int = 4,
    layers: int = 3,
) -> GPT:
    """Build a decoder-only transformer with pre-normalization, GELU and learned positions (Radford et al. 2019).

    It maps integer tokens ``(batch, time)`` to scores of the next token, ``(batch, time, num_classes)``. The output
    projection shares the embedding's weight (Press and Wolf 2017).

    Args:
        input_shape: (time,) of a sample, the longest accepted sequence.
        num_classes: number of tokens.
        seed: seed of the initial weights, normal with standard deviation 0.02; None takes fresh entropy.
        width: width of the embedding.
        heads: attention heads; divides ``width``.
        layers: number of blocks.

    Raises:
        ConfigError: ``input_shape`` is not that of a sequence, a number is below 1, or ``heads`` does not divide
            ``width``.
    """
    (time,) = lengths("gpt", "input_shape", input_shape, ("time",))
    whole_numbers("gpt", 1, num_classes=num_classes, width=width, heads=heads, layers=layers)
    return GPT(time, num_classes, width, heads, layers, seed)


_WIDTHS = (64, 128, 256, 512)


class Residual(Module):
    """Residual block: ``relu(x + f(x))``, where ``f`` is two normalized convolutions (He et al. 2016, figure 2).

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        stride: stride of the first convolution. If it is not 1, or the channels change, the shortcut is a 1 x 1
            convolution with this stride.
        bias: whether convolutions have a bias, which the following normalization cancels.
        normalises_shortcut: whether the shortcut's convolution is normalized, too.
        weight_init: initializer of the convolutions, by default `init.Xavier`.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int = 1, bias: bool = True,
        normalises_shortcut: bool = False, weight_init: Initialiser | None = None,
    ) -> None:  # fmt: skip
        weights = weight_init or Xavier()
        self.conv1 = Conv2D(in_channels, out_channels, 3, stride, padding=1, bias=bias, weight_init=weights)
        self.norm1 = BatchNorm(out_channels)
        self.conv2 = Conv2D(out_channels, out_channels, 3, padding=1, bias=bias, weight_init=weights)
        self.norm2 = BatchNorm(out_channels)
        self.shortcut: Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = Conv2D(in_channels, out_channels, 1, stride, bias=bias, weight_init=weights)
            if normalises_shortcut:
                self.shortcut = Sequential(self.shortcut, BatchNorm(out_channels))

    def forward(self, x: Any) -> Any:
        """Map ``(batch, in_channels, height, width)`` to ``(batch, out_channels, height / stride, width / stride)``."""
        y = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(y + (x if self.shortcut is None else self.shortcut(x)))


def resnet18(
    input_shape: Sequence[int] = (1, 28, 28), num_classes: int = 10, seed: int | None = 0, variant: str = "document"
) -> Sequential:
    """Build ResNet-18 for small images: a 3 x 3 convolution and eight residual blocks, pooled only at the end.

    Args:
        input_shape: (channels, height, width) of a sample.
        num_classes: length of the output, ``(batch, num_classes)``.
        seed: seed of the initial weights; None takes fresh entropy.
        variant: "document" has biases in convolutions and plain shortcuts, with 11,175,818 parameters for one channel
            and ten classes. "cifar", usual for CIFAR-10, has no biases and normalized shortcuts, with 11,173,962 for
            three channels.

    Raises:
        ConfigError: an unknown variant, or ``input_shape`` is not that of an image.
    """
    channels, _, _ = lengths("resnet18", "input_shape", input_shape, _IMAGE)
    whole_numbers("resnet18", 1, num_classes=num_classes)
    one_of("resnet18", "variant", variant, ("document", "cifar"))
    weights, is_document = Xavier(seed), variant == "document"
    net = Sequential(
        Conv2D(channels, _WIDTHS[0], 3, padding=1, bias=is_document, weight_init=weights), BatchNorm(_WIDTHS[0]), ReLU()
    )
    before = _WIDTHS[0]
    for width in _WIDTHS:
        blocks = Sequential()
        for number in range(2):
            stride = 2 if number == 0 and width != _WIDTHS[0] else 1
            blocks.add(Residual(before, width, stride, is_document, not is_document, weights))
            before = width
        net.add(blocks)
    net.add(GlobalAvgPool2D(), Flatten(), Dense(before, num_classes, weight_init=weights))
    return net


def resnet18_cifar(input_shape: Sequence[int] = (3, 32, 32), num_classes: int = 10, seed: int | None = 0) -> Sequential:
    """Build `resnet18` in the variant "cifar"."""
    return resnet18(input_shape, num_classes, seed, "cifar")


MODELS: dict[str, Callable[..., Module]] = {
    "char_lstm": char_lstm,
    "gpt": gpt,
    "lenet": lenet,
    "mlp": mlp,
    "resnet18": resnet18,
    "resnet18_cifar": resnet18_cifar,
}


def create(name: str, **kwargs: Any) -> Module:
    """Build the network called ``name``, e.g. ``create("lenet", input_shape=(1, 28, 28), num_classes=10, seed=0)``.

    Args:
        name: one of `MODELS`.
        kwargs: arguments of its function.

    Raises:
        ConfigError: an unknown name, or arguments that the network does not accept.
    """
    one_of("model", None, name, MODELS)
    try:
        return MODELS[name](**kwargs)
    except TypeError as error:
        raise ConfigError("model", where=name, got=f"{kwargs}: {error}") from error


def export_graph(graph: Graph, path: str | Path) -> tuple[Path, Path]:
    """Write ``graph`` and its network's tensors; see `Module.export`.

    An older pair is replaced once both files are complete. The JSON file holds checksums of the tensors in the other.
    """
    description, parameters = _files("export", path)
    arrays = arrays_of(graph)
    text = json.dumps(as_json(graph, arrays), indent=1)
    try:
        with replaced(description, own_part_of) as part:
            part.write_text(text + "\n")
            hdf5.write_arrays(parameters, arrays)
    except OSError as error:
        raise DataError("export", where=description, expected="a file that can be written", got=error) from error
    return description, parameters


def _files(operation: str, path: str | Path) -> tuple[Path, Path]:
    if os.path.basename(path) in ("", ".", ".."):
        expected = "a path that ends in a name, such as folder/net"
        raise ConfigError(operation, where=path, expected=expected, got="a folder")
    base = Path(path)
    if base.suffix == ".json":
        base = base.with_suffix("")
    return base.with_name(base.name + ".json"), base.with_name(base.name + ".h5")


class _TensorHolder(Module):
    """Container for tensors of a `SymbolBlock` with dotted names."""


class SymbolBlock(Module):
    """Network loaded from the files of `Module.export`; create it with `load`.

    It predicts the same bits as the exported network. Its parameters have the same names, get gradients, and can be
    trained further. Layers stay in prediction mode: batch normalization uses running statistics, and dropout is
    inactive. It accepts any batch size, unless the forward used the batch size as a number, e.g. as the divisor of a
    mean. All other shapes are fixed.

    Source: the interface is that of Gluon's ``SymbolBlock.imports``.
    """

    def __init__(self, graph: Graph) -> None:
        self.__graph = graph  # mangled, so that no child has this name
        for name, value in zip(graph.names, graph.held, strict=True):
            *parts, last = name.split(".")
            parent: Module = self
            for part in parts:
                if part not in vars(parent):
                    setattr(parent, part, _TensorHolder())
                parent = vars(parent)[part]
            setattr(parent, last, value)

    @classmethod
    def load(cls, path: str | Path) -> SymbolBlock:
        """Return the network exported to ``path``, given with or without ``.json``.

        Raises:
            ConfigError: ``path`` is a folder.
            MissingFileError: there is no such file.
            DataError: a file is damaged, or from another export. The error names it.
        """
        description, parameters = _files("load", path)
        try:
            content = json.loads(description.read_text())
        except FileNotFoundError:
            raise MissingFileError("load", where=description, expected="an exported graph", got="none") from None
        except OSError as error:
            raise DataError("load", where=description, expected="an exported graph", got=reason(error)) from error
        except (ValueError, RecursionError) as error:
            raise DataError("load", where=description, expected="an exported graph", got=error) from error
        graph, tensors = Reader(description, content).graph()
        arrays = hdf5.read_arrays(
            parameters, {entry["name"]: (entry["meta"].shape, entry["meta"].dtype) for entry in tensors}
        )
        held: list[Any] = []
        for entry in tensors:
            array = arrays[entry["name"]]
            if zlib.crc32(bits(np.ascontiguousarray(array)).data) != entry["crc32"]:
                raise DataError(
                    "load", where=f"{parameters}:{entry['name']}", expected="the values exported with the graph",
                    got="a different checksum", remedy="copy both files of one export, or export again",
                )  # fmt: skip
            held.append({"parameter": Parameter, "buffer": Tensor}.get(entry["kind"], np.asarray)(array))
            _require_name(description, entry["name"])
        _try(graph := with_held(graph, held), description)
        return cls(graph)

    def forward(self, *inputs: Any) -> Any:
        """Compute the exported network; inputs need the exported shapes and dtypes."""
        graph = self.__graph
        any_batch = graph.any_batch
        actual = [(meta.ndim, tuple(meta.shape[any_batch:]), str(meta.dtype)) for meta in inputs]
        expected = [(len(meta.shape), meta.shape[any_batch:], meta.dtype) for meta in graph.inputs]
        if actual != expected:
            shape_of = _any_batch if any_batch else tuple
            shapes = ", ".join(f"{meta.dtype} of shape {shape_of(meta.shape)}" for meta in graph.inputs)
            got = ", ".join(f"{meta.dtype} of shape {tuple(meta.shape)}" for meta in inputs)
            raise ConfigError("SymbolBlock", where="inputs", expected=shapes, got=got or "none")
        return _computed(graph, inputs)

    def describe(self) -> str:
        """Return the number of operations, shown in ``repr``."""
        return f"{len(self.__graph.nodes)} operations"


def _computed(graph: Graph, inputs: Any, check: bool = False) -> Any:
    """Return the outputs of ``graph``; with ``check`` raise `ValueError` if a result contradicts its metadata."""
    results: list[list[Any]] = []

    def value(source: Source) -> Any:
        if isinstance(source, Input):
            return inputs[source.number]
        if isinstance(source, CapturedTensor):
            held = graph.held[source.number]
            return held.data if source.is_detached and isinstance(held, Tensor) else held
        if isinstance(source, Result):
            return results[source.node][source.output]
        return source.operand() if isinstance(source, Literal) else None

    for number, node in enumerate(graph.nodes):
        result = call(node, [value(source) for source in node.inputs], CALLS)
        results.append(list(result) if isinstance(result, tuple) else [result])
        declared = [(meta.shape, meta.dtype) for meta in node.outputs]
        if check and declared != [(tuple(output.shape), str(output.dtype)) for output in results[-1]]:
            raise ValueError(f"node {number} ({node.operator}), whose shapes or dtypes differ from the file")
    return graph.returned(value)


def _try(graph: Graph, where: Path) -> None:
    """Compute once on zeros, so that an inconsistent or manipulated graph is refused now, by name."""
    try:
        zeros = [Tensor(np.zeros(meta.shape, dtype_of(meta.dtype))) for meta in graph.inputs]
        with pause(), np.errstate(all="ignore"):
            _computed(graph, zeros, check=True)
    except (HpcdpError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, MemoryError) as error:
        raise DataError("load", where=where, expected="a computable graph", got=error) from error


def _any_batch(shape: tuple[int, ...]) -> str:
    return f"({', '.join(['batch', *map(str, shape[1:])])})" if shape else "()"


def _require_name(where: Path, name: str) -> None:
    """Raise `DataError` if a tensor's name would replace an attribute of `Module`."""
    parts = name.split(".")
    if any(hasattr(Module, part) or part.startswith("_SymbolBlock__") for part in parts):
        raise DataError("load", where=where, expected="tensor names that a network can have", got=repr(name))


__all__ = ["MODELS", "char_lstm", "create", "gpt", "lenet", "mlp", "resnet18", "resnet18_cifar"]
