"""Gradients in fewer bits on the wire: fp16, bf16, 2 bits, 1 bit, and the largest elements alone."""

from .codecs import (
    CODECS,
    BFloat16,
    Codec,
    Compression,
    ErrorFeedback,
    Float16,
    OneBit,
    Settings,
    TopK,
    TwoBit,
    pays_below,
)

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
