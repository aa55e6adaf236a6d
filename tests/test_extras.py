"""The base install: what works where the packages of extras are missing, and what is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MISSING = (
    "matplotlib",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "pyarrow",
    "math_verify",
)
WITHOUT = f"""
import sys
sys.modules.update(dict.fromkeys({MISSING}))
from lenience.cli import main
main(sys.argv[1:])
"""


def without_extras(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_comparison_without_extras_says_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "compared"
    short = ["--limit", 2, "--timed", 1, "--repeats", 1, "--max-new-tokens", 20]
    short += ["--window", 4, "--rule", "exact"]
    done = without_extras("compare", "--out", out, *short)
    assert done.returncode == 0, done.stderr
    assert (
        "decoding runs in PyTorch" in done.stderr
        and "pip install 'lenience[onnx]'" in done.stderr
    )
    assert "pip install 'lenience[plots]'" in done.stderr
    page = (out / "report.html").read_text()
    assert "pip install 'lenience[plots]'" in page and "<svg" not in page
    assert not (out / "frontier.svg").exists()


def test_compiling_without_its_extra_warns_and_decodes() -> None:
    done = without_extras(
        "generate", "Ann has 3 apples.", "--compile", "--max-new-tokens", 4
    )
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if "is not compiled" in line]
    assert len(warned) == 2 and all(
        "pip install 'lenience[onnx]'" in line for line in warned
    )
