"""Heat maps of tables, as pixels. Imports no plotting library, which a rank would have to load."""

from __future__ import annotations

import numpy as np

_PIXELS = 8
"""Side of a cell."""
_FACTOR = 4.0
"""Values of 1 are white, those from this factor on are red, and those below its inverse are blue."""


def heat_map(values_RC: np.ndarray) -> np.ndarray:
    """Draw a heat map of nonnegative values as (H, W, 3) bytes, with one row of cells per row. Colors follow
    the logarithm of a value."""
    floor = np.maximum(values_RC, 1 / _FACTOR)
    above_RC = np.clip(np.log(floor) / np.log(_FACTOR), -1, 1)
    fading_RC = 1 - np.abs(above_RC)
    red_RC, blue_RC = np.where(above_RC > 0, 1, fading_RC), np.where(above_RC < 0, 1, fading_RC)
    colors_RC3 = np.stack([red_RC, fading_RC, blue_RC], -1)
    return np.round(255 * colors_RC3).astype(np.uint8).repeat(_PIXELS, 0).repeat(_PIXELS, 1)
