"""A language model of characters with an LSTM."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ConfigError
from ..init import Normal, Xavier
from ..layers import Dense
from ..module import Sequential
from ..recurrent import LSTM
from ..tokens import Embedding


def char_lstm(
    input_shape: Sequence[int] = (64,),
    num_classes: int = 65,
    seed: int | None = 0,
    width: int = 64,
    size: int = 256,
    layers: int = 1,
) -> Sequential:
    """Scores of the next token at each place: embedding, LSTMs, a dense layer (Graves 2013, section 2).

    Tokens ``(batch, time)``, integers, become ``(batch, time, num_classes)``; any ``time``.

    Args:
        input_shape: (time,) of a sample.
        num_classes: how many tokens there are.
        seed: of the initial weights; None takes fresh entropy.
        width: of the embedding.
        size: of each LSTM.

    Raises:
        ConfigError: samples that are no sequences of tokens, or a number below 1.
    """
    shape = tuple(input_shape)
    if len(shape) != 1 or min(*shape, num_classes, width, size, layers) < 1:
        got = f"{shape}, {num_classes} tokens, width {width}, size {size}, {layers} layers"
        raise ConfigError("char_lstm", expected="input_shape (time,) and numbers from 1 on", got=got)
    weights = Xavier(seed)
    net = Sequential(Embedding(num_classes, width, Normal(1 / width**0.5, seed)))
    for number in range(layers):
        net.add(LSTM(size if number else width, size, weights))
    net.add(Dense(size, num_classes, weight_init=weights))
    return net
