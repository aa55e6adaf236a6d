"""The engine's speed on the built-in pair against transformers' own decoding. Prints one JSON
object.

    python benchmarks/engine.py

Every figure is a ratio of tokens per second measured in one run, the decoders taking turns on the
same prompts; medians over repeats after a warm-up, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from lenience.core.profile import Profile
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.evaluation.table import machine
from lenience.heads.head import Head, Inputs
from lenience.tasks import WordMath, take

NEW = 160


def transformers_generate(pair: Pair, prompts: list[list[int]], window: int | None) -> int:
    """Answer one by one with transformers: plain greedy, or assisted at a window; returns the
    number of new tokens."""
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
    if window is not None:
        assert pair.draft
        draft = pair.draft.model
        assert draft.generation_config is not None
        draft.generation_config.num_assistant_tokens = window
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = draft
    tokens = 0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = pair.target.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        tokens += out.shape[1] - len(prompt)
    return tokens


def ours(pair: Pair, prompts: list[list[int]], size: int, profile: Profile, **options: Any) -> int:
    outs = pair.generate_batch(
        prompts, batch_size=size, max_new_tokens=NEW, profile=profile, **options
    )
    return sum(len(out.tokens) for out in outs)


def idle_judge(pair: Pair, models: tuple[str, ...], folder: Path) -> str:
    """A judge that reads the states of `models` and accepts nothing, so that its rule does what
    `exact` does and a judge costs."""
    inputs = Inputs(models)
    width = sum(getattr(pair, model).hidden_size for model in models) * len(inputs.tokens)
    Head(torch.zeros(width), 0.0, inputs, 2.0, pair.fingerprints).save(folder)
    return f"judge:{folder}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--window", type=int, default=8, help="the draft window of all")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; on small models one is faster than two"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    plain, fast = load_pair(compile=False), load_pair(compile=True)
    prompts = [
        plain.target.encode(sample.prompt) for sample in take(WordMath(), "test", given.prompts)
    ]
    few = prompts[:8]
    exact = {"rule": "exact", "window": given.window}
    wanted = [
        out.tokens for out in plain.generate_batch(prompts, rule="target", max_new_tokens=NEW)
    ]
    for pair, size in ((plain, 1), (fast, 1), (fast, given.batch)):
        outs = pair.generate_batch(prompts, batch_size=size, max_new_tokens=NEW, **exact)
        assert [out.tokens for out in outs] == wanted, (
            "greedy decoding is token-identical however it is done"
        )
    few_picked = {**exact, "window": fast.pick_window(few, max_new_tokens=NEW)}
    folder = Path(tempfile.mkdtemp())
    judges = {
        name: {**exact, "rule": idle_judge(fast, models, folder / name)}
        for name, models in (("target's", ("target",)), ("both models'", ("target", "draft")))
    }
    decoders: dict[str, tuple[Callable[[Profile], int], int]] = {
        "transformers, greedy": (lambda _: transformers_generate(plain, few, None), len(few)),
        "transformers, assisted": (
            lambda _: transformers_generate(plain, few, given.window),
            len(few),
        ),
        "plain, exact": (lambda profile: ours(plain, few, 1, profile, **exact), len(few)),
        "compiled, target alone": (
            lambda profile: ours(fast, few, 1, profile, rule="target"),
            len(few),
        ),
        "compiled, exact": (lambda profile: ours(fast, few, 1, profile, **exact), len(few)),
        "compiled, exact, picked window": (
            lambda profile: ours(fast, few, 1, profile, **few_picked),
            len(few),
        ),
        **{
            f"compiled, judge of {name} states": (
                lambda profile, judged=judged: ours(fast, few, 1, profile, **judged),
                len(few),
            )
            for name, judged in judges.items()
        },
        f"plain, exact, batch {given.batch}": (
            lambda p: ours(plain, prompts, given.batch, p, **exact),
            len(prompts),
        ),
        f"compiled, exact, batch {given.batch}": (
            lambda p: ours(fast, prompts, given.batch, p, **exact),
            len(prompts),
        ),
    }
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    profiles: dict[str, list[tuple[Profile, float]]] = {name: [] for name in decoders}
    for repeat in track(range(given.repeats + 1), "repeats", console=Console(stderr=True)):
        for name, (run, _) in decoders.items():
            profile, began = Profile(), time.perf_counter()
            tokens = run(profile)
            seconds = time.perf_counter() - began
            if repeat:  # the first is a warm-up
                speeds[name].append(tokens / seconds)
                profiles[name].append((profile, seconds))
    told = {name: about(name, speeds, profiles[name], decoders[name][1]) for name in decoders}
    how = {
        "machine": machine(fast),
        "window": given.window,
        "picked_window": few_picked["window"],
        "new_tokens": NEW,
        "repeats": given.repeats,
        "torch_threads": given.threads,
    }
    print(json.dumps({**how, "decoders": told}, indent=1))


def about(
    name: str, speeds: dict[str, list[float]], profiles: list[tuple[Profile, float]], prompts: int
) -> dict[str, Any]:
    told: dict[str, Any] = {
        "prompts": prompts,
        "tokens_per_second": round(float(np.median(speeds[name])), 1),
    }
    for base in ("transformers, assisted", "transformers, greedy"):
        times = np.array(speeds[name]) / np.array(speeds[base])
        told[f"times {base}"] = [round(float(f(times)), 2) for f in (np.median, np.min, np.max)]
    if profiles[0][0].cycles:
        passes = [profile.seconds["draft"] + profile.seconds["target"] for profile, _ in profiles]
        within = [sum(profile.seconds.values()) for profile, _ in profiles]
        told["share_in_passes"] = round(
            float(np.median([p / all_ for p, (_, all_) in zip(passes, profiles)])), 3
        )
        told["cycle_share_outside_passes"] = round(
            float(np.median([1 - p / w for p, w in zip(passes, within)])), 3
        )
        for part in profiles[0][0].seconds:
            told[f"{part}, ms a cycle"] = round(
                1e3
                * float(
                    np.median([profile.seconds[part] / profile.cycles for profile, _ in profiles])
                ),
                3,
            )
    return told


if __name__ == "__main__":
    main()
