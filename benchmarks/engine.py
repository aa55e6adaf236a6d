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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from recording import recorded
from rich.console import Console
from rich.progress import track

from lenience.core.profile import Profile
from lenience.decoding.loading import load_pair
from lenience.decoding.machine import machine
from lenience.decoding.pair import Pair
from lenience.heads.head import Head, Inputs
from lenience.tasks import WordMath, take

NEW = 160
UNITS = 128  # of a judge's hidden layer


def transformers_generate(
    pair: Pair, prompts: list[list[int]], window: int | None
) -> int:
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
        out = pair.target.model.generate(
            ids, attention_mask=torch.ones_like(ids), **options
        )
        tokens += out.shape[1] - len(prompt)
    return tokens


def ours(
    pair: Pair, prompts: list[list[int]], size: int, profile: Profile, **options: Any
) -> int:
    outs = pair.generate_batch(
        prompts, batch_size=size, max_new_tokens=NEW, profile=profile, **options
    )
    return sum(len(out.tokens) for out in outs)


def idle_judge(pair: Pair, inputs: Inputs, folder: Path) -> str:
    """Return a judge with a hidden layer that reads `inputs` and accepts nothing, so that its rule
    does what `exact` does and a judge costs."""
    width = inputs.width(
        {model: getattr(pair, model).hidden_size for model in inputs.models}
    )
    layer = torch.zeros(width, UNITS), torch.zeros(UNITS)
    head = Head(torch.zeros(UNITS), 0.0, inputs, 2.0, pair.fingerprints, layer=layer)
    head.save(folder)
    return f"judge:{folder}"


@dataclass(frozen=True)
class Decoder:
    """One of what is compared."""

    run: Callable[[Profile], int]
    """Answers the prompts and returns the number of new tokens."""
    prompts: int


def check_identical(
    pairs: Sequence[tuple[Pair, int]], prompts: list[list[int]], window: int
) -> None:
    """Fail where greedy decoding depends on how it is done; `pairs` come with batch sizes."""
    alone = pairs[0][0].generate_batch(prompts, rule="target", max_new_tokens=NEW)
    for pair, size in pairs:
        outs = pair.generate_batch(
            prompts, batch_size=size, max_new_tokens=NEW, rule="exact", window=window
        )
        assert [out.tokens for out in outs] == [out.tokens for out in alone]


def decoders_of(
    plain: Pair, fast: Pair, prompts: list[list[int]], window: int, batch: int
) -> tuple[dict[str, Decoder], int | Literal["auto"]]:
    """Return what is compared, by name; and the window that was picked."""
    few = prompts[:8]
    picked = fast.settle(few, max_new_tokens=NEW, rule="exact", window="auto").window

    def one_by_one(
        pair: Pair, rule: str, window: int | Literal["auto"] = window
    ) -> Decoder:
        options = {"rule": rule, "window": window}
        return Decoder(lambda profile: ours(pair, few, 1, profile, **options), len(few))

    def together(pair: Pair) -> Decoder:
        options = {"rule": "exact", "window": window}
        return Decoder(
            lambda profile: ours(pair, prompts, batch, profile, **options), len(prompts)
        )

    def theirs(window: int | None) -> Decoder:
        return Decoder(lambda _: transformers_generate(plain, few, window), len(few))

    folder = Path(tempfile.mkdtemp())
    read = {
        "target's states": Inputs(("target",)),
        "both models' states": Inputs(),
        "both models' states and 12 tokens ahead": Inputs(ahead=12),
    }
    judges = {
        f"compiled, judge of {name}": one_by_one(
            fast, idle_judge(fast, inputs, folder / name)
        )
        for name, inputs in read.items()
    }
    decoders = {
        "transformers, greedy": theirs(None),
        "transformers, assisted": theirs(window),
        "plain, exact": one_by_one(plain, "exact"),
        "compiled, target alone": one_by_one(fast, "target"),
        "compiled, exact": one_by_one(fast, "exact"),
        "compiled, exact, picked window": one_by_one(fast, "exact", picked),
        **judges,
        f"plain, exact, batch {batch}": together(plain),
        f"compiled, exact, batch {batch}": together(fast),
    }
    return decoders, picked


def measure(
    decoders: Mapping[str, Decoder], repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[tuple[Profile, float]]]]:
    """Return each decoder's tokens per second in each repeat, and its profile with its seconds.
    Decoders take turns after a warm-up."""
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    profiles: dict[str, list[tuple[Profile, float]]] = {name: [] for name in decoders}
    for repeat in track(range(repeats + 1), "repeats", console=Console(stderr=True)):
        for name, decoder in decoders.items():
            profile = Profile()
            began = time.perf_counter()
            tokens = decoder.run(profile)
            seconds = time.perf_counter() - began
            if repeat:  # the first is a warm-up
                speeds[name].append(tokens / seconds)
                profiles[name].append((profile, seconds))
    return speeds, profiles


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--window", type=int, default=8, help="the draft window of all")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    threads_help = "of torch; on small models one is faster than two"
    parser.add_argument("--threads", type=int, default=1, help=threads_help)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    plain = load_pair(compile=False)
    fast = load_pair(compile=True)
    samples = take(WordMath(), "test", given.prompts)
    prompts = [plain.target.encode(sample.prompt) for sample in samples]
    check_identical([(plain, 1), (fast, 1), (fast, given.batch)], prompts, given.window)
    decoders, picked = decoders_of(plain, fast, prompts, given.window, given.batch)
    speeds, profiles = measure(decoders, given.repeats)
    figures = {
        name: about(name, speeds, profiles[name], decoder.prompts)
        for name, decoder in decoders.items()
    }
    how = {
        "machine": machine(fast),
        "window": given.window,
        "picked_window": picked,
        "new_tokens": NEW,
        "repeats": given.repeats,
        "torch_threads": given.threads,
    }
    print(json.dumps(recorded({**how, "decoders": figures}), indent=1))


def about(
    name: str,
    speeds: dict[str, list[float]],
    profiles: list[tuple[Profile, float]],
    prompts: int,
) -> dict[str, Any]:
    """Return the figures of one decoder."""
    figures: dict[str, Any] = {
        "prompts": prompts,
        "tokens_per_second": round(float(np.median(speeds[name])), 1),
    }
    for base in ("transformers, assisted", "transformers, greedy"):
        times = np.array(speeds[name]) / np.array(speeds[base])
        figures[f"times {base}"] = [
            round(float(f(times)), 2) for f in (np.median, np.min, np.max)
        ]
    if not profiles[0][0].cycles:
        return figures
    in_passes = np.array(
        [
            profile.seconds["draft"] + profile.seconds["target"]
            for profile, _ in profiles
        ]
    )
    in_cycles = np.array([sum(profile.seconds.values()) for profile, _ in profiles])
    in_all = np.array([seconds for _, seconds in profiles])
    figures["share_in_passes"] = round(float(np.median(in_passes / in_all)), 3)
    figures["cycle_share_outside_passes"] = round(
        float(np.median(1 - in_passes / in_cycles)), 3
    )
    for part in profiles[0][0].seconds:
        each = [1e3 * profile.seconds[part] / profile.cycles for profile, _ in profiles]
        figures[f"{part}, ms a cycle"] = round(float(np.median(each)), 3)
    return figures


if __name__ == "__main__":
    main()
