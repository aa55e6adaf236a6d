"""What drafters and trees bring on the built-in pair, strictly, one by one. Prints one JSON object.

    python recipes/built_in_heads.py --kind eagle --answers 2000 --epochs 8 --work heads-work
    python benchmarks/drafters.py --eagle heads-work/eagle

Decoders take turns on the same prompts; every answer is asserted to be
the target's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from itertools import islice
from statistics import median
from typing import Any

from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.evaluation.table import machine
from lenience.tasks import WordMath

NEW = 160
WINDOWS = (2, 3, 4, 6, 8, 16)


def decoders(eagle: str | None = None) -> dict[str, dict[str, Any]]:
    """What is compared, by name; `eagle` is a folder of EAGLE's model for the built-in target."""
    found: dict[str, dict[str, Any]] = {"target": {"rule": "target"}}
    drafters = {"model": WINDOWS, "ngram": (2, 4, 8), "suffix": (4, 8), "medusa": (2, 3, 4)}
    if eagle is not None:
        drafters["eagle"] = (3, 4, 6, 8)
    trees = ("dynamic:8", "dynamic:16")
    for drafter, windows in drafters.items():
        named = f"eagle:{eagle}" if drafter == "eagle" else drafter
        for window in windows:
            found[f"{drafter}, window {window}"] = {"drafter": named, "window": window}
        for tree in () if drafter == "ngram" else trees:
            options = {"drafter": named, "tree": tree, "window": 16}
            found[f"{drafter}, {tree}"] = options
    found["model, planned:16"] = {"drafter": "model", "tree": "planned:16", "window": 16}
    for joined in ("ngram|model", "ngram>model", "model:2+ngram", "exit:6", "skip:4,5"):
        found[f"{joined}, window 4"] = {"drafter": joined, "window": 4}
    return found


def measure(
    pair: Pair, prompts: list[str], repeats: int, decoders: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Tokens per pass and per second of each decoder, by name."""
    speeds: dict[str, list[float]] = defaultdict(list)
    about: dict[str, dict[str, Any]] = {}
    plain = [pair.generate(prompt, rule="target", max_new_tokens=NEW).tokens for prompt in prompts]
    for turn in range(repeats + 1):
        for name, options in decoders.items():
            asked = {"rule": "exact", "max_new_tokens": NEW, **options}
            few = prompts[: 5 if turn == 0 else None]  # the first turn warms up
            began = time.perf_counter()
            outs = [pair.generate(prompt, **asked) for prompt in few]
            seconds = time.perf_counter() - began
            assert [out.tokens for out in outs] == plain[: len(few)], name
            if turn == 0:
                continue
            tokens = sum(len(out.tokens) for out in outs)
            speeds[name].append(tokens / seconds)
            passes = sum(out.target_passes for out in outs)
            drafted = sum(out.draft_passes for out in outs)
            about[name] = {
                "tokens_per_pass": tokens / passes,
                "draft_passes_per_pass": drafted / passes,
            }
    return {
        name: {**about[name], "tokens_per_second": median(of), "range": [min(of), max(of)]}
        for name, of in speeds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eagle", help="a folder that `recipes/built_in_heads.py` made")
    given = parser.parse_args()
    pair = load_pair(compile=True)
    prompts = [sample.prompt for sample in islice(WordMath().samples("test"), given.prompts)]
    rows = measure(pair, prompts, given.repeats, decoders(given.eagle))
    print(json.dumps({"machine": machine(pair), "prompts": len(prompts), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
