"""Arrays made of what is given to a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import HpcdpError, shortened


def array_of(data: Any) -> np.ndarray:
    """Numbers, or nested sequences of them, as float32; an array of another library in its own dtype."""
    remedy = None
    try:
        numbers = np.asarray(data, None if hasattr(data, "dtype") else np.float32)
    except (RuntimeError, TypeError, ValueError) as error:
        remedy = str(error) if hasattr(data, "dtype") else None  # as PyTorch says what is to be done
    else:
        if numbers.dtype.kind in "OSU":  # NumPy takes any object for an array
            pass
        elif not np.isnan(numbers).any() or not any(each is None for each in np.asarray(data, object).flat):
            return numbers
        else:
            remedy = "leave out an input that is optional"  # NumPy makes NaN of it
    raise HpcdpError("Tensor", expected="an array, or numbers", got=shortened(repr(data), 40), remedy=remedy)
