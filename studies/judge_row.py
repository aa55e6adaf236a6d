"""What a logistic judge on the target's last state costs, as one more row of the LM head and apart
(AutoJudge, Garipov 2025: "no overhead").

    python studies/judge_row.py OUT [--window 8]

Writes OUT/judge_row.json and prints it. For several sizes of hidden states and vocabularies, random
float32 weights and a window of states: milliseconds of the LM head alone, of the LM head with the
judge as its last row, and of the LM head with the judge as a product of its own; medians, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

SIZES = {
    "built-in pair": (320, 252),
    "SmolLM2-135M": (576, 49152),
    "Llama 3.2 1B": (2048, 128256),
}
"""Hidden size and vocabulary."""
TURNS = 60


@torch.inference_mode()
def costs(hidden: int, vocabulary: int, window: int) -> dict[str, Any]:
    states = torch.randn(window + 1, hidden)
    head = torch.randn(vocabulary, hidden)
    row = torch.randn(1, hidden)
    joined = torch.cat([head, row])
    ways: dict[str, Callable[[], Any]] = {
        "alone": lambda: linear(states, head),
        "one more row": lambda: linear(states, joined),
        "apart": lambda: (linear(states, head), linear(states, row)),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            taken[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(times[5:]) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--window", type=int, default=8)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = [
        {"model": name, "hidden": h, "vocabulary": v, **costs(h, v, given.window)}
        for name, (h, v) in SIZES.items()
    ]
    about = {"window": given.window, "rows": rows}
    write_results(given.out / "judge_row.json", about)
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
