"""The head that weighs the target against the draft: what it decodes, and how it is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from test_mining import ParityTask
from test_rules import decide, greedy, reading, softmax, window

import lenience
from lenience import InputError
from lenience.core.context import Context, Row
from lenience.core.noise import Noise
from lenience.core.types import Draft, Reading
from lenience.decoding.pair import Pair
from lenience.heads.head import Head, Inputs, load_head
from lenience.mining.search import MineConfig, mine
from lenience.tasks import Sample
from lenience.training.mixture import (
    INPUTS,
    MixturePlan,
    Rollout,
    _loss,
    _Weigher,
    fit_mixture,
)


def save_mixture(folder: Path, weight: list[float], bias: float = 0.0) -> str:
    """Save a head on the states of both models; return its rule."""
    head = Head(torch.tensor(weight), bias, INPUTS, 0.5, {}, role="mixture")
    head.save(folder)
    return f"diversed:{folder}"


def test_the_weight_of_each_position_is_that_of_its_own_states(tmp_path: Path) -> None:
    """At the first position the states give the target all of the weight, at the second none."""
    rule = lenience.rule(save_mixture(tmp_path, [40.0, 0.0]))
    logits = np.log(np.array([[0.6, 0.4], [0.9, 0.1], [0.5, 0.5]], np.float32))
    drafted = torch.log(torch.tensor([[0.1, 0.9], [0.2, 0.8]]))
    hidden = torch.tensor([[1.0], [-1.0], [0.0]])
    for tokens, kept, after in (([0, 1], 2, 0), ([1, 1], 0, 0), ([0, 0], 1, 1)):
        draft = window(tokens, drafted, hidden)
        read = reading(logits, torch.zeros(3, 1))
        verdict = decide(rule, draft, read, greedy())
        assert (verdict.num_accepted, verdict.next_token) == (kept, after)


@pytest.mark.parametrize("bias", [-1.5, 0.4])
def test_sampled_tokens_have_the_mixtures_distribution(
    bias: float, tmp_path: Path
) -> None:
    rule = lenience.rule(save_mixture(tmp_path, [0.0, 0.0], bias))
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.1, 0.3, 0.6])
    rows = 6000
    rng = np.random.default_rng(3)
    drafted = rng.choice(3, rows, p=q)
    draft = Draft(
        torch.tensor(drafted)[:, None],
        torch.ones(rows, dtype=torch.long),
        torch.log(torch.tensor(q)).float().expand(rows, 1, 3),
        torch.zeros(rows, 2, 1),
    )
    logits = torch.log(torch.tensor(p)).float().expand(rows, 2, 3)
    ctx = Context([Row(Noise.for_prompt(1, [i]), [i]) for i in range(rows)], 1.0)
    verdicts = rule(draft, Reading(logits, torch.zeros(rows, 2, 1)), ctx)
    first = [v.drafted[0] if v.num_accepted else v.next_token for v in verdicts]
    weight = 1 / (1 + np.exp(-bias))
    wanted = weight * p + (1 - weight) * q
    counts = np.bincount(first, minlength=3)
    assert chisquare(counts, wanted * rows).pvalue > 1e-3


def test_a_threshold_is_refused(tmp_path: Path) -> None:
    rule = save_mixture(tmp_path, [0.0, 0.0])
    with pytest.raises(InputError, match="takes no @threshold"):
        lenience.rule(f"{rule}@0.5")
    with pytest.raises(InputError, match="cannot be combined"):
        lenience.rule(f"{rule}|exact")


def rollout(seed: int, reward: float) -> Rollout:
    rng = np.random.default_rng(seed)
    p, q = (softmax(rng.normal(size=(4, 6))) for _ in range(2))
    return Rollout(
        torch.tensor(rng.normal(size=(4, 3))).float(),
        torch.tensor(p[:, 0]).float(),
        torch.tensor(q[:, 0]).float(),
        torch.tensor(np.abs(p - q).sum(1) / 2).float(),
        reward,
    )


def test_the_loss_and_its_gradient_are_those_of_numpy() -> None:
    rollouts = [rollout(1, 1.0), rollout(2, 0.0)]
    states = torch.cat([each.states for each in rollouts])
    weigher = _Weigher(states.mean(0), states.std(0))
    start = np.array([0.3, -0.2, 0.5])

    def by_numpy(weight: np.ndarray) -> float:
        total = []
        for each in rollouts:
            scaled = (each.states.numpy() - states.mean(0).numpy()) / states.std(
                0
            ).numpy()
            w = 1 / (1 + np.exp(-(scaled @ weight)))
            mixed = w * each.target.numpy() + (1 - w) * each.draft.numpy()
            rejected = (w * each.distance.numpy()).sum()
            total.append(0.2 * rejected - (each.reward - 0.4) * np.log(mixed).sum())
        return float(np.mean(total))

    with torch.no_grad():
        weigher.layer.weight.copy_(torch.tensor(start)[None])
    loss, _ = _loss(weigher, rollouts, 0.4, 0.2)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(by_numpy(start), rel=1e-5)
    for i in range(3):
        step = np.eye(3)[i] * 1e-4
        slope = (by_numpy(start + step) - by_numpy(start - step)) / 2e-4
        assert float(weigher.layer.weight.grad[0, i]) == pytest.approx(slope, rel=1e-2)
    # the saved weights read states that are not standardised
    folded, bias = weigher.folded()
    with torch.no_grad():
        wanted = weigher.weights(states)
    torch.testing.assert_close(torch.sigmoid(states @ folded + bias), wanted)


class WithReferences(ParityTask):
    name = "with-references"

    def samples(self, split: str):
        for sample in super().samples(split):
            yield Sample(sample.id, sample.prompt, "0")


def test_training_begins_with_equal_weights_and_saves_what_it_learned(
    llama: Pair, tmp_path: Path
) -> None:
    task = WithReferences()
    mine(llama, task, tmp_path, MineConfig(answers_only=True, limit=6))
    untrained = fit_mixture(
        llama, task, tmp_path, MixturePlan(tmp_path / "before", updates=0)
    )
    assert not untrained.weight.any() and untrained.bias == 0
    prompt, options = [5, 9, 3], {"window": 4, "max_new_tokens": 30}
    half = llama.generate(prompt, rule="ensemble:0.5", **options)
    same = llama.generate(prompt, rule=f"diversed:{tmp_path / 'before'}", **options)
    assert same.tokens == half.tokens
    plan = MixturePlan(tmp_path / "mixture", updates=5, batch_size=3, rate=0.05)
    head = fit_mixture(llama, task, tmp_path, plan)
    again = load_head(tmp_path / "mixture", "mixture")
    torch.testing.assert_close(again.weight, head.weight)
    assert head.weight.any() and len(head.metrics["history"]) == 5
    assert len(head.prompts) == 6 and again.inputs == Inputs(
        ("draft", "target"), ("previous",)
    )
    for bias, like in ((40.0, "exact"), (-40.0, "ensemble:0")):
        head.weight.zero_()
        head.bias = bias
        head.save(tmp_path / f"sure{bias}")
        sure = llama.generate(
            prompt, rule=f"diversed:{tmp_path / f'sure{bias}'}", **options
        )
        assert sure.tokens == llama.generate(prompt, rule=like, **options).tokens


def test_acceptance_alone_moves_the_weight_to_the_draft(
    llama: Pair, tmp_path: Path
) -> None:
    """With a reward that is always the same, only rejections are left to learn from."""

    class Same(WithReferences):
        def correct(self, text: str, sample: Sample) -> bool:
            return True

    mine(llama, Same(), tmp_path, MineConfig(answers_only=True, limit=6))
    plan = MixturePlan(
        tmp_path / "mixture", updates=8, batch_size=3, rate=0.1, acceptance=1.0
    )
    history = fit_mixture(llama, Same(), tmp_path, plan).metrics["history"]
    assert {row["reward"] for row in history} == {1.0}
    assert history[-1]["rejected"] < 0.8 * history[0]["rejected"]


def test_an_interrupted_training_resumes_after_its_last_update(
    llama: Pair, tmp_path: Path
) -> None:
    """The head is that of an undisturbed training, and another plan begins anew."""
    task = WithReferences()
    mine(llama, task, tmp_path, MineConfig(answers_only=True, limit=6))
    plan = MixturePlan(tmp_path / "mixture", updates=6, batch_size=4, rate=0.05)
    whole = fit_mixture(llama, task, tmp_path, replace(plan, out=tmp_path / "whole"))
    updates = list[int]()

    def stop_after_three(phase: str, done: int, total: int) -> None:
        updates.append(done)
        if len(updates) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_mixture(llama, task, tmp_path, plan, stop_after_three)
    head = fit_mixture(llama, task, tmp_path, plan, stop_after_three)
    assert updates == [1, 2, 3, 4, 5, 6]
    torch.testing.assert_close(head.weight, whole.weight, atol=0, rtol=0)
    assert head.bias == whole.bias and head.metrics == whole.metrics
    assert not (plan.out / "training.safetensors").exists()
    updates.clear()
    with pytest.raises(KeyboardInterrupt):
        fit_mixture(llama, task, tmp_path, plan, stop_after_three)
    updates.clear()
    other = replace(plan, updates=2)
    assert len(fit_mixture(llama, task, tmp_path, other).metrics["history"]) == 2
    updates.clear()
    with pytest.raises(KeyboardInterrupt):
        fit_mixture(llama, task, tmp_path, plan, stop_after_three)
    updates.clear()
    # what counts as right has changed
    task.version = 2
    with pytest.raises(KeyboardInterrupt):
        fit_mixture(llama, task, tmp_path, plan, stop_after_three)
    assert updates == [1, 2, 3]


def test_samples_without_references_are_refused(llama: Pair, tmp_path: Path) -> None:
    mine(llama, ParityTask(), tmp_path, MineConfig(answers_only=True, limit=2))
    with pytest.raises(InputError, match="none of its samples has a reference"):
        fit_mixture(llama, ParityTask(), tmp_path, MixturePlan(tmp_path / "mixture"))
