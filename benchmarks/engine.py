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


class Timed:
    """An ONNX Runtime session that counts the seconds of its passes."""

    def __init__(self, session: Any):
        self.session, self.seconds = session, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def run_with_iobinding(self, binding: Any) -> None:
        began = time.perf_counter()
        self.session.run_with_iobinding(binding)
        self.seconds += time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--window", type=int, default=8, help="the draft window of all")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch; on small models one is faster than two")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    plain, fast = load_pair(compile=False), load_pair(compile=True)
    passes = [Timed(lm.graph.session) for lm in (fast.target, fast.draft)]
    for lm, timed in zip((fast.target, fast.draft), passes):
        lm.graph.session = timed
    prompts = [plain.target.encode(sample.prompt) for sample in take(WordMath(), "test", given.prompts)]
    few = prompts[:8]
    exact = {"rule": "exact", "window": given.window}
    wanted = [out.tokens for out in plain.generate_batch(prompts, rule="target", max_new_tokens=NEW)]
    for pair, size in ((plain, 1), (fast, 1), (fast, given.batch)):
        outs = pair.generate_batch(prompts, batch_size=size, max_new_tokens=NEW, **exact)
        assert [out.tokens for out in outs] == wanted, "greedy decoding is token-identical however it is done"
    decoders: dict[str, tuple[Callable[[], int], int]] = {
        "transformers, greedy": (lambda: transformers_generate(plain, few, None), len(few)),
        "transformers, assisted": (lambda: transformers_generate(plain, few, given.window), len(few)),
        "plain, exact": (lambda: ours(plain, few, 1, **exact), len(few)),
        "compiled, target alone": (lambda: ours(fast, few, 1, rule="target"), len(few)),
        "compiled, exact": (lambda: ours(fast, few, 1, **exact), len(few)),
        f"plain, exact, batch {given.batch}": (lambda: ours(plain, prompts, given.batch, **exact), len(prompts)),
        f"compiled, exact, batch {given.batch}": (lambda: ours(fast, prompts, given.batch, **exact), len(prompts)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    shares: dict[str, list[float]] = {name: [] for name in decoders}
    for repeat in track(range(given.repeats + 1), "repeats"):
        for name, (run, _) in decoders.items():
            began, before = time.perf_counter(), sum(timed.seconds for timed in passes)
            tokens = run()
            seconds = time.perf_counter() - began
            if repeat:  # the first is a warm-up
                speeds[name].append(tokens / seconds)
                shares[name].append((sum(timed.seconds for timed in passes) - before) / seconds)
    base = np.array(speeds["transformers, assisted"])
    told = {
        name: {
            "prompts": decoders[name][1],
            "tokens_per_second": round(float(np.median(values)), 1),
            "times_assisted": round(float(np.median(np.array(values) / base)), 2),
            "range": [round(float(end), 2) for end in ((np.array(values) / base).min(), (np.array(values) / base).max())],
            **({"share_in_passes": round(float(np.median(shares[name])), 3)} if name.startswith("compiled") else {}),
        }
        for name, values in speeds.items()
    }
    about = {"machine": machine(fast), "window": given.window, "new_tokens": NEW, "repeats": given.repeats}
    print(json.dumps({**about, "torch_threads": given.threads, "decoders": told}, indent=1))


if __name__ == "__main__":
    main()
