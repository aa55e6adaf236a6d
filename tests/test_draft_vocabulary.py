"""Drafts cut out of a target, and draft vocabularies of cut drafts, EAGLE and Medusa heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CONFIGS, VOCABULARY, save_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

import lenience
from lenience.core.errors import InputError
from lenience.decoding.pair import Pair
from lenience.models.compile import compile_model
from lenience.models.vocabulary import FILE, most_frequent
from lenience.training.distillation import choose_layers, cut_draft
from lenience.training.fit_drafter import DrafterPlan, fit_to_answers

Answers = list[tuple[list[int], list[int]]]
KEPT = 20
DEPTH = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of five layers with tied embeddings."""
    config = LlamaConfig(
        **{**CONFIGS["llama"].to_dict(), "num_hidden_layers": DEPTH},
    )
    config.tie_word_embeddings = True
    return save_model(tmp_path_factory.mktemp("deep") / "target", config, seed=3)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Pair:
    return lenience.load_pair(str(folder), dtype="float32", compile=False)


@pytest.fixture(scope="module")
def answers(alone: Pair) -> Answers:
    prompts = [[1 + i, 1 + (7 * i) % 40] for i in range(30)]
    outs = alone.generate_batch(prompts, rule="target", max_new_tokens=16)
    return [(prompt, out.tokens) for prompt, out in zip(prompts, outs)]


def counted(answers: Answers) -> list[int]:
    """The most frequent tokens, EOS among them, the lower id first where two are as frequent. The
    tenth that only measures is not counted."""
    learned = answers[max(1, round(0.1 * len(answers))) :]
    written = [token for _, answer in learned for token in answer]
    ranked = sorted(set(written), key=lambda token: (-written.count(token), token))
    others = [token for token in range(VOCABULARY) if token not in ranked]
    order = [0, *(token for token in [*ranked, *others] if token != 0)]
    return sorted(order[:KEPT])


def test_a_cut_draft_has_the_targets_layers(folder: Path, alone: Pair) -> None:
    cut = cut_draft(alone.target, (0, 4))
    whole = AutoModelForCausalLM.from_pretrained(folder)
    whole.model.layers = torch.nn.ModuleList(whole.model.layers[i] for i in (0, 4))
    ids = torch.tensor([[3, 5, 9, 2]])
    with torch.no_grad():
        theirs = whole(ids, use_cache=False).logits
        ours = cut.model(ids, use_cache=False).logits
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert alone.target.num_layers == DEPTH


def test_the_closest_layers_are_chosen(
    folder: Path, alone: Pair, answers: Answers
) -> None:
    whole = AutoModelForCausalLM.from_pretrained(folder)
    layers = list(whole.model.layers)

    def logs(kept: tuple[int, ...], answer: tuple[list[int], list[int]]) -> np.ndarray:
        prompt, tokens = answer
        whole.model.layers = torch.nn.ModuleList(layers[i] for i in kept)
        with torch.no_grad():
            ids = torch.tensor([prompt + tokens])
            logits = whole(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits.double(), -1).numpy()

    layouts = [(0, 1, 2), (0, 2, 4), (0, 1, 4)]
    divergence = {}
    for layout in layouts:
        parts = []
        for answer in answers[:3]:
            p, q = logs(tuple(range(DEPTH)), answer), logs(layout, answer)
            parts.append((np.exp(p) * (p - q)).sum(-1))
        divergence[layout] = np.concatenate(parts).mean()
    best = min(layouts, key=divergence.__getitem__)
    assert choose_layers(alone.target, answers[:3], 3) == best


@pytest.mark.parametrize("vocabulary", [None, KEPT])
def test_a_cut_draft_is_a_model_folder(
    vocabulary: int | None, folder: Path, alone: Pair, answers: Answers, tmp_path: Path
) -> None:
    plan = DrafterPlan(
        "model", tmp_path / "model", layers=2, draft_vocab=vocabulary, epochs=3
    )
    made: Any = fit_to_answers(alone, answers, plan)
    assert made.metrics["tokens_per_pass"] >= made.metrics["before"]["tokens_per_pass"]
    theirs = AutoModelForCausalLM.from_pretrained(plan.out)
    assert theirs.config.num_hidden_layers == 2
    pair = lenience.load_pair(
        str(folder), str(plan.out), dtype="float32", compile=False
    )
    assert pair.draft is not None
    ids = torch.tensor([[3, 5, 9, 2]])
    with torch.no_grad():
        whole = theirs(ids).logits
        ours = pair.draft.model(ids).logits
    assert ours.shape == whole.shape
    tokens = list(range(VOCABULARY))
    if vocabulary:
        tokens = counted(answers)
        assert json.loads((plan.out / FILE).read_text())["tokens"] == tokens
        outside = sorted(set(range(VOCABULARY)) - set(tokens))
        assert bool((ours[..., outside] == -torch.inf).all())
    assert torch.allclose(ours[..., tokens], whole[..., tokens], atol=1e-5)
    prompts = [prompt for prompt, _ in answers]
    strict = pair.generate_batch(prompts, max_new_tokens=16)
    assert [out.tokens for out in strict] == [answer for _, answer in answers]
    assert sum(out.accepted_exact for out in strict) > 0


def test_a_draft_vocabulary_is_exported(
    folder: Path, alone: Pair, answers: Answers, tmp_path: Path
) -> None:
    plan = DrafterPlan(
        "model", tmp_path / "model", layers=(0, 4), draft_vocab=KEPT, epochs=2
    )
    fit_to_answers(alone, answers, plan)
    pair = lenience.load_pair(
        str(folder), str(plan.out), dtype="float32", compile=False
    )
    passes = []
    for compiled in (False, True):
        assert pair.draft is not None
        assert not compiled or compile_model(pair.draft)
        outs = pair.generate_batch([p for p, _ in answers], max_new_tokens=16)
        assert [out.tokens for out in outs] == [answer for _, answer in answers]
        passes.append([out.target_passes for out in outs])
    assert passes[0] == passes[1]


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_heads_draft_within_their_vocabulary(
    kind: Any, alone: Pair, answers: Answers, tmp_path: Path
) -> None:
    plan = DrafterPlan(kind, tmp_path / kind, heads=2, draft_vocab=KEPT, epochs=3)
    made: Any = fit_to_answers(alone, answers, plan)
    tokens = counted(answers)
    if kind == "eagle":
        saved = load_file(plan.out / "model.safetensors")
        ids = (saved["d2t"] + torch.arange(KEPT)).tolist()
        assert ids == tokens == saved["t2d"].nonzero().flatten().tolist()
        config = json.loads((plan.out / "config.json").read_text())
        assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCABULARY, KEPT)
        assert saved["lm_head.weight"].shape == (KEPT, alone.target.hidden_size)
    else:
        saved = load_file(plan.out / "medusa.safetensors")
        assert saved["draft_vocab"].tolist() == tokens
        assert saved["0.matrix"].shape == (KEPT, alone.target.hidden_size)
    assert made.metrics["draft_vocab"] == KEPT
    drafter = f"{kind}:{plan.out}"
    prompts = [prompt for prompt, _ in answers]
    outs = alone.generate_batch(prompts, drafter=drafter, max_new_tokens=16)
    assert [out.tokens for out in outs] == [answer for _, answer in answers]
    assert sum(out.accepted_exact for out in outs) > 0
    kept = [
        entry.token for out in outs for entry in out.trace if entry.origin == "draft"
    ]
    assert set(kept) <= set(tokens)


def test_rare_tokens_fill_a_vocabulary() -> None:
    written = [[5, 5, 5, 2], [7, 7, 2, 2]]
    assert most_frequent(written, 3, 10, [0]).tolist() == [0, 2, 5]
    assert most_frequent(written, 6, 10, [0]).tolist() == [0, 1, 2, 3, 5, 7]


def test_wrong_layers_and_vocabularies_are_refused(
    alone: Pair, answers: Answers, folder: Path, tmp_path: Path
) -> None:
    def fit(**changes: Any) -> None:
        kind = changes.pop("kind", "model")
        fit_to_answers(alone, answers, DrafterPlan(kind, tmp_path / "no", **changes))

    for layers in ((0, 5), (0, 0), (-1,), tuple(range(DEPTH))):
        with pytest.raises(InputError, match="the target has layers 0 to 4"):
            fit(layers=layers)
    for count in (0, 5):
        with pytest.raises(InputError, match="name a number from 1 to 4"):
            fit(layers=count)
    for size in (0, VOCABULARY):
        with pytest.raises(InputError, match="name fewer"):
            fit(kind="eagle", draft_vocab=size)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"torn", "broken"),
        ({"tokens": [1.5]}, "no list of ids"),
        ({"tokens": [1, VOCABULARY]}, "outside the vocabulary"),
        ({"others": [1]}, "tokens"),
        ({"tokens": ["a"]}, "cannot be read"),
        ({"tokens": []}, "no list of ids"),
    ],
)
def test_a_broken_vocabulary_is_refused(
    content: Any, why: str, checkpoints: Callable, tmp_path: Path
) -> None:
    draft = save_model(tmp_path / "draft", CONFIGS["llama"], seed=1)
    if isinstance(content, bytes):
        (draft / FILE).write_bytes(content)
    else:
        (draft / FILE).write_text(json.dumps(content))
    with pytest.raises(InputError, match=why) as told:
        lenience.load_pair(checkpoints("llama")[0], str(draft))
    assert "\n" not in str(told.value)
