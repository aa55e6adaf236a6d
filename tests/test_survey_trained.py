"""The counts of studies that read strict decoding off one forward pass."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lenience.decoding.pair import Pair

sys.path.insert(0, str(Path(__file__).parents[1] / "studies"))
pytest.importorskip("matplotlib")

import survey_trained as study


def answers_of(pair: Pair, prompts: list[list[int]]) -> list[study.Answer]:
    outs = [pair.generate(ids, rule="target", max_new_tokens=12) for ids in prompts]
    return [(ids, list(out.tokens)) for ids, out in zip(prompts, outs)]


@pytest.fixture
def data(llama: Pair) -> study.Data:
    pair = llama
    prompts = [[5, 6, 7], [9, 8], [11, 3, 4, 2]]
    answers = answers_of(pair, prompts)
    return study.Data(pair, answers, answers, epochs=1)


def test_windows_are_counted_as_the_engine_decodes_them(data: study.Data) -> None:
    draft = data.pair.draft
    assert draft is not None
    for prompt, answer in data.held_out:
        count = study.counted(draft.model, [(prompt, answer)])
        options = {"window": study.WINDOW, "max_new_tokens": len(answer)}
        out = data.pair.generate(prompt, rule="exact", **options)
        assert list(out.tokens) == answer
        assert count.each[0, 1] == out.target_passes


def test_leading_runs_and_rejected_tokens_by_hand() -> None:
    same = np.array([1, 1, 0, 1, 1, 1, 1, 1, 0, 0], bool)
    runs = study.leading(same, 4)
    assert runs.tolist() == [2, 1, 0, 4, 4, 3, 2, 1, 0, 0]
    # windows begin at 0 (2 accepted), 3 (4 accepted, position 7 is the bonus), 8 and 9
    assert study.walk(runs).each.tolist() == [[10, 4, 16]]
    assert study._rejected(runs) == [2, 8, 9]
    # passes for tokens 0, 3 and 9, and for the windows at 1 (1 accepted) and 4 (4 accepted)
    assert study._two_passes(runs).each[0, :2].tolist() == [10, 5]


@torch.no_grad()
def test_look_ahead_tokens_see_what_they_would_see_in_a_pass_of_their_own(
    data: study.Data,
) -> None:
    lm = data.target
    prompt, answer = data.held_out[0]
    table = lm.model.get_input_embeddings().weight
    embeddings = table[20 : 20 + study.LOOK_AHEAD].clone()
    ahead, wanted = study._ahead(prompt, answer)
    together = ahead.logits(lm, embeddings)
    assert wanted[0].tolist() == answer[1 : 1 + study.LOOK_AHEAD]
    for row, place in enumerate(ahead.places.tolist()):
        text = table[torch.tensor((prompt + answer)[: place + 1])]
        alone = lm.model(inputs_embeds=torch.cat([text, embeddings])[None]).logits
        torch.testing.assert_close(
            together[row], alone[0, place + 1 :], atol=1e-4, rtol=1e-4
        )


def test_silent_modules_leave_the_residual_stream(data: study.Data) -> None:
    """Without attention and MLP a layer does nothing, as if it were skipped."""
    answers = data.held_out
    depth = data.target.num_layers
    last = [(depth - 1, "self_attn"), (depth - 1, "mlp")]
    silent = study.predictions(study.kept_modules(data.target, last), answers)
    skipped = study.take_apart(data.target, [depth]).model
    for ours, theirs in zip(silent, study.predictions(skipped, answers)):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
