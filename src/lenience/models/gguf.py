"""GGUF files (llama.cpp's format), which transformers reads and dequantises."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lenience.core.errors import InputError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
NEEDS_GGUF = "reading GGUF files needs the extra gguf: pip install 'lenience[gguf]'"


def is_named(source: str) -> bool:
    """Return True if a source names a GGUF file."""
    return source.lower().endswith(SUFFIX)


def located(source: str, role: str) -> tuple[str, dict[str, str]]:
    """Return the folder or Hub name for from_pretrained, and its `gguf_file` argument.

    A source is a path, "models/file.gguf", or a file in a Hub repository, "org/repo:file.gguf".
    Raises InputError if the file is missing or not a GGUF file, or if the package gguf is missing.
    """
    if find_spec("gguf") is None:
        raise InputError(f"{role} {source!r}: {NEEDS_GGUF}")
    path = Path(source)
    repository, _, name = source.rpartition(":")
    if not path.exists() and repository.count("/") == 1:
        return repository, {"gguf_file": name}
    if not path.is_file():
        fix = "name an existing file, or a file of the Hub as org/repo:file.gguf"
        raise InputError(f"{role} {source!r}: there is no such file; {fix}")
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise InputError(f"{role} {source!r}: is no GGUF file; fetch it again")
    return str(path.parent), {"gguf_file": path.name}


def dequantized(name: str) -> dict[str, Any]:
    """Return the arguments of from_pretrained that dequantise the weights. A model that stays
    quantised can be neither saved nor exported."""
    from transformers import GgufConfig

    config = GgufConfig(gguf_file=name, dequantize=True)
    return {"gguf_file": name, "quantization_config": config}


def dtype_of(dtype: str, device: str) -> str:
    """Return the dtype to load the weights in. GGUF files name none, so "auto" means float32 on a
    CPU and bfloat16 elsewhere."""
    if dtype != "auto":
        return dtype
    return "float32" if str(device) == "cpu" else "bfloat16"
