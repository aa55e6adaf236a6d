"""What drafters that look up propose on real prompts, losslessly. Prints one JSON object.

    python benchmarks/retrieval.py HumanEval.jsonl.gz

The model is a random one of bytes: what counts is that each answer is the target's own to the
token, and how many tokens a query proposes. Its answers soon repeat themselves, so tokens per pass
say nothing of a trained model. The datastore is of the other half of the problems, with their
solutions.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from recording import recorded
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lenience import load_pair
from lenience.decoding.machine import processor
from lenience.decoding.pair import Pair
from lenience.drafting.datastore import build_store
from lenience.tasks import load_task, take

NEW = 64
WINDOW = 16
TREE = {"tree": "dynamic:16"}


def random_pair() -> Pair:
    """Return a target of bytes, on random weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(["</s>", *alphabet])}
    made = Tokenizer(BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=8192,
        eos_token_id=0,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    return load_pair(model, tokenizer=tokenizer, compile=False)


def measure(
    pair: Pair, prompts: list[str], decoders: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return tokens per pass and proposed tokens of each decoder, whose answers are the target's
    own."""
    rows = {}
    plain = [
        pair.generate(prompt, rule="target", max_new_tokens=NEW).tokens
        for prompt in prompts
    ]
    for name, options in decoders.items():
        began = time.perf_counter()
        asked = {"rule": "exact", "window": WINDOW, "max_new_tokens": NEW, **options}
        outs = [pair.generate(prompt, **asked) for prompt in prompts]
        assert [out.tokens for out in outs] == plain, name
        passes = sum(out.target_passes for out in outs)
        rows[name] = {
            "tokens_per_pass": sum(len(out.tokens) for out in outs) / passes,
            "proposed_per_pass": sum(out.drafted for out in outs) / passes,
            "seconds": time.perf_counter() - began,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="HumanEval's file")
    given = parser.parse_args()
    task = load_task("humaneval", data=given.data)
    samples = [*take(task, "train", None), *take(task, "test", None)]
    pair = random_pair()
    stored = samples[::2]
    asked = samples[1::2]
    with tempfile.TemporaryDirectory() as folder:
        texts = (f"{sample.prompt}{sample.reference}" for sample in stored)
        documents = (pair.target.encode(text) for text in texts)
        build_store(documents, pair.target.tokenizer_fingerprint, Path(folder))
        decoders = {"ngram": {"drafter": "ngram"}, "suffix": {"drafter": "suffix"}}
        decoders["suffix, dynamic:16"] = {"drafter": "suffix", **TREE}
        decoders["datastore"] = {"drafter": f"datastore:{folder}"}
        decoders["datastore, dynamic:16"] = {"drafter": f"datastore:{folder}", **TREE}
        decoders["ngram|suffix"] = {"drafter": "ngram|suffix"}
        rows = measure(pair, [str(sample.prompt) for sample in asked], decoders)
    about = {
        "machine": processor(),
        "prompts": len(asked),
        "window": WINDOW,
        "new_tokens": NEW,
    }
    print(json.dumps(recorded({**about, "rows": rows}), indent=1))


if __name__ == "__main__":
    main()
