"""A small GPT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import ConfigError, UnsupportedError
from ..init import Initialiser, Normal
from ..layers import Dense
from ..module import Module, Parameter, Sequential
from ..tokens import GELU, CausalSelfAttention, Embedding, LayerNorm


class Block(Module):
    """Attention, then a network for each place, each added to what goes in (Radford et al. 2019, section 2.3)."""

    def __init__(self, width: int, heads: int, weight_init: Initialiser) -> None:
        self.norm1 = LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, weight_init)
        self.norm2 = LayerNorm(width)
        self.feed = Sequential(
            Dense(width, 4 * width, weight_init=weight_init), GELU(), Dense(4 * width, width, weight_init=weight_init)
        )

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class GPT(Module):
    """Scores of the next token at each place; see `gpt`."""

    def __init__(self, context: int, num_tokens: int, width: int, heads: int, layers: int, seed: int | None) -> None:
        weights = Normal(0.02, seed)
        self.tokens = Embedding(num_tokens, width, weights)
        self.places = Parameter(weights((context, width)))
        self.blocks = Sequential(*(Block(width, heads, weights) for _ in range(layers)))
        self.norm = LayerNorm(width)

    def forward(self, x: Any) -> Any:
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
    """A decoder of tokens: ``(batch, time)``, integers, become scores ``(batch, time, num_classes)``.

    Normalised before attention and network (Radford et al. 2019), GELU, learnt places, and the embedding's weights
    again in the last product (Press and Wolf 2017), which so has no parameters of its own.

    Args:
        input_shape: (time,) of a sample, the most that it takes.
        num_classes: how many tokens there are.
        seed: of the initial weights, normal with deviation 0.02; None takes fresh entropy.
        heads: divides ``width``.

    Raises:
        ConfigError: samples that are no sequences of tokens, a number below 1, heads that do not divide the width.
    """
    shape = tuple(input_shape)
    if len(shape) != 1 or min(*shape, num_classes, width, heads, layers) < 1:
        got = f"{shape}, {num_classes} tokens, width {width}, {heads} heads, {layers} layers"
        raise ConfigError("gpt", expected="input_shape (time,) and numbers from 1 on", got=got)
    return GPT(shape[0], num_classes, width, heads, layers, seed)
