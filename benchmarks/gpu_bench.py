"""The record of benchmarks/gpu.py: one line per measurement, written as soon as it is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from lenience.core.errors import first_line

ATTEMPTS = 2
"""Number of times that a measurement is begun which ends its process each time."""
Result = dict[str, Any]
Item = tuple[str, Callable[[], Result]]
"""A measurement: its key and the function that makes it."""


class Skipped(Exception):
    """A measurement that cannot be made on this machine; its message says why."""


@dataclass
class Bench:
    """The settings of a call, and the results so far."""

    out: Path
    device: torch.device
    toy: bool
    parts: Path | None = None
    """Folder with the parts of SmolLM2's GGUF file, if it was brought over."""
    retry: bool = False
    """Whether what failed is measured again."""
    done: set[str] = field(default_factory=set)
    """Keys that are not measured again."""

    def begin(self) -> None:
        """Read the results of earlier calls, and write a line about this machine."""
        self.out.mkdir(parents=True, exist_ok=True)
        begun = Counter(row["key"] for row in self.results() if row.get("begun"))
        for row in self.results():
            kept = row.get("begun") is None and "failed" not in row
            if kept or (
                not self.retry and ("failed" in row or begun[row["key"]] >= ATTEMPTS)
            ):
                self.done.add(row["key"])
        self.write("machine", about_machine(self.device))

    @property
    def path(self) -> Path:
        return self.out / "results.jsonl"

    def results(self) -> list[Result]:
        """Return the rows written so far; a row that a cut left half-written is left out."""
        rows = []
        for line in (
            self.path.read_text(encoding="utf-8").split("\n")
            if self.path.exists()
            else ()
        ):
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return rows

    def write(self, key: str, result: Result) -> None:
        """Append a row; it begins a line of its own, whatever a cut left before it."""
        cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut + json.dumps({"key": key, **result}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def run(self, step: str, items: Iterator[Item], until: float) -> bool:
        """Make a step's measurements until the time is over. A failure is written and does not end
        the step. Returns False if an error left the device unusable for this process."""
        for name, measure in items:
            key = f"{step}/{name}"
            if key in self.done:
                continue
            if time.monotonic() > until:
                print(f"{step}: no time left at {name}", flush=True)
                return True
            self.write(key, {"begun": True})
            began = time.monotonic()
            result = _result_of(measure)
            result["seconds"] = round(time.monotonic() - began, 2)
            self.write(key, result)
            print(key, json.dumps(result)[:160], flush=True)
            if "CUDA error" in result.get("failed", ""):
                return False
        return True


def _result_of(measure: Callable[[], Result]) -> Result:
    try:
        return measure()
    except Skipped as why:
        return {"skipped": str(why)}
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return {"skipped": first_line(error)}
    except Exception as error:  # whatever a GPU raises is a result
        return {"failed": f"{type(error).__name__}: {first_line(error)}"}


def about_machine(device: torch.device) -> Result:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": " ".join(sys.argv),
    }


def synchronised(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, up to the end of what it left on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
