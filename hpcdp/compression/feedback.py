"""Error feedback: what a codec has not sent is added to what it sends next, so that nothing is lost, only late."""

from __future__ import annotations

import numpy as np

from .codecs import Codec


class ErrorFeedback:
    """A codec that remembers, for one flat array whose parts are encoded again and again.

    Args:
        codec: any; see `codecs`.
        count, dtype: elements of the array.
        remembers: False: forget what was not sent, to see what that does.

    Source: Seide et al., "1-bit stochastic gradient descent", 2014, section 3; Stich et al., "Sparsified SGD with
    memory", 2018; Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", 2019.
    """

    def __init__(self, codec: Codec, count: int, dtype: np.dtype, remembers: bool = True) -> None:
        self.codec = codec
        self.remembers = remembers
        self.residual = np.zeros(count, dtype)
        """What was not sent yet, shape ``(count,)``, in the gradients' dtype."""

    def encode(self, x: np.ndarray, part: slice, wire: np.ndarray) -> None:
        """Encode ``x``, elements ``part`` of the array, and what was not sent of them before; changes ``wire``."""
        residual = self.residual[part]
        if not self.remembers:
            residual[...] = 0
        self.codec.encode(x, residual, wire)

    def nbytes(self, count: int) -> int:
        """Of what ``count`` elements are encoded to."""
        return self.codec.nbytes(count, self.residual.dtype)
