"""Measure everything that only a GPU can tell, within minutes.

    python benchmarks/gpu.py                      all steps, at most 9 minutes, into gpu/
    python benchmarks/gpu.py --only right fast    some steps: right, windows, fast, scale,
                                                  serving
    python benchmarks/gpu.py --toy                a dry run at toy size, also on a CPU

Each result is appended to OUT/results.jsonl as soon as it is measured. A second call skips what is
there, what failed too, unless --retry. `tools/gpu_wheels.sh` collects the wheels for a machine that
has PyTorch and transformers but no package index, and SmolLM2's file in parts. `python
benchmarks/gpu_report.py OUT` writes the results into docs/performance.md.

- right: greedy answers against transformers' own, for plain and recorded passes, batches, trees,
  sliding windows and drafters, in float32 without TF32 and in bfloat16. In bfloat16 answers that
  part at a near-tie are counted apart.
- windows: milliseconds of a forward pass over 1 to 64 tokens and over trees, for targets of 0.1, 1
  and 8 billion parameters, with the bound that the memory's bandwidth sets.
- fast: tokens per second on the built-in pair, plain and recorded, by batch size, next to
  transformers' assisted generation and prompt lookup.
- scale: a target of 63 million parameters trained on the built-in task, then mined, judged,
  compared, tuned and certified; with --parts the same with SmolLM2.
- serving: the built-in pair inside vLLM and SGLang where they are installed: plain, strict, lenient
  and judged, with and without asynchronous scheduling.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from gpu_bench import Bench, Item
from gpu_right import right
from gpu_scale import scale
from gpu_serving import serving
from gpu_speed import fast, windows

STEPS: dict[str, tuple[float, Callable[[Bench], Iterator[Item]]]] = {
    "right": (2.0, right),
    "windows": (1.0, windows),
    "fast": (2.0, fast),
    "scale": (4.0, scale),
    "serving": (4.0, serving),
}
"""Shares of the time and functions of the steps, in the order of their worth."""


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="minutes of all steps"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu"), help="folder of the results"
    )
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument(
        "--parts", type=Path, help="folder with the parts of SmolLM2's file"
    )
    parser.add_argument(
        "--retry", action="store_true", help="measure again what failed"
    )
    parser.add_argument("--toy", action="store_true", help="toy sizes, also on a CPU")
    return parser


def main() -> None:
    given = (parser := options()).parse_args()
    if not torch.cuda.is_available() and not given.toy:
        parser.error(
            "no CUDA device is available; --toy runs all steps at toy size on a CPU"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(given.out, device, given.toy, given.parts, given.retry)
    bench.begin()
    ends = time.monotonic() + 60 * given.minutes
    total = sum(STEPS[step][0] for step in given.only)
    until = time.monotonic()
    for step in given.only:
        share, items = STEPS[step]
        until += 60 * given.minutes * share / total
        if not bench.run(step, items(bench), until):
            begin_anew(max(0.0, ends - time.monotonic()) / 60)


def begin_anew(minutes: float) -> None:
    """Start this command again in place of this process, whose device is lost, for the minutes that
    are left."""
    arguments = [argument for argument in sys.argv if argument != "--retry"]
    os.execv(
        sys.executable, [sys.executable, *arguments, "--minutes", f"{minutes:.2f}"]
    )


if __name__ == "__main__":
    main()
