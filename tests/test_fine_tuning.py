"""A target that learns together with its blockwise heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lenience.cli import main
from lenience.core.errors import InputError
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.drafting.heads import load_heads
from lenience.training.fit_drafter import DrafterPlan, fit_to_answers

HELD_OUT, HEADS = 4, 2
"""Of forty answers, the first; and how many tokens further are predicted."""


def rightly_said(
    folder: Path, answers: list[tuple[list[int], list[int]]]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """[N] and [N, HEADS] each: whether a saved target, and each of its heads, says the token of an
    answer, by transformers and the heads' formula alone."""
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype="float32")
    matrix = model.get_output_embeddings().weight.detach()
    own, further = [], []
    for prompt, answer in answers:
        with torch.inference_mode():
            out = model(torch.tensor([prompt + answer]), output_hidden_states=True)
        said = out.logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        own += [a == b for a, b in zip(said, answer)]
        states = out.hidden_states[-1][0, len(prompt) - 1 : -1]
        for i, x in enumerate(states):
            row = []
            for k, (block,) in enumerate(load_heads(folder, "blockwise").blocks):
                into, bias, back, last = (
                    block[name].float()
                    for name in ("into", "into_bias", "out", "out_bias")
                )
                y = x + back @ torch.relu(into @ x + bias) + last
                at = i + 1 + k
                row.append(
                    at < len(answer) and int((matrix @ y).argmax()) == answer[at]
                )
            further.append(np.array(row))
    return np.array(own), further


def test_a_target_learns_with_its_heads(
    llama: Pair, checkpoints: Callable, tmp_path: Path
) -> None:
    prompts = [[1 + i, 1 + (7 * i) % 40] for i in range(10)]
    outs = llama.generate_batch(
        prompts, rule="target", max_new_tokens=24, batch_size=10
    )
    answers = [(prompt, out.tokens) for prompt, out in zip(prompts, outs)] * 4
    plan = DrafterPlan("blockwise", tmp_path / "frozen", heads=HEADS, epochs=30)
    frozen = fit_to_answers(llama, answers, plan)
    plan = replace(plan, out=tmp_path / "tuned", tune_target=True)
    tuned = fit_to_answers(llama, answers, plan)
    own, heads = rightly_said(plan.out, answers[:HELD_OUT])
    told = tuned.metrics
    assert told["agreement"] == pytest.approx(own.mean())
    np.testing.assert_allclose(told["accuracy"], np.mean(heads, 0), atol=1e-6)
    kept = 1 + np.mean([row.cumprod().sum() for row in heads])
    assert told["tokens_per_pass"] == pytest.approx(kept)
    assert kept > frozen.metrics["tokens_per_pass"]

    spec = f"blockwise:{plan.out}"
    pair = load_pair(str(plan.out / "target"))
    out = pair.generate([3, 9, 27], drafter=spec, max_new_tokens=40)
    ids = torch.tensor([[3, 9, 27]])
    plain = pair.target.model.generate(ids, max_new_tokens=40, do_sample=False)
    assert out.tokens == plain[0, 3:].tolist()
    with pytest.raises(InputError, match="another target"):
        llama.generate([3, 9, 27], drafter=spec)
    with torch.inference_mode():  # the target itself is as it was
        again = AutoModelForCausalLM.from_pretrained(checkpoints("llama")[0])
        assert torch.equal(again(ids).logits, llama.target.model(ids).logits)


@pytest.mark.parametrize(
    "drafter", [("--drafter", "medusa"), ("--drafter", "model"), ()]
)
def test_only_blockwise_heads_take_a_target_along(
    drafter: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", str(tmp_path), *drafter, "--tune-target"])
    assert ended.value.code == 2
    assert "lenience: --tune-target: needs --drafter" in capsys.readouterr().err
