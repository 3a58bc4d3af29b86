"""When a codec pays: on links so slow that what it saves there is more than what coding takes."""

from __future__ import annotations

import time

import numpy as np

from ..errors import ConfigError
from .codecs import Codec
from .settings import Compression

_COUNT = 1 << 18
_REPEATS = 5


def coding_s(codec: Codec, count: int = _COUNT) -> tuple[float, float]:
    """Seconds to encode and to decode ``count`` elements of float32 on this core, the least of some times."""
    x = np.random.default_rng(0).standard_normal(count, np.float32)
    residual, out = np.zeros_like(x), np.empty_like(x)
    wire = np.empty(codec.nbytes(count, x.dtype), np.uint8)
    encoding, decoding = [], []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        codec.encode(x, residual, wire)
        middle = time.perf_counter()
        codec.decode(wire, out)
        encoding.append(middle - begin)
        decoding.append(time.perf_counter() - middle)
    return min(encoding), min(decoding)


def pays_below(codec: Codec | Compression | str, n: int = 2) -> float:
    """The rate of links between ``n`` nodes, in bytes a second, below which a sum takes less time with the codec.

    Without it 2 (n - 1) / n S bytes leave every node; with it that part w of them which the codec leaves, but S bytes
    are encoded and (2 n - 1) / n S decoded. Nothing is taken to be coded while messages are under way: with cores to
    spare it pays on faster links, too. Measures the codec on this core, which takes some milliseconds.
    """
    settings = Compression.of(codec)
    if settings is None or n < 2:
        raise ConfigError("pays_below", expected="a codec, and 2 nodes or more", got=f"{codec!r} and {n!r}")
    codec, nbytes = settings.codec, 4 * _COUNT
    encoding_s, decoding_s = coding_s(codec)
    saved = 2 * (n - 1) / n * (nbytes - codec.nbytes(_COUNT, np.dtype(np.float32)))
    return max(0.0, saved) / (encoding_s + (2 * n - 1) / n * decoding_s)
