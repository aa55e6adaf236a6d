"""Readers of drafters' files, also published ones, with messages about what is wrong in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

BROKEN = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    EOFError,
    SafetensorError,
)
"""Exceptions that a broken file, or a file of another kind, can raise."""
POINTER = b"version https://git-lfs"
PICKLE = b"\x80"
"""First bytes of a Git LFS pointer and of a pickle."""


def tensors_in(file: Path) -> Mapping[Any, Any]:
    """Return the tensors in a file of safetensors or PyTorch; nothing but tensors is loaded. Raises
    one of BROKEN for any other content."""
    if file.suffix == ".safetensors":
        return load_file(file)
    with file.open("rb") as begun:
        start = begun.read(len(POINTER))
    if start == POINTER:
        raise ValueError("it is a Git LFS pointer; fetch the file itself")
    if not is_zipfile(file) and not start.startswith(PICKLE):
        raise ValueError("it is not a PyTorch file")
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError:
        # torch's own message explains how to run the file's code
        raise ValueError("it holds more than tensors and is not loaded") from None
    if not isinstance(saved, Mapping):
        raise ValueError(f"it is a {type(saved).__name__} and no table of tensors")
    return saved


def shown_shape(tensor: Tensor | tuple[int | None, ...]) -> str:
    """Return a shape as text, such as 32 × 64; None in a shape stands for any size."""
    shape = tensor.shape if isinstance(tensor, Tensor) else tensor
    return " × ".join("any" if n is None else str(n) for n in shape) or "one number"


def has_shape(tensor: Tensor, wanted: tuple[int | None, ...]) -> bool:
    """Return True if a tensor has a shape; None in `wanted` stands for any size."""
    return len(tensor.shape) == len(wanted) and all(
        n in (known, None) for known, n in zip(tensor.shape, wanted)
    )


def table(value: Any, name: str) -> dict[str, Any]:
    """Return a value that must be a JSON object. Raises ValueError for any other value."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no table")
    return value
