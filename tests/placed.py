"""Arrays that begin anywhere in memory, as kernels may be given them."""

from typing import Any

from hpcdp.core.arrays import array_namespace


def beginning_at(offset: int, x: Any) -> Any:
    """A copy so many elements behind the beginning of memory."""
    whole = array_namespace(x).empty(offset + x.size, dtype=x.dtype)
    whole[offset:] = x.reshape(-1)
    return whole[offset:].reshape(x.shape)
