"""Rounded weights of a target, through torchao."""

from __future__ import annotations

from typing import Any

import torch

from lenience.core.errors import InputError

GROUP = 32
"""Number of 4-bit weights that share a scale."""
WAYS = ("int8", "int4")
"""Roundings of the weights by name. Activations stay as they are: their rounding turns a last bit
into a step, so a window would be read otherwise than its tokens one by one."""


def quantization_config(way: str) -> Any:
    """Return the configuration with which transformers rounds a model's linear layers while it
    loads them. Raises InputError for an unknown way or without torchao."""
    if way not in WAYS:
        raise InputError(f"quantization {way!r}: name one of {', '.join(WAYS)}")
    try:
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
        from torchao.quantization.granularity import PerGroup
        from transformers import TorchAoConfig
    except ImportError as error:
        raise InputError(
            f"quantization {way}: needs torchao ({error}); pip install 'lenience[quantized]'"
        ) from None
    if way == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig())
    four_bits = getattr(torch, "int4")  # noqa: B009 - PyTorch's stubs lack it
    groups = PerGroup(GROUP)
    return TorchAoConfig(IntxWeightOnlyConfig(four_bits, granularity=groups))
