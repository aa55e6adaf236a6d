"""What reading tokens costs, against PyTorch's own count of operations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import CONFIGS
from test_mining import ParityTask
from torch.utils.flop_counter import FlopCounterMode

from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.models.flops import ReadingCost
from lenience.models.lm import LM
from lenience.rules.parsing import parse_rule
from lenience.runs.answers import Answers
from lenience.tasks import as_task, take


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3"])
def test_a_token_costs_what_pytorch_counts(name: str, checkpoints) -> None:
    assert name in CONFIGS
    options = {"dtype": "float32", "attn_implementation": "eager", "device": "cpu"}
    lm = LM.load(checkpoints(name)[0], "target", options)
    cost = ReadingCost.of(lm)
    for n in (1, 7):
        with FlopCounterMode(display=False) as counted, torch.inference_mode():
            lm.model(torch.arange(n)[None] + 1)
        # read at once each token is multiplied with all keys, those after it too
        wanted = n * cost.per_token + n * n * cost.per_key
        assert counted.get_total_flops() == pytest.approx(wanted, rel=0.01)


def test_answers_say_what_was_read_for_them(llama: Pair, tmp_path: Path) -> None:
    samples = take(as_task(ParityTask()), "test", 3)
    answers = Answers(
        llama, as_task(ParityTask()), tmp_path / "answers.jsonl", batch_size=1
    )
    cost = {role: ReadingCost.of(lm) for role, lm in llama.models.items()}
    for rule in ("target", "draft", "topk:2"):
        decoder = Decoder.of({"rule": rule, "max_new_tokens": 20})
        for sample, answer in zip(samples, answers.get(decoder, samples)):
            out = llama.generate(sample.prompt, decoder)
            length = len(out.prompt_tokens) + len(out.tokens)
            read = {"target": out.target_tokens, "draft": out.draft_tokens}
            parts = {
                role: n * (cost[role].per_token + cost[role].per_key * length / 2)
                for role, n in read.items()
            }
            assert answer.flops == pytest.approx(sum(parts.values()))
            tables = sum(n * cost[role].lookup for role, n in read.items())
            assert answer.flops_as_sprinter == pytest.approx(answer.flops + tables)
    other = Decoder.of({"drafter": "ngram", "max_new_tokens": 20})
    assert answers.get(other, samples)[0].flops is None


def test_answers_say_below_which_threshold_they_change(
    llama: Pair, judge: str, tmp_path: Path
) -> None:
    """Just above the closest rejected score an answer is the same, and just below it is not."""
    path = judge.removesuffix("@0.5")
    task = as_task(ParityTask())
    samples = take(task, "test", 6)
    answers = Answers(llama, task, tmp_path / "answers.jsonl", batch_size=1)
    strict = Decoder.of({"rule": f"{path}@0.9", "max_new_tokens": 20})
    several = 0
    for sample, answer in zip(samples, answers.get(strict, samples)):
        own = llama.generate(sample.prompt, strict)
        several += sum(entry.origin == "correction" for entry in own.trace) > 1
        assert answer.closest is not None and 0 < answer.closest < 0.9
        for factor, same in ((1.001, True), (0.999, False)):
            rule = f"{path}@{answer.closest * factor}"
            other = llama.generate(
                sample.prompt, replace(strict, rule=parse_rule(rule))
            )
            assert (other.trace == own.trace) == same
    assert several
