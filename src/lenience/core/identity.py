"""Fingerprints of models and tokenizers, and searches of a tokenizer's vocabulary."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Parameter

from lenience.core.errors import InputError, first_line
from lenience.core.files import digest_bytes, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def weights_fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Return a hash that identifies weights in whatever dtype they are loaded. It covers each
    parameter's name, shape and a sample of its numbers, rounded to bfloat16. Of quantised weights
    it covers each part, such as the integers and their scales."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in _plain(weights):
        flat = value.detach().flatten()
        some = (
            flat[:: max(1, flat.numel() // 64)]
            .to(torch.float32)
            .to(torch.bfloat16)
            .view(torch.int16)
        )
        digest.update(
            f"{name}{tuple(value.shape)}".encode() + some.cpu().numpy().tobytes()
        )
    return digest.hexdigest()


def _plain(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights by name, in order; a tensor that is made of others (torchao) as its parts."""
    for name in sorted(weights):
        value = weights[name]
        parts = getattr(value, "__tensor_flatten__", None)
        if parts is None or type(value) in (Tensor, Parameter):
            yield name, value
            continue
        names, _ = parts()
        yield from _plain({f"{name}.{part}": getattr(value, part) for part in names})


def checkpoint_fingerprint(folder: Path) -> str:
    """Return the `weights_fingerprint` of a model in a folder of safetensors files, without loading
    the model.

    The result differs for architectures whose parameters have other names in files than in memory.
    Raises InputError if the files are missing or broken.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise InputError(
            f"{folder}: has no safetensors file, which identifies the model"
        )
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, "pt")) for path in paths]
            named = {name: file for file in files for name in file.keys()}  # noqa: SIM118
            return weights_fingerprint(_Lazy(named, _tied(folder, named)))
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{folder}: its weights cannot be read ({first_line(error)})"
        ) from None


def _tied(folder: Path, named: Mapping[str, Any]) -> dict[str, str]:
    """Map each parameter that the files leave out to the stored parameter it is tied to."""
    config = read_json(folder / "config.json")
    tied = config.get("tie_word_embeddings", True) and "lm_head.weight" not in named
    embeddings = []
    for name in named:
        if name.endswith(("embed_tokens.weight", "wte.weight")):
            embeddings.append(name)
    return {"lm_head.weight": embeddings[0]} if tied and embeddings else {}


class _Lazy(Mapping[str, Tensor]):
    """The parameters of open safetensors files, each read on access."""

    def __init__(self, files: Mapping[str, Any], twins: Mapping[str, str]):
        self.files = files
        self.twins = twins

    def __getitem__(self, name: str) -> Tensor:
        stored = self.twins.get(name, name)
        tensor: Tensor = self.files[stored].get_tensor(stored)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter((*self.files, *self.twins))

    def __len__(self) -> int:
        return len(self.files) + len(self.twins)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash that identifies a tokenizer by its vocabulary and chat template."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    template = getattr(tokenizer, "chat_template", None) or ""
    return digest_bytes((vocabulary + str(template)).encode())


def tokens_with(tokenizer: PreTrainedTokenizerBase, pattern: str, size: int) -> Tensor:
    """Return [size] bool: True for each of the first `size` tokens whose text contains a match of a
    regular expression."""
    texts = tokenizer.batch_decode([[id] for id in range(size)])
    return torch.tensor([bool(re.search(pattern, text)) for text in texts])
