"""Strict decoding of a pretrained model on Spec-Bench, one question at a time.

    python benchmarks/real_strict.py MODEL spec_bench/question.jsonl OUT.jsonl [--questions 40]

Every decoder answers each question in turn: the target alone, lenience's drafters without training,
and `transformers`' own generation, alone and with prompt lookup. Each line of OUT.jsonl is one
answer with its seconds, its passes, and whether its tokens are those of the target alone. The
command resumes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.runs.journal import Journal

TOKENS = 64
"""Maximum number of new tokens in an answer."""
DECODERS: dict[str, dict[str, Any]] = {
    "target": {"rule": "target"},
    "ngram": {"drafter": "ngram", "window": 4},
    "suffix": {"drafter": "suffix", "window": 4},
    "suffix, tree": {"drafter": "suffix", "tree": "dynamic:8"},
    "skip": {"drafter": "skip:10,11,12,13,14,15", "window": 3},
    "exit": {"drafter": "exit:20", "window": 2},
    "ngram>skip": {"drafter": "ngram>skip:10,11,12,13,14,15", "window": 3},
}
"""Options of our decoders by name; the first gives the reference answers."""
THEIRS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "transformers, prompt lookup": {"prompt_lookup_num_tokens": 10},
}
"""Options of `transformers`' generate by name."""


def questions(path: Path, count: int) -> list[dict[str, Any]]:
    """Return a seeded choice of questions, the same number of each category."""
    rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    by_category: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_category.setdefault(row["category"], []).append(row)
    each = max(1, count // len(by_category))
    rng = random.Random(0)
    return [row for some in by_category.values() for row in rng.sample(some, each)]


def ours(pair: Pair, prompt: list[int], name: str) -> dict[str, Any]:
    """Return an answer of our loop."""
    options = {"rule": "exact", **DECODERS[name]}
    out = pair.generate(prompt, max_new_tokens=TOKENS, **options)
    return {
        "tokens": out.tokens,
        "passes": out.target_passes,
        "seconds": out.seconds,
    }


def theirs(pair: Pair, prompt: list[int], name: str) -> dict[str, Any]:
    """Return an answer of `transformers`' generate on the same model."""
    model: Any = pair.target.model
    ids = torch.tensor([prompt])
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    hook = model.register_forward_hook(count)
    began = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=TOKENS,
        eos_token_id=sorted(pair.target.eos_ids),
        **THEIRS[name],
    )
    seconds = time.perf_counter() - began
    hook.remove()
    tokens = out[0, len(prompt) :].tolist()
    return {"tokens": tokens, "passes": passes, "seconds": seconds}


def answered(pair: Pair, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the record of each decoder's answer to a question."""
    message = [{"role": "user", "content": row["turns"][0]}]
    prompt = pair.target.encode(message)
    own: list[int] = []
    for name in (*DECODERS, *THEIRS):
        answer = (ours if name in DECODERS else theirs)(pair, prompt, name)
        own = own or answer["tokens"]
        yield {
            "id": f"{row['question_id']} {name}",
            "decoder": name,
            "category": row["category"],
            "prompt_tokens": len(prompt),
            "same": answer["tokens"] == own,
            **answer,
        }


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each decoder's tokens per second and per pass over all answers, and the number of
    answers that are the target's own."""
    by_decoder: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_decoder.setdefault(record["decoder"], []).append(record)
    figures: dict[str, Any] = {}
    for name, some in by_decoder.items():
        tokens = sum(len(record["tokens"]) for record in some)
        figures[name] = {
            "n": len(some),
            "same": sum(record["same"] for record in some),
            "tokens_per_second": tokens / sum(record["seconds"] for record in some),
            "tokens_per_pass": tokens / sum(record["passes"] for record in some),
            "median_seconds": statistics.median(r["seconds"] for r in some),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--questions", type=int, default=40)
    args = parser.parse_args()
    pair = load_pair(args.model, dtype="float32", device="cpu", compile=True)
    journal = Journal(args.out)
    done = {record["id"] for record in journal.resume()}
    ours(pair, pair.target.encode("Hello"), "target")  # warm-up
    for number, row in enumerate(questions(args.data, args.questions), 1):
        if f"{row['question_id']} {[*THEIRS][-1]}" in done:
            continue
        for record in answered(pair, row):
            if record["id"] not in done:
                journal.write(record)
        print(f"{number} questions", flush=True)
    print(json.dumps(summary(list(journal))))


if __name__ == "__main__":
    main()
