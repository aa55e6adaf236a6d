"""The steps `windows` and `fast` of benchmarks/gpu.py: times of passes, and tokens per second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from gpu_bench import Bench, Item, Result, synchronised
from scale import SHAPES, bandwidth, random_model, weight_bytes

from lenience.core.profile import Profile
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.models.lm import LM
from lenience.models.session import Session
from lenience.tasks import WordMath, take

BILLIONS: dict[str, dict[str, Any]] = {
    "0.1b": {
        "vocab_size": 49152,
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "1b": SHAPES["8b"][1],
    "8b": SHAPES["8b"][0],
}
TOY: dict[str, Any] = {
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = (1, 2, 4, 8, 16, 32, 64)
NODES = (16, 32, 64)


def windows(bench: Bench) -> Iterator[Item]:
    """Time forward passes by the number of tokens, rows and tokens before."""
    shapes = {"toy": TOY} if bench.toy else BILLIONS
    rows = (1, 2) if bench.toy else (1, 8, 32)
    before = (20, 50) if bench.toy else (100, 1000, 8000)
    peak = bandwidth(bench.device) if not bench.toy else 1e9
    for name, shape in shapes.items():
        lm = random_model(
            {**shape, "max_position_embeddings": 16384}, str(bench.device), "target"
        )
        for past in before:
            for batch in rows:
                yield (
                    f"{name}, {batch} rows, {past} tokens before",
                    partial(pass_times, lm, batch, past, peak),
                )
        del lm
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def pass_times(lm: LM, rows: int, past: int, peak: float) -> Result:
    """Return the milliseconds of passes over windows and trees after `past` tokens, whose keys are
    zeros: they take as long as others. The bound is of reading the weights and the keys once."""
    session = Session(lm, rows, past + 2 * max(TOKENS))
    session.read([[1]] * rows)  # makes the cache
    prefix = [1] * past
    for row in session.tokens():
        row[:] = prefix
    told: Result = {"milliseconds": {}, "trees": {}}
    for n in TOKENS:
        told["milliseconds"][n] = _pass_ms(session, prefix, n, None)
    for n in NODES:
        chains = [i - 4 if i >= 4 else -1 for i in range(n)]  # four paths side by side
        told["trees"][n] = _pass_ms(session, prefix, n, chains)
    config = lm.model.config
    key_bytes = (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    )
    key_bytes *= lm.model.dtype.itemsize * rows * past
    told["bound_ms"] = round(1e3 * (weight_bytes(lm) + key_bytes) / peak, 4)
    return told


def _pass_ms(
    session: Session, prefix: list[int], n: int, parents: list[int] | None
) -> float:
    rows = len(session.tokens())
    taken = []
    for turn in range(6):
        tokens = [
            2 + turn
        ] * n  # others than the last turn's, so that nothing is reused
        trees = None if parents is None else [parents] * rows
        sequences = [prefix + tokens] * rows
        read = partial(session.read, sequences, n, parents=trees)
        taken.append(synchronised(read, session.lm.device))
    return round(1e3 * statistics.median(taken[1:]), 4)


OWN_LAYERS = ("strict, exit", "strict, skip")
"""Decoders that draft with layers of the target, whose graphs are exported when first asked for."""


def plain_and_compiled(device: torch.device) -> dict[str, Pair]:
    """Return the built-in pair in PyTorch, and with recorded or exported passes."""
    pairs = {}
    compiled = "recorded" if device.type == "cuda" else "exported"
    for name, compiles in (("plain", False), (compiled, True)):
        pairs[name] = load_pair(device=str(device), dtype="float32", compile=compiles)
    return pairs


def fast(bench: Bench) -> Iterator[Item]:
    """Time decoders of the built-in pair, plain and recorded."""
    pairs = plain_and_compiled(bench.device)
    samples = take(WordMath(), "test", 8 if bench.toy else 128)
    prompts = [pairs["plain"].target.encode(sample.prompt) for sample in samples]
    decoders: dict[str, dict[str, Any]] = {
        "target alone": {"rule": "target"},
        "strict": {"window": 8},
        "strict, ngram": {"drafter": "ngram", "window": 8},
        "strict, suffix": {"drafter": "suffix", "window": 8},
        "strict, medusa": {"drafter": "medusa", "window": 3},
        "strict, exit": {"drafter": "exit:4", "window": 4},
        "strict, skip": {"drafter": "skip:3,4,5,6", "window": 4},
        "strict, tree": {"tree": "dynamic:16", "window": 8},
        "judge": {"rule": "judge@0.9985", "window": 8},
    }
    for batch in (2,) if bench.toy else (1, 8, 32, 128):
        for how, pair in pairs.items():
            for name, given in decoders.items():
                # a dry run exports no graph that the package does not hold
                if bench.toy and how == "exported" and name in OWN_LAYERS:
                    continue
                asked = prompts[: 2 if bench.toy else max(8, batch)]
                options = {
                    "batch_size": batch,
                    "max_new_tokens": 16 if bench.toy else 128,
                    **given,
                }
                yield (
                    f"{name}, {how}, batch {batch}",
                    partial(speed, pair, asked, options, 1 if bench.toy else 3),
                )
    theirs: dict[str, dict[str, Any]] = {
        "transformers, greedy": {},
        "transformers, assisted": {"assistant_model": pairs["plain"].draft},
        "transformers, prompt lookup": {"prompt_lookup_num_tokens": 8},
    }
    for name, given in theirs.items():
        yield (
            name,
            partial(
                their_speed,
                pairs["plain"],
                prompts[: 1 if bench.toy else 8],
                {"max_new_tokens": 16 if bench.toy else 128, **given},
            ),
        )


def speed(
    pair: Pair, prompts: list[list[int]], given: Mapping[str, Any], turns: int
) -> Result:
    """Return tokens per second, the median of `turns` after a warm-up, and from a turn with a
    profile the share of the time outside the models and the milliseconds of the rule."""
    speeds = []
    for _ in range(1 + turns):
        began = time.perf_counter()
        outs = pair.generate_batch(prompts, **given)
        speeds.append(
            sum(len(out.tokens) for out in outs) / (time.perf_counter() - began)
        )
    profile = Profile()
    pair.generate_batch(prompts, profile=profile, **given)
    in_models = sum(profile.seconds.get(name, 0.0) for name in ("target", "draft"))
    tokens = sum(len(out.tokens) for out in outs)
    passes = sum(out.target_passes for out in outs)
    return {
        "tokens_per_second": round(statistics.median(speeds[1:]), 1),
        "turns": [round(speed, 1) for speed in speeds[1:]],
        "tokens_per_pass": round(tokens / passes, 3),
        "outside_the_models": round(1 - in_models / sum(profile.seconds.values()), 4),
        "rule_ms": round(
            1e3 * profile.seconds.get("rule", 0.0) / max(profile.cycles, 1), 4
        ),
    }


def their_speed(
    pair: Pair, prompts: list[list[int]], options: Mapping[str, Any]
) -> Result:
    """Return the tokens per second of transformers' own generation, one prompt at a time."""
    lm = options.get("assistant_model")
    given = {**options, **({"assistant_model": lm.model} if lm else {})}
    speeds = []
    for _ in range(3):
        began = time.perf_counter()
        tokens = 0
        for prompt in prompts:
            ids = torch.tensor([prompt], device=pair.target.device)
            out = pair.target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                **given,
            )
            tokens += out.shape[1] - len(prompt)
        speeds.append(tokens / (time.perf_counter() - began))
    return {"tokens_per_second": round(statistics.median(speeds[1:]), 1)}
