"""The engine on models of real size with random weights, where acceptance is drawn at a set rate.
Prints one JSON object.

    python benchmarks/scale.py                                  # 1 B and a small draft, bfloat16
    python benchmarks/scale.py --shape 8b --batch 1 8 32 --compile   # Llama-3.1-8B and
    Llama-3.2-1B, for a GPU

What the bare forwards allow: the seconds that the passes of a run would take if there were nothing
else, told from passes through `transformers`' own cache that are timed beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from recording import recorded
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from lenience.core.context import Context
from lenience.core.noise import uniform
from lenience.core.profile import Profile
from lenience.core.types import Draft, Reading
from lenience.decoding.machine import machine
from lenience.decoding.pair import Pair
from lenience.models.lm import LM
from lenience.rules.base import Lenient

SHAPES = {
    "1b": (
        {
            "vocab_size": 32000,
            "num_hidden_layers": 16,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        {
            "vocab_size": 32000,
            "num_hidden_layers": 6,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
        },
    ),
    "8b": (
        {
            "vocab_size": 128256,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
        {
            "vocab_size": 128256,
            "num_hidden_layers": 16,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
    ),
}
PROMPT = 200
NEW = 64


@dataclass(frozen=True)
class Synthetic(Lenient):
    """Accept each drafted token with a set probability, whatever it is."""

    rate: float
    name = "synthetic"

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        return (
            uniform(
                ctx.noise_keys(draft.width, "synthetic", device=reading.logits.device)
            )
            < self.rate
        )


def random_model(shape: dict[str, Any], device: str, role: str) -> LM:
    config = LlamaConfig(
        **{"tie_word_embeddings": True, "max_position_embeddings": 4096, **shape},
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    words = Tokenizer(
        WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w0")
    )
    return LM(
        model.eval(),
        PreTrainedTokenizerFast(tokenizer_object=words),
        f"random {role}",
        role,
    )


def seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


class Bare:
    """Passes of a model through transformers' own cache, after a prompt and half of an answer."""

    @torch.inference_mode()
    def __init__(self, lm: LM, prompts: list[list[int]]):
        self.lm = lm
        self.prompts = torch.tensor(prompts, device=lm.device)
        self.cache = DynamicCache(config=lm.model.config)
        before = torch.ones(
            len(prompts), PROMPT + NEW // 2, dtype=torch.long, device=lm.device
        )
        lm.model(before, past_key_values=self.cache, logits_to_keep=1)

    @torch.inference_mode()
    def over(self, tokens: int) -> float:
        """Return seconds of a pass over `tokens` new tokens of each row."""
        ids = self.prompts[:, :tokens]
        took = seconds(
            lambda: self.lm.model(ids, past_key_values=self.cache), self.lm.device
        )
        self.cache.crop(-tokens)
        return took

    @torch.inference_mode()
    def prefill(self) -> float:
        cache = DynamicCache(config=self.lm.model.config)
        return seconds(
            lambda: self.lm.model(
                self.prompts, past_key_values=cache, logits_to_keep=1
            ),
            self.lm.device,
        )


def bandwidth(device: torch.device) -> float:
    """Return bytes a second that summing a large tensor reads."""
    numbers = torch.ones(
        1 << (32 if device.type == "cuda" else 28), dtype=torch.float32, device=device
    )
    return numbers.nbytes / min(seconds(numbers.sum, device) for _ in range(10))


def weight_bytes(lm: LM) -> int:
    return sum(weight.nbytes for weight in lm.model.parameters())


class Figures:
    """Everything is timed in turn, several times, so that ratios are of times that lie side by
    side."""

    def __init__(self, pair: Pair, window: int, rate: float, peak: float):
        """`rate` is the chance that a drafted token is accepted, `peak` the bandwidth."""
        assert pair.draft
        self.pair = pair
        self.draft = pair.draft
        self.window = window
        self.peak = peak
        self.rules = {"plain": "target", "speculative": Synthetic(rate)}
        self.on_gpu = pair.target.device.type == "cuda"
        self.values: dict[str, list[float]] = {}

    def measure(self, rows: int, repeats: int) -> dict[str, Any]:
        """Return medians, smallest and largest of `repeats` turns after a warm-up, in batches of
        `rows`."""
        prompts = [
            [(7 * i + 13 * row) % 1000 + 1 for i in range(PROMPT)]
            for row in range(rows)
        ]
        bare = Bare(self.pair.target, prompts), Bare(self.draft, prompts)
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(repeats + 1):
            passes = self.time_passes(*bare)
            prefill = bare[0].prefill(), bare[1].prefill()
            for name in self.rules:
                self.decode(name, prompts, passes, prefill)
        told: dict[str, Any] = {
            name: [
                round(float(f(values[1:])), 3) for f in (statistics.median, min, max)
            ]
            for name, values in self.values.items()
        }
        self.values.clear()
        if self.on_gpu:
            weights = weight_bytes(self.pair.target) + weight_bytes(self.draft)
            most = torch.cuda.max_memory_allocated()
            told["memory, GiB: peak, weights"] = [
                round(n / 2**30, 2) for n in (most, weights)
            ]
        return {"rows": rows, **told}

    def note(self, name: str, value: float) -> float:
        self.values.setdefault(name, []).append(value)
        return value

    def time_passes(self, target: Bare, draft: Bare) -> dict[int, float]:
        """Return seconds of the target's passes over some numbers of tokens; under 0, of the
        draft's over one."""
        passes = {
            t: self.note(f"target's pass over {t}, ms", 1e3 * target.over(t)) / 1e3
            for t in sorted({1, 8, self.window + 1})
        }
        passes[0] = self.note("draft's pass over 1, ms", 1e3 * draft.over(1)) / 1e3
        self.note("target's pass over 8 to its pass over 1", passes[8] / passes[1])
        bound = weight_bytes(self.pair.target) / self.peak
        self.note("plain pass, of the bandwidth bound", bound / passes[1])
        return passes

    def decode(
        self,
        name: str,
        prompts: list[list[int]],
        passes: dict[int, float],
        prefill: tuple[float, float],
    ) -> None:
        """Answer the prompts by one of the rules."""
        # it would wait for a GPU after each part
        profile = None if self.on_gpu else Profile()
        options: dict[str, Any] = {
            "rule": self.rules[name],
            "window": self.window,
            "max_new_tokens": NEW,
        }
        rows = len(prompts)
        began = time.perf_counter()
        outs = self.pair.generate_batch(
            prompts, batch_size=rows, profile=profile, **options
        )
        took = time.perf_counter() - began
        cycles = max(out.target_passes for out in outs)
        drafts = max(out.draft_passes for out in outs)
        allowed = prefill[0] + (cycles - 1) * passes[self.window + 1 if drafts else 1]
        allowed += prefill[1] + (drafts - 1) * passes[0] if drafts else 0
        tokens = sum(len(out.tokens) for out in outs)
        self.note(f"{name}, tokens/s", tokens / took)
        self.note(f"{name}, tokens per pass", tokens / rows / cycles)
        self.note(f"{name}, of what the bare forwards allow", allowed / took)
        if profile:
            in_passes = profile.seconds["draft"] + profile.seconds["target"]
            outside = 1 - in_passes / sum(profile.seconds.values())
            self.note(f"{name}, outside the passes", outside)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--window", type=int, default=7)
    parser.add_argument(
        "--rate",
        type=float,
        default=0.8,
        help="the chance that a drafted token is accepted",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--compile", action="store_true", help="record passes and replay them, on a GPU"
    )
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, draft = (
        random_model(shape, device, role)
        for shape, role in zip(SHAPES[given.shape], ("target", "draft"))
    )
    pair = Pair(target, draft, f"random {given.shape}")
    if given.compile and not pair.compile():
        raise SystemExit("the passes cannot be compiled here")
    peak = bandwidth(target.device)
    figures = Figures(pair, given.window, given.rate, peak)
    sizes = track(given.batch, "batches", console=Console(stderr=True))
    batches = [figures.measure(rows, given.repeats) for rows in sizes]
    about = {
        "machine": machine(pair),
        "shape": given.shape,
        "dtype": "bfloat16",
        "window": given.window,
        "rate": given.rate,
        "prompt": PROMPT,
        "new_tokens": NEW,
        "repeats": given.repeats,
        "parameters": {
            lm.role: sum(weight.numel() for weight in lm.model.parameters())
            for lm in (target, draft)
        },
        "read bandwidth, GB/s": round(peak / 1e9, 1),
        "figures": "median, smallest, largest",
    }
    print(json.dumps(recorded({**about, "batches": batches}), indent=1))


if __name__ == "__main__":
    main()
