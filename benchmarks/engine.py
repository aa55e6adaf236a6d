"""The engine's speed on the built-in pair against transformers' own decoding. Prints one JSON object.

    python benchmarks/engine.py

Every figure is a ratio of tokens per second measured in one run, the decoders taking turns on the same prompts; medians
over repeats after a warm-up, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.progress import track

from lenience.compare import machine
from lenience.pair import Pair, load_pair
from lenience.tasks import WordMath, take

NEW = 160


def transformers_generate(pair: Pair, prompts: list[list[int]], window: int | None) -> int:
    """Answer one by one with transformers: plain greedy, or assisted at a window; returns the number of new tokens."""
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
    if window is not None:
        draft = pair.draft.model
        assert draft.generation_config is not None
        draft.generation_config.num_assistant_tokens = window
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = draft
    tokens = 0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = pair.target.model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
        tokens += out.shape[1] - len(prompt)
    return tokens


def ours(pair: Pair, prompts: list[list[int]], size: int, **options: Any) -> int:
    return sum(len(out.tokens) for out in pair.generate_batch(prompts, batch_size=size, max_new_tokens=NEW, **options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--window", type=int, default=8, help="the draft window of both")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    pair = load_pair()
    prompts = [pair.target.encode(sample.prompt) for sample in take(WordMath(), "test", given.prompts)]
    few = prompts[:8]
    exact = {"rule": "exact", "window": given.window}
    decoders: dict[str, tuple[Callable[[], int], int]] = {
        "transformers, greedy": (lambda: transformers_generate(pair, few, None), len(few)),
        "transformers, assisted": (lambda: transformers_generate(pair, few, given.window), len(few)),
        "lenience, target alone": (lambda: ours(pair, few, 1, rule="target"), len(few)),
        "lenience, exact": (lambda: ours(pair, few, 1, **exact), len(few)),
        f"lenience, exact, batch {given.batch}": (lambda: ours(pair, prompts, given.batch, **exact), len(prompts)),
        f"lenience, target alone, batch {given.batch}": (lambda: ours(pair, prompts, given.batch, rule="target"), len(prompts)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    for repeat in track(range(given.repeats + 1), "repeats"):
        for name, (run, _) in decoders.items():
            began = time.perf_counter()
            tokens = run()
            if repeat:  # the first is a warm-up
                speeds[name].append(tokens / (time.perf_counter() - began))
    base = np.array(speeds["transformers, assisted"])
    told = {
        name: {
            "prompts": decoders[name][1],
            "tokens_per_second": float(np.median(values)),
            "times_assisted": float(np.median(np.array(values) / base)),
            "range": [float((np.array(values) / base).min()), float((np.array(values) / base).max())],
        }
        for name, values in speeds.items()
    }
    print(json.dumps({"machine": machine(pair), "window": given.window, "repeats": given.repeats, "decoders": told}))


if __name__ == "__main__":
    main()
