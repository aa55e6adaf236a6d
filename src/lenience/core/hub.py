"""Heads and drafters on the Hugging Face Hub, as "hf:org/name". No torch.

$LENIENCE_HUB may name a local folder that replaces the Hub.
"""

from __future__ import annotations

import os
import re
import shutil
from functools import lru_cache
from pathlib import Path

from lenience.core.errors import InputError, RunError, first_line
from lenience.core.files import written

PREFIX = "hf:"
FETCHED = ("*.json", "*.safetensors", "medusa_lm_head.pt", "pytorch_model.bin")
"""Patterns of the files fetched from a repository; the last two are layouts of published
drafters."""


def is_on_hub(path: str | Path) -> bool:
    return str(path).startswith(PREFIX)


def local(path: str | Path) -> Path:
    """Return the local folder of a path; a path on the Hub is downloaded first. Raises InputError
    if a Hub name is invalid or its repository cannot be fetched."""
    if not is_on_hub(path):
        return Path(path)
    name = _checked(str(path).removeprefix(PREFIX), str(path))
    served = os.environ.get("LENIENCE_HUB")
    if served:
        folder = Path(served) / name
        if not folder.is_dir():
            raise InputError(f"{path}: is missing in LENIENCE_HUB, {served}")
        return folder
    try:
        return _fetched(name)
    except Exception as error:  # network, Hub or missing repository
        raise InputError(f"{path}: cannot be fetched ({first_line(error)})") from error


@lru_cache(maxsize=64)
def _fetched(name: str) -> Path:
    """Return the local folder of a repository. It is fetched once per process, so it stays the
    same."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=list(FETCHED)))


def upload(folder: Path, name: str, private: bool) -> str:
    """Upload a folder's files to the Hub as "org/name" and return their address. Raises InputError
    for an invalid name, and RunError if the upload fails."""
    name = _checked(name, name)
    served = os.environ.get("LENIENCE_HUB")
    if served:
        place = Path(served) / name
        with written(place):
            shutil.copytree(folder, place, dirs_exist_ok=True)
        return str(place)
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        made = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:
        fix = "log in with `hf auth login`, or check the network"
        raise RunError(
            f"{name}: cannot be pushed ({first_line(error)}); {fix}"
        ) from error
    return str(made)


def _checked(name: str, shown: str) -> str:
    if not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", name):
        raise InputError(f"{shown}: is not a Hub name; write org/name")
    return name
