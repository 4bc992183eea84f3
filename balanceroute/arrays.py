"""Names for array types, and conversions of their numbers to Python's."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def plain(value: Any) -> Any:
    """A number of numpy's as one of Python's, which compiled code asks for; all else as it is."""
    return value.item() if isinstance(value, np.generic) else value
