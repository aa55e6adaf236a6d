"""Cycles of targets that keep a state, against their plain steps and against attention alone.

    python benchmarks/states.py

The models have random weights, so what is timed is a pass and not how often a draft is right: the
time of a cycle in which the target reads the tokens that the last cycle accepted again, and a new
window.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from recording import write_results
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
)

from lenience.models.lm import LM
from lenience.models.session import Session, check_windows

RESULTS = Path(__file__).parent / "results" / "states.json"
COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 8,
}
ATTENTION: dict[str, Any] = {
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "attention alone (Llama)": LlamaConfig(**COMMON, **ATTENTION),
    "gated delta rule in 3 of 4 layers (Qwen3.5)": Qwen3_5TextConfig(
        **COMMON,
        **ATTENTION,
        head_dim=64,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    "convolutions in 3 of 4 layers (LFM2)": Lfm2Config(
        **COMMON, **ATTENTION, layer_types=(["conv"] * 3 + ["full_attention"]) * 2
    ),
    "recurrence alone (Mamba 2)": Mamba2Config(
        **COMMON, num_heads=16, head_dim=64, state_size=64, n_groups=1
    ),
}
PROMPT = 64
WINDOW = 4
ACCEPTED = 2
"""Number of the window's tokens that each cycle accepts."""
TURNS = 5
CYCLES = 12


def loaded(config: PretrainedConfig) -> LM:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    words = {f"w{i}": i for i in range(8192)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)))
    lm = LM(model, tokenizer, config.model_type)
    check_windows(lm)
    return lm


def seconds(lm: LM, window: int, accepted: int) -> float:
    """Return the seconds of a cycle: a pass over the accepted tokens, a correction and a window."""
    session = Session(lm, capacity=PROMPT + 200)
    tokens = torch.randint(0, 8192, (PROMPT + 200,)).tolist()
    length = PROMPT
    session.read([tokens[:length]])
    began = time.perf_counter()
    for _ in range(CYCLES):
        session.read([tokens[: length + 1] + [7] * window], window + 1)
        length += accepted + 1
    return (time.perf_counter() - began) / CYCLES


def main() -> None:
    torch.set_num_threads(2)
    rows = []
    for name, config in CONFIGS.items():
        lm = loaded(config)
        plain, cycle = [], []
        for _ in range(TURNS):
            plain.append(seconds(lm, 0, 0))
            cycle.append(seconds(lm, WINDOW, ACCEPTED))
        row: dict[str, Any] = {
            "kind": name,
            "plain_ms": 1000 * sorted(plain)[TURNS // 2],
            "cycle_ms": 1000 * sorted(cycle)[TURNS // 2],
            "one_by_one": lm.reads_one_by_one,
        }
        row["ratio"] = row["cycle_ms"] / row["plain_ms"]
        rows.append(row)
        print(row, flush=True)
    write_results(RESULTS, {"window": WINDOW, "accepted": ACCEPTED, "rows": rows})


if __name__ == "__main__":
    main()
