"""Error feedback: what a codec has not sent is added to what it sends next, so that nothing is lost, only late."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..arrays import Array
from .codecs import Codec

Zeros = Callable[[int, np.dtype], Array]
"""``zeros(count, dtype)``: a new array, where arrays to be encoded are."""


class ErrorFeedback:
    """A codec that remembers, for one flat array whose parts are encoded again and again.

    Args:
        codec: any; see `codecs`.
        count, dtype: elements of the array.
        share: how much of what was not sent is added to what is sent next, 0 to 1; default what the codec needs.
        zeros: makes the `residual`.

    Source: Seide et al., "1-bit stochastic gradient descent", 2014, section 3; Stich et al., "Sparsified SGD with
    memory", 2018; Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", 2019; the
    share as in Wu et al., "Error compensated quantized SGD", 2018, section 3.
    """

    def __init__(
        self, codec: Codec, count: int, dtype: np.dtype, share: float | None = None, zeros: Zeros = np.zeros
    ) -> None:
        self.codec = codec
        self.share = codec.feedback if share is None else share
        self.residual = zeros(count, dtype)
        """What was not sent yet, shape ``(count,)``, in the gradients' dtype."""

    @np.errstate(over="ignore", invalid="ignore")  # what cannot be kept, or sent, is found when it has come
    def encode(self, x: Array, part: slice, wire: Array, codec: Codec | None = None) -> None:
        """Encode ``x``, elements ``part`` of the array, and what was not sent of them before; changes ``wire``.

        Args:
            codec: default that of construction.
        """
        residual = self.residual[part]
        if self.share != 1:
            residual *= residual.dtype.type(self.share)
        (self.codec if codec is None else codec).encode(x, residual, wire)

    def rescale(self, factor: float) -> None:
        """From now on what is encoded is so many times what it was, and so is what was not sent yet."""
        with np.errstate(over="ignore"):  # what cannot be kept is found when it is sent
            self.residual *= self.residual.dtype.type(factor)

    def nbytes(self, count: int) -> int:
        """Of what ``count`` elements are encoded to."""
        return self.codec.nbytes(count, self.residual.dtype)
