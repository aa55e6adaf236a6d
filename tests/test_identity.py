"""What a server knows checkpoints and tokenizers by, without loading a model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lenience.core.errors import InputError
from lenience.core.identity import checkpoint_fingerprint
from lenience.decoding.pair import Pair


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "mistral"])
def test_a_checkpoint_is_known_as_the_model_loaded_from_it(
    name: str,
    checkpoints: Callable[[str], tuple[str, str]],
    pairs: Callable[[str], Pair],
) -> None:
    target, draft = (
        checkpoint_fingerprint(Path(folder)) for folder in checkpoints(name)
    )
    assert {"target": target, "draft": draft}.items() <= pairs(
        name
    ).fingerprints.items()
    assert target != draft


def test_a_folder_without_whole_weights_is_refused(
    tmp_path: Path, checkpoints: Callable[[str], tuple[str, str]]
) -> None:
    with pytest.raises(InputError, match="has no safetensors file"):
        checkpoint_fingerprint(tmp_path)
    folder = Path(shutil.copytree(checkpoints("llama")[0], tmp_path / "torn"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot be read"):
        checkpoint_fingerprint(folder)
