"""Checkpoints that a serving engine loads: folders and fingerprints."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from lenience.core.identity import checkpoint_fingerprint, tokenizer_fingerprint

weights = lru_cache(checkpoint_fingerprint)
"""Fingerprint of a checkpoint, computed once per process."""


@lru_cache
def vocabulary(name: str, revision: str | None, trust_remote_code: bool) -> str:
    """Return the fingerprint of a tokenizer, computed once per process."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        name, revision=revision, trust_remote_code=trust_remote_code
    )
    return tokenizer_fingerprint(tokenizer)


def folder_of(name: str, revision: str | None, cache: str | None) -> Path:
    """Return the folder of a checkpoint. A model of the Hub is downloaded into the engine's
    cache."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name,
            revision=revision,
            cache_dir=cache,
            allow_patterns=["*.safetensors", "config.json"],
        )
    )
