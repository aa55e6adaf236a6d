"""Numeric operations that PyTorch does slowly on a CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BY_NUMPY = (torch.float32, torch.float64)


def argmax(values: Tensor) -> Tensor:
    """Return […]: the index of the largest of `values` […, V], as `Tensor.argmax(-1)` does: the
    first of equal ones, or the first NaN.

    numpy searches with vector instructions. For 9 rows of 49,152 logits it takes a twentieth of
    PyTorch's time on a CPU.
    """
    if values.device.type != "cpu" or values.dtype not in BY_NUMPY:
        return values.argmax(-1)
    return torch.from_numpy(np.asarray(values.detach().numpy().argmax(-1)))
