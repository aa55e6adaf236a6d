"""A draft that is aligned with its target."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lenience.core.errors import InputError
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.training.distillation import Distill, DistillFit
from lenience.training.fit_drafter import DrafterPlan, fit_to_answers

Answers = list[tuple[list[int], list[int]]]
HELD_OUT = 3
"""Of thirty answers, the first."""


@pytest.fixture(scope="module")
def answers(llama: Pair) -> Answers:
    prompts = [[1 + i, 1 + (7 * i) % 40] for i in range(30)]
    outs = llama.generate_batch(
        prompts, rule="target", max_new_tokens=24, batch_size=30
    )
    return [(prompt, out.tokens) for prompt, out in zip(prompts, outs)]


def said(model: torch.nn.Module, answer: tuple[list[int], list[int]]) -> np.ndarray:
    """[n, V]: a model's distributions along an answer, by transformers alone."""
    prompt, tokens = answer
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.softmax(logits.double(), -1).numpy()


@pytest.mark.parametrize("how", get_args(Distill))
def test_a_draft_is_aligned_with_its_target(
    how: Distill, llama: Pair, answers: Answers, checkpoints: Callable, tmp_path: Path
) -> None:
    plan = DrafterPlan("model", tmp_path / "model", distill=how, epochs=25)
    made = fit_to_answers(llama, answers, plan)
    assert not (plan.out / "training.safetensors").exists()
    target, before = (
        AutoModelForCausalLM.from_pretrained(path) for path in checkpoints("llama")
    )
    now = AutoModelForCausalLM.from_pretrained(plan.out)
    kls, found = [], []
    for model in (before, now):
        both = [(said(target, one), said(model, one)) for one in answers[:HELD_OUT]]
        p, q = (np.concatenate(parts) for parts in zip(*both))
        from_, to = (q, p) if how == "reverse-kl" else (p, q)
        kls.append((from_ * np.log(from_ / to)).sum(-1).mean())
        kept = [
            next((n for n, same in enumerate(window) if not same), len(window))
            for one, other in both
            for i in range(len(one))
            for window in [(one.argmax(-1) == other.argmax(-1))[i : i + 8]]
        ]
        same = p.argmax(-1) == q.argmax(-1)
        found.append((np.minimum(p, q).sum(-1).mean(), same.mean(), 1 + np.mean(kept)))
    assert kls[1] < 0.95 * kls[0]
    keys = ("acceptance", "agreement", "tokens_per_pass")
    for wanted, told in zip(found, (made.metrics["before"], made.metrics)):
        np.testing.assert_allclose([told[key] for key in keys], wanted, rtol=1e-4)
    # it decodes as before, losslessly
    pair = load_pair(checkpoints("llama")[0], str(plan.out))
    plain = llama.generate([3, 9, 27], rule="target", max_new_tokens=40)
    assert pair.generate([3, 9, 27], max_new_tokens=40).tokens == plain.tokens


@pytest.mark.parametrize(
    "how",
    [
        {"distill": "forward-kl"},
        {"distill": "reverse-kl", "only_rejected": True},
        {"distill": "on-policy"},
    ],
)
def test_training_that_is_stopped_goes_on_and_ends_the_same(
    how: dict[str, Any], llama: Pair, answers: Answers, tmp_path: Path
) -> None:
    plan = DrafterPlan("model", tmp_path / "whole", epochs=3, **how)
    whole = fit_to_answers(llama, answers, plan)

    def stopping(what: str, done: float, total: float) -> None:
        if what == "training model" and done == 2:
            raise KeyboardInterrupt

    again, seen = replace(plan, out=tmp_path / "again"), []
    with pytest.raises(KeyboardInterrupt):
        fit_to_answers(llama, answers, again, stopping)
    resumed = fit_to_answers(
        llama, answers, again,
        lambda what, done, total: seen.append(done) if what == "training model" else None,
    )  # fmt: skip
    assert seen == [2, 3]
    for name, weight in resumed.model.state_dict().items():
        torch.testing.assert_close(weight, whole.model.state_dict()[name])


def test_where_nothing_is_rejected_there_is_nothing_to_learn(
    llama: Pair, answers: Answers, tmp_path: Path
) -> None:
    same = Pair(llama.target, copy.copy(llama.target), "twice")
    same.draft.role = "draft"
    plan = DrafterPlan("model", tmp_path / "same", only_rejected=True, epochs=2)
    made = fit_to_answers(same, answers, plan)
    assert made.metrics["agreement"] == 1
    for name, weight in made.model.state_dict().items():
        assert torch.equal(weight, llama.target.model.state_dict()[name])
    learned = fit_to_answers(
        llama, answers, replace(plan, out=tmp_path / "other", epochs=25)
    )
    assert learned.metrics["agreement"] > learned.metrics["before"]["agreement"]


def test_there_must_be_a_draft(llama: Pair, answers: Answers, tmp_path: Path) -> None:
    alone = Pair(llama.target, None, "alone")
    with pytest.raises(InputError, match="--drafter model"):
        fit_to_answers(alone, answers, DrafterPlan("model", tmp_path))


@pytest.mark.parametrize("distill", ["forward-kl", "reverse-kl"])
def test_the_loss_is_the_divergence_of_its_name(llama: Pair, distill: str) -> None:
    answers = [([3, 4, 5], [6, 7, 8, 9]), ([9, 8], [7, 6, 5])]
    fit = DistillFit(llama, answers, answers, distill, only_rejected=False, seed=0)
    losses: list[torch.Tensor] = []
    fit.epoch(0, losses.append)
    by_hand = []
    for prompt, answer in answers:
        with torch.inference_mode():
            p, q = (
                lm.model(torch.tensor([prompt + answer])).logits[
                    0, len(prompt) - 1 : -1
                ]
                for lm in (llama.target, llama.draft)
            )
        p, q = (logits.double().softmax(-1) for logits in (p, q))
        one, other = (p, q) if distill == "forward-kl" else (q, p)
        by_hand.append((one * (one / other).log()).sum(-1))
    assert float(losses[0]) == pytest.approx(float(torch.cat(by_hand).mean()), rel=1e-4)
