"""Floor 1: compression, gradients in fewer bits on the wire. Imports: kernels, arrays, errors.

- `codecs`: fp16, bf16, 2 bits, 1 bit, and the largest elements alone.
- `feedback`: what a codec has not sent is added to what it sends next.
- `settings`: which codec, and where; from a name such as ``"2bit"``.
- `worth`: on which links a codec pays.
"""

from .codecs import BFloat16, Codec, Float16, OneBit, TopK, TwoBit
from .feedback import ErrorFeedback
from .settings import CODECS, Compression, Settings
from .worth import pays_below

__all__ = [
    "CODECS",
    "BFloat16",
    "Codec",
    "Compression",
    "ErrorFeedback",
    "Float16",
    "OneBit",
    "Settings",
    "TopK",
    "TwoBit",
    "pays_below",
]
